"""`april sft`: the checks of a supervised run before it starts, and the processes of its learner on this machine."""

import math
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from april.broker.journal.files import journal_folder
from april.broker.recovery import checkpoints_of
from april.broker.telemetry.metrics_file import parse_line
from april.broker.telemetry.recorder import read_summary
from april.config import Config
from april.config.checks import check_model
from april.config.stored import is_step
from april.launch import TARGETS
from april.launch.check import (
    Findings,
    check_devices,
    check_learner_parts,
    check_models,
    check_room,
    check_sinks,
    check_source,
    check_store,
    check_weights,
    installed_backend,
    is_plain,
    try_apart,
)
from april.launch.dry_run import count_of, describe_model, describe_training
from april.launch.memory import adapter_parameters, read_shape
from april.launch.row_checks import inspect_conversations
from april.launch.sft.source import STOP_FILE, ConversationBook, checked_order
from april.launch.supervisor import Part, RunFailed
from april.util.errors import refuse
from april.util.files import has_weights, replace_file
from april.util.lifetime import REFUSED, stop_signals, was_interrupted
from april.util.registry import python_command
from april.util.versions import RUN_FOLDER

POLL_S = 0.2
FIRST_ROWS_S = 10.0
"""Time for looking at rows when a run starts, seconds; a dry run looks at all."""

# --- checks -----------------------------------------------------------------------------------------------------------


def examine_sft(config: Config, devices: Sequence[str], everything: bool, resumes: bool = False) -> Findings:
    """Make all checks of a supervised run. `devices`: names of the accelerators; `everything`: look at all rows,
    however long that takes; `resumes`: the run goes on from its checkpoints, if there are any."""
    found = Findings()
    run_check, shape = found.run_check, read_shape(config.model.path)
    if run_check(check_model, config):
        folder = config.model.path
        weighed = (config.model.commit and not has_weights(folder)) or run_check(check_weights, folder)
        if weighed and not is_plain(config):
            try_apart(check_models, config, found, f"whether {folder} can be trained")
    for source in config.sources:
        run_check(check_source, source)
    readable = not found.errors
    run_check(check_learner_parts, config)
    found.facts["installed"] = run_check(installed_backend, config) or ""
    run_check(check_sinks, config.operations.sinks)
    run_check(TARGETS.find, config.run.target)
    run_check(check_devices, config, devices)
    parameters = shape.parameters if shape else 0
    trained = run_check(adapter_parameters, config) if readable and config.lora.is_set else parameters
    found.facts["disk"] = run_check(check_room, config, trained or 0) or ""
    found.facts["store"] = run_check(check_store, config) or ""
    book = run_check(ConversationBook, config) if readable else None
    if book and resumes:
        run_check(checked_order, config, book, max(checkpoints_of(config.run_dir), default=0))
    if book:
        inspect_book(config, book, found, math.inf if everything else FIRST_ROWS_S)
    return found


def inspect_book(config: Config, book: ConversationBook, found: Findings, patience_s: float) -> None:
    """Tokenise held-out rows and training rows for `patience_s` seconds; records facts about them, the rows that are
    left out, and an error for the first that cannot be trained."""
    found.run_check(book.held_out_batch)
    for name, left_out in book.held_out_too_long.items():
        if left_out:
            found.warnings.append(
                f"{left_out} of {len(book.held_out[name])} held-out rows of {name} are left out: they have more than "
                f"{book.max_tokens} tokens; raise sft.max_tokens if the model's context has room"
            )
    facts = inspect_conversations(config, book.training, config.data.train_sources, found, patience_s)
    if facts:
        held_out = sum(map(len, book.held_out.values()))
        also = f" and {held_out:,} held out" if held_out else ""
        found.facts["rows"] = f"{len(book.rows):,} rows{also}; {facts}"
    if not book.steps:
        refused_batch = f"{book.positions} rows in all epochs make no batch of sft.batch_size = {config.sft.batch_size}"
        found.errors.append(f"{refused_batch}; lower it, or set schedule.last_batch = 'train'")
    found.facts["steps"] = f"{book.steps:,} of {config.sft.batch_size} rows, {book.training.per_epoch:,} rows an epoch"


def describe_sft(config: Config) -> str:
    """Lines for people about what a supervised run would train: run, model, data, held-out data and learner."""
    shape, section = read_shape(config.model.path), config.learner
    lines = {
        "run": f"{config.run_dir}, seed {config.seed}",
        "model": describe_model(config, shape),
        "data": ", ".join(source.named() for source in config.data.train_sources),
        "held out": ", ".join(each.source.named() for each in config.evaluation_sets) or "none",
        "trains": "what the assistant says" if config.sft.train_on == "assistant" else "all tokens",
        "learner": f"{section.ranks} ranks; {describe_training(config, shape)}",
    }
    return "\n".join(f"{label:11}{text}" for label, text in lines.items())


# --- the run ----------------------------------------------------------------------------------------------------------


def check_sft_resume(config: Config) -> None:
    """Raises ConfigError unless the run folder is that of a supervised run."""
    if journal_folder(config.run_dir).is_dir():
        refuse("run.name", config.run.name, "names a run of `april run`", "resume it with that")
    if not (config.run_dir / "config.toml").is_file():
        refuse("run.name", config.run.name, f"names no run in {config.run.dir} to resume", "give one that does")
    RUN_FOLDER.check(config.run_dir)


class SftRun:
    """The learner of a supervised run in its folder, from its start to its end.

    state = SftRun(config, devices, print).run()      # "finished" or "stopped"; raises RunFailed
    """

    def __init__(self, config: Config, devices: Sequence[str], say: Callable[[str], None], every: int = 1):
        """`devices`: accelerators of the learner; `say`: shows a line; `every`: steps between two lines about steps."""
        self.config, self.say, self.every, self.run_dir = config, say, every, config.run_dir
        self.metrics = self.run_dir / "metrics.jsonl"
        section, log = config.learner, self.run_dir / "logs/learner.log"
        ranks = ["--nproc-per-node", str(section.ranks), "--max-restarts", str(section.max_restarts)]
        program = ["-m", "april.launch.sft", str(self.run_dir / "config.toml")]
        command = python_command("-m", "april.learner.launch", *ranks, *program)
        self.part = Part(
            TARGETS.find(config.run.target)(), "learner", command, log, section.threads, 0, section.hung_s,
            section.load_s, devices,
        )  # fmt: skip
        self._stops = 0
        self._shown = self.metrics.stat().st_size if self.metrics.exists() else 0

    def run(self) -> str:
        self.part.log.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.run_dir / "config.toml", self.config.to_toml().encode())
        (self.run_dir / STOP_FILE).unlink(missing_ok=True)
        previous = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        try:
            if was_interrupted():
                self._on_signal()
            self.part.start()
            self.say(f"the learner starts; its log is {self.part.log}")
            while self.part.status is None and self._stops < 2:
                self._show()
                self.part.wait(POLL_S)
            self._show()
        finally:
            self.part.kill()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._stops < 2 and self.part.status:
            why = (
                "refuses to work" if self.part.status == REFUSED else "has ended; --resume goes on from its checkpoint"
            )
            raise RunFailed(f"the learner {why}:\n{self.part.last_lines()}")
        return "stopped" if self._stops > 1 else str(read_summary(self.run_dir / "summary.json").get("state"))

    def _on_signal(self, *_: Any) -> None:
        """Ask the learner to end after its batch, with a checkpoint; a second time, end it at once."""
        self._stops += 1
        (self.run_dir / STOP_FILE).touch()

    def _show(self) -> None:
        """Show the new lines of metrics.jsonl. The file becomes shorter when a learner goes on from a checkpoint."""
        if not self.metrics.exists():
            return
        self._shown = min(self._shown, self.metrics.stat().st_size)
        with self.metrics.open("rb") as file:
            file.seek(self._shown)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._shown += len(line)
                record = parse_line(line)
                if record and not (is_step(record) and record["step"] % self.every):
                    self.say(describe_line(record))


def describe_line(record: dict[str, Any]) -> str:
    """A sentence about `record`, a line of metrics.jsonl of a supervised run: a step with loss and speed, or an
    evaluation."""
    if is_step(record):
        speed = f", {record['tokens_per_s']:,.0f} tokens/s" if record.get("tokens_per_s") else ""
        loss = f"loss {loss_of(record['learner'])}" if record["samples"] else "no row to train"
        return f"step {record['step']}: {loss}, {count_of(record['tokens'])} tokens{speed}"
    found = record["evaluation"]
    sets = found.get("sets") or {found.get("set", "held out"): found}
    scores = ", ".join(f"{name} {loss_of(scored)} on {scored['prompts']} rows" for name, scored in sets.items())
    return f"held-out loss at step {record['step']}: {scores}"


def loss_of(figures: dict[str, Any]) -> str:
    """The loss in `figures` (of a line of metrics.jsonl) as text: a number with four decimals, or "not finite" if it is
    null."""
    loss = figures["loss"]
    return "not finite" if loss is None else f"{loss:.4f}"


def policy_folders(config: Config) -> list[Path]:
    """Folders of the models that a finished run has exported: those of the policy, the adapter and the best policy that
    exist."""
    exported = (config.exported_policy, config.exported_adapter, config.exported_best)
    return [folder for folder in exported if folder.is_dir()]
