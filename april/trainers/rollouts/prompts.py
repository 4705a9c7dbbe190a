"""Prompts that a trainer submits, encoded for the broker: token ids, reference answer, extra data, and images."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import msgspec
import numpy as np

from april import wire
from april.broker.image_preparation import THREADS
from april.config import Config
from april.data.images import ImageRule, PreparedImage, prepare
from april.data.row_images import file_bytes, image_at, with_images
from april.data.rows import DatasetRow, RowImage, check_message
from april.data.tokenizer import Tokenizer
from april.util.errors import refuse
from april.wire.limits import FROM_PEER
from april.workers.engines import ENGINES

MAX_BODY_BYTES = FROM_PEER.body_bytes // 2
"""Maximum number of bytes of labels and extras in one message, which leaves room for the rest of the message body."""
MAX_MESSAGE_TOKENS = FROM_PEER.frame_bytes // 4
"""Maximum number of prompt tokens in one message of submitted prompts."""
HEAD_BYTES = 160
"""Estimated bytes of a prompt's header in a message, without label, extra and images."""
NAME_BYTES = 66
"""Bytes that the name of an image takes in a message, for an estimate of the message's size."""
MAX_MESSAGE_IMAGES = 256
"""Maximum number of images in one message of submitted prompts. Images are sent before the prompts that name them, and
the broker keeps an image that no prompt names for ten minutes only."""
WORKING_FOLDER = Path()
"""Folder from which relative paths of images are resolved."""


PromptText: TypeAlias = str | list[dict] | Sequence[int]


class PromptsWanted(RuntimeError):
    """Raised when a batch needs more groups than the submitted prompts can complete; the trainer must submit more."""


@dataclass(frozen=True)
class Prompt:
    """A prompt for `Rollouts.submit`; it becomes one group."""

    prompt: PromptText
    """The prompt as text, as chat messages, or as token ids."""
    label: str = ""
    """Reference answer for the verifier."""
    reward: str = ""
    """Registry name of the prompt's verifier; "" for the run's verifier."""
    extra: Any = None
    """Any value that MessagePack can encode; it comes back with the group, even after a crash."""
    images: Sequence[Any] = ()
    """Images of the prompt, each a path, the bytes of a file, a data: URL, or an image of Pillow. With text there is
    one for each `<image>` in it, or all are placed in front of it; images that chat messages contain as parts are not
    listed. With token ids there is one for each consecutive sequence of placeholder ids."""


class EncodedPrompt(NamedTuple):
    """A prompt in the broker's form."""

    submission: wire.Submission
    """Length, label, extra data, and the names of the images."""
    ids: np.ndarray
    """Token ids, int32 [T]."""
    images: dict[str, bytes]
    """Files of the images by name."""


class PromptImages:
    """Images of the prompts that are encoded together, each prepared once.

    images = PromptImages(config, lambda: tokenizer)
    messages, sources = images.place(messages, [])      # its images become canonical parts
    images.prepare()                                    # all that were placed
    images.prepared[sources[0]].tokens
    """

    def __init__(self, config: Config, tokenizer: Callable[[], Tokenizer]):
        """`tokenizer`: function that loads the policy's tokeniser, called once there is an image."""
        self._config, self._tokenizer = config, tokenizer
        self._files: dict[str, bytes] = {}
        """Content of the images that were given as bytes instead of as paths, by its sha256 in hex."""
        self._placed: dict[str, RowImage] = {}
        self.prepared: dict[str, PreparedImage] = {}
        """Prepared images by the sha256 of their source."""

    def place(self, prompt: str | list[dict[str, Any]], column: Sequence[Any]) -> tuple[str | list[dict], list[str]]:
        """(the prompt with each image as a content part in April's own format, the images' sources in order). `column`:
        images that come beside the prompt, not as parts of its messages. A source is what `RowImage.source` names.
        Raises BadRow."""
        row = with_images(DatasetRow(prompt, ""), list(column), "given", WORKING_FOLDER, self._keep)
        return row.prompt, self._note(row.images)

    def sources(self, column: Sequence[Any]) -> list[str]:
        """Sources (`RowImage.source`) of the images in `column`, those of a prompt of token ids, in order. Raises
        BadRow."""
        return self._note(image_at(image, WORKING_FOLDER, self._keep) for image in column)

    def prepare(self) -> None:
        """Prepare all images that were placed. Raises BadRow, and ConfigError where the run takes no images."""
        if not self._placed:
            return
        rule = self._rule()
        with ThreadPoolExecutor(THREADS, "images") as threads:
            prepared = threads.map(lambda image: prepare(self._source(image), rule), self._placed.values())
            self.prepared = dict(zip(self._placed, prepared, strict=True))

    def _keep(self, file: bytes) -> RowImage:
        source = sha256(file).hexdigest()
        self._files[source] = file
        return RowImage(source)

    def _note(self, images: Iterable[RowImage]) -> list[str]:
        images = list(images)
        self._placed |= {image.source: image for image in images}
        return [image.source for image in images]

    def _source(self, image: RowImage) -> bytes:
        return file_bytes(Path(image.path)) if image.path else self._files[image.source]

    def _rule(self) -> ImageRule:
        engine, rule = self._config.worker.engine, self._tokenizer().image_rule
        if not ENGINES.find(engine).takes_images:
            able = ", ".join(repr(name) for name in ENGINES.shipped if ENGINES.find(name).takes_images)
            refuse("worker.engine", engine, "takes no images, and submitted prompts have some", f"use one of {able}")
        if rule is None:
            why = "takes no images, and submitted prompts have some"
            refuse("model.path", self._config.model.path, why, "use a model with an image processor")
        return rule


class PromptEncoder:
    """Encodes the prompts of a run."""

    def __init__(self, config: Config, keeps_files: bool = True):
        """`keeps_files`: whether encoded prompts have the files of their images, and not only the names."""
        self._config, self._keeps_files = config, keeps_files

    def encode(self, prompts: Iterable[Prompt]) -> list[EncodedPrompt]:
        """Encode prompts. Raises ValueError, BadRow included, for a prompt that cannot be used, and ConfigError for
        images that the run does not take."""
        images = PromptImages(self._config, lambda: self._tokenizer)
        placed = [(prompt, *place(prompt, images)) for prompt in prompts]
        images.prepare()
        return [
            self._encode(prompt, said, [images.prepared[source] for source in sources])
            for prompt, said, sources in placed
        ]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._config.model.path)

    def _encode(self, prompt: Prompt, said: PromptText, images: list[PreparedImage]) -> EncodedPrompt:
        """Encode one prompt. `said`: its token ids, or its text or messages with a content part for each image;
        `images`: the prepared images in order."""
        longest, lengths = self._config.longest_prompt_tokens, [image.tokens for image in images]
        if is_said(said):
            ids = self._tokenizer.encode_row(said, lengths, **self._config.data.prompt_options)
        else:
            ids = np.asarray(said, np.int32)
            check_placeholders(ids, lengths, self._tokenizer.image_rule if images else None)
        if not 1 <= len(ids) <= longest:
            raise ValueError(f"a prompt has {len(ids)} tokens; between 1 and {longest} fit, data.max_prompt_tokens")
        extra = b"" if prompt.extra is None else msgspec.msgpack.encode(prompt.extra, enc_hook=to_plain)
        names = [image.name for image in images]
        submission = wire.Submission(len(ids), prompt.label, prompt.reward, extra, names)
        if body_bytes(submission) > MAX_BODY_BYTES:
            raise ValueError(
                f"label and extra of a prompt have more than {MAX_BODY_BYTES} bytes together; shorten them"
            )
        return EncodedPrompt(submission, ids, {image.name: image.png for image in images if self._keeps_files})


def is_said(prompt: PromptText) -> TypeGuard[str | list[dict]]:
    """Whether a prompt is text or chat messages, and not token ids."""
    return isinstance(prompt, str) or bool(len(prompt) and isinstance(prompt[0], dict))


def place(prompt: Prompt, images: PromptImages) -> tuple[PromptText, list[str]]:
    """(the prompt with each image as a content part in April's own format, the images' sources in order). A prompt of
    token ids is returned as it is. Raises BadRow."""
    if not is_said(prompt.prompt):
        return prompt.prompt, images.sources(prompt.images)
    if not isinstance(prompt.prompt, str):
        for message in prompt.prompt:
            check_message(message, "prompt")
    return images.place(prompt.prompt, prompt.images)


def check_placeholders(ids: np.ndarray, lengths: list[int], rule: ImageRule | None) -> None:
    """Raises ValueError unless a prompt of token ids has as many placeholder ids as its images have tokens. `lengths`:
    number of tokens of each image; `rule`: the model's way to prepare images, which names the placeholder; None: check
    nothing."""
    if rule and (found := np.count_nonzero(ids == rule.token_id)) != sum(lengths):
        raise ValueError(
            f"the images of a prompt take {sum(lengths)} tokens, and its ids have {found} of their placeholders; "
            "repeat the placeholder of each image as often as the image has tokens"
        )


def decode_extra(extra: bytes) -> Any:
    return msgspec.msgpack.decode(extra) if extra else None


def to_plain(value: Any) -> Any:
    """MessagePack hook: NumPy numbers and arrays as Python numbers and lists."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"extra of a prompt holds a {type(value).__name__}, which MessagePack does not")


def body_bytes(prompt: wire.Submission) -> int:
    return HEAD_BYTES + 4 * len(prompt.label) + len(prompt.extra) + NAME_BYTES * len(prompt.images)


def split_into_messages(prompts: Sequence[EncodedPrompt]) -> Iterator[list[EncodedPrompt]]:
    """Yield the prompts in lists that each fit one message."""
    limits = MAX_BODY_BYTES, MAX_MESSAGE_TOKENS, MAX_MESSAGE_IMAGES
    current: list[EncodedPrompt] = []
    sizes = (0, 0, 0)
    for prompt in prompts:
        own = body_bytes(prompt.submission), len(prompt.ids), len(prompt.submission.images)
        if current and any(size + more > limit for size, more, limit in zip(sizes, own, limits, strict=True)):
            yield current
            current, sizes = [], (0, 0, 0)
        current.append(prompt)
        sizes = sizes[0] + own[0], sizes[1] + own[1], sizes[2] + own[2]
    if current:
        yield current
