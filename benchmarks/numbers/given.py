"""The functions of expressions in notes that read settings, constants of benchmarks, and published results of conf/."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import OmegaConf

from benchmarks.numbers.kept import SourceFiles
from trime.config.fields import defaults
from trime.config.schema import Settings
from trime.inspection.ledger import expected_cells, reproductions


class GivenValues:
    """Values that were set or published, not measured."""

    def __init__(self, files: SourceFiles):
        self.files = files

    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Return the functions."""
        return self.published, self.expected, self.setting, self.default, self.constant

    def published(self, title: str, name: str, split: str = "test") -> float:
        """Return the published result of a run; ``title`` is that of the set or its beginning."""
        results = [rows[name] for whole, rows in self.files.published().items() if whole.startswith(title) and name in rows]
        if len(results) != 1:
            raise LookupError(f"{len(results)} sets of published results begin with {title} and have {name}")
        return results[0][0 if split == "dev" else -1]

    def expected(self, experiment: str, column: str = "test") -> float:
        """Return the published result that an experiment of conf/experiment/reproduce reproduces, as table2/trime."""
        cells = expected_cells(reproductions()[f"reproduce/{experiment}"])
        (value,) = [cell["value"] for cell in cells if cell["column"] == column]
        return float(value)

    def setting(self, file: str, *keys: str | int) -> Any:
        """Return the value under some keys of a file of conf/."""
        part = self.files.yaml(self.files.conf / file)
        for key in keys:
            part = part[key]
        return part

    def default(self, key: str) -> Any:
        """Return the default of a setting, by its dotted key."""
        return OmegaConf.select(OmegaConf.create(defaults(Settings)), key)

    def constant(self, benchmark: str, name: str) -> Any:
        """Return a constant of a benchmark's module, without importing it."""
        source = (self.files.root / "benchmarks" / f"{benchmark}.py").read_text(encoding="utf-8")
        return ast.literal_eval(dict(assignments(ast.parse(source)))[name])


def assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a module assigns, each with its expression."""
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                yield from ((name.id, value) for name, value in zip(names, values, strict=True) if isinstance(name, ast.Name))
