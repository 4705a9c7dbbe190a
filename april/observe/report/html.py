"""report.html: pictures, figures and token ledger of a run in one self-contained HTML file."""

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

from april.observe.report import learner_pictures, pictures, timeline
from april.observe.report.drawing import DARK, LIGHT
from april.observe.report.facts import (
    TokenTotals,
    accuracy,
    count,
    duration,
    facts,
    number,
    resumes,
    reward,
    rollout_tokens_per_s,
    short_count,
    steps,
    token_totals,
)
from april.observe.report.run_folder import RunFolder, dig, read_run
from april.observe.report.samples import samples_section

SECTIONS: list[tuple[str, str, Callable[[RunFolder], str | None]]] = [
    (
        "Reward",
        "The line is the mean reward of each trained batch; diamonds are the accuracy on held-out prompts. "
        "Both should rise, and rise together.",
        pictures.reward_picture,
    ),
    (
        "What the reward is made of",
        "Means of the details that the reward has named. One that rises while another falls shows what the policy has "
        "found out.",
        learner_pictures.details_picture,
    ),
    (
        "Gradient",
        "Shares of the trained tokens and groups that bore a gradient. A group whose rewards are all equal bears none: "
        "near 0 the prompts are too easy or too hard, or the reward does not tell responses apart.",
        pictures.gradient_picture,
    ),
    (
        "Learner",
        "Entropy that falls towards 0 ends exploration. A gradient norm that jumps, with a loss that does, announces "
        "steps that are too large.",
        learner_pictures.learner_picture,
    ),
    (
        "Rollout speed",
        "Acknowledged tokens divided by the time in which generation was under way. "
        "A fall without longer responses points at waiting or lost workers.",
        pictures.throughput_picture,
    ),
    (
        "Staleness",
        "Height is the number of tokens trained in a step; the colour is how many policy steps old they were. "
        "Darker means older in a light page, brighter means older in a dark one.",
        pictures.staleness_picture,
    ),
    (
        "Stale tokens in training",
        "Above, what the corrections of stale tokens leave of a batch: an effective sample share (of the tokens' "
        "ratios, and of the weights that were applied) that falls announces trouble before "
        "the reward does. Below, a dot for each policy version by its age, as large as its share of the step.",
        learner_pictures.corrections_picture,
    ),
    (
        "Response lengths",
        "Filled: all samples of settled cohorts as they were created; outlined: the samples that were trained. "
        "Where the outline leaves the filled shape, training sees other lengths than the policy produces.",
        pictures.lengths_picture,
    ),
    (
        "Lengths by step",
        "Growth is often what is learnt. Growth towards sampling.max_response_tokens with a falling reward is not.",
        learner_pictures.lengths_by_step_picture,
    ),
    (
        "Learner's time",
        "A learner that mostly waits for batches wants more workers; one that never does keeps them waiting.",
        learner_pictures.phases_picture,
    ),
    (
        "Worker lanes",
        "One row a worker: what it did, and what it waited for where it did nothing. A long run is filled as high as "
        "the share of time spent.",
        timeline.workers_picture,
    ),
    (
        "Worker lanes, the last steps",
        "Numbers over dotted lines are the steps recorded there.",
        timeline.last_steps_workers_picture,
    ),
]
OPTIONAL_PICTURES = (learner_pictures.details_picture, timeline.last_steps_workers_picture)
"""Pictures that the report omits without a note if the run has no data for them."""

STATE_MEANINGS = {
    "trained": "in batches that the learner has consumed",
    "delivered": "handed to the learner, not yet consumed",
    "ready": "in complete groups that wait for a batch",
    "open": "in groups that are still being generated",
}

CSS = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f5f7f9; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #12161b; --card: #1a2027; DARK } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif }
main { max-width: 1160px; margin: 0 auto; padding: 2.2rem 1.2rem 4rem }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 0 2rem }
.pictures section { min-width: 0 }
h1 { font-size: 1.7rem; margin: 0 }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .2rem }
.state { color: var(--muted); margin: .2rem 0 1.4rem }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: .7rem }
.card { background: var(--card); border-radius: 8px; padding: .7rem .8rem }
.card b { display: block; font-size: 1.15rem; font-weight: 600; white-space: nowrap;
  font-variant-numeric: tabular-nums }
.card span { color: var(--muted); font-size: .82rem }
figure { margin: 0 }
figure svg { display: block; width: 100%; height: auto; stroke-linejoin: round }
figcaption, .note { color: var(--muted); font-size: .9rem; margin: .1rem 0 0; max-width: 95ch }
table { border-collapse: collapse; margin-top: .7rem; font-size: .93rem; width: 100% }
th, td { text-align: left; padding: .32rem .8rem .32rem 0; border-bottom: 1px solid var(--grid); vertical-align: top }
th { color: var(--muted); font-weight: 500 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td.muted { color: var(--muted) } td.muted + td { overflow-wrap: anywhere }
tr.sum td:not(.muted) { font-weight: 600 }
.good { color: var(--green) } .bad { color: var(--red) }
details { margin-top: 2.6rem } details.sample { margin-top: .6rem } .sample pre { white-space: pre-wrap;
  overflow-wrap: anywhere } .prompt { color: var(--muted) } summary { cursor: pointer; font-weight: 600 }
@media (max-width: 640px) { .ledger th:last-child, .ledger td:last-child { display: none } }
pre { background: var(--card); border-radius: 8px; padding: 1rem; overflow-x: auto;
  font-size: .84rem; line-height: 1.45 }
"""


def write_report(run_dir: str | Path) -> Path:
    """Write report.html into the run folder and return its path; needs matplotlib."""
    run = read_run(run_dir)
    path = run.path / "report.html"
    path.write_text(page(run))
    return path


def page(run: RunFolder) -> str:
    sections = "\n".join(section(run, *entry) for entry in SECTIONS)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.name)} – April</title>
<style>{CSS.replace("LIGHT", css_variables(LIGHT)).replace("DARK", css_variables(DARK))}</style>
</head>
<body>
<main>
<h1>{escape(run.name)}</h1>
<p class="state">{escape(headline(run))}</p>
{cards(run)}
<div class="pictures">
{sections}
</div>
<h2>Samples</h2>
{samples_section(run)}
<h2>Token ledger</h2>
{ledger_table(token_totals(run), dig(run.summary, "gradient", "tokens"))}
<h2>Summary</h2>
{facts_table(run)}
<details><summary>Resolved configuration</summary><pre>{escape(run.config_text)}</pre></details>
</main>
</body>
</html>
"""


def css_variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


def headline(run: RunFolder) -> str:
    kind = dig(run.config, "schedule", "kind")
    wall_s = run.summary.get("wall_s")
    parts = [
        run.state,
        f"{steps(run)} steps",
        f"schedule {kind}" if kind else "",
        duration(wall_s) if wall_s else "",
    ]
    return " · ".join(part for part in parts if part)


def cards(run: RunFolder) -> str:
    """HTML of the run's headline figures, one card per figure."""
    speed, ledger = rollout_tokens_per_s(run), token_totals(run)
    age, oldest = dig(run.summary, "staleness", "mean"), dig(run.summary, "staleness", "max")
    figures = [
        (reward(run), "reward, first → last 3"),
        (accuracy(run).partition(" (")[0], "held-out accuracy"),
        (short_count(speed) if speed is not None else "", "rollout tokens/s"),
        (f"{number(age, 2)} / {oldest}" if age is not None else "", "staleness, mean / max (steps)"),
        (
            f"{ledger.trained / ledger.generated:.1%}" if ledger and ledger.generated else "",
            "of generated tokens trained",
        ),
    ]
    boxes = [
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in figures if value
    ]
    return f'<div class="cards">{"".join(boxes)}</div>' if boxes else ""


def section(run: RunFolder, title: str, explanation: str, picture: Callable[[RunFolder], str | None]) -> str:
    svg = picture(run)
    if svg is None and picture in OPTIONAL_PICTURES:
        return ""
    caption = " ".join([explanation, *remarks(run, picture)]) if svg else "Nothing recorded yet."
    figure = f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
    drawn = figure if svg else f'<p class="note">{caption}</p>'
    return f"<section><h2>{escape(title)}</h2>\n{drawn}</section>"


def remarks(run: RunFolder, picture: Callable[[RunFolder], str | None]) -> Iterator[str]:
    """Sentences specific to this run that follow the general explanation of a picture."""
    if picture is pictures.reward_picture:
        if len(run.evaluation_sets) > 1:
            yield "Accuracies on different held-out prompts are not joined."
        if run.resumes:
            yield f"Dotted lines: resumed {resumes(run)}."
    if picture is timeline.workers_picture:
        workers = len({event["worker"] for event in run.worker_events})
        if workers > timeline.MAX_DRAWN_WORKERS:
            yield f"The first {timeline.MAX_DRAWN_WORKERS} of {workers} workers are drawn."
        yield f"Of all workers' time: {timeline.activity_shares(run)}."


def ledger_table(ledger: TokenTotals | None, with_gradient: int | None) -> str:
    if ledger is None:
        return '<p class="note">No token has been generated yet.</p>'
    verdict = '<b class="good">closed</b>' if ledger.closed else '<b class="bad">not closed</b>'
    rows = [table_row("generated", ledger.generated, "100.0%", "acknowledged policy tokens", "sum")]
    for name, tokens in ledger.by_state:
        share = f"{tokens / ledger.generated:.1%}" if ledger.generated else ""
        meaning = STATE_MEANINGS.get(name, "in groups that were given up, with the reason")
        rows.append(table_row(name, tokens, share, meaning))
        if name == "trained" and with_gradient is not None:
            share = f"{with_gradient / ledger.generated:.1%}" if ledger.generated else ""
            rows.append(table_row("– of them with a gradient", with_gradient, share, "which have moved the weights"))
    share = f"{ledger.accounted / ledger.generated:.1%}" if ledger.generated else ""
    rows.append(table_row("sum of all states", ledger.accounted, share, "equals generated if the ledger closes", "sum"))
    rows += [table_row(name, tokens, "", "counted beside the ledger") for name, tokens in ledger.outside_ledger]
    return (
        f'<p class="note">The ledger is {verdict}: {escape(ledger.equation)}.</p>\n<table class="ledger">'
        f'<tr><th>tokens</th><th class="n">count</th><th class="n">share</th><th>where they are</th></tr>'
        f"{''.join(rows)}</table>"
    )


def table_row(name: str, tokens: int, share: str, meaning: str, kind: str = "") -> str:
    return (
        f'<tr class="{kind}"><td>{escape(name)}</td><td class="n">{count(tokens)}</td><td class="n">{share}</td>'
        f'<td class="muted">{escape(meaning)}</td></tr>'
    )


def facts_table(run: RunFolder) -> str:
    rows = [f'<tr><td class="muted">{escape(name)}</td><td>{escape(value)}</td></tr>' for name, value in facts(run)]
    return f"<table>{''.join(rows)}</table>"
