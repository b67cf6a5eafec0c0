"""The files of a repository from which numbers come, and comparisons of runs; each is read or computed once."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trime.report import bootstrap
from trime.report.bootstrap import Difference
from trime.report.comparison_table import PublishedResults, order_table
from trime.report.groups import Group, fitted_part, group_runs, has_paper_and_fitted_rows, paper_part, split_by_mixture

VERDICTS = ("agrees", "no difference shown", "disagrees")


class SourceFiles:
    """Results and configuration files below ``root``, read when they are first used."""

    def __init__(self, root: Path):
        self.root, self.results, self.conf = root, root / "benchmarks" / "results", root / "conf"
        self.json, self.yaml = cache(read_json), cache(read_yaml)
        self.difference, self.verdicts, self.published = cache(self._difference), cache(self._verdicts), cache(self._published)

    def run(self, path: Path, mixture: str = "") -> Any:
        """Return a run with the papers' rows, or that of a fitted mixture if one is named."""
        run = self.json(path)
        if not mixture:
            return paper_part(run) if "questions" not in run and has_paper_and_fitted_rows(run) else run
        if run["metrics"]["test"][-1]["mixture"] != mixture:
            raise LookupError(f"{path.name} has no {mixture} row")
        return fitted_part(run)

    def _difference(self, one: tuple[Path, ...], other: tuple[Path, ...], kind: str, mixtures: tuple[str, str]) -> Difference:
        """Compare two groups of runs by perplexity (or bits), or by BLEU; LookupError without statistics of BLEU."""
        compare = bootstrap.bleu_difference if kind == "BLEU" else bootstrap.difference
        pairs = zip((one, other), mixtures, strict=True)
        result = compare(*(Group([self.run(path, mixture) for path in paths]) for paths, mixture in pairs))
        if result is None:
            raise LookupError(f"no statistics of BLEU are kept in {one[0].parent}")
        return result

    def _verdicts(self, folder: Path, title: str) -> tuple[int, ...]:
        """Count the pairs of a folder's runs in published sets whose titles begin with ``title``; all, and by verdict."""
        groups = group_runs(split_by_mixture([self.json(path) for path in sorted(folder.glob("*.json"))]))
        sets = {name: results for name, results in self.published().items() if name.startswith(title)}
        verdicts = Counter(line[-1] for line in order_table(groups, sets)[1])
        return verdicts.total(), *(verdicts[verdict] for verdict in VERDICTS)

    def _published(self) -> PublishedResults:
        """Return every set of published results in the configuration: dev and test, or test alone, by the run's name."""
        sets = [self.yaml(file) for file in sorted(self.conf.glob("published.yaml"))]
        return {title: results for part in sets for title, results in part.items()}


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))
