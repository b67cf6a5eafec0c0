"""Folders from elsewhere run nothing: whatever code a file names, no reader calls it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, composed
from tests.helpers.runs import SharedRun
from trime.common.io import plain
from trime.config.registry import registered_targets, unregistered
from trime.errors import UserError
from trime.lab.manifest import MANIFEST, write_manifest
from trime.lab.runner import run
from trime.stages.graph import Graph
from trime.stages.model_io import ModelSettings


def planted(content: Any, mark: Path) -> Any:
    """The same content, in which every object names a call that would leave a file."""
    if isinstance(content, dict):
        call = {"_target_": "pathlib.Path.touch", "_args_": [{"_target_": "pathlib.Path", "_args_": [str(mark)]}]}
        return {name: planted(value, mark) for name, value in content.items()} | call
    return [planted(value, mark) for value in content] if isinstance(content, list) else content


@pytest.mark.parametrize("names", [("model.json", "mixture.json"), pytest.param((), marks=pytest.mark.slow)])
def test_no_reader_calls_what_a_file_names(names: tuple[str, ...], language: SharedRun, tmp_path: Path) -> None:
    """In JSON files of a run with everything, one file after the other; in the slow test in every file."""
    copied = language.copy(tmp_path / "outputs")
    every = ["prepare", "pack", "fit", "encode", "index", "tune", "evaluate", "report", "audit"]
    copied.config.stages = ["audit"] if names else every
    files = [file for file in copied.outputs.rglob("*.json") if file.name != MANIFEST]
    assert len({file.name for file in files}) >= 10
    mark = tmp_path / "called"
    for file in files:
        if names and file.name not in names:
            continue
        original = file.read_bytes()
        for content in (json.dumps(planted(json.loads(original), mark)).encode(), original):
            file.write_bytes(content)
            if (file.parent / MANIFEST).exists():
                write_manifest(file.parent, file.parent.name)
            if content != original:
                with suppress(Exception):  # a refusal, or whatever else a strange file leads to: here only the call counts
                    run(copied.config)
        assert not mark.exists(), file


def test_a_stored_model_names_registered_parts_alone(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("experiment=vanilla", f"paths.outputs={tmp_path}", "stages=[prepare,fit]")
    run(config)
    folder = Graph(config).model.path()
    content = json.loads((folder / "model.json").read_text())
    targets = "torch.utils.collect_env.run os.system trime.models.network.save_network trime.common.pretrained.convert"
    calls = [({"_target_": target, "command": "ls"}, {"extra": [{"_target_": target}]}) for target in targets.split()]
    for part, changed in product(["embedding", "backbone", "head"], [*chain(*calls), {"extra": "${oc.env:HOME}"}]):
        other = content | {"model": content["model"] | {part: content["model"][part] | changed}}
        (folder / "model.json").write_text(json.dumps(other))
        with pytest.raises(UserError, match=re.escape(f"{folder / 'model.json'} has")):
            ModelSettings.of(config).open(folder)
    (folder / "model.json").write_text(json.dumps(content))
    assert ModelSettings.of(config).open(folder)[1] == content


def test_own_classes_may_be_named_in_the_present_settings() -> None:
    own = {"backbone": {"_target_": "mine.Backbone"}}
    assert unregistered(own, {}) and not unregistered(own, {"model": own})


@pytest.mark.parametrize("name", ["trime_ext", "memorizing", "trime_mt", "srupp"])
def test_every_model_of_the_lab_is_registered(name: str) -> None:
    config = composed(f"experiment={name}")
    assert not unregistered({"model": ModelSettings.of(config).components(), "eviction": plain(config.eviction)}, {})
    assert len(registered_targets()) > 15
