"""Every benchmark runs, and its contestants compute the same; measured values are not asserted."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from benchmarks import __main__, attendre, datastore, external, fit, memorizing, objective, packing, startup
from benchmarks.measure import Claim, alternately
from tests.helpers.pretrained import save_model
from trime.memory.retrieval.search import MIN_POINTS_PER_CELL

Bench = Callable[..., dict[str, Any]]
FEW = [
    *("--model", "tiny", "--tokens", "300", "--updates", "1", "--rounds", "1", "--window", "64"),
    *("--set", "index.k=16", "segments.length=64", "train.plain_share=0"),
]


@pytest.fixture()
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a function that runs a benchmark by its command line and returns what it writes."""

    def run(name: str, *words: str) -> dict[str, Any]:
        file = tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", ["benchmarks", name, "--json", str(file), *words])
        assert __main__.main() == 0
        found = json.loads(file.read_text())
        assert {"name", "command", "date", "commit", "hardware", "versions", "rows", "claims"} == found.keys()
        assert found["name"] == name and all(claim.keys() == {"claim", "value", "bound", "holds"} for claim in found["claims"])
        return found

    return run


def test_a_claim_holds_up_to_its_bound() -> None:
    assert Claim("", 0.4, 0.4).holds is True and Claim("", 0.41, 0.4).holds is False and Claim("", None, 1.0).holds == "not run"
    assert Claim("nothing finds enough", math.inf, 5.0).holds is False


def test_the_order_of_contestants_changes() -> None:
    order: list[str] = []
    names = ("a", "b", "c", "d")
    alternately({name: partial(order.append, name) for name in names}, 8, warmup=0)
    rounds = [order[start : start + 4] for start in range(0, 32, 4)]
    assert all(sorted(own) == list(names) for own in rounds)
    assert len({own[own.index("b") - 1] for own in rounds if own[0] != "b"}) == 3, "each follows every other one"


def test_kinds_of_search_have_entries_for_their_cells() -> None:
    for entries in (200, 2000, 1_000_000, 10_000_000):
        for _, factory, _ in external.kinds_of(entries)[1:]:
            assert int(re.findall(r"[a-z](\d+)", str(factory), re.IGNORECASE)[0]) * MIN_POINTS_PER_CELL <= entries


def test_memorizing(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"SEGMENT": 64, "WIDTH": 32, "EXACT": 128, "TRAINED": 2, "ASKED": 2}.items():
        monkeypatch.setattr(memorizing, name, value)
    found = bench("memorizing", "--sizes", "256", "128", "--rounds", "1")
    rows = found["rows"]
    steps = [(row["step"], row["memory"], row["search"]) for row in rows]
    kinds = ((128, "exact"), (256, "approximate"), (256, "faiss"))
    assert steps == [(step, *own) for step in ("evaluation", "training") for own in kinds]
    assert all(row["recall"] == 1 if row["search"] == "exact" else 0 < row["recall"] <= 1 for row in rows)
    assert "| training" in capsys.readouterr().out
    assert len(found["claims"]) == 4 and sum("with 256 entries" in claim["claim"] for claim in found["claims"]) == 2


@pytest.mark.slow
def test_attendre(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"WIDTH": 16, "CHUNKS": (16, 32), "TOP_K": 8, "SIZE": 32, "LONGEST": 64, "SMOLLM2_LAYERS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(attendre, name, value)
    found = bench("attendre", "--lengths", "64", "128", "--wide", "64", "--queries", "16", "--rounds", "1")
    rows = found["rows"]
    ways = {
        "read, fifo",
        "read, lra_sum",
        "read, lfa",
        "read, everything kept",
        "read, full attention",
        "read, attention alone, by PyTorch",
        "both ways, flush",
        "both ways, drain",
    }
    assert {row["what"] for row in rows} == ways and all(row["tokens/s"] > 0 for row in rows)
    assert Counter((row["model"], row["chunk"]) for row in rows) == {
        **{(attendre.SMALL, 16): 6 + 2 + 2 + 2, (attendre.SMALL, 32): 6 + 2, (attendre.SMALL, ""): 2},
        **{(attendre.WIDE, 32): 3 + 1, (attendre.WIDE, ""): 1},
    }
    assert sum("attention alone" in claim["claim"] for claim in found["claims"]) == 2


def test_retained(bench: Bench, text_folder: Path, tmp_path: Path) -> None:
    """A memory that holds the whole prompt keeps all of its attention; a small one does not."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = save_model("Llama", tmp_path / "model")
    options = ["--background", str(text_folder), "--questions", "3", "--words", "30", "--policies", "fifo", "h2o", "--set"]
    settings = [f"model.name={model}", "model.chunk=16", "model.dtype=float32", "answering.max_new_tokens=2"]
    small = bench("retained", "--memory", "16", *options, *settings)["rows"]
    whole = bench("retained", "--memory", "120", *options, *settings, "model.top_k=120")["rows"]
    assert [row["policy"] for row in whole] == ["fifo", "h2o", "rank correlation with contained"]
    assert all(row["retained"] == pytest.approx(1) for row in whole[:2])
    assert all(0 < row["retained"] < 0.9 and 0 <= row["number"] <= 1 for row in small[:2])


@pytest.mark.slow
def test_objective(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Claims about a device that is missing are marked as not run."""
    found = bench("objective", "--n", "512", "1024", "--d", "16", "--rounds", "1", "--device", "cpu")
    assert {(row["what"], row["n"]) for row in found["rows"] if "seconds" in row} == {
        (way, n)
        for way in ("blockwise", "direct", "three products", "blockwise, local", "blockwise, long")
        for n in (512, 1024)
    }
    not_run = {claim["claim"] for claim in found["claims"] if claim["holds"] == "not run"}
    assert any("CUDA" in claim for claim in not_run) and not any(claim.startswith("CPU") for claim in not_run)
    assert "| not run |" in capsys.readouterr().out


@pytest.mark.parametrize("sight", objective.SIGHTS)
def test_the_direct_formulation_is_the_objective(sight: str) -> None:
    ways = objective.Implementations(1200, 16, "cpu")
    torch.testing.assert_close(ways.blockwise(sight), ways.direct(sight), rtol=1e-3, atol=1e-5)


def test_the_heads_are_the_same() -> None:
    head = objective.Head(300, 16, "cpu")
    torch.testing.assert_close(head.blockwise(), head.direct(), rtol=1e-3, atol=1e-5)


def test_packing(bench: Bench) -> None:
    found = bench("packing", "--sizes", "300", "40", "--sizes", "600", "40", "--queries", "50", "--rounds", "1")
    assert [(row["what"], row["segments"]) for row in found["rows"]] == [
        ("trime", 300),
        ("bm25s", 300),
        ("rank_bm25", 300),
        ("trime", 600),
    ]
    assert len(found["claims"]) == 5


def test_contestants_of_packing_agree() -> None:
    segments = packing.segments_of(None, 400, 60)
    fast, other = packing.BM25(), packing.Bm25s()
    for backend in (fast, other):
        backend.fit(segments)
    found, theirs = fast.nearest([5, 6, 7], 20), other.nearest([5, 6, 7], 20)
    for own, others, query in zip(found, theirs, (5, 6, 7), strict=True):
        assert len({*own} & ({*others} - {query})) >= 19


def test_step(bench: Bench) -> None:
    found = bench("step", "--model", "tiny", "--tokens", "256", "--rounds", "1")
    assert {row["what"] for row in found["rows"]} >= {"head", "trime, objective", "trime_ext step"}
    assert len(found["claims"]) == 3


def test_fit(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fit, "EXPERIMENTS", ("vanilla", "trime_long"))
    threads = torch.get_num_threads(), numba.get_num_threads()
    sizes = ["--size", "tiny", "--updates", "2", "--rounds", "1", "--set", "dataset.modules=40", "segments.length=64"]
    try:
        rows = bench("fit", "--outputs", str(tmp_path), *sizes)["rows"]
    finally:
        torch.set_num_threads(threads[0])
        numba.set_num_threads(threads[1])
    assert [row["what"] for row in rows] == ["vanilla", "trime_long"]
    assert rows[0]["over plain"] == 1 and all(row["tokens/s"] > 0 and len(row["rounds"]) == 1 for row in rows)


def test_mixture(bench: Bench, tmp_path: Path) -> None:
    words = ("--size", "tiny", "--tokens", "300", "--keys", "2k", "--updates", "1", "--rounds", "1", "--outputs", str(tmp_path))
    found = bench("mixture", *words, "--set", "index.k=16", "tune.memory_size=[64]")
    assert [row["mixture"] for row in found["rows"]] == 3 * ["joint", "adaptive"] and len(found["claims"]) == 4
    assert [len(row["memories"].split(", ")) for row in found["rows"]] == [1, 1, 2, 2, 3, 3]


@pytest.mark.slow
def test_external(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kinds = [("exact", None, 1), ("faiss", "IVF16_SQ8", 16), ("cells", "Cells16", 16)]
    monkeypatch.setattr(external, "kinds_of", lambda entries: kinds)
    found = bench("external", "--keys", "1k", "2k", "--outputs", str(tmp_path), *FEW)
    assert [row["keys"] for row in found["rows"]] == [1000] * 4 + [2000] * 4 and len(found["claims"]) == 2
    rows = {row["search"]: row for row in found["rows"][4:]}
    assert list(rows) == ["none", "exact", "faiss IVF16_SQ8, 16 cells", "cells Cells16, 16 cells"]
    assert rows["cells Cells16, 16 cells"]["mass"] == pytest.approx(1, abs=1e-3)  # recall means little where keys are equal


@pytest.mark.slow
def test_datastore(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'trime[cluster]'")
    monkeypatch.setattr(datastore, "COMPRESSED", [("float16", None), ("int8", "PCA8_IVF16_SQ8")])
    monkeypatch.setattr(datastore, "CELLS", "Cells16")
    found = bench("datastore", "--keys", "2k", "--outputs", str(tmp_path), *FEW)
    built, whole, packed = found["rows"][1:4]
    assert built["bytes"] == pytest.approx(built["forecast bytes"], rel=0.2) and len(found["claims"]) == 3
    assert packed["bytes"] < whole["bytes"] and len(found["rows"]) == 7


@pytest.mark.slow
def test_startup(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "COMMANDS", {"--help": ["--help"]})
    rows = bench("startup", "--tokens", "40000", "--scored", "500", "--keys", "3000", "--rounds", "1")["rows"]
    assert len(rows) == 3 and all(row["largest costs"].count("%") == 3 for row in rows[1:])


def test_cache(bench: Bench) -> None:
    few = ["--layers", "1", "--vocabulary", "50", "--size", "80", "--decode", "2", "--prompt", "160", "--rounds", "1"]
    found = bench("cache", *few, "--policies", "fifo", "snapkv")
    ways = [("decode until full", "decode when full", "read a prompt"), ("read, guided by a question",)]
    assert [(row["what"], row["policy"]) for row in found["rows"]] == [
        *((what, "fifo") for what in ways[0]),
        *((what, "snapkv") for what in (*ways[0], *ways[1])),
    ]
    assert [claim["bound"] for claim in found["claims"]] == [1.1, 1.3]
