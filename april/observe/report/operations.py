"""Render in the terminal: the status of a live broker, its dead letters, and the account of a run's tokens."""

from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from april.observe.report.facts import TokenTotals, count, duration, facts, number, token_totals
from april.observe.report.live import alarms, failures, holders_table, plain_console, step_of_total
from april.observe.report.run_folder import RunFolder, dig, read_run
from april.observe.report.timeline import waiting_for

DRAIN = {
    "draining": "draining: nothing is handed out, leases are still coming back",
    "drained": "drained: nothing is handed out and nothing leased, until `april drain --end`",
}


def render_live(status: dict[str, Any]) -> RenderableType:
    """The output of `april status` for a broker that answers."""
    title = Text.assemble(("broker of run ", "dim"), (status["run"], "bold"), "  ", (status["phase"], "bold yellow"))
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    if status["read_only"]:
        rows.add_row("READ ONLY", Text(status["read_only"], style="bold red"))
    if status["drain"]:
        rows.add_row("drain", Text(DRAIN[status["drain"]], style="bold yellow"))
    rows.add_row("waits for", waiting_for(status))
    queues, letters = status["queues"], status["dead_letters"]
    rows.add_row("step", f"{step_of_total(status['step'], status['max_steps'])}  round {status['round']}")
    rows.add_row("reward", number(status["reward"]))
    rows.add_row("samples", by_state(queues["training"]))
    if queues["evaluation"]:
        rows.add_row("evaluation", by_state(queues["evaluation"]))
    rows.add_row(
        "oldest waiting", f"{duration(queues['oldest_waiting_s'])}, {queues['oldest_waiting_steps']} policy steps"
    )
    rows.add_row("leases", f"{count(status['leases'])}, the longest held for {duration(queues['longest_lease_s'])}")
    rows.add_row("peers", ", ".join(f"{number} {role}" for role, number in sorted(status["sessions"].items())))
    rows.add_row(
        "dead letters",
        f"{letters['total']}, {letters['to_requeue']} groups can be re-queued, {letters['waiting']} wait to be drawn",
    )
    for alarm in [*alarms({"alarms": status["step_alarms"]}), *alarms(status)]:
        rows.add_row("ALARM", Text(alarm, style="bold red"))
    for failed in failures(status):
        rows.add_row("failed", Text(failed, style="bold red"))
    for name in ("refusals", "failed_handshakes", "replays"):
        if any(status[name].values()):
            rows.add_row(name.replace("_", " "), Text(by_state(status[name])))
    rows.add_row("ledger", "closed" if status["ledger_closed"] else Text("NOT CLOSED", style="bold red"))
    return Group(title, rows, holders_table(status))


def by_state(counts: dict[str, int]) -> str:
    return ", ".join(f"{count(number)} {name}" for name, number in counts.items() if number) or "none"


def render_dead_letters(listed: dict[str, Any]) -> RenderableType:
    """The output of `april dead-letters`: one line per letter, oldest first."""
    letters = listed["letters"]
    if not letters:
        return Text("no dead letters", style="dim")
    table = Table(box=None, padding=(0, 2), show_edge=False, header_style="dim")
    for heading in ("group", "sample", "prompt row", "attempts", "when", "outcome", "last error"):
        table.add_column(heading, justify="right" if heading in ("group", "sample", "attempts") else "left")
    for letter in letters:
        drawn_for = "evaluation" if letter["evaluation"] else f"epoch {letter['epoch']}"
        table.add_row(
            str(letter["group"]),
            str(letter["sample"]),
            f"{letter['row']} ({drawn_for})",
            str(letter["attempts"]),
            datetime.fromtimestamp(letter["at"]).isoformat(" ", "seconds"),
            letter["outcome"].replace("_", " "),
            Text(letter["error"]),
        )
    older = listed["total"] - len(letters)
    return Group(table, Text(f"and {older} older ones", style="dim")) if older else table


# --- table of a run ---------------------------------------------------------------------------------------------------

STATE_STYLE = {"finished": "bold green", "failed": "bold red"}


def render_status(run: RunFolder) -> RenderableType:
    """The status table of a run folder, printed by `april status`, and by `april run` at its end."""
    state_style = STATE_STYLE.get(run.state, "bold yellow")
    title = Text.assemble(("run ", "dim"), (run.name, "bold"), "  ", (run.state, state_style))
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    for name, value in facts(run):
        rows.add_row(name, Text(value))
    ledger = token_totals(run)
    if ledger is None:
        return Group(title, rows, Text("no token has been generated yet", style="dim"))
    rows.add_row("ledger", verdict(ledger))
    return Group(title, rows, states_table(ledger, dig(run.summary, "gradient", "tokens")))


def print_status(run_dir: Path) -> None:
    """Print the status of a run as the files of its folder show it, without a broker. Raises ConfigError."""
    plain_console().print(render_status(read_run(run_dir)))


def verdict(ledger: TokenTotals) -> Text:
    word, style = ("closed", "bold green") if ledger.closed else ("NOT CLOSED", "bold red")
    return Text.assemble((word, style), f"  {ledger.equation}")


def states_table(ledger: TokenTotals, with_gradient: int | None = None) -> Table:
    """Generated tokens by state, in tokens and as a share. `with_gradient`: number of trained tokens that have a
    gradient; None leaves that row out."""
    table = Table(box=None, padding=(0, 2), show_edge=False, header_style="dim")
    table.add_column("tokens")
    table.add_column("count", justify="right")
    table.add_column("share", justify="right")
    table.add_row("generated", count(ledger.generated), "", style="bold")
    for name, tokens in ledger.by_state:
        table.add_row(f"  {name}", count(tokens), f"{tokens / ledger.generated:.1%}" if ledger.generated else "")
        if name == "trained" and with_gradient is not None:
            table.add_row("    with a gradient", count(with_gradient), "", style="dim")
    for name, tokens in ledger.outside_ledger:
        table.add_row(name, count(tokens), "", style="dim")
    return table
