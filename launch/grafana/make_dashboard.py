"""Makes `april.json`, a Grafana dashboard of a broker's metrics: `python launch/grafana/make_dashboard.py`."""

from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

TARGET = Path(__file__).parents[2] / "april" / "launch" / "monitoring" / "april.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="$source")
WIDTH, HEIGHT = 8, 7
RUN = '{instance=~"$broker"}'
SYNCS = "sum by (le) (rate(april_journal_sync_seconds_bucket[1m]))"
PANELS = {
    "Learning": [
        (
            "Reward",
            "none",
            {
                "april_reward": "of the newest batch",
                "april_evaluation_reward": "held out",
                "april_evaluation_accuracy": "held out, accuracy",
            },
        ),
        ("Steps", "none", {"april_steps": "{{kind}}"}),
        ("Staleness, policy steps", "none", {"april_staleness_steps": "{{kind}}"}),
        ("Alarms that are raised", "none", {"april_alarms": "{{alarm}}"}),
        ("Learner against engine", "none", {"april_engine_gap_nats": "{{worker}} {{kind}}"}),
    ],
    "Rollouts": [
        ("Tokens a second", "none", {"rate(april_tokens_accepted_total[1m])": "{{use}}"}),
        ("Tokens a second, by worker", "none", {"april_worker_tokens_per_second": "{{worker}}"}),
        ("Slots in use", "percentunit", {"april_worker_leases / april_worker_capacity": "{{worker}}"}),
        ("Samples of open groups", "none", {"april_samples": "{{use}} {{state}}"}),
        ("Groups", "none", {"april_groups": "{{state}}"}),
        ("Waiting longest", "s", {"april_oldest_waiting_seconds": "sample", "april_longest_lease_seconds": "lease"}),
        ("Weights of each worker", "none", {"april_worker_policy_step": "{{worker}}"}),
        ("Prefixes leased again, tokens a second", "none", {"rate(april_tokens_resumed_total[1m])": "{{prefix}}"}),
        ("Where the tokens are", "none", {"april_tokens": "{{place}}"}),
    ],
    "Broker": [
        ("Journal", "bytes", {"april_journal_bytes": "on disk"}),
        (
            "Sync of the journal",
            "s",
            {f"histogram_quantile({share}, {SYNCS})": f"{share:.0%}" for share in (0.5, 0.99)},
        ),
        ("Loop came round", "s", {"april_last_pass_age_seconds": "ago"}),
        ("Peers", "none", {"april_sessions": "{{role}}"}),
        (
            "Dead letters, lost tokens",
            "none",
            {"april_dead_letters_total": "dead", "april_tokens_lost_total": "{{why}}"},
        ),
        ("Outbox", "none", {"april_outbox_messages": "messages"}),
    ],
}
"""by row: title, unit, and expressions with their legends; `of_broker` puts the chosen brokers in"""


def of_broker(expression: str) -> str:
    """With the variable's selector behind each metric."""
    words = expression.replace("[", " [").replace(")", " )").split(" ")
    marked = [word + RUN if "april_" in word else word for word in words]
    return " ".join(marked).replace(" [", "[").replace(" )", ")")


def panel(title: str, unit: str, expressions: dict[str, str]) -> Panel:
    made = Panel().title(title).unit(unit).datasource(SOURCE).span(WIDTH).height(HEIGHT)
    for number, (expression, legend) in enumerate(expressions.items()):
        query = Dataquery().expr(of_broker(expression)).legend_format(legend).ref_id(chr(ord("A") + number))
        made = made.with_target(query)
    return made


def make() -> str:
    board = Dashboard("April").uid("april").refresh("10s").time("now-1h", "now").readonly()
    board = board.with_variable(DatasourceVariable("source").type("prometheus").label("Prometheus"))
    brokers = QueryVariable("broker").query("label_values(april_round, instance)").datasource(SOURCE)
    board = board.with_variable(brokers.label("broker").multi(True).include_all(True))
    for title, panels in PANELS.items():
        board = board.with_row(Row(title))
        for one in panels:
            board = board.with_panel(panel(*one))
    return JSONEncoder(sort_keys=True, indent=1).encode(board.build()) + "\n"


if __name__ == "__main__":
    TARGET.write_text(make())
