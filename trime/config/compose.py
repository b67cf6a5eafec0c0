"""Compose configurations the way the command line does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

import trime.config.register  # noqa: F401  what conf/config.yaml refers to
from trime.config.folder import CONF


@contextmanager
def command_of(*overrides: str) -> Iterator[DictConfig]:
    """Yield the configuration of a command; a run that the block makes of it records that command as its own."""
    config, before = compose_config(*overrides, with_hydra=True), HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    try:
        yield config
    finally:
        HydraConfig.instance().cfg = before


def compose_config(*overrides: str, with_hydra: bool = False) -> DictConfig:
    """Return the configuration that ``cli.py`` would run with these overrides, if asked ``with_hydra``'s own settings."""
    if GlobalHydra.instance().is_initialized():
        return compose("config", [*overrides], return_hydra_config=with_hydra)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [*overrides], return_hydra_config=with_hydra)
