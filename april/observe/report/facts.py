"""Figures about a run, shared by the terminal table and the HTML report, and the formatting of numbers."""

from dataclasses import dataclass
from statistics import fmean

from april.config.stored import held_out_score
from april.observe.report.run_folder import RunFolder, dig
from april.util.text import counted

SOURCE_REWARD = "reward_source_"
"""Prefix of the names of the learner's figures that are the mean reward of one source (data set). The rest of such a
name is the source's number."""

WORST_ENGINES = 3
"""Maximum number of workers that `engine_gaps` names: those whose engine's log-probabilities differ most from the
learner's."""


@dataclass(frozen=True)
class TokenTotals:
    """The token ledger of a run: `generated` tokens by state. The ledger is closed if `generated` equals the sum over
    all states."""

    generated: int
    trained: int
    delivered: int
    ready: int
    open: int
    discarded: dict[str, int]
    emitted_unacked: int
    refused: int
    evaluation: int
    broker_closed: bool
    """Whether the broker found its token ledger closed (generated = sum over all states) when it wrote the summary."""

    @property
    def by_state(self) -> list[tuple[str, int]]:
        """(state, number of tokens) for each state that a generated token can be in. In a closed ledger they add up to
        `generated`."""
        held = [
            ("trained", self.trained),
            ("delivered", self.delivered),
            ("ready", self.ready),
            ("open", self.open),
        ]
        return held + [(f"discarded ({reason})", tokens) for reason, tokens in self.discarded.items()]

    @property
    def outside_ledger(self) -> list[tuple[str, int]]:
        """(name, number of tokens) of the kinds of tokens that the ledger's equation does not contain: never
        acknowledged by the broker, refused by it, or of evaluations."""
        return [
            ("emitted, never acknowledged", self.emitted_unacked),
            ("refused as fenced", self.refused),
            ("evaluation", self.evaluation),
        ]

    @property
    def accounted(self) -> int:
        return sum(tokens for _, tokens in self.by_state)

    @property
    def closed(self) -> bool:
        return self.broker_closed and self.generated == self.accounted

    @property
    def equation(self) -> str:
        """The ledger's equation in numbers: generated = trained + delivered + ready + open + discarded."""
        sign = "=" if self.generated == self.accounted else "≠"
        return f"{count(self.generated)} generated {sign} " + " + ".join(
            f"{count(tokens)} {name}" for name, tokens in self.by_state
        )


def token_totals(run: RunFolder) -> TokenTotals | None:
    """The token ledger in the run's summary, or else in the last step's record; None without either."""
    tokens = run.summary.get("tokens") or (dig(run.steps[-1], "tokens_ledger") if run.steps else None)
    if not tokens:
        return None
    names = ["generated", "trained", "delivered", "ready", "open", "emitted_unacked", "refused", "evaluation"]
    return TokenTotals(
        **{name: tokens.get(name) or 0 for name in names},
        discarded={reason: n or 0 for reason, n in (tokens.get("discarded") or {}).items()},
        broker_closed=run.summary.get("ledger_closed") is not False,
    )


def facts(run: RunFolder) -> list[tuple[str, str]]:
    """(name, value) of the run's main facts and figures as texts, in the order in which they are shown; without the
    token ledger."""
    rows = [
        ("failed because", run.summary.get("failure") or ""),
        ("steps", steps(run)),
        ("reward, first → last 3", first_to_last_3(run, "reward")),
        *rewards_of_sources(run),
        ("loss, first → last 3", first_to_last_3(run, "loss")),
        (f"held-out {measure_of(run.evaluation)}, first → last", "" if run.named_evaluations else accuracy(run)),
        *(
            (f"{measure_of(points)}, {name}", first_to_last_of(points))
            for name, points in run.named_evaluations.items()
        ),
        ("evaluations cost", evaluation_cost(run)),
        ("paced, not measured", paced(run)),
        ("rollout speed", rate(rollout_tokens_per_s(run))),
        ("gradient", gradient(run)),
        ("conversations", conversations(run)),
        ("learner and engine apart", engine_gaps(run)),
        ("alarms", alarms(run)),
        ("failed for good", failed(run)),
        ("token staleness", staleness(run)),
        ("response length, created", lengths(run, "created")),
        ("response length, trained", lengths(run, "trained")),
        ("length ratio, trained / created", length_ratio(run)),
        ("time", times(run)),
        ("largest buffer", buffer_peak(run)),
        ("restarts", restarts(run)),
        ("resumed", resumes(run)),
    ]
    return [(name, value) for name, value in rows if value]


def steps(run: RunFolder) -> str:
    done, wanted = steps_done(run), max_steps(run)
    return f"{done} of {wanted}" if wanted else str(done)


def steps_done(run: RunFolder) -> int:
    done = run.summary.get("steps")
    return len(run.steps) if done is None else done


def max_steps(run: RunFolder) -> int | None:
    return run.summary.get("max_steps") or dig(run.config, "schedule", "max_steps")


def first_to_last_3(run: RunFolder, figure: str) -> str:
    """Text: the value of a figure in the run's first step, and its mean over the last three steps. `figure`: its key in
    summary.json."""
    return first_to_last(dig(run.summary, figure, "first"), dig(run.summary, figure, "last3"))


def rewards_of_sources(run: RunFolder) -> list[tuple[str, str]]:
    """(source, text) for each of a run's several sources: its mean reward in its first batch, and in the last three."""
    found: dict[str, list[float]] = {}
    for step in run.steps:
        for name, value in (dig(step, "learner") or {}).items():
            if name.startswith(SOURCE_REWARD):
                found.setdefault(name.removeprefix(SOURCE_REWARD), []).append(value)
    return [
        (f"reward of source {source}, first → last 3", first_to_last(values[0], fmean(values[-3:])))
        for source, values in sorted(found.items(), key=lambda item: int(item[0]))
    ]


def first_to_last(first: float | None, last: float | None) -> str:
    return "" if first is None and last is None else f"{number(first)} → {number(last)}"


def accuracy(run: RunFolder) -> str:
    if not run.evaluation:
        return ""
    return first_to_last_of(run.evaluation_sets[-1])


def measure_of(points: list[dict]) -> str:
    """Measure of the evaluations `points`: "accuracy" if the newest one says which responses were correct, otherwise
    "reward", or "loss" in a supervised run."""
    return held_out_score(points[-1])[0] if points else "accuracy"


def first_to_last_of(points: list[dict]) -> str:
    first, last = points[0], points[-1]
    values = [held_out_score(point)[1] for point in (first, last)]
    prompts = f", {last['prompts']} prompts" if last.get("prompts") else ""
    prompts += f", {last['failed']} left out" if last.get("failed") else ""
    prompts += f", {last['not_evaluated']} not evaluated in time" if last.get("not_evaluated") else ""
    if len(points) == 1:
        return f"{number(values[0])} (step {first.get('step')}{prompts})"
    steps_named = f"steps {first.get('step')} → {last.get('step')}"
    return f"{first_to_last(*values)} ({steps_named}{prompts})"


def evaluation_cost(run: RunFolder) -> str:
    """Text: what the evaluations cost that only weights of one version may generate. It has the slot-seconds that
    workers kept free while they put off loading newer weights for it, and the number of prompts left out because no
    worker had the version any more."""
    results = run.summary.get("evaluation") or []
    slot_s = sum(result.get("held_slot_s") or 0 for result in results)
    scored = [each for result in results for each in (result.get("sets") or {"": result}).values()]
    left_out = sum(each.get("not_evaluated") or 0 for each in scored)
    costs = [f"{slot_s:,.0f} slots × s until newer weights were loaded" if slot_s >= 1 else ""]
    costs.append(f"{count(left_out)} prompts not evaluated in time" if left_out else "")
    return ", ".join(filter(None, costs))


def paced(run: RunFolder) -> str:
    """Text about paced engines (`engine.pace`), which are slowed down to imitate a given hardware: the name of that
    hardware, and the share of engine steps that took longer than they would on it; "" if engines are not paced."""
    hardware, reports = run.summary.get("pace"), run.pace
    if not hardware:
        return ""
    steps, late = sum(report["steps"] for report in reports), sum(report["late_steps"] for report in reports)
    share = f", {late / steps:.1%} of {count(steps)} steps late" if steps else ""
    return f"as {hardware}{share}"


def rollout_tokens_per_s(run: RunFolder) -> float | None:
    return run.summary.get("rollout_tokens_per_s")


def gradient(run: RunFolder) -> str:
    """Text: mean share of the trained tokens that have a gradient, and the number of steps without any such token."""
    shares = [share for step in run.steps if (share := dig(step, "gradient", "tokens")) is not None]
    if not shares:
        return ""
    empty = sum(share == 0 for share in shares)
    return f"borne by {sum(shares) / len(shares):.0%} of trained tokens" + (
        f", by none in {counted(empty, 'step')}" if empty else ""
    )


def conversations(run: RunFolder) -> str:
    """Text: conversations trained in addition to samples, their tokens, their loss in the first step and the last
    three, and how many were left out; empty without any."""
    found = dig(run.summary, "conversations")
    if not found:
        return ""
    losses = [loss for step in run.steps if (loss := dig(step, "learner", "sft_loss")) is not None]
    loss = f", loss {first_to_last(losses[0], fmean(losses[-3:]))}" if losses else ""
    reasons = {"too_long": "as too long", "bad_rows": "as bad"}
    left_out = [f", {count(found[name])} left out {why}" for name, why in reasons.items() if found.get(name)]
    return f"{count(found['rows'])}, {count(found['tokens'])} tokens{loss}{''.join(left_out)}"


def engine_gaps(run: RunFolder) -> str:
    """Text: for the `WORST_ENGINES` workers with the largest differences, the difference between learner's and engine's
    log-probabilities (nats) of tokens sampled with the learner's own weights (age 0), over the whole run."""
    fresh: dict[str, list[dict]] = {}
    for step in run.steps:
        for worker, gap in (step.get("engine_gaps") or {}).items():
            if gap["age"] == 0 and gap["mean"] is not None:
                fresh.setdefault(worker, []).append(gap)
    worst = sorted(fresh, key=lambda worker: -max(gap["mean"] for gap in fresh[worker]))
    parts = [
        f"{worker} {max(gap['mean'] for gap in fresh[worker]):.1e} in a step's mean, "
        f"{max(gap['largest'] for gap in fresh[worker]):.1e} at most"
        for worker in worst[:WORST_ENGINES]
    ]
    if len(worst) > len(parts):
        parts.append(f"{len(worst) - len(parts)} more workers closer")
    return "; ".join(parts)


def failed(run: RunFolder) -> str:
    """Text: shares of the training prompts and of the evaluation prompts that could not be generated or scored; "" if
    none failed."""
    shares = run.summary.get("failed_share") or {}
    parts = [f"{share:.1%} of {name}" for name, share in shares.items() if share]
    return f"{' and '.join(parts)} prompts; see `april dead-letters {run.path}`" if parts else ""


def alarms(run: RunFolder) -> str:
    """Text: for each alarm that was raised the number of steps in which it was, the last of these, the alarm's sentence
    in that step, and the documentation page about it."""
    raised: dict[str, list[tuple[int, str]]] = {}
    for step in run.steps:
        for alarm in step.get("alarms") or []:
            raised.setdefault(alarm["name"], []).append((step["step"], f"{alarm['sentence']} ({alarm['page']})"))
    return "; ".join(
        f"{counted(len(raisings), 'step')}, last step {raisings[-1][0]}: {raisings[-1][1]}"
        for raisings in raised.values()
    )


def staleness(run: RunFolder) -> str:
    figures = run.summary.get("staleness") or {}
    if figures.get("mean") is None:
        return ""
    by_age = figures.get("tokens_by_age") or {}
    total = sum(by_age.values())
    fresh = f", {by_age.get('0', 0) / total:.0%} of tokens fresh" if total else ""
    return f"mean {number(figures['mean'], 2)}, max {figures.get('max')} steps{fresh}"


def lengths(run: RunFolder, which: str) -> str:
    figures = dig(run.summary, "lengths", which) or {}
    named = [
        f"{name} {number(figures[name], 1).removesuffix('.0')}"
        for name in ("mean", "p50", "p95", "p99")
        if figures.get(name) is not None
    ]
    responses = f" ({figures['responses']:,} responses)" if "responses" in figures else ""
    return ", ".join(named) + " tokens" + responses if named else ""


def length_ratio(run: RunFolder) -> str:
    ratio, cohorts = dig(run.summary, "lengths", "ratio"), dig(run.summary, "lengths", "settled_cohorts")
    if ratio is None:
        return ""
    return number(ratio) + (f" over {cohorts} settled cohorts" if cohorts is not None else "")


def times(run: RunFolder) -> str:
    wall_s = run.summary.get("wall_s")
    rollout_s = sum(step.get("rollout_s") or 0 for step in run.steps)
    learner_s = sum(dig(step, "learner", "train_s") or 0 for step in run.steps)
    parts = [(wall_s, "in all"), (rollout_s, "generating"), (learner_s, "training")]
    return ", ".join(f"{duration(seconds)} {name}" for seconds, name in parts if seconds)


def buffer_peak(run: RunFolder) -> str:
    tokens, size = dig(run.summary, "buffer_peak", "tokens"), dig(run.summary, "buffer_peak", "bytes")
    if not tokens:
        return ""
    return f"{count(tokens)} tokens" + (f", {size / 2**20:.1f} MiB" if size else "")


def restarts(run: RunFolder) -> str:
    """Text: number of restarts of broker and learner."""
    starts = run.summary.get("starts") or {}
    return ", ".join(f"{name} {count - 1}" for name, count in starts.items() if count > 1)


def resumes(run: RunFolder) -> str:
    """Text: the steps at which the run was resumed, each with the configuration keys that were changed."""
    parts = []
    for resume in run.resumes:
        changed = f" with {', '.join(resume['changed'])}" if resume.get("changed") else ""
        parts.append(f"after step {resume['step']}{changed}")
    return "; ".join(parts)


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def short_count(value: float) -> str:
    """A number as short text: 16780 -> 16.8k."""
    for size, unit in [(1e9, "G"), (1e6, "M"), (1e3, "k")]:
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def rate(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f"{short_count(tokens_per_s)} tokens/s"


def duration(seconds: float) -> str:
    """Seconds as text: 41.3 -> 41s, 181 -> 3m 01s, 7500 -> 2h 05m."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest_s = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest_s:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
