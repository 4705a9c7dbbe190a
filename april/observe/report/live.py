"""The live view of `april run`: a panel on a terminal, one plain line per step elsewhere."""

import math
from collections import deque
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from april.observe.report.facts import duration, number, short_count
from april.observe.report.run_folder import dig
from april.util.logs import ERROR_NAME

SPARKS = "▁▂▃▄▅▆▇█"
REFRESH_HZ = 4
Bar = partial(ProgressBar, complete_style="cyan", finished_style="green")


def plain_console(width: int | None = None) -> Console:
    """A console that prints texts as they are: names of runs, peers and options may look like its markup. `width`:
    columns; None: those of the terminal."""
    return Console(width=width, markup=False, emoji=False)


class LiveView:
    """A context manager; `update` shows a broker's status, `step` a trained step, `note` one line of text.

    On a terminal `update` redraws the panel, and notes scroll above it. Elsewhere steps, notes and new alarms are
    printed as lines; `update` prints new alarms and stores the status. The next step's line takes from it the number
    of unfinished samples that wait to be resumed, and the time left.
    """

    def __init__(self, console: Console | None = None):
        self.console = console or plain_console()
        self.on_terminal = self.console.is_terminal and not self.console.is_dumb_terminal
        self.status: dict = {}
        self.last_step: dict = {}
        self.rewards: deque[float] = deque(maxlen=20)
        self.live = Live(get_renderable=self.panel, console=self.console, refresh_per_second=REFRESH_HZ)

    def __enter__(self) -> "LiveView":
        if self.on_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def update(self, status: dict) -> None:
        again = str(status.get("phase") or "").partition("training again, ")[2]
        if again and "training again" not in str(self.status.get("phase")):
            self.note(f"the weights of a checkpoint are trained again {again}: these steps have their lines already")
        known = {alarm["name"] for alarm in self.status.get("alarms") or []}
        new = [alarm for alarm in status.get("alarms") or [] if alarm["name"] not in known]
        self.status = status
        if not self.on_terminal:
            self.print_alarms({"alarms": new})

    def step(self, metrics: dict) -> None:
        self.last_step = metrics
        if metrics.get("reward") is not None:
            self.rewards.append(metrics["reward"])
        if not self.on_terminal:
            self.print_line(step_line(metrics, self.status))
            self.print_alarms(metrics)

    def note(self, text: str) -> None:
        if self.on_terminal:
            self.console.print(Text(text))
        else:
            self.print_line(text)

    def print_alarms(self, record: dict) -> None:
        for alarm in alarms(record):
            self.print_line(f"  ALARM: {alarm}")

    def print_line(self, text: str) -> None:
        """Print a line unwrapped and flushed."""
        print(text, file=self.console.file, flush=True)

    def panel(self) -> RenderableType:
        status = self.status
        title = f"april  {status['run']}" if status.get("run") else "april"
        body = Group(overview(status, self.last_step, list(self.rewards)), holders_table(status))
        return Panel(body, title=Text(title, style="bold"), title_align="left", border_style="dim", padding=(0, 1))


def step_line(metrics: dict, status: dict) -> str:
    """One line about a trained step: `step 3/24 reward 0.612 16.8k tok/s staleness 0.4/1 partials 90 ETA 41s`; values
    that are unknown are left out. `metrics`: the step's record; `status`: the broker's."""
    age = metrics.get("staleness") or {}
    partials = dig(metrics, "round", "partials_waiting")
    if partials is None:
        partials = status.get("partials_waiting")
    parts = [
        f"step {step_of_total(metrics.get('step'), status.get('max_steps'))}",
        f"reward {number(metrics['reward'])}" if metrics.get("reward") is not None else "",
        speed(metrics.get("rollout_tokens_per_s")),
        f"staleness {number(age['mean'], 1)}/{age.get('max')}" if age.get("mean") is not None else "",
        f"partials {partials}" if partials is not None else "",
        gradient(metrics),
        effective(metrics),
        drift_warning(metrics),
        *failures(status),
        f"ETA {duration(status['eta_s'])}" if status.get("eta_s") is not None else "",
    ]
    return "  ".join(part for part in parts if part)


def drift_warning(metrics: dict) -> str:
    """A warning if the lengths of the trained responses differ from those of all created ones by more than chance
    explains; otherwise "". `metrics`: a step's record."""
    drift = dig(metrics, "lengths", "drift") or {}
    return f"LENGTHS BIASED {drift['distance']:.3f} > {drift['band']:.3f}" if drift.get("alarm") else ""


def failures(status: dict) -> list[str]:
    """One line for each cause of failures since the broker started, such as `scoring: 212 failed, TypeError`."""
    lines = []
    for cause, failed in (status.get("failures") or {}).items():
        name = ERROR_NAME.search(failed["last"])
        lines.append(
            f"{cause.removesuffix('_failed')}: {failed['count']} failed, {name[0] if name else failed['last']}"
        )
    return lines


def gradient(metrics: dict) -> str:
    """Text: share of the batch's tokens that have a gradient (the learner's `trained_tokens` of its `tokens`); "" where
    the learner has not reported it."""
    share = dig(metrics, "gradient", "tokens")
    return "" if share is None else f"gradient {share:.0%}"


def effective(metrics: dict) -> str:
    """Text: effective sample size of the batch's responses under their importance ratios, as a share of their number;
    "" if all of them are on-policy."""
    share = dig(metrics, "learner", "sequence_ess")
    return f"effective {share:.0%}" if share is not None and share < 1 else ""


def alarms(metrics: dict) -> list[str]:
    """The alarms of a step record or of a status, as sentences."""
    return [f"{alarm['sentence']} ({alarm['page']})" for alarm in metrics.get("alarms") or []]


def overview(status: dict, last_step: dict, rewards: list[float]) -> Table:
    """A summary of the run: step and phase, reward and speed, groups and partials, time and staleness. `status`: the
    broker's; `last_step`: record of the last step; `rewards`: mean rewards of the latest steps, in order."""
    reward = status.get("reward") if status.get("reward") is not None else last_step.get("reward")
    rate = status.get("rollout_tokens_per_s") or last_step.get("rollout_tokens_per_s")
    age = status.get("staleness") or last_step.get("staleness") or {}
    stale = f"{number(age['mean'], 1)} mean  {age.get('max')} max" if age.get("mean") is not None else "–"
    eta = f"  ETA {duration(status['eta_s'])}" if status.get("eta_s") is not None else ""
    done, needed = status.get("groups_complete") or 0, status.get("groups_needed") or 0
    groups = Table.grid(padding=(0, 1))
    groups.add_row(Bar(total=max(needed, 1), completed=done, width=14), f"{done} of {needed}")

    table = Table.grid(padding=(0, 2))
    for style in ("dim", "", "dim", ""):
        table.add_column(style=style, no_wrap=True)
    table.add_row(
        "step", step_of_total(status.get("step"), status.get("max_steps")), "phase", status.get("phase") or "starting"
    )
    table.add_row("reward", f"{number(reward)}  {sparkline(rewards)}", "rollout", speed(rate) or "–")
    table.add_row("groups", groups, "partials", f"{status.get('partials_waiting') or 0} waiting")
    table.add_row("time", duration(status.get("elapsed_s") or 0) + eta, "staleness", stale)
    if warning := drift_warning(last_step):
        table.add_row("lengths", Text(warning, style="bold red"), "", "")
    if share := gradient(last_step):
        table.add_row("gradient", f"{share.removeprefix('gradient ')} of tokens", "", "")
    for failed in failures(status):
        table.add_row("FAILED", Text(failed, style="bold red", no_wrap=False), "", "")
    for alarm in [*alarms(last_step), *alarms(status)]:
        table.add_row("ALARM", Text(alarm, style="bold red", no_wrap=False), "", "")
    return table


def holders_table(status: dict) -> Table:
    """Table with one row per process that holds samples: workers (version, busy slots, speed), scorers and agent
    processes."""
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "left", "right", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    for worker in status.get("workers") or []:
        slots, leased = worker.get("slots") or 0, worker.get("leased") or 0
        busy = (worker.get("does") or {}).get("generating", min(leased, slots))
        table.add_row(
            Text(str(worker.get("name"))),
            Text(f"version {worker.get('version', '–')}", style="dim"),
            Bar(total=max(slots, 1), completed=busy, width=16),
            f"{busy}/{slots} slots",
            speed(worker.get("tokens_per_s")) or "–",
            gap_text(worker.get("gap")),
        )
    for role, verb, unit in (("scorers", "scores", "leases"), ("agents", "runs agents", "sessions")):
        for holder in status.get(role) or []:
            capacity, leased = holder.get("capacity") or 0, holder.get("leased") or 0
            bar = Bar(total=max(capacity, 1), completed=min(leased, capacity), width=16)
            table.add_row(Text(str(holder.get("name"))), Text(verb, style="dim"), bar, f"{leased}/{capacity} {unit}")
    return table


def gap_text(gap: dict | None) -> str:
    """Text: mean absolute difference, in nats, between the log-probabilities that the learner and a worker's engine
    compute for the same tokens. `gap`: the worker's entry in the broker's status; "" without one."""
    if not gap or gap.get("mean") is None:
        return ""
    return f"gap {gap['mean']:.1e}" + (f" at age {gap['age']:.0f}" if gap["age"] else "")


def step_of_total(step: int | None, max_steps: int | None) -> str:
    return f"{step or 0}/{max_steps}" if max_steps else str(step or 0)


def speed(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f"{short_count(tokens_per_s)} tok/s"


def sparkline(values: list[float]) -> str:
    """One block character per value, scaled from the lowest to the highest."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    low, spread = min(known), max(known) - min(known)
    return "".join(SPARKS[round((value - low) / spread * 7) if spread else 3] for value in known)
