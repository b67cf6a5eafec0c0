"""The same input gives the same bytes, so that artefacts of one model fit another that was trained the same way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from trime.lab.artefact import Artefact
from trime.lab.runner import run
from trime.stages.graph import Graph

DATA = {".safetensors", ".npy", ".bin", ".index"}  # JSON has times


def contents(folder: Path) -> dict[str, bytes]:
    """Return the data files of all artefacts below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.suffix in DATA}


@pytest.mark.parametrize("words", [("experiment=trime_ext", "index=cells"), ("experiment=srupp",)])
def test_a_run_from_nothing_writes_the_same_bytes(words: list[str], tiny: Callable[..., DictConfig], tmp_path: Path) -> None:
    written = []
    for number in range(2):
        folder = tmp_path / str(number)
        config = tiny(
            *words, f"paths.outputs={folder}/outputs", f"paths.data={folder}/data", "train.updates=4", "dataset.modules=20"
        )
        run(config)
        written.append(contents(folder))
    assert written[0].keys() == written[1].keys() and len(written[0]) > 5
    assert [name for name, content in written[0].items() if content != written[1][name]] == []


def test_a_store_fits_the_same_model_trained_again(tiny: Callable[..., DictConfig], tmp_path: Path) -> None:
    first, again = (
        tiny("experiment=knn_lm", "dataset.modules=20", f"paths.outputs={tmp_path}/{number}") for number in range(2)
    )
    run(first)
    store: Artefact | None = Graph(first).store_of(first)
    assert store is not None
    other = tiny("experiment=knn_lm", "dataset.modules=20", f"paths.outputs={tmp_path}/1", f"datastore.path={store.path()}")
    assert run(other).loss == run(again).loss
