"""What our kernels are measured against computes the same."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks import pays
from trime.common.types import Contexts, LogMass, Tensor, TokenPosition
from trime.layers.attention_cpu import Reach, attend
from trime.token_memory.search.datastore import Datastore, retrieved_mass
from trime.token_memory.search.search import ExactSearch
from trime.token_memory.test.base import Window
from trime.token_memory.test.ngrams import DocumentNgrams, Ngrams, SuffixArray, TextNgrams

ORDERS = [1, 2, 3, 5, 9]


def read(memory: Ngrams, text: Tensor) -> Tensor:
    """Return the log-masses of a document of 300 tokens, read in windows of 100."""
    none, place, masses = torch.zeros(100), torch.arange(300), []
    contexts = Contexts(torch.zeros(300, 2), text[:300], TokenPosition(0 * place, 0 * place, place))
    for part in place.split(100):
        window = Window(contexts.take(part), 0, LogMass(none, none))
        mass = memory.experts(window, torch.ones(1))
        masses += [mass.target, mass.total]
        memory.write(window)
    return torch.cat(masses, -1)


def test_counts_of_ngrams() -> None:
    text = pays.zipf_tokens(2000) % 50
    array = SuffixArray.build(text.numpy(), 50, np.array([0, 900, 2000]))
    ours = read(TextNgrams(array, ORDERS), text)
    with patch("trime.token_memory.test.ngrams.counts_in_text", pays.plain_text_counts):
        assert torch.equal(read(TextNgrams(array, ORDERS), text), ours)
    assert torch.equal(read(pays.CountedNgrams(ORDERS), text), read(DocumentNgrams(ORDERS), text))


def test_search_and_masses(tmp_path: Path) -> None:
    keys, query = pays.clustered(3000, 16), pays.clustered(20, 16)
    store = Datastore.from_tensors(tmp_path / "store", keys, pays.zipf_tokens(3000))
    score, number = ExactSearch(store.keys.blocks, "ip").nearest(query, 40)
    for other in (pays.TopKSearch(store.keys), pays.FaissKNN(store.keys)):
        torch.testing.assert_close(other.nearest(query, 40)[0], score, rtol=1e-4, atol=1e-4)
    target, divisor = store.token[number[:, 3]].long(), torch.tensor([1.0, 2.0])
    masses = [mass(score, store.token[number].long(), target, divisor) for mass in (retrieved_mass, pays.plain_mass)]
    torch.testing.assert_close(masses[0].target, masses[1].target)
    torch.testing.assert_close(masses[0].total, masses[1].total)


@pytest.mark.parametrize("longest", [None, 20])
def test_attention(longest: int | None) -> None:
    logits, far = torch.randn(2, 2, 4, 5, 60)
    at, of = torch.arange(55, 60).expand(2, 5), torch.randperm(60).expand(2, 60)
    rest = None if longest is None else far, at, of, torch.randn(2, 60, 2, 8), 7, Reach(True, None, longest)
    ours, theirs = attend(logits.clone(), *rest), pays.plain_attend(logits.clone(), *rest)
    torch.testing.assert_close(ours.attended, theirs.attended, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours.retrieved, theirs.retrieved)


def test_rows_of_other_contests_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def contests(folder: Path) -> Iterator[pays.Contest]:
        yield pays.Contest("new", "list", "sum", "1,000", lambda: sum(range(1000)), lambda: sum([*range(100_000)]))

    file = tmp_path / "pays.json"
    gone = {"code": "gone", "library": "b", "call": "c", "size": "d", "ours": 2.0, "theirs": 2.0, "times faster": 1.0}
    file.write_text(json.dumps({"rows": [gone]}))
    monkeypatch.setitem(pays.CONTESTS, "training", contests)
    rows = pays.measure(argparse.Namespace(json=file, only=["training"], rounds=3)).rows
    assert [(row["code"], row["decision"]) for row in rows] == [("gone", "deleted"), ("new", "kept")]
