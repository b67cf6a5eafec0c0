"""The audit passes an honest run and catches a planted violation of each kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from tests.conftest import Tiny
from trime.common.types import LogMass, TokenPosition
from trime.errors import UserError
from trime.lab.runner import run
from trime.layers import attention
from trime.scoring.mixtures.experts import History
from trime.stages import audit as audit_stage
from trime.stages.audit import audit
from trime.stages.encode import read_windows
from trime.stages.graph import Graph
from trime.token_memory.search.datastore import KNNMemory
from trime.token_memory.test.base import Window
from trime.token_memory.train.visibility import Extent, Local, SameDocument, same

OPTIONS = (
    "experiment=trime_ext",
    "evaluate.tokens=600",
    "datastore.tokens=5000",
    "evaluate.block=16",
    "evaluate.context=16",
    "tune.memory_size=[16,48]",
)


@pytest.fixture(autouse=True)
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_stage, "MAX_WINDOWS", 3)


@pytest.fixture(scope="module")
def honest(tiny: Tiny) -> DictConfig:
    config = tiny(*OPTIONS)
    run(config)
    return config


def test_an_honest_run_passes(honest: DictConfig, capsys: pytest.CaptureFixture[str]) -> None:
    honest.stages = ["audit"]
    run(honest)
    output, results = capsys.readouterr().out, json.loads((Graph(honest).run_folder / "audit.json").read_text())
    assert output.count("changes no probability") == 2
    assert results["max_change_by_later_tokens"] <= results["tolerance"]
    assert results["max_change_by_other_documents"] <= results["tolerance"]
    assert max(results["test_documents_in_datastore"].values()) < 0.5 and not results["datastore_is_the_test_text"]


def test_the_own_token_is_caught(honest: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def sees(self: Local, query: TokenPosition, memory: TokenPosition) -> torch.Tensor:
        return same(query.segment, memory.segment) & (memory.position[None, :] <= query.position[:, None])

    monkeypatch.setattr(Local, "sees", sees)
    with pytest.raises(UserError, match="altering a token and later ones"):
        audit(Graph(honest))


def test_later_tokens_are_caught(honest: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, -1) @ value

    monkeypatch.setattr(attention, "fused_attention", unmasked)
    with pytest.raises(UserError, match="altering a token and later ones"):
        audit(Graph(honest))


def test_weights_that_know_the_token_are_caught(honest: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def knows(self: History, document: int, found: torch.Tensor) -> torch.Tensor:
        return found.clamp(min=-12).repeat(1, len(self.decays))

    assert json.loads((Graph(honest).run_folder / "results.json").read_text())["metrics"]["test"][-1]["mixture"] == "adaptive"
    monkeypatch.setattr(History, "features", knows)
    with pytest.raises(UserError, match="changes the mixture's weights"):
        audit(Graph(honest))


def test_another_document_is_caught(honest: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(self: SameDocument, query: TokenPosition, memory: TokenPosition) -> torch.Tensor:
        return torch.ones(len(query.segment), len(memory.segment), dtype=torch.bool)

    def nothing(self: SameDocument, query: Extent, memory: Extent) -> bool:
        return False

    monkeypatch.setattr(SameDocument, "sees", everything)
    monkeypatch.setattr(SameDocument, "rules_out", nothing)
    with pytest.raises(UserError, match="other documents"):
        audit(Graph(honest))


def test_stored_encodings_of_something_else_are_caught(honest: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def misaligned(*args: object) -> Iterator[Window]:
        for window in read_windows(*args):  # type: ignore[arg-type]
            mass = window.vocabulary
            yield window._replace(vocabulary=LogMass(mass.target.roll(1), mass.total))

    monkeypatch.setattr(audit_stage, "read_windows", misaligned)
    with pytest.raises(UserError, match="stored encodings"):
        audit(Graph(honest))


def test_documents_that_are_not_bounded_are_reported(
    honest: DictConfig, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = "stages=[import,prepare,pack,fit,encode,index,tune,evaluate,audit]"
    config = tiny(*OPTIONS, "long.across_documents=true", stages)
    run(config)
    assert "not bounded" in capsys.readouterr().out


def test_test_text_in_the_datastore_is_caught(tiny: Tiny, text_folder: Path) -> None:
    shutil.copy(text_folder / "test" / "1.txt", text_folder / "train" / "9.txt")
    config = tiny(
        "experiment=knn_lm",
        "dataset=folder_words",
        f"dataset.path={text_folder}",
        "datastore.tokens=null",
        "index.k=8",
        "mixture=none",
    )
    run(config)
    with pytest.raises(UserError, match="are in the datastore"):
        audit(Graph(config))


def test_a_datastore_of_the_test_text_must_hide_each_documents_own(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(*OPTIONS, "mixture=none", "datastore.split=test", "index.k=8")
    run(config)
    assert audit(Graph(config))["datastore_is_the_test_text"]
    entries = KNNMemory.entries

    def shown(self: KNNMemory, query: object) -> object:
        self.hide_own = False
        found = entries(self, query)  # type: ignore[arg-type]
        self.hide_own = True
        return found

    monkeypatch.setattr(KNNMemory, "entries", shown)
    with pytest.raises(UserError, match="are in the datastore"):
        audit(Graph(config))
