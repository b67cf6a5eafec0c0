"""Weights without texts of the user's own: fitted to stored documents that are hidden while they are read, or the package's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.decoders import write_texts
from trime.text_memory import index
from trime.text_memory.held_out import SLICE, from_stored
from trime.text_memory.index import KeyIndex
from trime.text_memory.memory import WEIGHTS, TextMemory


@pytest.fixture(scope="module")
def ten(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> TextMemory:
    """A memory of ten documents that was never fitted."""
    folder = tmp_path_factory.mktemp("ten")
    memory = TextMemory(model, tokenizer, folder / "memory", window=100, overlap=28)
    memory.add(write_texts(folder / "texts", range(10)))
    return memory


def test_a_hidden_document_might_as_well_not_be_stored(ten: TextMemory, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Counts and neighbours are those of a memory of the other nine."""
    chosen = from_stored(ten.decoder, ten._experts(), seed=0)
    assert len({text.name for text in chosen}) == len(chosen) == 10  # as small as they are
    for text in chosen[:2]:
        other = TextMemory(model, tokenizer, tmp_path / Path(text.name).stem, window=100, overlap=28)
        other.add([name for name in ten.names if name != text.name])
        hidden, without = (ten._read(each).masses for each in (text, text._replace(experts=other._experts())))
        assert Path(text.name).read_text().endswith(text.content)
        assert torch.equal(hidden.total.isfinite(), without.total.isfinite())
        torch.testing.assert_close(hidden.target, without.target, atol=2e-3, rtol=1e-4)  # keys are kept in half precision
        torch.testing.assert_close(hidden.total, without.total, atol=2e-3, rtol=1e-4)


def test_a_fit_without_texts_is_worth_that_with_some(ten: TextMemory, tmp_path: Path) -> None:
    """It is reported as any fit is, and its weights serve on other texts."""
    evaluation = ten.fit()
    assert evaluation.documents == 10 and evaluation.tokens > 2000
    assert evaluation.perplexity["all"] < evaluation.perplexity["model"] / 2
    other = write_texts(tmp_path / "other", range(30, 33))
    fitted_to_stored = ten.evaluate(other).perplexity["all"]
    ten.fit(write_texts(tmp_path / "held_out", range(20, 26)))
    assert fitted_to_stored < 1.1 * ten.evaluate(other).perplexity["all"]
    (ten.folder / WEIGHTS).unlink()


def test_a_book_is_known_by_its_other_chapters(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Of a single long document some slices are read, and each is hidden by itself."""
    memory = TextMemory(model, tokenizer, tmp_path / "memory", knn=False)
    (tmp_path / "book.txt").write_text("".join(f"{number} {number**2} chapter\n" for number in range(6000)))
    memory.add(tmp_path / "book.txt")
    chosen = from_stored(memory.decoder, memory._experts(), seed=0)
    assert [len(text.tokens) for text in chosen] == [SLICE] * 3
    places = [text.experts.hidden.places for text in chosen if text.experts.hidden]
    assert len({*places}) == 3 and all(last - first == SLICE for first, last in places)


def test_a_memory_serves_before_any_fit(ten: TextMemory, caplog: pytest.LogCaptureFixture) -> None:
    """The package's weights do better than the model by itself, with and without neighbours, and are named once."""
    text = Path(ten.names[0]).read_text()[:400]
    alone = ten.decoder.read(torch.from_numpy(ten.decoder.encode(text)), logits=True)
    tokens = ten.decoder.encode(text)
    own = torch.cat([read.log_probability for read in alone if read.log_probability is not None])
    of_model = own.gather(1, torch.from_numpy(tokens[1:])[:, None]).mean()
    assert ten.score(text).mean() > of_model + 1
    assert ten.generate(text[:100], 8)
    assert sum("fitted on other texts" in record.message for record in caplog.records) <= 1


def test_hidden_keys_are_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither by the index of many keys nor among few that are all compared."""
    key = np.random.default_rng(0).normal(size=(3000, 8)).astype(np.float16)
    key /= np.linalg.norm(key.astype(np.float32), axis=1, keepdims=True)
    first = np.array([0])
    query = torch.from_numpy(key[500:510].astype(np.float32))
    for exact in (2**15, 1000):
        monkeypatch.setattr(index, "EXACT", exact)
        folder = tmp_path / str(exact)
        folder.mkdir()
        KeyIndex.build(folder, key, first)
        keys = KeyIndex(folder, key, first)
        assert (index.nearest([keys], query, 4, [(0, 0)])[2][:, 0] == torch.arange(500, 510)).all()
        place = index.nearest([keys], query, 4, [(400, 600)])[2]
        assert not ((place >= 400) & (place < 600)).any()


@pytest.mark.parametrize("queries", [3, 30])
@pytest.mark.parametrize("edges", [[0, 1000, 1500, 4000], [0, 3000, 3020, 4000]])
def test_several_indices_are_searched_as_one(
    edges: list[int], queries: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether all keys are compared, or those of the first index are searched by FAISS, which visits all cells here."""
    draw = np.random.default_rng(2)
    key = draw.normal(size=(4000, 32))
    key = (key / np.linalg.norm(key, axis=1, keepdims=True)).astype(np.float16)
    query = torch.from_numpy(key[draw.permutation(4000)[:queries]].astype(np.float32) + 0.05)
    whole = KeyIndex(tmp_path, key, np.array(edges[:-1]))
    score, number, place = index.nearest([whole], query, 40, [(0, 0)])
    assert not number.any()
    monkeypatch.setattr(index, "EXACT", 900)
    for has_faiss in (False, True):
        parts = []
        for first, last in pairwise(edges):
            folder = tmp_path / f"{has_faiss}-{first}"
            folder.mkdir()
            if has_faiss and not first:
                KeyIndex.build(folder, key[first:last], np.array([0]))
            parts.append(KeyIndex(folder, key[first:last], np.array([0])))
        assert has_faiss == (parts[0].index is not None)
        score_of_parts, number, place_in_part = index.nearest(parts, query, 40, [(0, 0)] * 3)
        if not has_faiss:  # which compares bytes
            torch.testing.assert_close(score_of_parts, score, rtol=0, atol=1e-6)
        row = 10**6 * torch.arange(queries)[:, None]
        same = torch.isin(torch.tensor(edges)[number] + place_in_part + row, place + row)
        assert same.float().mean() > (0.9 if has_faiss else 0.99)


def test_copied_runs_name_their_file_and_line(fitted: TextMemory, texts: Path) -> None:
    """A run ends where the text goes on otherwise; all of its tokens share it."""
    lines = (texts / "stored" / "2.py").read_text().splitlines(keepends=True)
    ids = fitted.decoder.encode("    def zzz():\n" + "".join(lines[6:10]) + "    zzz = 9\n")
    (row,) = fitted.explain(torch.from_numpy(ids))
    longest = max((token.run for token in row if token.run), key=lambda run: run.tokens)
    copied = "".join(token.text for token in row if token.run is longest)
    assert "".join(lines[7:10]) in copied and copied in "".join(lines)
    assert Path(longest.source.name).name == "2.py" and lines[longest.source.line - 1].strip() in "".join(lines[5:8])
    assert sum(token.run is longest for token in row) == longest.tokens and row[2].run is None


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_keys_as_bytes_lose_no_neighbour(spread: float, tmp_path: Path) -> None:
    """A single query finds what a comparison with all keys finds, whatever the keys' largest numbers are; hidden ones never."""
    draw = np.random.default_rng(1)
    key = draw.normal(size=(5000, 48)) * np.exp(spread * draw.normal(size=(5000, 48)))
    key[3000:4000] = key[:1000] + 1e-3 * draw.normal(size=(1000, 48))  # many that are nearly equal
    key = (key / np.linalg.norm(key, axis=1, keepdims=True)).astype(np.float16)
    keys, first = KeyIndex(tmp_path, key, np.array([0, 2500])), [0, 2500]
    query = torch.from_numpy(key[:60].astype(np.float32)) + 0.01 * torch.randn(60, 48)
    for hidden in ((0, 0), (100, 4900), (1, 4990)):
        score = query @ torch.from_numpy(key.astype(np.float32)).T
        score[:, first] = score[:, slice(*hidden)] = -torch.inf
        left = int((score[0] > -torch.inf).sum())
        expected = index.steady_topk(score, min(64, left))
        for row in range(60):
            similarity, _, place = index.nearest([keys], query[row : row + 1], 64, [hidden])
            assert similarity.shape == (1, min(64, left)) and (score[row, place[0]] - similarity[0]).abs().max() < 1e-6
            # Which of two equal ones comes first is a matter of rounding.
            torch.testing.assert_close(similarity[0], score[row, expected[row]], rtol=0, atol=2 * index.EQUAL)
