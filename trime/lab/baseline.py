"""The baseline of a run: another experiment with the same text, budget and seed."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from trime.config.compose import compose_config
from trime.errors import UserError

OWN = ("experiment", "name", "table", "report.baseline")  # settings of the run that the baseline does not share
OWN_SECTIONS = ("memory", "neighbours", "evaluate.rows", "evaluate.memories")


def baseline_overrides(config: DictConfig) -> list[str]:
    """Return the command of ``report.baseline`` with this command's other settings; empty if the run is that baseline.

    Raises UserError if the baseline does not understand them.
    """
    name = config.report.baseline
    if name == config.name:
        return []
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    overrides = [f"experiment={name}", *(word for word in words if not is_own(word.lstrip("+~").partition("=")[0], config))]
    try:
        compose_config(*overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"report.baseline={name} does not fit this command ({' '.join(str(error).split())})") from error
    return overrides


def is_own(key: str, config: DictConfig) -> bool:
    """Return True for a setting that the baseline does not take over; a section named as a memory at test is that memory's."""
    key = key.partition("@")[0]
    sections = (*OWN_SECTIONS, *config.test_memories)
    return key in OWN or any(key == section or key.startswith(f"{section}.") for section in sections)
