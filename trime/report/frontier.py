"""table=frontier: every subset of memories × K × index × precision of keys, compared by perplexity, speed and size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from trime.common.io import write_atomically
from trime.common.metrics import MEASURES
from trime.errors import UserError
from trime.report.bootstrap import Difference, paired_bootstrap
from trime.report.canvas import BLUE, GREY, ORANGE, SCALES, Panel, save_panels
from trime.report.groups import size_text
from trime.report.page import Page, Section, commands_section, picture_sections, place_of, write_page
from trime.report.run_result import ScoredRun
from trime.report.tables import Table, decimals, markdown, to_csv
from trime.report.terminal import ending, fitted

AXES = (
    ("seconds", 1e6, "µs/token", "log"),
    ("gb", 1, "GB of memories, without the model", "linear"),
)  # cost, factor to the displayed unit, label, scale
NOTE = (
    "Pareto fronts are chosen on dev. The time per token is the elapsed time of model, memories and mixture in one pass: "
    "compare runs of one machine that did nothing else."
)
EARLIER = "external"  # the memory of the datastore, in results of versions that had one and did not name it
ZOOM = 1.6  # results up to so many times the best one are drawn
GREEN = "#009E73"  # of Okabe and Ito
TOLERANCE = 0.02  # relative difference of a subset's dev results in two runs: fits differ between machines


@dataclass(frozen=True)
class External:
    """How the memory of a datastore was stored and searched; ``precision`` is that of keys."""

    index: str
    k: int | str
    precision: str

    def __str__(self) -> str:
        return f"{self.index}, K {self.k}, {self.precision} keys"


@dataclass(frozen=True)
class Point:
    """A subset of memories under some settings; ``seconds`` per token of model, memories and mixture, ``gb`` of memories."""

    memories: tuple[str, ...]
    external: External | None
    dev: float
    test: float
    seconds: float
    gb: float
    documents: tuple[tuple[float, float], ...] = ()  # summed loss and tokens of each on test

    @property
    def names(self) -> str:
        return " + ".join(self.memories or ("vocabulary alone",))

    @property
    def label(self) -> str:  # the memories, and how the one of a datastore was searched
        return self.names + (f" ({self.external})" if self.external else "")


def frontier_points(runs: list[ScoredRun]) -> list[Point]:
    """Return every subset of memories in runs of one model, the best on dev first."""
    points: dict[Any, Point] = {}
    for run, subsets in ((run, run.subsets) for run in runs if run.subsets):
        to_metric, search = MEASURES[run.row.metric_name], subsets.external_search
        stores = run.datastores or ({EARLIER: run.datastore} if run.datastore else {})
        for subset in subsets.subsets:
            costs = [subsets.costs[name] for name in subset.memories]
            used = [store for name, store in stores.items() if name in subset.memories]
            # The exact index ignores nprobe.
            indices = [s.index + (f", nprobe {s.nprobe}" if s.nprobe and s.index != "exact" else "") for s in used]
            point = Point(
                memories=tuple(subset.memories),
                external=External(" and ".join(dict.fromkeys(indices)), search.k, search.keys) if search and used else None,
                dev=to_metric(subset.valid_loss),
                test=to_metric(subset.loss),
                seconds=subsets.encode_seconds_per_token + subset.seconds_per_token + sum(c.seconds_per_token for c in costs),
                gb=sum(cost.bytes for cost in costs) / 1e9,
                documents=tuple(subset.documents),
            )
            # Subsets without a datastore do not depend on its settings: they count once.
            # The same subset in another run must agree: otherwise the runs differ in more than their memories.
            first = points.setdefault((point.memories, point.external), point)
            if abs(point.dev / first.dev - 1) > TOLERANCE:
                raise UserError(
                    f"{point.label} occurs twice, with {first.dev:.2f} and {point.dev:.2f} on dev: runs of one frontier may "
                    "differ only in index, K and precision of keys; report the others separately"
                )
    return sorted(points.values(), key=lambda point: (math.isnan(point.dev), point.dev))


def pareto_front(points: list[Point], cost: str) -> list[Point]:
    """Return the points that no other point beats both on dev and in a cost, the best on dev first."""
    front: list[Point] = []
    # From the best on dev on, a point is on the front if it is cheaper than all better ones.
    for point in sorted(points, key=lambda point: (point.dev, getattr(point, cost))):
        if not front or getattr(point, cost) < getattr(front[-1], cost):
            front.append(point)
    return front


def within_budget(points: list[Point], seconds: float | None, gb: float | None) -> list[Point]:
    """Return the points within a budget, whose parts may be None."""
    return [p for p in points if (seconds is None or p.seconds <= seconds) and (gb is None or p.gb <= gb)]


def cheapest(points: list[Point], metric: str) -> tuple[Point, Difference | None]:
    """Return the fastest point that is as good as the best on dev, noise apart, and its difference to that one.

    A point is as good if its paired difference on test to the best one is not shown to be above zero; where no interval is
    known, only the best is.
    """
    best = points[0]
    for point in sorted(points, key=lambda p: (p.seconds, p.gb, p.dev)):
        if point is best:
            break
        same_text = [count for _, count in point.documents] == [count for _, count in best.documents]
        if same_text and len(point.documents) > 1:
            excess = paired_bootstrap(np.array([[point.documents, best.documents]]), metric)
            if excess.low <= 0:
                return point, excess
    return best, None


def advice(points: list[Point], seconds: float | None, gb: float | None, metric: str) -> str:
    """Return one sentence of advice: the cheapest point within the budget, beside the best on dev."""

    def describe(p: Point) -> str:
        return f"{p.label}: test {metric} {p.test:.2f} at {1e3 * p.seconds:.2f} ms a token and {p.gb:.3g} GB"

    within = within_budget(points, seconds, gb)
    budget = [*([f"{1e3 * seconds:g} ms a token"] if seconds is not None else []), *([f"{gb:g} GB"] if gb is not None else [])]
    if not within:
        fastest = min(points, key=lambda point: point.seconds)
        return f"Nothing fits into {' and '.join(budget)}: the fastest is {describe(fastest)}."
    (chosen, excess), limit = cheapest(within, metric), f"Within {' and '.join(budget)}, choose" if budget else "Choose"
    if excess is None:
        return f"{limit} {describe(chosen)}, the best on dev."
    return (
        f"{limit} {describe(chosen)}; the best on dev, {describe(within[0])}, is not shown to be better "
        f"(paired difference {excess.interval}, 95 % over documents of test)."
    )


def frontier_table(points: list[Point], metric: str) -> Table:
    """Return the table of all points, the best on dev first, with the Pareto fronts they are on."""
    fronts = {name: pareto_front(points, cost) for cost, name in (("seconds", "speed"), ("gb", "size"))}
    header = ["memories", "index", "K", "keys", f"dev {metric}", f"test {metric}", "elapsed ms/token", "GB"]
    lines = []
    for point in points:
        searched = [point.external.index, str(point.external.k), point.external.precision] if point.external else ["", "", ""]
        values = [decimals(point.dev), decimals(point.test), f"{1e3 * point.seconds:.2f}", f"{point.gb:.3g}"]
        on = ", ".join(name for name, front in fronts.items() if point in front)
        lines.append([point.names, *searched, *values, on])
    return Table([*header, "on the Pareto front of"], lines)


def front_panel(
    axis: Any, points: list[Point], cost_axis: tuple[str, float, str, str], metric: str, chosen: Point | None
) -> None:
    """Draw the points, by whether they have a datastore; those on the Pareto front are ringed and named.

    Points far worse than the best are left out, and counted, so that the others can be told apart.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    cost, factor, cost_label, scale = cost_axis
    for colour, has_external, label in ((GREY, False, "without external memory"), (ORANGE, True, "with external memory")):
        shown = [point for point in points if bool(point.external) is has_external]
        costs = [factor * getattr(point, cost) for point in shown]
        axis.plot(costs, [point.test for point in shown], "o", ms=4, alpha=0.7, color=colour, label=label)
    front, named = pareto_front(points, cost), set()
    costs = [factor * getattr(point, cost) for point in front]
    axis.plot(costs, [point.test for point in front], "o", ms=9, mfc="none", color=BLUE, label="Pareto front (on dev)")
    for point, position in zip(front, costs, strict=True):
        if point.memories not in named:
            axis.annotate(point.names, (position, point.test), (6, 6), textcoords="offset points", fontsize=7)
            named.add(point.memories)
    if chosen:
        place = factor * getattr(chosen, cost), chosen.test
        axis.plot(*[[end] for end in place], "*", ms=13, color=GREEN, label="the cheapest as good as the best")
    axis.set(xlabel=cost_label, ylabel=f"test {metric}", xscale=scale, yscale=SCALES[metric])
    best = min(point.test for point in points)
    above = sum(point.test > ZOOM * best for point in points)
    if 0 < above < len(points):
        axis.set_ylim(0.97 * best, ZOOM * best)
        axis.text(0.98, 0.98, f"{above} worse points lie above", ha="right", va="top", transform=axis.transAxes, fontsize=7)
    for ticks in (ticks for ticks in (axis.xaxis, axis.yaxis) if ticks.get_scale() == "log"):
        ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ticks.set_minor_formatter(NullFormatter())
    axis.legend(frameon=False, fontsize=8)


def report_frontier(runs: list[ScoredRun], budget: DictConfig, folder: Path, command: str | None = None) -> None:
    """Write tables, pictures and a page, a part for each trained model; print the points on Pareto fronts and the advice."""
    sections: list[Section] = []
    texts: list[str] = []
    csvs: list[str] = []
    models = group_by_model(runs)
    for title, model_runs in models.items():
        points, metric = frontier_points(model_runs), model_runs[0].row.metric_name
        table = frontier_table(points, metric)
        sentence = advice(points, budget.seconds_per_token, budget.gb, metric)
        within = within_budget(points, budget.seconds_per_token, budget.gb)
        chosen = cheapest(within, metric)[0] if within else None
        draw = partial(front_panel, points=points, metric=metric, chosen=chosen)
        panels: list[Panel] = [partial(draw, cost_axis=axis) for axis in AXES]
        texts.append(f"{title}:\n\n{markdown(*table)}\n{sentence}\n")
        on_front = Table(table.header, [line for line in table.lines if line[-1]])
        lines = fitted(on_front, ("memories", "K", f"test {metric}", "elapsed ms/token", "GB"))
        print(ending(sentence, lines, [f"These are the Pareto fronts of {len(points)} points of {title}."], ""))
        name = "frontier" if len(models) == 1 else f"frontier-{len(texts)}"
        csvs.append(f"{name}.csv")
        write_atomically(folder / csvs[-1], to_csv(*table))
        save_panels(panels, folder / f"{name}.png", title)
        sections += [Section(title, f"{sentence} {NOTE}", [table]), *picture_sections(f"Pictures of {title}", panels)]
    write_atomically(folder / "frontier.md", "\n".join(texts))
    page = Page(folder.name, [f"{len(runs)} runs"], [*sections, commands_section(runs, command)], csvs)
    print(place_of(write_page(page, folder / "frontier.html")))


def group_by_model(runs: list[ScoredRun]) -> dict[str, list[ScoredRun]]:
    """Group runs that differ only in the settings of their memories, by a title that describes the model."""
    groups: dict[str, list[ScoredRun]] = {}
    for run in runs:
        size, mixture = run.row.memory_size, run.subsets.mixture if run.subsets else "no"
        facts = [
            f"{run.name}, seed {run.seed}, {mixture} mixture, on {run.title} ({run.row.tokens:,} tokens)",
            *([f"{run.parameters:,} parameters"] if run.parameters else []),
            *([f"{run.train.updates:,} updates"] if run.train.updates else []),
            *([f"{run.datastore.entries:,} datastore entries"] if run.datastore else []),
            *([f"memory size {size_text(size)} ({run.row.eviction})"] if size else []),
        ]
        groups.setdefault(", ".join(facts), []).append(run)
    return groups
