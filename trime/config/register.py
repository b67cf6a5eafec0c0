"""Registers with Hydra, when it is imported, the schema's defaults, which conf/config.yaml names first, and the resolvers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from trime.config.fields import defaults
from trime.config.schema import Settings


def local_folder(place: str) -> str:
    """Return a path with the home folder in place of ~."""
    return str(Path(place).expanduser())


def words_of(values: Any) -> str:
    """Return a list as part of a name: ``[0.0, 0.8]`` as 0.0_0.8."""
    return "_".join(map(str, values)) or "none"


def last_memory(rows: Any) -> str:
    """Return the last memory in the softmax of the last row of results, as part of a name; ``cache`` where it interpolates."""
    return "cache" if rows[-1].get("interpolate") else (*rows[-1]["joint"], "none")[len(rows[-1]["joint"]) - 1]


RESOLVERS: dict[str, Callable[..., object]] = {  # as ${quotient:4096,512} and ${kind:package.module.Shuffled} in a yaml
    "quotient": lambda a, b: int(a) // int(b),
    "local": local_folder,
    "kind": lambda target: target.rpartition(".")[2].lower(),
    "words": words_of,
    "last_memory": last_memory,
}
for name, resolver in RESOLVERS.items():
    OmegaConf.register_new_resolver(name, resolver, replace=True)
ConfigStore.instance().store("schema", defaults(Settings))
