"""What pictures are drawn on and with."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from trime.metrics import MEASURES

BLUE, GREY, ORANGE = "#2a6f97", "#9aa5b1", "#d9772b"
Panel = Callable[[Any], None]
SCALES = {"perplexity": "log", "bits/char": "linear"}


def canvas(width: float, height: float, columns: int, lines: int = 1) -> Any:
    """A figure without a display, and its panels, line by line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(lines, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def fill(axes: list[Any], panels: list[Panel]) -> None:
    """Each panel on an axis of its own; axes may be left over."""
    for axis, panel in zip(axes, panels, strict=False):
        panel(axis)


def saved(figure: Any, path: Path) -> Path:
    """Writes the picture whole and closes it."""
    from matplotlib import pyplot

    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=140)
    pyplot.close(figure)
    partial.replace(path)
    return path


def drawn(panel: Panel, title: str = "") -> str:
    """One panel as SVG, its text as text."""
    import matplotlib
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{title} {id(panel)}"}):
        figure, (axis,) = canvas(5.6, 3.8, 1)
        panel(axis)
        if title:
            axis.set_title(title)
        content = io.StringIO()
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return content.getvalue()[content.getvalue().index("<svg") :]


def bars(axis: Any, names: list[str], figures: list[list[float]], kind: str, colours: list[str]) -> None:
    """Horizontal bars from the top, each with the mean of its figures, and those as dots where there are several."""
    places, values = range(len(names)), [mean(own) for own in figures]
    axis.barh(places, values, color=colours, height=0.66)
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set_xlabel(f"test {kind} ({'higher' if kind == 'BLEU' else 'lower'} is better)")
    axis.set_xlim(0, 1.14 * max(map(max, figures)) or 1)
    for place, value, own in zip(places, values, figures, strict=True):
        if len(own) > 1:
            axis.plot(own, [place] * len(own), ".", color="black", ms=4, alpha=0.6)
        axis.text(max(own), place, f" {value:.2f}", va="center", fontsize=9)


def curve(axis: Any, losses: dict[str, float], label: str, kind: str) -> None:
    """One line over the sizes of the long memory."""
    sizes = [int(size) for size in losses]
    axis.plot(sizes, [MEASURES[kind](loss) for loss in losses.values()], marker="o", ms=4, label=label)
    axis.set_xscale("log")
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.minorticks_off()


def small_panels(count: int, most: int) -> tuple[Any, Any]:
    """A figure of so many panels, at most so many in a row."""
    columns = min(count, most)
    rows = -(-count // columns)
    figure, axes = canvas(1 + 5.2 * columns, 4.4 * rows, columns, rows)
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes


def over_sizes(axis: Any, sizes: Sequence[float]) -> None:
    """Ticks at sizes of a memory, and the lines' names."""
    axis.set_xscale("log")
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)
