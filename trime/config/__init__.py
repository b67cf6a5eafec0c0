"""The configuration: what every setting is, its default, its help and what it may be; no heavy package is imported here."""

from collections.abc import Callable
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from trime.config.schema import Settings
from trime.config.table_source import TableSearchPath, TableSource


def register() -> None:
    """Let Hydra find the schema, which conf/config.yaml names first, the rows of published tables, and three resolvers."""
    resolvers: dict[str, Callable[..., object]] = {  # as ${quotient:4096,512} and ${kind:package.module.Shuffled} in a yaml
        "quotient": lambda a, b: int(a) // int(b),
        "local": local_folder,
        "kind": lambda target: target.rpartition(".")[2].lower(),
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    schema = OmegaConf.structured(Settings)
    OmegaConf.set_struct(schema.trainer, False)  # any argument of Lightning's trainer; check_trainer judges them
    ConfigStore.instance().store("schema", schema)
    for plugin in (TableSource, TableSearchPath):
        Plugins.instance().register(plugin)


def local_folder(place: str) -> str:
    """Return a path with the home folder in place of ~."""
    return str(Path(place).expanduser())


register()
