"""Compose configurations the way the command line does."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from trime.config.folder import CONF


def compose_config(*overrides: str) -> DictConfig:
    """Return the configuration that ``cli.py`` would run with these overrides."""
    if GlobalHydra.instance().is_initialized():
        return compose("config", [*overrides])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [*overrides])
