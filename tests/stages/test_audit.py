"""The audit passes an honest run and catches a planted violation of each kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from trime.token_memory.train.visibility import Local, SameDocument, same

OPTIONS = (
    *("experiment=trime_ext", "evaluate.tokens=600", "datastore.tokens=5000"),
    *("evaluate.block=16", "evaluate.context=16", "tune.memory_size=[16,48]"),
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


def own_token(self: Local, query: TokenPosition, memory: TokenPosition) -> torch.Tensor:
    return same(query.segment, memory.segment) & (memory.position[None, :] <= query.position[:, None])


def later_tokens(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, -1) @ value


def knowing_weights(self: History, document: int, found: torch.Tensor) -> torch.Tensor:
    return found.clamp(min=-12).repeat(1, len(self.decays))


def every_document(self: SameDocument, query: TokenPosition, memory: TokenPosition) -> torch.Tensor:
    return torch.ones(len(query.segment), len(memory.segment), dtype=torch.bool)


def other_encodings(*args: object) -> Iterator[Window]:
    for window in read_windows(*args):  # type: ignore[arg-type]
        mass = window.vocabulary
        yield window._replace(vocabulary=LogMass(mass.target.roll(1), mass.total))


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ({(Local, "sees"): own_token}, "altering a token and later ones"),
        ({(attention, "fused_attention"): later_tokens}, "altering a token and later ones"),
        ({(History, "features"): knowing_weights}, "changes the mixture's weights"),
        ({(SameDocument, "sees"): every_document, (SameDocument, "rules_out"): lambda *_: False}, "other documents"),
        ({(audit_stage, "read_windows"): other_encodings}, "stored encodings"),
    ],
)
def test_a_planted_violation_is_caught(
    planted: dict[tuple[Any, str], Any], message: str, honest: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for (place, name), function in planted.items():
        monkeypatch.setattr(place, name, function)
    with pytest.raises(UserError, match=message):
        audit(Graph(honest))


def test_documents_that_are_not_bounded_are_reported(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    stages = "stages=[import,prepare,pack,fit,encode,index,tune,evaluate,audit]"
    config = tiny(*OPTIONS, "long.across_documents=true", stages)
    run(config)
    assert "not bounded" in capsys.readouterr().out


def test_test_text_in_the_datastore_is_caught(tiny: Tiny, text_folder: Path) -> None:
    shutil.copy(text_folder / "test" / "1.txt", text_folder / "train" / "9.txt")
    text = "dataset=folder_words", f"dataset.path={text_folder}", "datastore.tokens=null"
    config = tiny("experiment=knn_lm", *text, "index.k=8", "mixture=none")
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
