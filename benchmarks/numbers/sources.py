"""The functions of expressions in notes that read kept results of runs and benchmarks.

Names of runs are those of files under a note's folder: ``vanilla`` is ``vanilla.json``, ``vanilla/results.json`` or
``vanilla-seed*.json``; several seeds are one group, of which numbers are the mean, as in the project's reports.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.numbers.given import GivenValues
from benchmarks.numbers.kept import SourceFiles
from trime.metrics import mean_over_seeds, perplexity
from trime.report.bootstrap import Difference
from trime.report.frontier import External, frontier_points
from trime.report.run_result import Row, run_from_json, scored_runs
from trime.report.tables import memory_contribution


class Sources:
    """The functions that expressions may call; ``base`` is the folder under benchmarks/results that the note names."""

    def __init__(self, files: SourceFiles, base: str):
        self.files, self.folder = files, files.results / base

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by the name that expressions use."""
        of_runs = (self.dev, self.test, self.value, self.tuned, self.at_size, self.bleu, self.difference, self.bleu_difference)
        of_mixtures = (self.without, self.adds, self.point)
        of_folders = (self.agreement, self.answers, self.exact_match, self.retained, self.cores, self.without_commit)
        of_benchmarks = (self.entry, self.column, self.claim, self.bound)
        others: tuple[Any, ...] = (*GivenValues(self.files).functions(), max, min, round, shown)
        return {function.__name__: function for function in (*of_runs, *of_mixtures, *of_folders, *of_benchmarks, *others)}

    def paths(self, name: str) -> tuple[Path, ...]:
        """Return the files of a run, one for each seed; LookupError if there is none, or a seed occurs twice."""
        name = name.partition(", ")[0]
        for pattern in (name, f"{name}.json", f"{name}/results.json", f"{name}-seed*.json"):
            paths = tuple(sorted(path for path in self.folder.glob(pattern) if path.is_file()))
            if paths:
                seeds = [self.files.json(path)["seed"] for path in paths]
                if len(set(seeds)) < len(seeds):
                    raise LookupError(f"{name} matches several runs of one seed: {', '.join(path.name for path in paths)}")
                return paths
        raise LookupError(f"there is no {name} in {self.folder.relative_to(self.files.root)}")

    def runs(self, name: str) -> list[dict[str, Any]]:
        """Return the results of a run for each seed; ``NAME, adaptive`` are those of that mixture."""
        return [self.files.run(path, name.partition(", ")[2]).to_json() for path in self.paths(name)]

    def dev(self, name: str, row: int = -1) -> float:
        """Return a row's perplexity (or bits) on valid, the mean over seeds."""
        return self.result(name, "valid", row)

    def test(self, name: str, row: int = -1) -> float:
        """Return a row's perplexity (or bits) on test, the mean over seeds."""
        return self.result(name, "test", row)

    def result(self, name: str, split: str, row: int) -> float:
        """Return a row's perplexity (or bits) on a split, the mean over seeds."""
        rows = [Row(**run["metrics"][split][row]) for run in self.runs(name)]
        return mean_over_seeds([row.value for row in rows], rows[0].metric_name)

    def value(self, name: str, *keys: str | int, seed: int | None = None) -> Any:
        """Return the value under some keys: the mean of a number over seeds, or a text that all seeds share."""
        values = []
        for run in self.runs(name):
            part: Any = run
            for key in keys:
                part = part[key]
            values += [part] if seed in (None, run["seed"]) else []
        return values[0] if isinstance(values[0], str) and len({*values}) == 1 else mean(values)

    def tuned(self, name: str, row: int = -1) -> list[float]:
        """Return the tuned settings of a row, in their order in the results; the run must have a single seed."""
        (run,) = self.runs(name)
        return list(run["metrics"]["test"][row]["tuned"].values())

    def at_size(self, name: str, size: int, split: str = "test") -> float:
        """Return the perplexity at a size of the long memory, the mean over seeds."""
        return perplexity(mean(run["analysis"][split]["by_memory_size"][str(size)] for run in self.runs(name)))

    def bleu(self, name: str, split: str = "test", row: int = -1) -> float:
        """Return the mean BLEU over seeds."""
        return mean(run["metrics"][split][row]["bleu"] for run in self.runs(name))

    def difference(self, name: str, other: str) -> Difference:
        """Return the first run's perplexity (or bits) less the other's, with the interval of the project's reports."""
        return self.files.difference(self.paths(name), self.paths(other), "loss", mixtures_of(name, other))

    def bleu_difference(self, name: str, other: str) -> Difference:
        """Return the first run's BLEU less the other's, with the interval of the project's reports."""
        return self.files.difference(self.paths(name), self.paths(other), "BLEU", mixtures_of(name, other))

    def without(self, name: str, memory: str) -> float:
        """Return the perplexity (or bits) on test of a run's fitted mixture without a memory, the mean over seeds."""
        return memory_contribution(scored_runs(run_from_json(self.files.json(path)) for path in self.paths(name)), memory)[0]

    def adds(self, name: str, memory: str) -> Difference:
        """Return the change by adding a memory to a run's fitted mixture of the others, with the interval of reports."""
        return memory_contribution(scored_runs(run_from_json(self.files.json(path)) for path in self.paths(name)), memory)[1]

    def point(self, memories: str, index: str = "", k: int = 0, precision: str = "") -> tuple[float, float, float, float]:
        """Return dev, test, tokens per second and GB of a frontier's point, whose memories are named ``one + another``."""
        points = frontier_points(
            scored_runs(run_from_json(self.files.json(path)) for path in sorted(self.folder.glob("*.json")))
        )
        external = External(index, k, precision) if index else None
        for point in points:
            if point.names == memories and point.external == external:
                return point.dev, point.test, 1 / point.seconds, point.gb
        raise LookupError(f"there is no point {memories} ({external})")

    def agreement(self, title: str, folder: str = "") -> tuple[int, ...]:
        """Count the pairs of a folder's runs in a published set: all, those that agree, show no difference, disagree."""
        return self.files.verdicts(self.folder / folder, title)

    def answers(self, name: str, eviction: str, **conditions: Any) -> dict[str, Any]:
        """Return the row of the only answering run whose folder begins with a name and that has some settings.

        By default that is on test with untruncated inputs.
        """
        rows = []
        for path in sorted(self.folder.glob(f"{name}-*/results.json")):
            run = self.files.json(path)
            ((split, (row,)),) = run["metrics"].items()
            rows.append({"split": split, "words": run["questions"]["words"]} | row)
        return only(rows, {"split": "test", "max_prompt_tokens": None, "eviction": eviction} | conditions, name)

    def exact_match(self, name: str, eviction: str, **conditions: Any) -> float:
        """Return an answering run's exact match in per cent."""
        return 100 * self.answers(name, eviction, **conditions)["exact_match"]

    def retained(self, file: str, policy: str, size: int) -> float:
        """Return the share of attention mass that a policy retains in a replay of one memory."""
        (memory,) = self.files.json(self.folder / file)["memories"]
        return only(memory["rows"], {"policy": policy, "size": size}, file)["retained"]

    def entry(self, file: str, *keys: str, **conditions: Any) -> Any:
        """Return values of the only row of a benchmark that matches ``conditions``; the row itself without keys."""
        row = only(self.files.json(self.folder / file)["rows"], conditions, file)
        values = [row[key] for key in keys]
        return row if not keys else values[0] if len(keys) == 1 else values

    def column(self, file: str, key: str, **conditions: Any) -> list[Any]:
        """Return the values under a key of all rows of a benchmark that match ``conditions``."""
        return [row[key] for row in self.files.json(self.folder / file)["rows"] if has(row, conditions)]

    def claim(self, file: str, claim: str) -> float:
        """Return the value of a benchmark's claim."""
        return only(self.files.json(self.folder / file)["claims"], {"claim": claim}, file)["value"]

    def bound(self, file: str, claim: str) -> float:
        """Return the bound of a benchmark's claim."""
        return only(self.files.json(self.folder / file)["claims"], {"claim": claim}, file)["bound"]

    def without_commit(self) -> int:
        """Count the results in the folder that do not name the commit of their code."""
        return sum(not self.files.json(path)["commit"] for path in self.folder.rglob("*.json"))

    def cores(self, files: str, cpu: str) -> int:
        """Return the number of cores of the machine that made some results; LookupError if its CPU has another name."""
        machines = [self.files.json(path)["hardware"] for path in sorted(self.folder.glob(files)) if path.suffix == ".json"]
        if {machine["cpu"] for machine in machines} != {cpu}:
            raise LookupError(f"{files} name {', '.join(sorted({machine['cpu'] for machine in machines})) or 'no machine'}")
        (cores,) = {machine["cores"] for machine in machines}
        return cores


def shown(difference: Difference) -> bool:
    """Return True if a difference is significant at 95 %."""
    return difference.significant


def has(row: dict[str, Any], conditions: dict[str, Any]) -> bool:
    """Return True if a row has some values; texts may contain wildcards."""
    return all(
        fnmatchcase(row.get(key) or "", value) if isinstance(value, str) else row.get(key) == value
        for key, value in conditions.items()
    )


def only(rows: list[dict[str, Any]], conditions: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the only row that has some values; LookupError if there is none or several."""
    rows = [row for row in rows if has(row, conditions)]
    if len(rows) != 1:
        raise LookupError(
            f"{len(rows)} rows of {where} have {', '.join(f'{key} {value}' for key, value in conditions.items())}"
        )
    return rows[0]


def mixtures_of(*names: str) -> tuple[str, ...]:
    """Return the fitted mixture that follows each name after a comma, or an empty string."""
    return tuple(name.partition(", ")[2] for name in names)
