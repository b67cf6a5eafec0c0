"""Which artefacts an experiment makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from tests.conftest import composed
from trime.lab.runner import run
from trime.stages.graph import Graph


def test_neighbours_are_for_training_alone() -> None:
    """A model that is given by checkpoint= is not trained: no segment needs neighbours."""
    words = ["experiment=trime_ext", "dataset=stdlib_tiny"]
    assert Graph(composed(*words)).pack is not None
    assert Graph(composed(*words, "checkpoint=outputs/artefacts/fit-0")).pack is None


def test_the_text_of_ngrams_is_prepared_without_a_datastore(
    text_folder: Path, tiny: Callable[..., DictConfig], tmp_path: Path
) -> None:
    """The memory ngram reads datastore.dataset, whether or not a row searches an index over it."""
    words = ["experiment=ngram_lm", "dataset=stdlib_tiny", "dataset@datastore.dataset=folder", f"paths.data={tmp_path}/data"]
    config = tiny(*words, f"datastore.dataset.path={text_folder}", f"paths.outputs={tmp_path}/outputs")
    graph = Graph(config)
    assert not graph.memories.datastores and graph.text_of(config) in graph.made_by("prepare")
    run(config)
    assert "ngram" in graph.evaluate.rows()[-1]["memories"]
