"""Prompts that a trainer submits, encoded for the broker: token ids, reference answer, and extra data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from april import wire
from april.config import Config
from april.data.rows import has_other_parts
from april.data.tokenizer import Tokenizer
from april.wire.limits import FROM_PEER

MAX_BODY_BYTES = FROM_PEER.body_bytes // 2
"""Most bytes of labels and extras in one message, which leaves room for the rest of the message body."""
MAX_MESSAGE_TOKENS = FROM_PEER.frame_bytes // 4
"""Most prompt tokens in one message."""
HEAD_BYTES = 160
"""Estimated bytes of a prompt's header in a message, without label and extra."""


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


EncodedPrompt: TypeAlias = tuple[wire.Submission, np.ndarray]
"""A prompt in the broker's form: (header with label and extra, token ids int32 [T])."""


def encoder(config: Config) -> Callable[[Prompt], EncodedPrompt]:
    """A function that encodes prompts; it raises ValueError, BadRow included, for a prompt that cannot be used."""
    tokenizer: list[Tokenizer] = []
    longest = config.longest_prompt_tokens

    def encode(prompt: Prompt) -> EncodedPrompt:
        if isinstance(prompt.prompt, str) or (len(prompt.prompt) and isinstance(prompt.prompt[0], dict)):
            if not tokenizer:
                tokenizer.append(Tokenizer(config.model.path))
            if not isinstance(prompt.prompt, str) and any(map(has_other_parts, prompt.prompt)):  # type: ignore[arg-type]
                raise ValueError("a submitted prompt has text only; bring images as rows of a dataset (data.path)")
            ids = tokenizer[0].encode_row(prompt.prompt, **config.data.prompt_options)  # type: ignore[arg-type]
        else:
            ids = np.asarray(prompt.prompt, np.int32)
        if not 1 <= len(ids) <= longest:
            raise ValueError(f"a prompt has {len(ids)} tokens; between 1 and {longest} fit, data.max_prompt_tokens")
        extra = b"" if prompt.extra is None else msgspec.msgpack.encode(prompt.extra, enc_hook=to_plain)
        submission = wire.Submission(len(ids), prompt.label, prompt.reward, extra)
        if body_bytes(submission) > MAX_BODY_BYTES:
            raise ValueError(
                f"label and extra of a prompt have more than {MAX_BODY_BYTES} bytes together; shorten them"
            )
        return submission, ids

    return encode


def decode_extra(extra: bytes) -> Any:
    return msgspec.msgpack.decode(extra) if extra else None


def to_plain(value: Any) -> Any:
    """MessagePack hook: NumPy numbers and arrays as Python numbers and lists."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"extra of a prompt holds a {type(value).__name__}, which MessagePack does not")


def body_bytes(prompt: wire.Submission) -> int:
    return HEAD_BYTES + 4 * len(prompt.label) + len(prompt.extra)


def split_into_messages(prompts: Sequence[EncodedPrompt]) -> Iterator[list[EncodedPrompt]]:
    """Yield the prompts in lists that each fit one message."""
    current: list[EncodedPrompt] = []
    size = tokens = 0
    for prompt in prompts:
        submission, ids = prompt
        if current and (size + body_bytes(submission) > MAX_BODY_BYTES or tokens + len(ids) > MAX_MESSAGE_TOKENS):
            yield current
            current, size, tokens = [], 0, 0
        current.append(prompt)
        size, tokens = size + body_bytes(submission), tokens + len(ids)
    if current:
        yield current
