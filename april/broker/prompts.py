"""The prompts of a run: dataset rows in a seeded order per epoch, tokenised when they are drawn, or prompts that the
trainer submits during the run."""

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np

from april import wire
from april.broker.image_preparation import PROMPTS_AHEAD, ImagePreparation
from april.broker.images import ImageStore
from april.broker.journal.files import Damaged
from april.broker.ledger.events import Event, EventArray, PromptSubmitted
from april.broker.ledger.ledger import Ledger
from april.broker.samplers.draws import SampledOrder, draws_in_order
from april.config import Config, ConfigError, ScheduleSection
from april.config.algorithms import algorithm_of, response_budget
from april.config.evaluation import EvaluationSet
from april.config.teachers import shows_feedback, teacher_of
from april.data.dataset import Dataset, load_dataset
from april.data.images import NO_IMAGES, PROMPT_IMAGES
from april.data.rows import BadRow, DatasetRow, checked_label, checked_reward, hinted_prompt
from april.data.tokenizer import Tokenizer
from april.util.errors import refuse
from april.wire.limits import clip

log = logging.getLogger(__name__)

ReadBack: TypeAlias = Callable[[Any], tuple[Event, list[EventArray]]]
"""Function that reads an event and its arrays by their journal reference."""
ROWS_CACHED = 16_384
"""Number of dataset rows whose token ids are kept in memory for the next epoch."""


@dataclass(frozen=True)
class HeldOut:
    """A set of held-out prompts for evaluation."""

    settings: EvaluationSet
    rows: Dataset
    tokens: list[tuple[int, bytes]]
    """(position, token ids) of the set's prompts that are not too long; the ids are int32."""


class PromptBook:
    """The prompts of a run: training prompts by (epoch, position), evaluation prompts by (number of the set,
    position)."""

    def __init__(self, config: Config, images: ImageStore | None = None):
        """`images`: where the files of images go; without one, as in a dry run, they are prepared and not kept."""
        data = config.data
        self.image_store = images
        allowed = config.reward.allowed
        self.rows = load_dataset(data.train_sources, data, allowed=allowed)
        self.tokenizer = Tokenizer(config.model.path)
        self.fingerprint = self.rows.fingerprint
        self.max_prompt_tokens = config.longest_prompt_tokens
        self.too_long: set[int] = set()
        """Drawn row numbers that were skipped for having no token or more than `max_prompt_tokens`."""
        self.untokenisable: set[int] = set()
        """Drawn row numbers that were skipped because the chat template rejects them."""
        self._last_refusal = ""
        """Why the chat template rejected the last of the `untokenisable` rows."""
        self._config, self.seed = config, config.seed
        self._budgets = [response_budget(config, source) for source in range(max(1, len(data.prompt_sources)))]
        """Limit on the length of a response, in tokens, for each source, by number of the source."""
        self._teachers = [teacher_of(config, source) for source in range(max(1, len(data.prompt_sources)))]
        """Name of the teacher of each source, by number of the source; "" without one."""
        shown = [bool(algorithm_of(config, source).divergence) for source in range(len(self._teachers))]
        self._hints = [config.algorithm.hint if is_shown else "" for is_shown in shown]
        """For each source, by number, the prompt template with the hint (`algorithm.hint`); "" for sources without
        self-distillation."""
        self.encoded = lru_cache(maxsize=ROWS_CACHED)(self._encode_row)
        """Function (row number) -> token ids of the row's prompt, None if it cannot be drawn; cached for the next
        epoch."""
        self.lost_hints: set[tuple[int, int]] = set()
        """(epoch, position) of the drawn prompts that are trained without their hint, for some samples at least, since
        prompt, hint and response do not fit into the context together."""
        self._prepared_until = 0, 0
        """(epoch, position) of the first prompt whose images are not yet being prepared ahead of its draw."""
        self._drawn = lru_cache(maxsize=16)(self._draw)
        """The method `_draw` with its last results cached, as a schedule may look at a prompt several times before it
        opens the group."""
        self._draws = draws_of(config.schedule, self)
        """Order in which `schedule.sampler` draws prompts; None if they are drawn in the seeded order of each epoch."""
        self.held_out: dict[int, HeldOut] = {}
        """Evaluation sets by number, in order."""
        try:
            self._look_at_prompts(allowed)
        except BaseException:
            self.close()  # what was begun is no longer of use
            raise

    def _look_at_prompts(self, allowed: Collection[str]) -> None:
        """Tokenise the held-out prompts, and training prompts up to the first that can be used. Raises ConfigError.
        `allowed`: names of the verifiers that rows may name; empty: those that ship with April."""
        config = self._config
        for settings in config.evaluation_sets:
            self.held_out[settings.number] = self._held_out(settings, allowed)
        if config.agent.is_set and self.with_images:
            raise ConfigError(
                "rows have images, and an agent's program writes the prompts of its session, without them; leave them "
                "out with data.images_key = ''"
            )
        if (config.teacher or config.algorithm.hint) and self.with_images:
            raise ConfigError(
                "rows have images, which a teacher is not shown; leave [teacher] and algorithm.hint out, or the images "
                "with data.images_key = ''"
            )
        self.draw((0, 0))

    def draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        """(epoch, position, token ids) of the first prompt from the cursor (epoch, position) on that is not skipped as
        empty, too long, or rejected by the chat template. None if no prompt is left.

        Raises ConfigError if no prompt of the dataset can be used.
        """
        return self._drawn(cursor)

    def _draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        epoch, position = cursor
        for _ in range(2 * len(self.rows) + len(self._order(epoch))):
            if position >= len(self._order(epoch)):
                epoch, position = epoch + 1, 0
            if self._config.data.epochs is not None and epoch >= self._config.data.epochs:
                return None
            self._prepare_ahead(epoch, position)
            tokens = self.encoded(self.row_number(epoch, position))
            if tokens is not None:
                return epoch, position, tokens
            position += 1
        paths = ", ".join(str(source.path) for source in self._config.data.train_sources)
        if self._last_refusal and not self.too_long:
            raise ConfigError(
                f"no prompt of {paths} can be used: {self._last_refusal}; mend the prompts, or data.template_options"
            )
        raise ConfigError(
            f"no prompt of {paths} has between 1 and {self.max_prompt_tokens} tokens with the tokeniser of "
            f"{self._config.model.path}; mend the prompts, raise data.max_prompt_tokens, or lower "
            "sampling.max_response_tokens if the model's context is short"
        )

    def _prepare_ahead(self, epoch: int, position: int) -> None:
        """Begin to prepare the images of the prompt at (epoch, position), and those of the prompts after it that will
        be drawn soon."""
        if not self.rows.with_images:
            return
        order, (begun_epoch, begun) = self._order(epoch), self._prepared_until
        if (self._draws and epoch) or epoch < begun_epoch:  # a sampler's choice, or a prompt that was queued again
            return self.preparation.begin(self.rows, self.rows[int(order[position])].images)
        begin = max(position, begun) if epoch == begun_epoch else position
        end = min(position + PROMPTS_AHEAD, len(order))
        for number in order[begin:end]:
            self.preparation.begin(self.rows, self.rows[int(number)].images)
        self._prepared_until = max(self._prepared_until, (epoch, end))

    def bind(self, ledger: Ledger, read: ReadBack) -> None:
        """Connect the prompts with the ledger. A sampler's order becomes the ledger's `prompt_order`; submitted prompts
        are read with `read` by the journal references that the ledger has."""
        if self._draws:
            ledger.prompt_order = self._draws

    def decode_submission(
        self, message: wire.Submit, arrays: list[wire.PackedArray]
    ) -> Iterator[tuple[PromptSubmitted, bytes]]:
        """Events and token ids of the prompts in a trainer's message. Raises BadRow for a prompt that the run cannot
        use."""
        raise BadRow("this run draws its prompts from files: set data.source to 'submitted' to bring them")

    def submission(self, row: int) -> tuple[int, bytes]:
        """(number, extra) of the prompt that the trainer has submitted as number `row`, `extra` being its opaque bytes;
        (-1, b"") for prompts from files."""
        return -1, b""

    def row(self, epoch: int, position: int) -> DatasetRow:
        return self.rows[self.row_number(epoch, position)]

    def held_out_row(self, number: int, position: int) -> DatasetRow:
        return self.held_out[number].rows[position]

    def source_of(self, epoch: int, position: int) -> int:
        """Number of the source of the prompt at (epoch, position)."""
        return self.rows.source_of(self.row_number(epoch, position)) if len(self.rows.counts) > 1 else 0

    def budget_of(self, evaluation: bool, epoch: int, position: int) -> int:
        """Limit on the length of responses (tokens), observations included, to the prompt at (epoch, position)."""
        whole = self._config.sampling.max_response_tokens
        if evaluation or self._budgets == [whole] * len(self._budgets):
            return whole
        return self._budgets[self.source_of(epoch, position)]

    def teacher_of(self, epoch: int, position: int) -> str:
        """Name of the teacher of the source of the prompt at (epoch, position); "" without one."""
        return self._teachers[self.source_of(epoch, position)] if self._config.teacher else ""

    def row_number(self, epoch: int, position: int) -> int:
        """Number of the dataset row at a position of an epoch, from 0, bad rows excluded."""
        return int(self._order(epoch)[position])

    def remaining(self, cursor: tuple[int, int]) -> int | None:
        """Number of prompts from the cursor to the end of the last epoch, including rows that will be skipped; None if
        the number of epochs is unlimited."""
        if self._config.data.epochs is None:
            return None
        epoch, position = cursor
        return max(0, (self._config.data.epochs - epoch) * len(self._order(epoch)) - position)

    def counts(self) -> dict[str, int]:
        """Counts of training rows: `rows` in the dataset, `bad_rows` left out as bad, `too_long` skipped so far as too
        long or empty, and `lost_hints` if there are any."""
        bad_rows = self.rows.bad_rows + len(self.untokenisable)
        lost = {"lost_hints": len(self.lost_hints)} if self.lost_hints else {}
        return {"rows": len(self.rows), "bad_rows": bad_rows, "too_long": len(self.too_long)} | lost

    def _order(self, epoch: int) -> np.ndarray:
        return self.rows.order(self.seed, epoch)

    def _encode_row(self, number: int) -> bytes | None:
        try:
            tokens = self._encode(self.rows, self.rows[number])
            self.encode_hinted(self.rows[number], self.rows.source_of(number))
        except BadRow as error:
            if number not in self.untokenisable:
                self._last_refusal = str(error)
                self.untokenisable.add(number)
                log.warning("row %d skipped: %s", number, error)
            return None
        if tokens is None and number not in self.too_long:
            self.too_long.add(number)
            if len(self.too_long).bit_count() == 1:
                log.warning(
                    "prompt of row %d skipped, between 1 and %d tokens are wanted; %d of %d rows skipped so far",
                    number, self.max_prompt_tokens, len(self.too_long), len(self.rows),
                )  # fmt: skip
        return tokens

    def hinted(self, epoch: int, position: int, feedback: str = "", response_tokens: int = 0) -> bytes:
        """Token ids, int32, of the prompt with its hint, under which the policy is its own teacher (self-distillation).
        With `feedback`, the text that the verifier gave, it is for one sample of `response_tokens` tokens; otherwise
        for all samples of a group.

        Empty without self-distillation, if the hint shows feedback and there is none or the reverse, or if the hinted
        prompt leaves no room for the response in the context.
        """
        if bool(feedback) != shows_feedback(self._config.algorithm):
            return b""
        try:
            row, source = self.row(epoch, position), self.source_of(epoch, position)
            return self.encode_hinted(row, source, feedback, response_tokens)
        except BadRow as error:
            if not self.lost_hints:
                log.warning("position %d of epoch %d is trained without its hint: %s", position, epoch, error)
            self.lost_hints.add((epoch, position))
            return b""

    def encode_hinted(self, row: DatasetRow, source: int, feedback: str = "", response_tokens: int = 0) -> bytes:
        """Token ids, int32, of a row's prompt with its hint; empty for a source without self-distillation. `source`:
        number of the row's source; `response_tokens`: length of the response, 0 if it is yet to be generated. Raises
        BadRow, also for a prompt that leaves no room for the response in the context."""
        config, hint = self._config, self._hints[source]
        if not hint:
            return b""
        prompt = hinted_prompt(row, hint, feedback)
        tokens = self.tokenizer.encode_row(prompt, **config.data.prompt_options)
        room = response_tokens or config.sampling.max_response_tokens
        if config.context_tokens and len(tokens) + room > config.context_tokens:
            fix = "shorten algorithm.hint" + (", or lower reward.feedback_characters" if feedback else "")
            raise BadRow(
                f"{len(tokens)} tokens of the prompt with its hint leave no room for a response of "
                f"{room} in the model's {config.context_tokens}; {fix}"
            )
        return tokens.astype("<i4").tobytes()

    def _held_out(self, settings: EvaluationSet, allowed: Collection[str]) -> HeldOut:
        rows = load_dataset([settings.source], self._config.data, settings.prompts, allowed)
        for index in range(len(rows) if rows.with_images else 0):
            self.preparation.begin(rows, rows[index].images, lasting=True)
        encoded = [(index, self._encode_held_out(rows, index)) for index in range(len(rows))]
        return HeldOut(settings, rows, [(index, tokens) for index, tokens in encoded if tokens is not None])

    def _encode_held_out(self, rows: Dataset, index: int) -> bytes | None:
        try:
            return self._encode(rows, rows[index])
        except BadRow as error:
            raise ConfigError(f"held-out prompt {index}: {error}; mend it, or data.template_options") from None

    def _encode(self, rows: Dataset, row: DatasetRow) -> bytes | None:
        """Token ids of the prompt in a dataset row; None if it is empty or too long. Empty bytes in a run with agents,
        which write the prompts."""
        if self._config.agent.is_set:
            return b""
        tokens = self.encode(rows, row)
        return tokens.astype("<i4").tobytes() if 0 < len(tokens) <= self.max_prompt_tokens else None

    def encode(self, rows: Dataset, row: DatasetRow) -> np.ndarray:
        """Token ids of the prompt in a row of `rows`, int32 [P], whatever its length. Raises BadRow."""
        lengths = [self.preparation.tokens_of(rows, image) for image in row.images]
        return self.tokenizer.encode_row(row.prompt, lengths, **self._config.data.prompt_options)

    @property
    def with_images(self) -> int:
        """Number of rows with images, held-out ones included."""
        return sum(rows.with_images for rows in (self.rows, *(held.rows for held in self.held_out.values())))

    @cached_property
    def preparation(self) -> ImagePreparation:
        """The threads that prepare images of dataset rows, created at first use. Raises ConfigError if the policy takes
        no images."""
        rule = self.tokenizer.image_rule
        if rule is None:
            refuse(
                "model.path",
                self._config.model.path,
                "takes no images, and rows have some",
                "use a model with an image processor, or leave the images out with data.images_key = ''",
            )
        return ImagePreparation(rule, self.image_store)

    def keep_images(self, evaluation: bool, epoch: int, row: int) -> list[str]:
        """Names of the images of a drawn prompt, in order, once their files are on disk.

        `epoch`: for evaluation, the number of the set. Raises OSError for a file that cannot be written, and for an
        image whose source has changed; a training row with it is not drawn again.
        """
        rows = self.held_out[epoch].rows if evaluation else self.rows
        if not rows.with_images:
            return []
        drawn = self.held_out_row(epoch, row) if evaluation else self.row(epoch, row)
        try:
            return [self.preparation.wait_for(rows, image).name for image in drawn.images]
        except BadRow as error:
            self.encoded.cache_clear()
            self._drawn.cache_clear()
            raise OSError(str(error)) from None

    def upcoming_images(self) -> Iterator[str]:
        """Names of the images of prompts that may be drawn soon."""
        return self.preparation.names() if self.with_images else iter(())

    def close(self) -> None:
        """End the threads that prepare images, if there are any."""
        if preparation := self.__dict__.get("preparation"):
            preparation.close()


# --- submitted prompts ------------------------------------------------------------------------------------------------


SUBMITTED_CACHED = 64
"""Number of submitted prompts that are kept in memory after they are read from the journal."""
IMAGES_CACHED = 16_384
"""Number of submitted images whose numbers of tokens are kept in memory."""


class SubmittedPrompts(PromptBook):
    """Training prompts that the trainer submits. Their place is (0, number), counted from 0; each is read from its
    record in the journal.

    prompts = SubmittedPrompts(config)
    prompts.bind(ledger, journal.read)
    for prompt, tokens in prompts.decode_submission(message, arrays):
        ledger.submit(prompt, tokens)
    prompts.draw((0, 0))                    # (0, 0, tokens)
    """

    def __init__(self, config: Config, images: ImageStore | None = None):
        self._ledger: Ledger | None = None
        super().__init__(config, images)
        self.fingerprint = "submitted"
        self._allowed = config.reward.allowed
        self._largest_id = (config.vocabulary or 1 << 31) - 1
        self._tokens_of = lru_cache(maxsize=IMAGES_CACHED)(self._image_tokens)

    def bind(self, ledger: Ledger, read: ReadBack) -> None:
        self._ledger = ledger
        self._read = lru_cache(maxsize=SUBMITTED_CACHED)(lambda number: read(ledger.prompts.submitted[number]))

    def draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        _, number = cursor
        if self._ledger is None or number not in self._ledger.prompts.submitted:
            return None
        _, [(_, tokens)] = self._read(number)
        return 0, number, bytes(tokens)

    def source_of(self, epoch: int, position: int) -> int:
        return 0

    def row(self, epoch: int, position: int) -> DatasetRow:
        prompt = self._prompt(position)
        return DatasetRow("", prompt.label, prompt.reward or None)

    def submission(self, row: int) -> tuple[int, bytes]:
        return row, self._prompt(row).extra

    def keep_images(self, evaluation: bool, epoch: int, row: int) -> list[str]:
        return super().keep_images(evaluation, epoch, row) if evaluation else self._prompt(row).images

    def _prompt(self, number: int) -> PromptSubmitted:
        event, _ = self._read(number)
        assert isinstance(event, PromptSubmitted)
        return event

    def remaining(self, cursor: tuple[int, int]) -> int | None:
        return None

    def counts(self) -> dict[str, int]:
        return super().counts() | {"rows": self._ledger.prompts.submitted_count if self._ledger else 0}

    def decode_submission(
        self, message: wire.Submit, arrays: list[wire.PackedArray]
    ) -> Iterator[tuple[PromptSubmitted, bytes]]:
        lengths = [prompt.prompt_tokens for prompt in message.prompts]
        if [array.dtype for array in arrays] != ["i4"] or sum(lengths) * 4 != len(arrays[0].data):
            raise BadRow("prompts come with one array, of as many token ids as they say")
        if not all(1 <= length <= self.max_prompt_tokens for length in lengths):
            raise BadRow(f"a prompt has between 1 and {self.max_prompt_tokens} tokens")
        ids = np.frombuffer(arrays[0].data, "<i4")
        if len(ids) and not (ids.min() >= 0 and ids.max() <= self._largest_id):
            raise BadRow(f"token ids of a prompt are between 0 and {self._largest_id}")
        for prompt in message.prompts:
            checked_label(prompt.label, "label")
            checked_reward(prompt.reward or None, self._allowed)
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        tokens = [ids[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        for prompt, own in zip(message.prompts, tokens, strict=True):
            if prompt.images:
                self._check_images(prompt.images, own)
        return (
            (PromptSubmitted(number, prompt.label, prompt.reward, prompt.extra, prompt.images), own.tobytes())
            for number, (prompt, own) in enumerate(zip(message.prompts, tokens, strict=True), message.first)
        )

    def _check_images(self, names: list[str], ids: np.ndarray) -> None:
        """Check that the images are on disk, and that `ids`, int32 [P], has as many placeholders as they take. Raises
        BadRow."""
        if self._config.teacher:
            raise BadRow("a prompt has images, which a teacher is not shown; leave [teacher] out, or the images")
        if len(names) > PROMPT_IMAGES:
            raise BadRow(f"a prompt has {len(names)} images, more than {PROMPT_IMAGES}")
        if missing := [name for name in names if not self.image_store or name not in self.image_store]:
            raise BadRow(f"a prompt names image {clip(missing[0])!r}, which the broker does not have; bring it first")
        rule = self.tokenizer.image_rule
        if rule is None:
            raise BadRow(NO_IMAGES)
        wanted, found = sum(map(self._tokens_of, names)), int((ids == rule.token_id).sum())
        if wanted != found:
            raise BadRow(f"a prompt's images take {wanted} tokens, and it has {found} of their placeholders")

    def _image_tokens(self, name: str) -> int:
        """Number of tokens of an image that the broker has kept. Raises BadRow for a file that cannot be read."""
        assert self.image_store and self.tokenizer.image_rule
        try:
            return self.tokenizer.image_rule.tokens(*self.image_store.size(name))
        except Damaged as error:
            raise BadRow(f"{error}, or bring it again") from None


def draws_of(section: ScheduleSection, prompts: PromptBook) -> SampledOrder | None:
    """The order in which `schedule.sampler` draws the prompts of files; None for the seeded order of each epoch."""
    if draws_in_order(section):
        return None
    return SampledOrder(
        section,
        len(prompts.rows),
        lambda epoch: prompts.rows.order(prompts.seed, epoch),
        lambda row: prompts.encoded(row) is not None,
    )


def open_prompts(config: Config, images: ImageStore | None = None) -> PromptBook:
    """The prompts of a run: those that the trainer submits if `data.source` is "submitted", otherwise those of dataset
    files. `images`: where the files of images go; None, as in a dry run: images are prepared and not kept."""
    return (SubmittedPrompts if config.data.source == "submitted" else PromptBook)(config, images)
