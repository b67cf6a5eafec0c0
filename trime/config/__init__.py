"""The configuration: what every setting is, its default, its help and what it may be; no heavy package is imported here."""

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from trime.config.schema import Settings
from trime.config.table_source import TableSearchPath, TableSource


def register() -> None:
    """Let Hydra find the schema, which conf/config.yaml names first, and the rows of published tables."""
    ConfigStore.instance().store("schema", Settings)
    for plugin in (TableSource, TableSearchPath):
        Plugins.instance().register(plugin)
