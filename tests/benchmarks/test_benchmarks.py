"""Every benchmark runs, and its contestants compute the same; measured values are not asserted."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from benchmarks import __main__, external, objective, packing
from benchmarks.measure import Claim, alternately
from tests.helpers.decoders import save_decoder, text_of, tokenizer_of, write_texts
from tests.helpers.pretrained import save_model
from trime.token_memory.search.search import MIN_POINTS_PER_CELL

Bench = Callable[..., dict[str, Any]]
FEW = "--model tiny --tokens 300 --updates 1 --rounds 1 --window 64 --set index.k=16 segments.length=64 train.plain_share=0"


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


SIZES = {"SEGMENT": 64, "WIDTH": 32, "EXACT": 128, "TRAINED": 2, "ASKED": 2}
# By benchmark: the words of its command, what is made small, and how many rows and claims come of it.
MADE_SMALL: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "memorizing": ("--sizes 256 128 --rounds 1", {f"memorizing.{name}": of for name, of in SIZES.items()}, 6, 4),
    "packing": ("--sizes 300 40 --sizes 600 40 --queries 50 --rounds 1", {}, 4, 5),
    "mixture": (
        "--size tiny --tokens 300 --keys 2k --updates 1 --rounds 1 --outputs OUT --set index.k=16 tune.memory_size=[64]",
        {},
        6,
        4,
    ),
    "external": (
        f"--keys 1k 2k --outputs OUT {FEW}",
        {"external.kinds_of": lambda entries: [("exact", None, 1), ("faiss", "IVF16_SQ8", 16), ("cells", "Cells16", 16)]},
        8,
        2,
    ),
    "datastore": (
        f"--keys 2k --outputs OUT {FEW}",
        {"datastore.COMPRESSED": [("float16", None), ("int8", "PCA8_IVF16_SQ8")], "datastore.CELLS": "Cells16"},
        7,
        3,
    ),
    "cache": ("--layers 1 --vocabulary 50 --size 80 --decode 2 --prompt 160 --rounds 1 --policies fifo snapkv", {}, 7, 2),
    "reading": ("--layers 1 --size 80 --recall 16 --lengths 160 --threads 1 --rounds 1", {}, 5, 2),
    "own_words": ("--folder OUT", {"own_words.DOCUMENTS": {"train": 3, "valid": 3, "test": 20}}, 3, 0),
    "counts": ("--packages omegaconf --rounds 1", {}, 1, 1),
    "startup": ("--tokens 40000 --scored 500 --keys 3000 --rounds 1", {"startup.COMMANDS": {"--help": ["--help"]}}, 3, 0),
    "fit": (
        "--outputs OUT --size tiny --updates 2 --rounds 1 --set dataset.modules=40 segments.length=64",
        {"fit.EXPERIMENTS": ("vanilla", "trime_long")},
        2,
        0,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE_SMALL)
def test_a_benchmark_runs(name: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, changes, rows, claims = MADE_SMALL[name]
    for place, value in changes.items():
        monkeypatch.setattr(f"benchmarks.{place}", value)
    threads = torch.get_num_threads(), numba.get_num_threads()
    try:
        found = bench(name, *words.replace("OUT", str(tmp_path)).split())
    finally:
        torch.set_num_threads(threads[0])
        numba.set_num_threads(threads[1])
    assert len(found["rows"]) == rows and len(found["claims"]) >= claims


@pytest.mark.slow
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


@pytest.mark.parametrize("sight", objective.SIGHTS)
def test_the_direct_formulation_is_the_objective(sight: str) -> None:
    ways = objective.Implementations(1200, 16, "cpu")
    torch.testing.assert_close(ways.blockwise(sight), ways.direct(sight), rtol=1e-3, atol=1e-5)


def test_the_heads_are_the_same() -> None:
    head = objective.Head(300, 16, "cpu")
    torch.testing.assert_close(head.blockwise(), head.direct(), rtol=1e-3, atol=1e-5)


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


def test_ngrams_of_a_memory_are_counted(bench: Bench, tmp_path: Path) -> None:
    """Beside infini-gram where it is installed, with the same answers."""
    tokenizer_of(tmp_path).save_pretrained(tmp_path / "decoder")
    words = "--model", str(tmp_path / "decoder"), "--texts", str(write_texts(tmp_path / "texts", range(3))), "--queries", "40"
    row = bench("ngrams", *words)["rows"][0]
    assert row["index of"] == "text memory" and row["tokens"] > 1000 and row["µs a count"] > 0 < row["µs a next"]


def test_recall_is_measured_as_its_store_grows(bench: Bench) -> None:
    sizes = "--layers 1 --vocabulary 99 --size 64 --recall 32 --lengths 200 400 --write 2 --read 32 --rounds 1"
    found = bench("recall", *sizes.split())
    both, written = ["evicted any", "recalled 200", "recalled 400"], ["everything kept 200", "everything kept 400"]
    expected = {f"{way} {memory}" for way in ("write", "read") for memory in both} | {f"write {memory}" for memory in written}
    assert {f"{row['what']} {row['memory']} {row['tokens before']}" for row in found["rows"]} == expected
    assert all(row["stored, MB"] >= 0 and row["ms a token"] > 0 for row in found["rows"]) and len(found["claims"]) == 2


@pytest.mark.slow
def test_lines_are_completed_and_names_ranked(bench: Bench, tmp_path: Path) -> None:
    """With and without memory, and passages; the same command goes on from what is finished."""
    texts = write_texts(tmp_path / "texts", range(12))
    words = ["--model", str(save_decoder(tmp_path)), "--texts", str(texts), "--folder", str(tmp_path / "done")]
    words += ["--characters", "40000", "--places", "3", "--dtype", "float32"]
    rows = bench("completion", *words)["rows"]
    lines = [row for row in rows if row.get("places")]
    ways = [*product(("nothing", "3 passages"), ("none", "all"))]
    assert [(row["beside the text"], row["memories"]) for row in lines[:4]] == ways
    assert all(row["places"] == 3 and row["bits a byte"] > 0 for row in lines)
    assert lines[1]["bits a byte"] < lines[0]["bits a byte"], "a random model knows nothing, the memory knows the names"
    assert bench("completion", *words)["rows"] == rows


def test_caches_answer_the_same_prompts(bench: Bench, tmp_path: Path) -> None:
    """With everything kept, and with a share of the prompt; answers that are there are not made again, the others are."""
    pytest.importorskip("lm_eval", reason="the extra harness")
    decoder = save_decoder(tmp_path)
    prompts = [{"task": "niah_single_1", "prompt": text_of(seed, 12), "outputs": ["lock"], "longest": 4} for seed in range(2)]
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "prompts-decoder-400-2-128-niah_single_1.json").write_text(json.dumps(prompts))
    words = ["--model", str(decoder), "--folder", str(tmp_path / "done"), "--tokens", "400", "--prompts", "2"]
    words += ["--tasks", "niah_single_1", "--share", "0.25", "--dtype", "float32", "--ours", "Sink", "KVzip, AdaKV, whole"]
    rows = bench("duel", *words)["rows"]
    assert [row["contestant"] for row in rows] == ["all is kept", "Sink", "KVzip, AdaKV, whole"]
    full, sink, whole = rows
    assert sink["MB at most"] == sink["MB after"] < full["MB after"] and whole["MB after"] < whole["MB at most"]
    assert all(row["prompts"] == 2 and 0 <= row["right"] <= 1 for row in rows)
    for file in (tmp_path / "done").glob("answers-*.json"):
        answers = json.loads(file.read_text())
        kept = answers[:1] if "Sink" in file.name else answers  # as after a kill
        file.write_text(json.dumps([answer | {"text": "a lock"} for answer in kept]))
    assert [row["right"] for row in bench("duel", *words)["rows"]] == [1, 0.5, 1]
