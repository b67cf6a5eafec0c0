"""Draw the pictures of the findings from kept results: ``make pictures``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import RESULTS, ROOT, Folder, Results, benchmark, entry
from trime.common.metrics import share_interval
from trime.report.bootstrap import Difference
from trime.report.canvas import LINES, canvas, without_mathematics

FOLDER = ROOT / "docs" / "findings"
BLUE, ORANGE = "#0072B2", "#D55E00"  # of Okabe and Ito, told apart in grey too by their forms
INK, SOFT = "#1d2733", "#5b6875"

Cells = Mapping[tuple[str, str], tuple[float, bool]]  # a number by line and column, and whether it is sure


def heatmap(axis: Any, lines: Sequence[str], columns: Sequence[str], cells: Cells, form: str, most: float) -> None:
    """Draw numbers on the more blue the larger they are; what is below zero is orange, and what is not sure is in brackets."""
    for row, line in enumerate(lines):
        for column, title in enumerate(columns):
            if (line, title) not in cells:
                continue
            value, sure = cells[line, title]
            depth = min(1.0, abs(value) / most)
            axis.add_patch(rectangle(column, row, BLUE if value >= 0 else ORANGE, 0.75 * depth))
            text = form.format(value).replace("-", "−")
            axis.text(column, row, text if sure else f"({text})", ha="center", va="center", fontsize=9, color=INK)
    axis.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(lines) - 0.5, -0.5))
    axis.set_xticks(range(len(columns)), columns, fontsize=8.5)
    axis.set_yticks(range(len(lines)), lines, fontsize=8.5)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def rectangle(column: float, row: float, colour: str, opacity: float) -> Any:
    """Return a cell of a heatmap."""
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=colour, alpha=opacity, linewidth=0)


def save(figure: Any, path: Path) -> None:
    """Write a picture as PNG."""
    from matplotlib import pyplot

    without_mathematics(figure)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def which_memory(path: Path) -> None:
    """Draw the share of bits that each memory saves a decoder on each text."""
    texts = {
        "a2a_sdk": "code\na2a-sdk",
        "openai_agents": "code\nopenai-agents",
        "git_manual": "manual pages\ngit",
        "Schreiner_Farm_1883": "a novel,\nits earlier chapters",
    }
    ways = {
        "the file\nso far": ("document", "nothing"),
        "stored\nn-grams": ("ngram", "nothing"),
        "stored\nneighbours": ("knn", "nothing"),
        "all three": ("ngram, document, knn", "nothing"),
        "passages in\nthe prompt": ("none", "3 passages"),
        "all three and\npassages": ("ngram, document, knn", "3 passages"),
        "LoRA": ("none", "LoRA"),
        "n-grams\nand LoRA": ("ngram, document", "LoRA"),
    }
    cells = {}
    for text, line in texts.items():
        found = {"text": text, "places": None}
        alone = entry("decoder_memory", **found, memories="none", **{"beside the text": "nothing"})["bits per byte"]
        for column, (memories, beside) in ways.items():
            row = entry("decoder_memory", **found, memories=memories, **{"beside the text": beside})
            _, low, high = row["less alone"]
            cells[line, column] = 100 * (1 - row["bits per byte"] / alone), low > 0 or high < 0
    figure, (axis,) = canvas(9.2, 3.3, 1)
    heatmap(axis, [*texts.values()], [*ways], cells, "{:.1f}", 30)
    axis.axvline(3.5, color="white", lw=6)
    figure.suptitle("Percent of SmolLM2-135M's bits that each saves (in brackets: the interval holds zero)", fontsize=10)
    save(figure, path)


def needles(path: Path) -> None:
    """Draw the share of numbers that a memory of 512 entries finds, by policy, depth, and when the question looks."""
    passkey = Folder("passkey")
    lines = ["fifo", "sink", "lra_sum", "tova", "snapkv", "all kept"]
    moments = {
        "evicts as it reads": "720-{}",
        "the question looks back\nafter each chunk": "720-{}-guided",
        "the question looks back\nafter the prompt": "720-{}-both-whole",
    }
    figure, axes = canvas(8.2, 3.1, len(moments))
    for axis, (moment, form) in zip(axes, moments.items(), strict=True):
        cells: dict[tuple[str, str], tuple[float, bool]] = {}
        for line in lines:
            file = form.format(line) if line != "all kept" else "720-whole"
            for cell in passkey(file)["row.by_depth"] if file in passkey else []:
                cells[line, f"{100 * cell['depth']:.0f}"] = 100 * cell["contained"], True
        heatmap(axis, lines, [*dict.fromkeys(column for _, column in cells)], cells, "{:.0f}", 100)
        axis.set_title(moment, fontsize=9, pad=20)
        axis.set_xlabel("depth of the number, %", fontsize=8.5)
    for axis in axes[1:]:
        axis.set_yticklabels([])
    fifo = passkey("720-fifo")
    asked = f"{fifo['row.questions']} numbers in {fifo['row.prompt_tokens']} tokens of a novel, M = {fifo['row.memory_size']}"
    figure.suptitle(f"Percent found by SmolLM2-135M: {asked}", fontsize=10)
    save(figure, path)


def papers_and_adaptive(path: Path) -> None:
    """Draw each row's paired difference to vanilla: by the mixture that is best on dev, and by the adaptive one."""
    main = Folder("tables/main")
    names = (
        "cache",
        "cache_long",
        "knn_lm",
        "knn_lm_cache",
        "trime",
        "trime_long",
        "trime_ext_no_long",
        "trime_ext",
        "trime_all",
    )
    vanilla = main("vanilla")
    rows = sorted(names, key=lambda name: (main(name).adaptive - vanilla).value)  # type: ignore[union-attr]
    extra = ("trime_all_ngram", "knn_lm_cache_ngram", "ngram_lm")  # rows of the adaptive mixture alone
    figure, (axis,) = canvas(8.6, 4.4, 1)
    for place, name in enumerate([*extra, *rows]):
        of_row: list[tuple[Results, str, str]] = [(main(name).row(-1), BLUE, "o")]
        if name not in extra:
            of_row.append((main(name).best, ORANGE, "D"))
        for results, colour, marker in of_row:
            difference = results - vanilla
            assert isinstance(difference, Difference)
            axis.plot([difference.low, difference.high], [place, place], color=colour, lw=2, alpha=0.45)
            axis.plot([difference.value], [place], marker, color=colour, ms=7)
    for label, colour, marker in (("best other mixture on dev", ORANGE, "D"), ("the adaptive mixture", BLUE, "o")):
        axis.plot([], [], marker, color=colour, label=label)
    axis.set_yticks(range(len(extra) + len(rows)), [*extra, *rows], fontsize=9)
    axis.invert_yaxis()
    axis.axvline(0, color=SOFT, lw=1)
    axis.grid(axis="x", color=LINES)
    axis.set_axisbelow(True)
    axis.set_xlabel(f"test perplexity less that of vanilla ({vanilla.test:.2f}); lines: 95 %, paired, 3 seeds", fontsize=9)
    axis.legend(frameon=False, fontsize=9, loc="lower left")
    axis.set_title("Rows of the main table, by two mixtures", fontsize=10)
    save(figure, path)


def duel(path: Path) -> None:
    """Draw how often each contestant is right, and beside it the bytes that it holds, at most and after the prompt."""
    rows = sorted(benchmark("duel_2k")["rows"], key=lambda row: (-row["right"], row["MB at most"]))
    figure, (right, held) = canvas(9.6, 5.0, 2)
    for place, row in enumerate(rows):
        kept, theirs = row["contestant"] == "all is kept", row["contestant"].startswith("kvpress")
        colour, marker = (ORANGE, "D") if theirs else (SOFT, "s") if kept else (BLUE, "o")
        low, high = share_interval(row["right"], row["prompts"])
        right.plot([low, high], [place, place], color=colour, lw=2, alpha=0.45)
        right.plot([row["right"]], [place], marker, color=colour, ms=6)
        held.plot([row["MB after"], row["MB at most"]], [place, place], color=colour, lw=1)
        held.plot([row["MB at most"]], [place], marker, color=colour, ms=7, mfc="white")
        held.plot([row["MB after"]], [place], marker, color=colour, ms=5)
    right.set_yticks(range(len(rows)), [row["contestant"] for row in rows], fontsize=9)
    held.set_yticks(range(len(rows)), [""] * len(rows))
    for axis in (right, held):
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.grid(color=LINES)
        axis.set_axisbelow(True)
    right.set_xlabel("share of wanted texts in the answers; lines: 95 %", fontsize=9)
    held.set_xlabel("MB held: at most (hollow), after the prompt (filled)", fontsize=9)
    held.set_xlim(0, None)
    asked = f"{rows[0]['prompts']} RULER prompts of some 2,000 tokens"
    figure.suptitle(f"{asked}, Qwen2.5-Coder-0.5B, a quarter of the entries kept", fontsize=10)
    save(figure, path)


def papers_order(path: Path) -> None:
    """Draw the test perplexity of each method by the updates of its training."""
    names = ("vanilla", "knn_lm", "knn_lm_cache", "trime", "trime_long", "trime_ext")
    lengths = sorted(int(file.stem) for file in (RESULTS / "tables" / "order").iterdir())
    points = {updates: Folder(f"tables/order/{updates}") for updates in lengths}
    figure, (axis,) = canvas(8.0, 4.4, 1)
    for name, colour, line in zip(
        names, (SOFT, ORANGE, ORANGE, BLUE, BLUE, BLUE), ("-", ":", "-", ":", "--", "-"), strict=True
    ):
        tests = [of(name).test for of in points.values()]
        axis.plot([*points], tests, line, color=colour, lw=1.8, marker="o", ms=4)
        place: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "center"}  # where lines are far apart
        axis.annotate(
            name, (min(points), tests[0]), (-8, {"knn_lm": 6, "trime_long": -6}.get(name, 0)), fontsize=9, color=colour, **place
        )
    axis.set(xscale="log", yscale="log", xlabel="updates of the whole training", ylabel="test perplexity")
    axis.set_xticks([*points], [f"{updates:,}" for updates in points])
    axis.set_yticks([75, 100, 150, 200, 300, 400], ["75", "100", "150", "200", "300", "400"])
    axis.minorticks_off()
    axis.set_xlim(min(points) * 0.6, max(points) * 1.15)
    axis.grid(color=LINES)
    axis.set_axisbelow(True)
    axis.set_title("Ninety novels in byte pairs; the external memory by its share alone", fontsize=10)
    save(figure, path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "which-memory": which_memory,
    "evict-and-recall": needles,
    "duel": duel,
    "adaptive-mixture": papers_and_adaptive,
    "papers-order": papers_order,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw(FOLDER / f"{name}.png")
