"""A stage: a step of a run that ``stages=`` names. To add one, declare it in a new file in ``trime/stages``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, NamedTuple

from omegaconf import DictConfig

from trime.config.schema import STAGES
from trime.errors import UserError
from trime.lab.artefact import Artefact


class RunOutcome(NamedTuple):
    """Dev loss of the experiment's own row in nats, which sweeps minimise, and the folders of the reported runs.

    ``made``: whether anything was made; else the run was complete already.
    """

    loss: float | None = None
    folders: tuple[Path, ...] = ()
    made: bool = False

    def then(self, later: RunOutcome) -> RunOutcome:
        """Return this outcome followed by a later one."""
        loss = self.loss if later.loss is None else later.loss
        return RunOutcome(loss, (*self.folders, *later.folders), self.made or later.made)


@dataclass(frozen=True)
class Stage:
    """A step of a run, by the ``name`` that ``stages=`` gives it.

    ``makes`` takes the graph of an experiment and returns the artefacts to build, in order; None among them is skipped.
    ``check`` is called with the graph before they are built, ``report`` afterwards; a RunOutcome that ``report`` returns is
    added to that of the run. A ``standalone`` stage takes the configuration instead: it is about finished runs.
    ``has_log``: the run also writes its messages into a file. ``kept_by_prune``: the run needs what the stage makes.
    """

    name: str
    makes: Callable[[Any], Sequence[Artefact | None]] = lambda graph: ()
    check: Callable[[Any], object] = lambda graph: None
    report: Callable[[Any], object] = lambda graph: None
    standalone: Callable[[DictConfig], object] | None = None
    has_log: bool = False
    kept_by_prune: bool = True

    def artefacts(self, graph: Any) -> list[Artefact]:
        """Return the artefacts that this stage makes for an experiment, in order."""
        return [*dict.fromkeys(artefact for artefact in self.makes(graph) if artefact is not None)]


@cache
def known_stages() -> dict[str, Stage]:
    """Return all stages by name: those that the modules of ``trime.stages`` and ``trime.lab.storage`` declare.

    Stages that run by default come first, in their order.
    """
    package = import_module("trime.stages")  # by name, for stages import from here
    names = [module.name for module in walk_packages(package.__path__, "trime.stages.")]
    modules = [vars(import_module(name)) for name in (*names, "trime.lab.storage")]
    found = {each.name: each for values in modules for each in values.values() if isinstance(each, Stage)}
    return {name: found.pop(name) for name in STAGES} | found


def requested_stages(config: DictConfig) -> list[Stage]:
    """Return the configured stages: first those that run by default, in their order, then the others as they are listed.

    A trial of a search does not score test: it neither evaluates nor reports. UserError if there is no such stage.
    """
    known = known_stages()
    if unknown := [name for name in config.stages if name not in known]:
        raise UserError(f"there is no stage {unknown[0]}: choose stages from {', '.join(known)}")
    left_out = ("evaluate", "report") if config.search else ()
    names = [*(name for name in STAGES if name in config.stages), *(name for name in config.stages if name not in STAGES)]
    return [known[name] for name in dict.fromkeys(names) if name not in left_out]
