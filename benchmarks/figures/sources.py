"""What expressions of notes may name: the kept results of runs and of benchmarks.

Names of runs are those of files under a note's folder: ``vanilla`` is ``vanilla.json``, ``vanilla/results.json`` or
``vanilla-seed*.json``; several seeds are one group, of which figures are the mean, as in the project's reports.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.figures.given import Given
from benchmarks.figures.kept import Kept
from trime.metrics import perplexity
from trime.report.differences import Difference
from trime.report.frontier import External, frontier_points
from trime.report.memories import memory_contribution
from trime.report.tables import metric_value


class Sources:
    """The functions that expressions may call; ``base`` is the folder under benchmarks/results that the note names."""

    def __init__(self, kept: Kept, base: str):
        self.kept, self.folder = kept, kept.results / base

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by the name that expressions use."""
        of_runs = (self.dev, self.test, self.value, self.tuned, self.at_size, self.bleu, self.difference, self.bleu_difference)
        of_mixtures = (self.without, self.adds, self.point)
        of_folders = (self.agreement, self.answers, self.exact_match, self.retained, self.cores, self.without_commit)
        of_benchmarks = (self.entry, self.column, self.claim, self.bound)
        others: tuple[Any, ...] = (*Given(self.kept).functions(), max, min, round, shown)
        return {function.__name__: function for function in (*of_runs, *of_mixtures, *of_folders, *of_benchmarks, *others)}

    def paths(self, name: str) -> tuple[Path, ...]:
        """Return the files of a run, one for each seed; LookupError where there is none, or one seed is there twice."""
        name = name.partition(", ")[0]
        for pattern in (name, f"{name}.json", f"{name}/results.json", f"{name}-seed*.json"):
            paths = tuple(sorted(path for path in self.folder.glob(pattern) if path.is_file()))
            if paths:
                seeds = [self.kept.json(path)["seed"] for path in paths]
                if len(set(seeds)) < len(seeds):
                    raise LookupError(f"{name} names several runs of one seed: {', '.join(path.name for path in paths)}")
                return paths
        raise LookupError(f"there is no {name} in {self.folder.relative_to(self.kept.root)}")

    def runs(self, name: str) -> list[dict[str, Any]]:
        """Return the results of a run, one for each seed; of ``NAME, adaptive`` as that mixture makes them."""
        return [self.kept.run(path, name.partition(", ")[2]) for path in self.paths(name)]

    def dev(self, name: str, row: int = -1) -> float:
        """Return a row's perplexity (or bits) on valid, the mean over seeds."""
        return mean(metric_value(run["metrics"]["valid"][row]) for run in self.runs(name))

    def test(self, name: str, row: int = -1) -> float:
        """Return a row's perplexity (or bits) on test, the mean over seeds."""
        return mean(metric_value(run["metrics"]["test"][row]) for run in self.runs(name))

    def value(self, name: str, *keys: str | int, seed: int | None = None) -> Any:
        """Return what stands under some keys: a number's mean over seeds, or a text that all have."""
        values = []
        for run in self.runs(name):
            part: Any = run
            for key in keys:
                part = part[key]
            values += [part] if seed in (None, run["seed"]) else []
        return values[0] if isinstance(values[0], str) and len({*values}) == 1 else mean(values)

    def tuned(self, name: str, row: int = -1) -> list[float]:
        """Return what was tuned for a row, in the order of the kept results; of one seed."""
        (run,) = self.runs(name)
        return list(run["metrics"]["test"][row]["tuned"].values())

    def at_size(self, name: str, size: int, split: str = "test") -> float:
        """Return the perplexity at a size of the long memory, the mean over seeds."""
        return mean(perplexity(run["analysis"][split]["by_memory_size"][str(size)]) for run in self.runs(name))

    def bleu(self, name: str, split: str = "test", row: int = -1) -> float:
        """Return the mean BLEU over seeds."""
        return mean(run["metrics"][split][row]["bleu"] for run in self.runs(name))

    def difference(self, name: str, other: str) -> Difference:
        """Return the first run's perplexity (or bits) less the other's, with the interval of the project's reports."""
        return self.kept.difference(self.paths(name), self.paths(other), "loss", mixtures_of(name, other))

    def bleu_difference(self, name: str, other: str) -> Difference:
        """Return the first run's BLEU less the other's, with the interval of the project's reports."""
        return self.kept.difference(self.paths(name), self.paths(other), "BLEU", mixtures_of(name, other))

    def without(self, name: str, memory: str) -> float:
        """Return the perplexity (or bits) on test of a run's fitted mixture without a memory, the mean over seeds."""
        return memory_contribution([self.kept.json(path) for path in self.paths(name)], memory)[0]

    def adds(self, name: str, memory: str) -> Difference:
        """Return what a memory adds to a run's fitted mixture of the others, with the interval of the project's reports."""
        return memory_contribution([self.kept.json(path) for path in self.paths(name)], memory)[1]

    def point(self, memories: str, index: str = "", k: int = 0, precision: str = "") -> tuple[float, float, float, float]:
        """Return dev, test, tokens a second and GB of a frontier's point, whose memories are named ``one + another``."""
        points = frontier_points([self.kept.json(path) for path in sorted(self.folder.glob("*.json"))])
        external = External(index, k, precision) if index else None
        for one in points:
            if one.names == memories and one.external == external:
                return one.dev, one.test, 1 / one.seconds, one.gb
        raise LookupError(f"there is no point {memories} ({external})")

    def agreement(self, title: str, folder: str = "") -> tuple[int, ...]:
        """Count the pairs of a folder's runs in a published set, those in its order, that show no difference, the others."""
        return self.kept.verdicts(self.folder / folder, title)

    def answers(self, name: str, eviction: str, **wanted: Any) -> dict[str, Any]:
        """Return the figures of the one answering run whose file begins with a name and that has the wanted settings.

        They are of test, of all tokens, unless wanted otherwise.
        """
        rows = []
        for path in sorted(self.folder.glob(f"{name}-*/results.json")):
            run = self.kept.json(path)
            ((split, (row,)),) = run["metrics"].items()
            rows.append({"split": split, "words": run["questions"]["words"]} | row)
        return only(rows, {"split": "test", "last": None, "eviction": eviction} | wanted, name)

    def exact_match(self, name: str, eviction: str, **wanted: Any) -> float:
        """Return an answering run's exact match in per cent."""
        return 100 * self.answers(name, eviction, **wanted)["exact_match"]

    def retained(self, file: str, policy: str, size: int) -> float:
        """Return the share of attention mass that a policy retains in a replay of one memory."""
        (memory,) = self.kept.json(self.folder / file)["memories"]
        return only(memory["rows"], {"policy": policy, "size": size}, file)["retained"]

    def entry(self, file: str, *keys: str, **wanted: Any) -> Any:
        """Return what the one row of a benchmark that has the wanted values has under some keys; without keys the row."""
        row = only(self.kept.json(self.folder / file)["rows"], wanted, file)
        values = [row[key] for key in keys]
        return row if not keys else values[0] if len(keys) == 1 else values

    def column(self, file: str, key: str, **wanted: Any) -> list[Any]:
        """Return what all rows of a benchmark that have the wanted values have under a key."""
        return [row[key] for row in self.kept.json(self.folder / file)["rows"] if has(row, wanted)]

    def claim(self, file: str, claim: str) -> float:
        """Return the value of a benchmark's claim."""
        return only(self.kept.json(self.folder / file)["claims"], {"claim": claim}, file)["value"]

    def bound(self, file: str, claim: str) -> float:
        """Return the bound of a benchmark's claim."""
        return only(self.kept.json(self.folder / file)["claims"], {"claim": claim}, file)["bound"]

    def without_commit(self) -> int:
        """Count the folder's results that do not name the commit of the code that made them."""
        return sum(not self.kept.json(path)["commit"] for path in self.folder.rglob("*.json"))

    def cores(self, files: str, cpu: str) -> int:
        """Return the number of cores of the machine that made some results; LookupError where its CPU has another name."""
        machines = [self.kept.json(path)["hardware"] for path in sorted(self.folder.glob(files)) if path.suffix == ".json"]
        if {machine["cpu"] for machine in machines} != {cpu}:
            raise LookupError(f"{files} name {', '.join(sorted({machine['cpu'] for machine in machines})) or 'no machine'}")
        (cores,) = {machine["cores"] for machine in machines}
        return cores


def shown(difference: Difference) -> bool:
    """Return whether a difference is shown at 95 %."""
    return difference.significant


def has(row: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return whether a row has the wanted values; a text may hold wildcards."""
    return all(
        fnmatchcase(row.get(key) or "", value) if isinstance(value, str) else row.get(key) == value
        for key, value in wanted.items()
    )


def only(rows: list[dict[str, Any]], wanted: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the one row that has the wanted values; LookupError where there is none or several."""
    rows = [row for row in rows if has(row, wanted)]
    if len(rows) != 1:
        raise LookupError(f"{len(rows)} rows of {where} have {', '.join(f'{key} {value}' for key, value in wanted.items())}")
    return rows[0]


def mixtures_of(*names: str) -> tuple[str, ...]:
    """Return the fitted mixture that each name asks for, or nothing."""
    return tuple(name.partition(", ")[2] for name in names)
