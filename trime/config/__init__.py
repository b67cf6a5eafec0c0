"""The configuration: what every setting is, its default, its help and what it may be; no heavy package is imported here."""

from hydra.core.config_store import ConfigStore

from trime.config.schema import Settings


def register() -> None:
    """Let Hydra find the schema, which conf/config.yaml names first."""
    ConfigStore.instance().store("schema", Settings)
