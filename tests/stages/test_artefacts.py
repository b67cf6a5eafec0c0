"""Which artefacts an experiment makes, from which windows, and that the same input gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Tiny, composed
from trime.lab.artefact import Artefact
from trime.lab.runner import run
from trime.stages.encode import Encode
from trime.stages.graph import Graph


def test_neighbours_are_for_training_alone() -> None:
    """A model that is given by checkpoint= is not trained: no segment needs neighbours."""
    words = ["experiment=trime_ext", "dataset=stdlib_tiny"]
    assert Graph(composed(*words)).pack is not None
    assert Graph(composed(*words, "checkpoint=outputs/artefacts/fit-0")).pack is None


def test_the_text_of_ngrams_is_prepared_without_a_datastore(text_folder: Path, tiny: Tiny, tmp_path: Path) -> None:
    """The memory ngram reads datastore.dataset, whether or not a row searches an index over it."""
    places = f"datastore.dataset.path={text_folder}", f"paths.data={tmp_path}/data", f"paths.outputs={tmp_path}/outputs"
    config = tiny("experiment=ngram_lm", "dataset=stdlib_tiny", "dataset@datastore.dataset=folder_words", *places)
    graph = Graph(config)
    assert not graph.memories.datastores and graph.text_of(config) in graph.artefacts_of("prepare")
    run(config)
    assert "ngram" in graph.evaluate.rows()[-1]["memories"]


DATA = {".safetensors", ".npy", ".bin", ".index"}  # JSON has times


@pytest.mark.parametrize("words", [("experiment=trime_ext",), pytest.param(("experiment=srupp",), marks=pytest.mark.slow)])
def test_a_run_from_nothing_writes_the_same_bytes(words: list[str], tiny: Tiny, tmp_path: Path) -> None:
    written = []
    for number in range(2):
        folder = tmp_path / str(number)
        places = f"paths.outputs={folder}/outputs", f"paths.data={folder}/data"
        run(tiny(*words, *places, "train.updates=4", "dataset.modules=20"))
        files = [file for file in folder.rglob("*") if file.suffix in DATA]
        written.append({str(file.relative_to(folder)): file.read_bytes() for file in files})
    assert written[0].keys() == written[1].keys() and len(written[0]) > 5
    assert [name for name, content in written[0].items() if content != written[1][name]] == []


@pytest.mark.slow
def test_a_store_fits_the_same_model_trained_again(tiny: Tiny, tmp_path: Path) -> None:
    words = "experiment=knn_lm", "dataset.modules=20"
    first, again = (tiny(*words, f"paths.outputs={tmp_path}/{number}") for number in range(2))
    run(first)
    store: Artefact | None = Graph(first).store_of(first)
    assert store is not None
    other = tiny(*words, f"paths.outputs={tmp_path}/1", f"datastore.path={store.path()}")
    assert run(other).loss == run(again).loss


def graph_of(tiny: Tiny, tmp_path: Path, *settings: str) -> tuple[Graph, Encode]:
    """Return the graph of a run of the first stages, and what encodes its datastore."""
    words = "experiment=knn_lm", "dataset.modules=20", "stages=[prepare,fit,encode]", f"paths.outputs={tmp_path}/outputs"
    graph = Graph(tiny(*words, *settings))
    store = graph.store_of(graph.config)
    assert isinstance(store, Encode)
    return graph, store


def shards(store: Encode) -> list[bytes]:
    """Return the bytes of an artefact's shards."""
    return [file.read_bytes() for file in sorted(store.path().glob("*.safetensors"))]


def columns(store: Encode) -> dict[str, list[torch.Tensor]]:
    """Return the columns of an artefact's shards."""
    files = [load_file(file) for file in sorted(store.path().glob("*.safetensors"))]
    return {name: [file[name] for file in files] for name in files[0]}


def test_a_datastore_has_windows_of_its_own(tiny: Tiny, tmp_path: Path) -> None:
    """Its keys are those of windows that are evaluated with the same block and context; evaluated text keeps its own.

    Windows of a size that is named are those of the same size taken from evaluation.
    """
    sizes = {"block": 40, "context": 8}
    graph, store = graph_of(tiny, tmp_path, *(f"datastore.{name}={size}" for name, size in sizes.items()))
    other_plan, expected = graph_of(tiny, tmp_path, *(f"evaluate.{name}={size}" for name, size in sizes.items()))
    default_plan, default = graph_of(tiny, tmp_path)
    for one in (graph, other_plan):
        run(one.config)
    assert shards(store) == shards(expected) != []
    assert graph.valid.name == default_plan.valid.name != other_plan.valid.name and store.name != default.name
    windows = store.windows(graph.text_of(graph.config).corpus())
    assert int(windows.context.max()) == sizes["context"] and int((windows.length - windows.context).max()) == sizes["block"]
    own = [f"datastore.{name}={default_plan.config.evaluate[name]}" for name in sizes]
    for more in ([], ["evaluate.block=48", "evaluate.context=16"]):
        assert graph_of(tiny, tmp_path, *own, *more)[1].name == default.name


def test_windows_of_like_length_are_read_together(tiny: Tiny, tmp_path: Path) -> None:
    """Each batch holds the next longest windows; the shards hold what windows read one by one give, in the text's order."""
    graph, store = graph_of(tiny, tmp_path, "evaluate.batch_tokens=300")
    run(graph.config)
    corpus = graph.text_of(graph.config).corpus()
    windows = store.windows(corpus)
    batches = store.batches(windows, False)
    lengths = windows.length[np.concatenate(batches)]
    assert sorted(np.concatenate(batches)) == [*range(len(windows))] and len(set(lengths)) > 1 and max(map(len, batches)) > 1
    assert (lengths[1:] <= lengths[:-1]).all()

    alone, one_by_one = graph_of(tiny, tmp_path, "evaluate.batch_tokens=1", f"paths.outputs={tmp_path}/alone")
    run(alone.config)
    together, expected = ({name: torch.cat(parts) for name, parts in columns(each).items()} for each in (store, one_by_one))
    firsts = np.add(windows.document_offset, windows.start + windows.context)
    tokens, counts = corpus.split("train").tokens, windows.length - windows.context
    text = [tokens[first : first + count] for first, count in zip(firsts, counts, strict=True)]
    assert together["token"].tolist() == np.concatenate(text).tolist()
    for name, column in together.items():
        torch.testing.assert_close(column, expected[name], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("context", [0, 8])
def test_the_published_order_is_of_windows_without_context(context: int, tiny: Tiny, tmp_path: Path) -> None:
    """Those of the datastore decide, not those of evaluated text."""
    others = f"evaluate.context={8 - context}", "compatibility.sorted_windows=true", "mixture.model.history=[]"
    graph, store = graph_of(tiny, tmp_path, f"datastore.context={context}", *others)
    run(graph.config)
    lengths = store.windows(graph.text_of(graph.config).corpus()).length
    assert (lengths[1:] >= lengths[:-1]).all() == (context == 0)
