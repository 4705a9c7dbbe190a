"""Figures that follow the page's theme: drawn in the light colors, which the SVG replaces by CSS variables.

matplotlib is imported only when a figure is drawn.
"""

import functools
import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from april.config import ConfigError
from april.observe.report.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1c2129", "#59636f", "#e2e6eb"
BLUE, ORANGE, GREEN, RED, VIOLET = "#2f6fdf", "#c8590d", "#1a7f4c", "#c62f3c", "#7a4fca"
WAITING = {"wait-others": "#c9d0d8", "wait-learner": "#d9c8f2", "wait-weights": "#f5d6bd", "wait-else": "#f2c4c8"}
"""Colors of a worker's idle time, by what the worker waits for: other workers, the learner, new weights, anything
else."""
AGES = ["#c5daf6", "#93b9ef", "#5f95e5", "#3672ca", "#2050a1", "#133473", "#0a2150"]
"""Colors of token ages 0 to 5 in policy steps, and of everything older."""

LIGHT = {
    "ink": INK,
    "muted": MUTED,
    "grid": GRID,
    "blue": BLUE,
    "orange": ORANGE,
    "green": GREEN,
    "red": RED,
    "violet": VIOLET,
    **WAITING,
    **{f"age-{age}": color for age, color in enumerate(AGES)},
}
DARK = {
    "ink": "#e6eaef", "muted": "#9aa5b1", "grid": "#2b323b", "blue": "#6ea3f7", "orange": "#f0924a",
    "green": "#4cc38a", "red": "#ff6b76", "violet": "#b394f4", "wait-others": "#3b444f", "wait-learner": "#473869",
    "wait-weights": "#5f3d22", "wait-else": "#60292f", "age-0": "#213f6e", "age-1": "#2c5798",
    "age-2": "#3f76c6", "age-3": "#6498e3", "age-4": "#92baf0", "age-5": "#c0d8f8", "age-6": "#e6effd",
}  # fmt: skip
"""The page's CSS variables by theme. The light values must differ from one another: `to_svg` tells them apart."""

STYLE = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
    "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": GRID, "axes.linewidth": 1,
    "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlecolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "ytick.major.size": 0, "legend.frameon": False, "legend.labelcolor": INK, "legend.fontsize": 8.5,
    "legend.title_fontsize": 8.5, "path.simplify": True,
}  # fmt: skip
WIDTH_IN = 5.6
"""Width of a picture in inches: half a page on a desktop, a whole one on a phone, with legible letters."""


def themed(picture: Callable[[RunFolder], str | None]) -> Callable[[RunFolder], str | None]:
    """Decorator: draw the picture in the report's style, whatever matplotlib's settings are."""

    @functools.wraps(picture)
    def draw(run: RunFolder) -> str | None:
        try:
            import matplotlib
        except ImportError:
            raise ConfigError(
                "the report's pictures need matplotlib, which is not installed; run `pip install 'april-rl[report]'`"
            ) from None
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "svg.hashsalt": picture.__name__}):
            return picture(run)

    return draw


def new_figure(height_in: float, panels: int = 1) -> "tuple[Figure, list[Axes]]":
    """A figure with `panels` axes stacked vertically."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained", facecolor="none")
    axes = list(figure.subplots(panels, squeeze=False)[:, 0])
    for panel in axes:
        panel.set_facecolor("none")
    return figure, axes


def draw_boxes(
    axes: "Axes", boxes: list[tuple[float, float, float]], color: str, half_height: float, label: str
) -> None:
    """Draw rectangles (left, right, row), each from `left` to `right` on the x axis, as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [
        [
            (left, row - half_height),
            (right, row - half_height),
            (right, row + half_height),
            (left, row + half_height),
        ]
        for left, right, row in boxes
    ]
    vertices = [point for four in corners for point in (*four, four[0])]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    if boxes:
        axes.add_patch(PathPatch(Path(vertices, codes), facecolor=color, edgecolor=color, lw=0.6, label=label))


def to_svg(figure: "Figure", description: str) -> str:
    """The figure as an `<svg>` element that takes its colors from the page's CSS variables and its font from the
    page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*" height="[^"]*"',
        rf'\1 role="img" aria-label="{description}"',
        svg,
        count=1,
    )
    for name, color in LIGHT.items():
        svg = svg.replace(color, f"var(--{name})")
    return re.sub(r"\s*\n\s*", " ", svg).strip()
