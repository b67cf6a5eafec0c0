"""An engine makes every part once; artefacts are the same bytes, whoever makes them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Tiny
from tests.helpers.parts import cut_small, open_part_files, open_small_parts
from trime.lab.engines import Job, Local
from trime.lab.manifest import MANIFEST
from trime.lab.runner import run
from trime.stages import encode, pack, scoring
from trime.stages import graph as language_model
from trime.stages.graph import Graph


def test_one_process_makes_all_parts(tmp_path: Path) -> None:
    job, amounts = Job(open_part_files, "", "encode", "x", tmp_path), list[int]()
    Local().run(job, open_part_files(job), [2, 3, 5, 8], amounts.append)
    assert sorted(amounts) == [1, 1, 1, 1, 2, 3, 5, 8]
    assert {(tmp_path / str(number)).read_text().split()[0] for number in (2, 3, 5, 8)} == {str(os.getpid())}


@pytest.mark.slow
def test_ray_makes_the_same_artefacts(tiny: Tiny, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="pip install -e '.[cluster]'").shutdown()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for module, setting in ((encode, "SHARD"), (pack, "QUERIES"), (scoring, "SPAN")):
        monkeypatch.setattr(module, setting, getattr(module, setting))  # restored after the test
    cut_small()
    monkeypatch.setattr(language_model, "open_job", open_small_parts)
    contents = []
    text = "dataset=folder_words", f"dataset.path={text_folder}", f"paths.data={tmp_path}/data"
    for engine, stages in (
        ("local", "prepare,pack,fit,encode,index,tune,evaluate"),
        ("ray", "pack,encode,index,tune,evaluate"),
    ):
        config = tiny(
            *("experiment=trime_ext", "batching.k=2", "index.factory=Cells16", f"paths.outputs={tmp_path}/outputs"),
            *(*text, f"engine={engine}", f"stages=[{stages}]"),
        )
        run(config)
        graph = Graph(config)
        datastore = graph.memories.datastores[0]
        made = [graph.pack, graph.valid, datastore.store, datastore.index, *graph.tune.build_order()]
        made += [graph.test, graph.evaluate, graph.subsets.mixtures, graph.subsets]
        contents.append({file.relative_to(tmp_path): content(file) for artefact in made for file in artefact.path().iterdir()})
        for artefact in made:
            shutil.rmtree(artefact.folder)
    assert len(contents[0]) > 10 and contents[0].keys() == contents[1].keys()
    assert [name for name in contents[0] if contents[0][name] != contents[1][name]] == []


def content(file: Path) -> Any:
    """Return what a file holds, without what was measured while it was made."""
    if file.name == MANIFEST:
        return None
    return file.read_bytes() if file.suffix != ".json" else without_measured(json.loads(file.read_text()))


def without_measured(content: Any) -> Any:
    """Return JSON without times and memory."""
    if isinstance(content, list):
        return [*map(without_measured, content)]
    measured = {"seconds", "build_seconds", "tokens_per_second", "peak_memory_mb"}
    measured |= {"encode_seconds_per_token", "seconds_per_token", "processor_seconds", "processor_ms_per_token"}
    if isinstance(content, dict):
        return {name: without_measured(content[name]) for name in content.keys() - measured}
    return content
