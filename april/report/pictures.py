"""The report's pictures of rewards, speed, staleness and lengths, as inline SVG coloured by the page's CSS variables.

Every picture is None where the run has nothing to draw yet.
"""

import math

import numpy as np

from april.report.drawing import (
    AGES,
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    new_figure,
    themed,
    to_svg,
)
from april.report.run_folder import RunFolder, dig
from april.report.series import draw_series, draw_stack, finish_axes, legend, step_numbers, values

BINS_PER_DOUBLING = 4
"""Histogram bins per doubling of the response length."""


@themed
def reward_picture(run: RunFolder) -> str | None:
    steps = step_numbers(run)
    rewards = values(run, "reward")
    if not np.isfinite(rewards).any() and not run.evaluation:
        return None
    figure, (axes,) = new_figure(2.9)
    if len(steps):
        draw_series(axes, steps, rewards, BLUE, "training reward")
    named = {f"accuracy, {name}": points for name, points in run.named_evaluations.items()}
    evaluation_sets = {
        f"held-out accuracy{f', set {n}' if n > 1 else ''}": p for n, p in enumerate(run.evaluation_sets, 1)
    }
    for number, (label, points) in enumerate((named or evaluation_sets).items()):
        axes.plot(
            [point.get("step") or 0 for point in points],
            [point["accuracy"] for point in points],
            color=ORANGE,
            lw=1.2,
            ls=(0, (4, 3)),
            marker="Ds^v"[number % 4],
            ms=5.5,
            label=label,
        )
    axes.set_ylabel("reward, accuracy")
    finish_axes(axes, run)
    return to_svg(figure, "reward and held-out accuracy per step")


@themed
def gradient_picture(run: RunFolder) -> str | None:
    shares = {name: values(run, "gradient", name) for name in ("tokens", "groups")}
    if not any(np.isfinite(share).any() for share in shares.values()):
        return None
    figure, (axes,) = new_figure(2.2)
    for (name, share), color in zip(shares.items(), (BLUE, GREEN), strict=True):
        draw_series(axes, step_numbers(run), share, color, name)
    axes.set_ylabel("share with a gradient")
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    finish_axes(axes, run)
    return to_svg(figure, "shares of trained tokens and groups that bore a gradient, per step")


@themed
def throughput_picture(run: RunFolder) -> str | None:
    steps, rates = step_numbers(run), values(run, "rollout_tokens_per_s")
    if not np.isfinite(rates).any():
        return None
    figure, (axes,) = new_figure(2.5)
    draw_series(axes, steps, rates, GREEN, "rollout")
    mean = run.summary.get("rollout_tokens_per_s")
    if mean:
        axes.axhline(mean, color=MUTED, lw=1, ls=(0, (4, 3)), label=f"whole run: {mean:,.0f} tokens/s")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(0, float(np.nanmax(rates)) * 1.12 or 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    finish_axes(axes, run)
    return to_svg(figure, "rollout tokens per second, per step")


@themed
def staleness_picture(run: RunFolder) -> str | None:
    oldest = len(AGES) - 1
    tokens = np.zeros((len(AGES), len(run.steps)))
    for column, step in enumerate(run.steps):
        for age, count in (dig(step, "staleness", "tokens_by_age") or {}).items():
            tokens[min(int(age), oldest), column] += count or 0
    if not tokens.any():
        return None
    figure, (axes,) = new_figure(2.7)
    labels = [f"age {age}" if age < oldest else f"age {oldest} or more" for age in range(len(AGES))]
    stride = draw_stack(axes, run, list(zip(labels, AGES, tokens, strict=True)))
    axes.set_ylabel("trained tokens" if stride == 1 else f"trained tokens (mean of {stride} steps)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    finish_axes(axes, run)
    return to_svg(figure, "trained tokens by age, stacked, per step")


@themed
def lengths_picture(run: RunFolder) -> str | None:
    created, trained = (length_density(run, f"{which}_histogram") for which in ("created", "trained"))
    if created is None and trained is None:
        return None
    figure, (axes,) = new_figure(2.7)
    if created is not None:
        edges, density = created
        axes.stairs(
            density / BINS_PER_DOUBLING, edges, fill=True, color=MUTED, alpha=0.35, label=with_mean(run, "created")
        )
    if trained is not None:
        edges, density = trained
        axes.stairs(density / BINS_PER_DOUBLING, edges, color=BLUE, lw=1.8, label=with_mean(run, "trained"))
    longest = max(found[0][-1] for found in (created, trained) if found is not None)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, longest)
    axes.set_xticks([2**power for power in range(math.ceil(math.log2(longest)) + 1)], minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.minorticks_off()
    axes.set(xlabel="response length (tokens)", ylabel="share in ¼ doubling")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    legend(axes)
    return to_svg(figure, "response lengths of created and of trained samples")


def length_density(run: RunFolder, key: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(bin edges in tokens [n + 1], share of samples per doubling of length [n]), summed over all steps.

    A length k covers [k, k + 1), so that bins of few lengths have the right height.
    """
    counts: dict[int, int] = {}
    for step in run.steps:
        for index, count in (dig(step, "lengths", key) or {}).items():
            counts[max(int(index), 0)] = counts.get(max(int(index), 0), 0) + (count or 0)
    total = sum(counts.values())
    if not total:
        return None
    starts = [i for i in range(max(counts) + 1) if first_length(i) < first_length(i + 1)]
    ends = [*starts[1:], max(counts) + 1]
    edges = np.array([first_length(i) for i in [*starts, ends[-1]]])
    shares = np.array([sum(counts.get(i, 0) for i in range(a, b)) for a, b in zip(starts, ends, strict=True)]) / total
    return edges, shares / np.diff(np.log2(edges))


def first_length(index: int) -> int:
    """The smallest length of histogram bin `index`, which counts [2^(index/4), 2^((index+1)/4)) tokens."""
    return math.ceil(2 ** (index / 4) - 1e-9)


def with_mean(run: RunFolder, which: str) -> str:
    mean = dig(run.summary, "lengths", which, "mean")
    return which if mean is None else f"{which} (mean {mean:.1f} tokens)"
