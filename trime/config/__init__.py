"""The configuration: what every setting is, its default, its help and what it may be; no heavy package is imported here."""

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from trime.config.schema import Settings
from trime.config.table_source import TableSearchPath, TableSource


def register() -> None:
    """Let Hydra find the schema, which conf/config.yaml names first, and the rows of published tables."""
    schema = OmegaConf.structured(Settings)
    OmegaConf.set_struct(schema.trainer, False)  # any argument of Lightning's trainer; check_trainer judges them
    ConfigStore.instance().store("schema", schema)
    for plugin in (TableSource, TableSearchPath):
        Plugins.instance().register(plugin)
