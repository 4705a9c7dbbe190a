"""The rows of a supervised run as training batches.

Batch k has the rows at positions k B to (k + 1) B of the seeded order of all epochs, so that it depends on the step
alone and a resumed run trains the batches of an unbroken one. A row that cannot be trained is left out of its batch and
counted.
"""

from typing import Any

import orjson

from april.broker.header import model_fingerprints
from april.config import Config, ConfigError
from april.data.conversation_rows import ConversationRows
from april.data.conversations import load_conversations
from april.data.dataset import Dataset
from april.data.rows import BadRow
from april.launch.sft.record import SftRecord
from april.learner.batch import ReceivedGroup, TrainingBatch, TrainSample
from april.learner.conversations import as_sample
from april.util.errors import refuse
from april.util.files import replace_file
from april.wire.training import Discard

ORDER_FILE = "order.json"
"""File of the run folder with all that determines the rows of each batch, their tokens and their loss (JSON), so that
a resumed run can be checked against it."""
ROWS_TO_TRAIN = "rows"
"""Field of `ORDER_FILE` with the number of rows in all epochs, which a resumed run may raise."""
STOP_FILE = "stop"
"""File of the run folder whose presence ends the run after the batch in training."""


class ConversationBook:
    """The rows of a run by number, as tokens, and the batches that they make."""

    def __init__(self, config: Config):
        """Read all rows. Raises ConfigError."""
        data, self.config = config.data, config
        if not data.train_sources:
            refuse("data.source", data.source, "brings no rows to train on", "give them in data.path")
        self.training = ConversationRows(data.train_sources, config)
        self.encoder, self.max_tokens = self.training.encoder, self.training.max_tokens
        self.held_out = {
            each.name: load_conversations([each.source], data, config.sft, each.prompts)
            for each in config.evaluation_sets
        }
        self.held_out_too_long: dict[str, int] = {}
        """Number of the held-out rows that were left out as too long, by the name of their set."""

    @property
    def rows(self) -> Dataset:
        """The training rows."""
        return self.training.rows

    @property
    def positions(self) -> int | None:
        """Number of rows in all epochs; None if the number of epochs is not limited."""
        epochs = self.config.data.epochs
        return None if epochs is None else epochs * self.training.per_epoch

    @property
    def steps(self) -> int:
        """Number of batches in the run."""
        schedule, size = self.config.schedule, self.config.sft.batch_size
        if self.positions is None:
            return schedule.max_steps
        whole, rest = divmod(self.positions, size)
        return min(schedule.max_steps, whole + (rest > 0 and schedule.last_batch == "train"))

    def batch(self, step: int) -> TrainingBatch:
        """The batch that turns weights `step` into weights `step + 1`; each row is a group."""
        size, source_of = self.config.sft.batch_size, self.rows.source_of
        found = self.training.at(range(step * size, min((step + 1) * size, self.positions or (step + 1) * size)))
        return TrainingBatch(step, [[as_sample(row, number, step, source_of(number))] for number, row in found])

    def held_out_batch(self) -> TrainingBatch:
        """The held-out rows, those of each set as one group; rows that are too long are left out and counted. Raises
        ConfigError for a row that cannot be used."""
        groups = []
        for name, rows in self.held_out.items():
            groups.append(group := list[TrainSample]())
            for number in range(len(rows)):
                try:
                    row = self.encoder.encode(rows[number])
                except BadRow as error:
                    raise ConfigError(
                        f"held-out row {number + 1} of {name}: {error}; mend it, or the template"
                    ) from None
                if len(row.tokens) <= self.max_tokens:
                    group.append(as_sample(row, number, 0))
            self.held_out_too_long[name] = len(rows) - len(group)
            if not group:
                refuse("sft.max_tokens", self.max_tokens, f"leaves no held-out row of {name}", "raise it")
        return TrainingBatch(0, groups)

    def counts(self) -> dict[str, int]:
        """Numbers of rows by name: `rows`, training rows; `bad_rows` and `too_long`, training rows left out so far for
        that reason; `held_out_too_long`, held-out rows left out as too long."""
        left_out = {reason: len(rows) for reason, rows in self.training.left_out.items()}
        left_out["bad_rows"] += self.rows.bad_rows
        return {"rows": len(self.rows), **left_out, "held_out_too_long": sum(self.held_out_too_long.values())}


class ConversationSource:
    """Batch source of a supervised run (`april.learner.prefetch.BatchSource`) on rank 0: makes batches of the rows of
    files."""

    leftover: list[ReceivedGroup] = []  # noqa: RUF012

    def __init__(self, config: Config, book: ConversationBook):
        self.config, self.book, self.run_dir = config, book, config.run_dir
        self.record: SftRecord

    def start(self, checkpoint_step: int) -> tuple[int, int]:
        """Go on from the checkpoint of step `checkpoint_step`, or begin at 0. Returns (incarnation of the learner,
        newest step that it has consumed), here always (0, `checkpoint_step`). Raises ConfigError if the run began with
        other rows, tokens or another loss."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(self.run_dir / ORDER_FILE, orjson.dumps(checked_order(self.config, self.book, checkpoint_step)))
        self.record = SftRecord(self.config, checkpoint_step, self.book.steps, self.book.counts)
        return 0, checkpoint_step

    def fetch(self, step: int) -> TrainingBatch | None:
        ends = step >= self.book.steps or (self.run_dir / STOP_FILE).exists()
        return None if ends else self.book.batch(step)

    def alive(self) -> None:
        pass

    def consumed(self, step: int, metrics: dict[str, float], discarded: Discard = "") -> None:
        self.record.step(step + 1, metrics, discarded)

    def evaluated(self, step: int, sets: dict[str, dict[str, float]]) -> None:
        """Record the figures of held-out rows, by the name of their set, under weights `step`."""
        self.record.evaluated(step, sets)

    def durable(self, step: int, oldest: int) -> None:
        pass

    def best(self) -> tuple[int, list[int]]:
        return self.record.best(self.config.evaluation.best), []

    def close(self) -> None:
        self.record.close()


def checked_order(config: Config, book: ConversationBook, checkpoint_step: int) -> dict[str, Any]:
    """Everything that determines the batches of a run and their loss, as stored in `ORDER_FILE`.

    Raises ConfigError if a run that goes on from weights `checkpoint_step` > 0 has other rows, tokens or another loss
    than at its beginning, or if its last batch was smaller than others for want of rows, and there are more rows now.
    """
    path, size = config.run_dir / ORDER_FILE, config.sft.batch_size
    settings = {
        "seed": config.seed,
        "sft.batch_size": size,
        "sft.max_tokens": book.max_tokens,
        "sft.train_on": config.sft.train_on,
        "data.add_bos": config.data.add_bos,
        "algorithm.normalisation": config.algorithm.normalisation,
    }
    order = settings | {"data.path": book.rows.fingerprint} | model_fingerprints(config, book.encoder.tokenizer)
    before = orjson.loads(path.read_bytes()) if checkpoint_step and path.exists() else {}
    for key, value in order.items():
        if before.get(key, value) != value:
            why = "is not what the run began with, and its batches or their loss would be others"
            refuse(key, settings.get(key), why, "restore it, or begin another run")
    rows, rows_now = before.get(ROWS_TO_TRAIN), book.positions
    if rows is not None and rows < checkpoint_step * size and (rows_now is None or rows_now > rows):
        why = f"gives more rows than the {rows} that the run has trained, and its last batch of them was not full"
        refuse("data.epochs", config.data.epochs, why, "restore it, or begin another run")
    return before | order | {ROWS_TO_TRAIN: rows_now}
