"""The configuration: what every setting is, its default, its help and what it may be; no heavy package is imported here."""

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from trime.config.schema import Settings


def register() -> None:
    """Let Hydra find the schema, which conf/config.yaml names first."""
    schema = OmegaConf.structured(Settings)
    OmegaConf.set_struct(schema.trainer, False)  # any argument of Lightning's trainer; check_trainer judges them
    ConfigStore.instance().store("schema", schema)
