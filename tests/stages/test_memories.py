"""Several memories of one kind side by side: two datastores of different text, each with settings of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trime
from tests.conftest import Tiny
from tests.helpers.runs import without_places
from trime.lab.runner import run
from trime.report.run_result import run_from_json
from trime.report.tables import run_table
from trime.stages.audit import audit
from trime.stages.graph import Graph
from trime.stages.memories import DatastoreMemory
from trime.stages.preflight import check

OTHER = "test_memories.external_other"
SECOND = ["+test_memories@test_memories.external_other=external"]
ROWS = "[{joint: []}, {joint: [local, external, external_other]}, {joint: [], interpolate: [[external], [external_other]]}]"


@pytest.fixture(scope="module")
def two(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Graph, Path]:
    """Return a run with two datastores of different text, and the folder of the second text."""
    folder = tmp_path_factory.mktemp("other")
    for number in range(6):
        text = "import os\nimport sys\n\nfor name in os.environ:\n    print(name)\n" * (9 + number)
        (folder / f"{number}.txt").write_text(text)
    config = tiny(
        "experiment=knn_lm",
        *SECOND,
        f"+{OTHER}.datastore={{dataset: {{_target_: trime.data.datasets.folder.Folder, path: {folder},"
        " tokenizer: {_target_: trime.data.tokenizers.PythonSource}}, tokens: 300}",
        f"+{OTHER}.index={{factory: null, k: 16, rescore: true}}",
        *("index.metric=ip", "index.k=24", "datastore.tokens=4000", f"evaluate.rows={ROWS}"),
        *("evaluate.analysis=true", "evaluate.tokens=1200"),
    )
    check(config)
    run(config)
    return Graph(config), folder


def test_each_memory_has_its_text_and_its_index(two: tuple[Graph, Path]) -> None:
    graph, folder = two
    one, other = graph.memories.datastores
    assert one.store.name != other.store.name and one.index.name != other.index.name
    assert (one.index.index.k, other.index.index.k) == (24, 16)
    results = json.loads((graph.run_folder / "results.json").read_text())
    described = results["datastores"]
    assert list(described) == ["external", "external_other"] and results["datastore"] == described["external"]
    assert described["external"]["entries"] == 4000 > 300 == described["external_other"]["entries"]
    assert described["external_other"]["dataset"] == folder.name and all("recall" in each for each in described.values())
    rows = results["metrics"]["test"]
    assert rows[1]["memories"] == "vocabulary + local + external + external_other"
    assert rows[2]["memories"] == "vocabulary ⊕ (external) ⊕ (external_other)"
    assert rows[-1]["memories"].endswith("vocabulary, local, external, external_other") and rows[-1]["k"] == "24 and 16"
    assert rows[-1]["search"] == "exact and exact, rescored"
    assert set(results["subsets"]["costs"]) == {"local", "external", "external_other"}
    hits = results["analysis"]["test"]["retrieval_by_memory"]
    assert hits["external"].keys() == hits["external_other"].keys() == {"1", "8"} and hits["external"] != hits["external_other"]
    assert any("external_other" in cell for line in run_table(run_from_json(results))[1] for cell in line)


def test_their_masses_are_those_of_each_alone(two: tuple[Graph, Path]) -> None:
    """Neither sees entries of the other: the joint row's parts are the entries that each search finds."""
    graph, _ = two
    opened = graph.memories.open_all(graph.test.summary(), [], {"external", "external_other"})
    for name, memory in opened.items():
        stored = graph.memories.stored[name]
        assert isinstance(stored, DatastoreMemory) and memory.nearest is not None
        assert len(memory.nearest.store) == stored.index.summary()["entries"]


@pytest.mark.slow
def test_a_bundle_has_both_and_explains_by_both(two: tuple[Graph, Path], tmp_path: Path) -> None:
    graph, folder = two
    graph.config.stages, graph.config.export.path = ["export"], f"{tmp_path}/bundle"
    run(graph.config)
    original, bundle = trime.load(graph.run_folder), trime.load(tmp_path / "bundle")
    prompt = "import os\nimport sys\n\nfor name in"
    assert original.score(prompt) == bundle.score(prompt)
    explained, by_run = (each.explain(prompt, 3, entries=6, temperature=0) for each in (bundle, original))
    assert without_places(explained) == without_places(by_run)
    # The files, and so their lines, are where the run was.
    for each, unit in ((explained, "token"), (by_run, "line")):
        assert all(f", {unit} " in entry["place"] for token in each for entry in token.entries if entry["memory"] != "local")
    assert all(token.parts.keys() == {"vocabulary", "local", "external", "external_other"} for token in explained)
    places: dict[str, set[str]] = {}
    for token in explained:
        for entry in token.entries:
            places.setdefault(entry["memory"], set()).add(entry["place"])
    names = {file.name for file in folder.iterdir()}
    assert all(place.split(",")[0] in names for place in places["external_other"])
    assert not any(place.split(",")[0] in names for place in places.get("external", ()))
    texts = [file.read_text() for file in (tmp_path / "bundle").rglob("*.json")]
    assert not any(str(folder) in text for text in texts), "no place of this machine"


def test_both_are_audited(two: tuple[Graph, Path]) -> None:
    graph, _ = two
    results: dict[str, Any] = audit(graph)
    assert results["test_documents_in_datastore"] and not results["datastore_is_the_test_text"]
