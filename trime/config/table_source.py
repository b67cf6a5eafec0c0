"""How Hydra finds the rows of published tables: as the choices of groups experiment/reproduce/TABLE."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from trime.config.folder import CONF
from trime.config.reproduce import PREFIX, PublishedRow, read_table, tables

GROUP = f"experiment/{PREFIX}"


class TableSource(ConfigSource):
    """A source of configurations beside the files of conf/; a table is read when it is first asked for."""

    @staticmethod
    def scheme() -> str:
        """Return the beginning of the source's address."""
        return "tables"

    def available(self) -> bool:
        """Return True if the folder of tables exists."""
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        """Return True for the group of all tables and for each table."""
        group = config_path.rstrip("/")
        return group == GROUP or self.file_of(group) is not None

    def is_config(self, config_path: str) -> bool:
        """Return True for each row of a table."""
        return self.find_row(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of all tables, or of the rows of one."""
        group = config_path.rstrip("/")
        if group == GROUP:
            return [] if results_filter == ObjectType.CONFIG else list(tables(Path(self.path)))
        file = self.file_of(group)
        return [] if file is None or results_filter == ObjectType.GROUP else list(read_table(file))

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a row as the content of an experiment's file."""
        row = self.find_row(config_path)
        if row is None:
            raise ConfigLoadError(f"there is no {config_path} in {self.path}")
        content = OmegaConf.create(row.config())
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", content, {"package": "_global_"})

    def file_of(self, group: str) -> Path | None:
        """Return the file of a table's group, None if there is no such table."""
        parent, _, table = group.rpartition("/")
        return tables(Path(self.path)).get(table) if parent == GROUP else None

    def find_row(self, config_path: str) -> PublishedRow | None:
        """Return the row of an experiment's path, None if there is no such row."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        file = self.file_of(group)
        return None if file is None else read_table(file).get(name)


class TableSearchPath(SearchPathPlugin):
    """Add the tables to what Hydra searches."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder of tables."""
        search_path.append("trime", f"{TableSource.scheme()}://{CONF / PREFIX}")
