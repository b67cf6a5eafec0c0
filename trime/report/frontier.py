"""table=frontier: every subset of a run's memories × K × kind of index × precision of keys, by perplexity, speed and size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.io import write_atomically
from trime.metrics import MEASURES
from trime.report.figures.canvas import BLUE, GREY, ORANGE, SCALES, Panel, canvas, fill, saved
from trime.report.groups import memory_size, size_text
from trime.report.page import Page, Section, Table, commands, pictured, write_page
from trime.report.tables import Lines, csv_of, evaluated, markdown, unit
from trime.types import UserError

AXES = (
    ("seconds", 1e6, "µs a token", "log"),
    ("gb", 1, "GB of memories, without the model", "linear"),
)  # cost, its unit, label, scale
NOTE = "Fronts are chosen on dev; a token's time is that of model, memories and mixture in one pass."
SAME = 0.02  # by which a subset's figures of two runs may lie apart: fits are not the same on every machine
NEAR = 1.01  # times the best perplexity on dev, which the cheapest may have that is advised beside it


@dataclass(frozen=True)
class External:
    """How the external memory was kept and searched."""

    index: str
    k: int
    precision: str  # of keys

    def __str__(self) -> str:
        return f"{self.index}, K {self.k}, {self.precision} keys"


@dataclass(frozen=True)
class Point:
    """A subset of memories under some settings. ``seconds``: a token's, of model, memories and mixture; ``gb``: of memories."""

    memories: tuple[str, ...]
    external: External | None
    dev: float
    test: float
    seconds: float
    gb: float

    @property
    def names(self) -> str:
        """Return its memories, ``one + another``."""
        return " + ".join(self.memories or ("vocabulary alone",))

    @property
    def label(self) -> str:
        """Return what a reader calls it."""
        return self.names + (f" ({self.external})" if self.external else "")


def points_of(runs: list[dict[str, Any]]) -> list[Point]:
    """Return every subset of runs of one model once: without the external memory its settings do not matter."""
    found: dict[Any, Point] = {}
    for run in runs:
        own, kind = run["subsets"], unit(run["metrics"]["test"][-1])
        for one in own["subsets"]:
            names = tuple(one["memories"])
            costs = [own["memories"][name] for name in names]
            seconds = own["encode_seconds_per_token"] + one["seconds_per_token"] + sum(c["seconds_per_token"] for c in costs)
            external = external_of(run) if "external" in names else None
            dev, test = (MEASURES[kind](one[key]) for key in ("dev_loss", "loss"))
            point = Point(names, external, dev, test, seconds, sum(c["bytes"] for c in costs) / 1e9)
            first = found.setdefault((names, external), point)
            if abs(point.dev / first.dev - 1) > SAME:
                raise UserError(
                    f"{point.label} is there twice, at {first.dev:.2f} and {point.dev:.2f} on dev: runs of one frontier "
                    "differ in the index, K and the precision of keys alone; report others apart"
                )
    return sorted(found.values(), key=lambda point: point.dev)


def external_of(run: dict[str, Any]) -> External:
    """Return how a run's external memory was kept and searched."""
    own, built = run["subsets"]["external"], run["datastore"]
    probe = f", probe {built['probe']}" if built.get("probe") and built["index"] != "exact" else ""
    return External(built["index"] + probe, own["k"], own["keys"])


def front(points: list[Point], cost: str) -> list[Point]:
    """Return the points that no other one beats both on dev and in a cost, the best on dev first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.dev, getattr(point, cost))):
        if not found or getattr(point, cost) < getattr(found[-1], cost):
            found.append(point)
    return found


def advice(points: list[Point], seconds: float | None, gb: float | None, kind: str) -> str:
    """Return one sentence: the best on dev within the budget; without one the best, and the fastest that is nearly as good."""
    within = [p for p in points if (seconds is None or p.seconds <= seconds) and (gb is None or p.gb <= gb)]
    budget = [*([f"{1e3 * seconds:g} ms a token"] if seconds is not None else []), *([f"{gb:g} GB"] if gb is not None else [])]
    if not within:
        least = min(points, key=lambda point: point.seconds)
        return f"Nothing fits into {' and '.join(budget)}: the fastest is {told(least, kind)}."
    best = within[0]
    if budget:
        return f"Within {' and '.join(budget)}, choose {told(best, kind)}."
    near = min((p for p in within if p.dev <= NEAR * best.dev), key=lambda point: point.seconds)
    first = f"Best of all is {told(best, kind)}"
    return f"{first}." if near is best else f"{first}; the fastest within 1 % of its perplexity on dev is {told(near, kind)}."


def told(point: Point, kind: str) -> str:
    """A point in words."""
    return f"{point.label}: test {kind} {point.test:.2f} at {1e3 * point.seconds:.2f} ms a token and {point.gb:.3g} GB"


def frontier_table(points: list[Point], kind: str) -> tuple[list[str], Lines]:
    """All points, the best on dev first; those of the Pareto fronts are marked."""
    marks = {cost: front(points, cost) for cost in ("seconds", "gb")}
    header = ["memories", "index", "K", "keys", f"dev {kind}", f"test {kind}", "tokens/s", "GB", "on the front of"]
    lines = []
    for point in points:
        own = point.external
        searched = [own.index, str(own.k), own.precision] if own else ["", "", ""]
        fronts = [said for cost, said in (("seconds", "speed"), ("gb", "size")) if point in marks[cost]]
        figures = [f"{point.dev:.2f}", f"{point.test:.2f}", f"{1 / point.seconds:,.0f}", f"{point.gb:.3g}"]
        lines.append([point.names, *searched, *figures, ", ".join(fronts)])
    return header, lines


def front_panel(axis: Any, points: list[Point], axis_of: tuple[str, float, str, str], kind: str) -> None:
    """Every point; those on the front are ringed and named, the colour tells whether the external memory is among them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    cost, by, label_of, scale = axis_of
    for colour, inside, label in ((GREY, False, "without external memory"), (ORANGE, True, "with external memory")):
        own = [point for point in points if bool(point.external) is inside]
        places = [by * getattr(point, cost) for point in own]
        axis.plot(places, [point.test for point in own], "o", ms=4, alpha=0.7, color=colour, label=label)
    best, named = front(points, cost), set()
    places = [by * getattr(point, cost) for point in best]
    axis.plot(places, [point.test for point in best], "o", ms=9, mfc="none", color=BLUE, label="Pareto front (by dev)")
    for point, place in zip(best, places, strict=True):
        if point.memories not in named:
            axis.annotate(point.names, (place, point.test), (6, 6), textcoords="offset points", fontsize=7)
            named.add(point.memories)
    axis.set(xlabel=label_of, ylabel=f"test {kind}", xscale=scale, yscale=SCALES[kind])
    for ticks in (ticks for ticks in (axis.xaxis, axis.yaxis) if ticks.get_scale() == "log"):
        ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ticks.set_minor_formatter(NullFormatter())
    axis.legend(frameon=False, fontsize=8)


def report_frontier(runs: list[dict[str, Any]], budget: DictConfig, folder: Path) -> None:
    """Write tables, pictures and a page, a part for each run that was trained; print the Pareto rows and the advice."""
    sections: list[Section] = []
    texts: list[str] = []
    models = by_model(runs)
    for title, own in models.items():
        points, kind = points_of(own), unit(own[0]["metrics"]["test"][-1])
        header, lines = frontier_table(points, kind)
        sentence = advice(points, budget.seconds_per_token, budget.gb, kind)
        panels: list[Panel] = [partial(front_panel, points=points, axis_of=axis_of, kind=kind) for axis_of in AXES]
        texts.append(f"{title}:\n\n{markdown(header, lines)}\n{sentence}\n")
        best = markdown(header, [line for line in lines if line[-1]])
        print(f"\n{title}, Pareto rows of {len(points)}:\n\n{best}\n{sentence}\n")
        name = "frontier" if len(models) == 1 else f"frontier-{len(texts)}"
        write_atomically(folder / f"{name}.csv", csv_of(header, lines))
        print(f"table: {folder / f'{name}.csv'}\npicture: {frontier_picture(panels, title, folder / f'{name}.png')}")
        sections += [Section(title, f"{sentence} {NOTE}", [Table(header, lines)]), *pictured(f"Pictures of {title}", panels)]
    write_atomically(folder / "frontier.md", "\n".join(texts))
    page = Page(folder.name, [f"{len(runs)} runs"], [*sections, commands(runs)])
    print(f"table: {folder / 'frontier.md'}\npage: {write_page(page, folder / 'frontier.html')}")


def by_model(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return runs that differ in the settings of their memories alone, by what they are of."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        text, row, store = evaluated(run), run["metrics"]["test"][-1], run.get("datastore", {}).get("entries")
        size, parameters, updates = memory_size(run), run["parameters"], run["train"].get("updates")
        said = [
            f"{run['name']}, seed {run['seed']}, {run['subsets']['mixture']} mixture, on {text[0]} ({text[2]:,} tokens)",
            *([f"{parameters:,} parameters"] if parameters else []),
            *([f"{updates:,} updates"] if updates else []),
            *([f"a store of {store:,}"] if store else []),
            *([f"memory of {size_text(size)} ({row['eviction']})"] if size else []),
        ]
        found.setdefault(", ".join(said), []).append(run)
    return found


def frontier_picture(panels: list[Panel], title: str, path: Path) -> Path:
    """Perplexity against time and against size, side by side."""
    figure, axes = canvas(12, 4.6, len(panels))
    fill(axes, panels)
    figure.suptitle(title, fontsize=9)
    return saved(figure, path)
