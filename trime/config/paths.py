"""The settings that are paths, and the folders that relative ones start from."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from trime.common.urls import is_url


def make_absolute(config: DictConfig, folder: Path) -> None:
    """Let the relative paths of a configuration, but ``paths.outputs``, begin at a folder; URLs stay."""
    stores = [config.datastore, *(node.datastore for node in config.test_memories.values() if node.get("datastore"))]
    paths = [(config.paths, "data"), (config, "checkpoint"), (config, "dictionary"), *((store, "path") for store in stores)]
    datasets = [config.dataset, config.evaluate.get("dataset"), *(store.get("dataset") for store in stores)]
    for part, name in [*paths, (config.mixture, "path"), *((dataset, "path") for dataset in datasets if dataset)]:
        if isinstance(given := part.get(name), str) and not is_url(given):
            part[name] = str(folder / Path(given).expanduser())
