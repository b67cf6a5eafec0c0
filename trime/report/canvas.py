"""Building blocks of pictures: figures, panels, bars and curves."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Collection, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from trime.common.io import replacing
from trime.common.metrics import mean_over_seeds
from trime.report.run_result import VOCABULARY

BLUE, GREY, ORANGE, LINES = "#2a6f97", "#9aa5b1", "#d9772b", "#e3e7ec"
MEMORY_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7")  # of Okabe and Ito: colour-blind eyes tell them apart
LINE_COLOURS = (  # of Okabe and Ito, then of Tol's muted scheme; black and grey have meanings of their own
    *("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7"),
    *("#882255", "#999933", "#332288", "#661100", "#117733", "#F0E442"),
)
MARKERS = "osD^vPX<>*hpd"
Panel = Callable[[Any], None]
SVG_WIDTH, SVG_HEIGHT = 3.3, 2.7  # inches: on a phone of 360 pixels the smallest letters, of 8 points, have 11 pixels
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 5.0, 4.0, 2  # of a picture's panels: inches, and how many are side by side
NAMED = "names"  # the id of a vertical axis of names, not of numbers
TITLE_WIDTH, LABEL_WIDTH, NAME_WIDTH = 40, 28, 20  # characters of a line
HEADLINE_WIDTH = 55  # for each column of panels
UNDATED: dict[str, dict[str, None]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}  # the same bytes always
SCALES = {"perplexity": "log", "bits/char": "linear", "bits/byte": "linear"}


def memory_colours(names: Iterable[str]) -> dict[str, str]:
    """Return the colours of the vocabulary and of memories in pictures and pages, by their order in a row."""
    memories = [name for name in names if name != VOCABULARY]
    return {VOCABULARY: GREY} | dict(zip(memories, cycle(MEMORY_COLOURS), strict=False))


def line_style(number: int) -> dict[str, Any]:
    """Return colour and marker of a picture's line by its number: no two of 156 lines share both."""
    return {"color": LINE_COLOURS[number % len(LINE_COLOURS)], "marker": MARKERS[number % len(MARKERS)], "ms": 5}


def canvas(width: float, height: float, columns: int, lines: int = 1, line_heights: list[float] | None = None) -> Any:
    """Return a figure that needs no display, and its axes, line by line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shape: dict[str, Any] = {"figsize": (width, height), "height_ratios": line_heights, "squeeze": False}
    figure, axes = pyplot.subplots(lines, columns, layout="constrained", **shape)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def without_mathematics(figure: Any) -> None:
    """Take dollar signs in titles, labels, legends and names literally, not for the marks of a formula."""
    legends = [*figure.legends, *(legend for axis in figure.axes if (legend := axis.get_legend()))]
    texts = [*figure.texts, *(text for legend in legends for text in legend.get_texts())]
    for axis in figure.axes:
        named = axis.get_yticklabels() if axis.yaxis.get_gid() == NAMED else []  # ticks of a logarithmic axis are formulas
        texts += [axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts, *named]
    for text in texts:
        text.set_parse_math(False)


def save_picture(figure: Any, path: Path) -> Path:
    """Write a picture atomically as PNG, with SVG and PDF beside it, close it and return the path of the PNG."""
    import matplotlib
    from matplotlib import pyplot

    without_mathematics(figure)
    # Without a fixed salt, the ids in an SVG differ from run to run.
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        for format, metadata in UNDATED.items():
            with replacing(path.with_suffix(f".{format}")) as partial:
                figure.savefig(partial, format=format, dpi=140, metadata=metadata)
            figure.set_layout_engine("none")  # the others keep the layout of the first, which takes a third of the time
    pyplot.close(figure)
    return path


def save_panels(panels: list[Panel], path: Path, headline: str = "", height: float = PANEL_HEIGHT) -> Path:
    """Draw panels under a headline, each of this height in inches, and return the path of the picture."""
    # Two in a line: their type is then legible in a column of text.
    columns = min(len(panels), COLUMNS)
    lines = -(-len(panels) // columns)
    figure, axes = canvas(1 + PANEL_WIDTH * columns, height * lines, columns, lines)
    for axis, panel in zip(axes, panels, strict=False):
        panel(axis)
    # An odd number of panels leaves the last place empty.
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(textwrap.fill(headline, HEADLINE_WIDTH * columns))
    return save_picture(figure, path)


def draw_svg(panel: Panel) -> str:
    """Return one panel as SVG for a page, with its text as text, which is legible on a phone too, and the page's colours."""
    import matplotlib
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": str(id(panel))}):
        figure, (axis,) = canvas(SVG_WIDTH, SVG_HEIGHT, 1)
        panel(axis)
        fit_narrow(figure, axis)
        without_mathematics(figure)
        content = io.StringIO()
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    _, start, rest = content.getvalue().partition("<svg")
    return f"{start}{rest}".replace("#000000", "currentColor").replace(LINES, "var(--line)")


def fit_narrow(figure: Any, axis: Any) -> None:
    """Wrap the title and the labels of an axis, put its legend below it, and give every line of its names room."""
    title = textwrap.fill(axis.get_title(), TITLE_WIDTH)
    figure.suptitle(title, fontsize=10)
    axis.set_title("")
    axis.set_xlabel(textwrap.fill(axis.get_xlabel(), LABEL_WIDTH), fontsize=9)
    names = [textwrap.fill(label.get_text(), NAME_WIDTH) for label in axis.get_yticklabels()]
    height = SVG_HEIGHT + 0.17 * title.count("\n")
    if axis.yaxis.get_gid() == NAMED:
        axis.set_yticks(axis.get_yticks(), names, fontsize=8)
        height = max(height, 0.9 + 0.14 * (len(names) + sum(1 + name.count("\n") for name in names)))
    if legend := axis.get_legend():
        handles, labels = axis.get_legend_handles_labels()
        legend.remove()
        labels = [textwrap.fill(label, TITLE_WIDTH) for label in labels]
        figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=8)
        height += 0.17 * sum(1 + label.count("\n") for label in labels)
    figure.set_size_inches(SVG_WIDTH, height)


def draw_dots(
    axis: Any,
    names: list[str],
    values: list[list[float]],
    intervals: list[tuple[float, float] | None],
    metric: str,
    colours: list[str],
) -> None:
    """Draw a line for each name from top to bottom: its interval, a small dot for each seed, and a large one at their mean."""
    means = [mean_over_seeds(of_seeds, metric) for of_seeds in values]
    for position, (of_seeds, value, interval, colour) in enumerate(zip(values, means, intervals, colours, strict=True)):
        if interval:
            axis.plot(interval, [position, position], color=colour, lw=2, alpha=0.45, solid_capstyle="butt")
        axis.plot(of_seeds, [position] * len(of_seeds), ".", color="black", ms=4, alpha=0.6)
        axis.plot([value], [position], "o", color=colour, ms=7)
        axis.annotate(f"{value:.2f}", (value, position), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.yaxis.set_gid(NAMED)
    axis.set_ylim(len(names) - 0.5, -0.7)
    axis.grid(axis="x", color=LINES, lw=0.8)
    axis.set_axisbelow(True)
    better = f"{'higher' if metric == 'BLEU' else 'lower'} is better"
    lines = "; lines: 95 %" * any(intervals) + "; small dots: seeds" * any(len(of_seeds) > 1 for of_seeds in values)
    axis.margins(x=0.12)  # room for the numbers at either end
    axis.set_xlabel(f"test {metric} ({better}{lines})")
    # Without a logarithm, results that differ fivefold would push all others together.
    if min(means) > 0 and max(means) > 5 * min(means):
        axis.set_xscale("log")
        digits = (1, 2, 5) if max(means) < 30 * min(means) else (1, 3)
        ticks = [digit * 10**power for power in range(-2, 8) for digit in digits]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        ends = [*means, *(end for interval in intervals if interval for end in interval)]
        axis.set_xlim(min(0.9 * min(ends), 0.6 * min(means)), max(1.1 * max(ends), 1.4 * max(means)))


def finish_size_axis(axis: Any, sizes: Collection[float]) -> None:
    """Set logarithmic ticks at memory sizes, and add the legend."""
    axis.set_xscale("log")
    axis.set_xticks(sorted({*sizes}), [f"{size:g}" for size in sorted({*sizes})])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)
