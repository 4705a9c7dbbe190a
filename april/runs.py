"""A run in a script or a notebook: its steps, samples and ledger as tables.

    run = april.runs.load("runs/quickstart")
    run.steps            # a row for each line of metrics.jsonl
    run.samples()        # the samples kept of all steps; run.samples(10): of one step
    run.ledger           # after each step, the states of all generated tokens

Tables are pandas data frames where pandas is installed; otherwise steps and ledger are lists of dictionaries, and
samples are a pyarrow table.
"""

from pathlib import Path
from typing import Any

from april.config import ConfigError
from april.observe.report.run_folder import RunFolder, read_run
from april.observe.report.samples import sample_files

TOKEN_STATES = ("trained", "delivered", "ready", "open")
"""States that a generated token can have, other than discarded."""


class LoadedRun:
    """Content of a run folder at the time of loading; its samples are read only when `samples` is called."""

    def __init__(self, run: RunFolder):
        self._run = run

    @property
    def path(self) -> Path:
        return self._run.path

    @property
    def state(self) -> str:
        return self._run.state

    @property
    def config(self) -> dict[str, Any]:
        return self._run.config

    @property
    def steps(self) -> Any:
        """A row for each step; in a data frame, nested figures have columns such as `learner.loss`."""
        pandas = find_pandas()
        return self._run.steps if pandas is None else pandas.json_normalize(self._run.steps, max_level=1)

    @property
    def ledger(self) -> Any:
        """A row for each step: tokens in each state, tokens discarded by reason as `discarded.REASON`, and `closes`,
        whether these add up to the tokens `generated`. The last row comes from the run summary, which is newer than
        the metrics of that step."""
        ledger_by_step = {step["step"]: step["tokens_ledger"] for step in self._run.steps if step.get("tokens_ledger")}
        summary = self._run.summary
        if summary.get("tokens"):
            ledger_by_step[summary.get("steps", 0)] = summary["tokens"]
        reasons = sorted({reason for tokens in ledger_by_step.values() for reason in tokens.get("discarded") or {}})
        rows = [ledger_row(step, tokens, reasons) for step, tokens in ledger_by_step.items()]
        pandas = find_pandas()
        return rows if pandas is None else pandas.DataFrame(rows)

    @property
    def evaluation(self) -> list[dict[str, Any]]:
        return self._run.evaluation

    @property
    def sample_steps(self) -> list[int]:
        """Policy steps whose samples are kept."""
        return sorted(sample_files(self.path))

    def samples(self, step: int | None = None, columns: list[str] | None = None) -> Any:
        """The kept samples of one step or of all, with all columns or some. Raises ConfigError if there are none."""
        kept = sample_files(self.path)
        if step is not None and step not in kept:
            raise ConfigError(f"step {step} has no samples in {self.path}; sample_steps lists those that have")
        import pyarrow.dataset as dataset

        paths = [str(kept[kept_step]) for kept_step in sorted(kept) if step in (None, kept_step)]
        if not paths:
            raise ConfigError(f"{self.path} has kept no samples; set samples.every above 0 in the next run")
        table = dataset.dataset(paths, format="parquet").to_table(columns=columns)
        return table if find_pandas() is None else table.to_pandas()


def ledger_row(step: int, tokens: dict[str, Any], reasons: list[str]) -> dict[str, Any]:
    discarded = tokens.get("discarded") or {}
    row = {"step": step} | {name: count for name, count in tokens.items() if name != "discarded"}
    row |= {f"discarded.{reason}": discarded.get(reason, 0) for reason in reasons}
    accounted = sum(tokens[state] for state in TOKEN_STATES) + sum(discarded.values())
    return row | {"closes": tokens["generated"] == accounted}


def load(run_dir: str | Path) -> LoadedRun:
    """Read a run folder, such as runs/NAME, also while the run is going on. Raises ConfigError for another folder."""
    return LoadedRun(read_run(run_dir))


def find_pandas() -> Any:
    try:
        import pandas
    except ImportError:
        return None
    return pandas
