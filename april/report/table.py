"""The table of a run in the terminal: results, speed, staleness, and whether its token ledger is closed."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from april.report.facts import TokenTotals, count, facts, token_totals
from april.report.run_folder import RunFolder, dig

STATE_STYLE = {"finished": "bold green", "failed": "bold red"}


def render_status(run: RunFolder) -> RenderableType:
    """The table that `april status` prints and that ends a run."""
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


def verdict(ledger: TokenTotals) -> Text:
    word, style = ("closed", "bold green") if ledger.closed else ("NOT CLOSED", "bold red")
    return Text.assemble((word, style), f"  {ledger.equation}")


def states_table(ledger: TokenTotals, with_gradient: int | None = None) -> Table:
    """Generated tokens by state, in tokens and as a share."""
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
