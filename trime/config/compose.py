"""Compose configurations as the command line does; importing this registers what conf/config.yaml refers to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from trime.config.fields import defaults
from trime.config.folder import CONF
from trime.config.rows import all_rows
from trime.config.schema import Settings


def last_memory(rows: Any) -> str:
    """Return the last memory in the softmax of the last row of results, as part of a name; ``cache`` if it joins none."""
    joined = rows[-1]["joint"]
    return joined[-1] if joined else "cache" if rows[-1].get("interpolate") else "none"


RESOLVERS: dict[str, Callable[..., object]] = {  # as ${quotient:4096,512} and ${kind:package.module.Shuffled} in a yaml
    "quotient": lambda a, b: int(a) // int(b),
    "local": lambda place: str(Path(place).expanduser()),
    "kind": lambda target: target.rpartition(".")[2].lower(),
    "words": lambda values: "_".join(map(str, values)) or "none",  # [0.0, 0.8] as 0.0_0.8
    "last_memory": last_memory,
}
for name, resolver in RESOLVERS.items():
    OmegaConf.register_new_resolver(name, resolver, replace=True)
ConfigStore.instance().store("schema", defaults(Settings))
for row in all_rows():
    group, _, choice = f"experiment/{row.experiment}".rpartition("/")
    ConfigStore.instance().store(choice, row.settings, group, package="_global_")


def compose_config(*overrides: str) -> DictConfig:
    """Return the configuration that ``cli.py`` would run with these overrides."""
    if GlobalHydra.instance().is_initialized():
        return compose("config", [*overrides])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [*overrides])
