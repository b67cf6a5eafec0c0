"""Text to rows: tokenizers, vocabulary, datasets, segments, batchings, neighbours."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import SHARED
from trime.data import bm25
from trime.data.batching.alternating import Alternating
from trime.data.batching.bm25 import BM25
from trime.data.batching.consecutive import Consecutive
from trime.data.batching.published import Published
from trime.data.batching.shuffled import Shuffled
from trime.data.batching.streams import Streams
from trime.data.corpus import Corpus, Split, build_corpus, smallest_type, symbol_counts
from trime.data.datasets import Dataset
from trime.data.datasets.enwik8 import Enwik8
from trime.data.datasets.folder import Folder
from trime.data.datasets.stdlib import StandardLibrary
from trime.data.datasets.wikitext import WikiText
from trime.data.module import PlannedLoader
from trime.data.neighbours import EXCLUDE, NEAR, Backend, Fast, Reference, Sparse, excluded_ranges
from trime.data.segments import Segments, allocate_tokens, collate, cut, parse_token_count
from trime.data.tokenizers import ByteNumbers, Bytes, PythonSource, Whitespace, Words
from trime.data.vocabulary import SpecialIds, Vocabulary
from trime.types import UserError


def flat(tokenizer: object, *lines: bytes) -> list[str]:
    return [token for piece in tokenizer.tokens(lines) for token in piece]  # type: ignore[attr-defined]


def built(dataset: Dataset, folder: Path) -> None:
    """The corpus of a dataset, every symbol of its training split in the vocabulary."""
    build_corpus(dataset, folder, Vocabulary.from_counts(symbol_counts(dataset), None, 1))


def test_tokenizers() -> None:
    assert flat(Whitespace(), b" = A = \n", b"\n", b"b <unk>\n") == ["=", "A", "=", "<eos>", "<eos>", "b", "<unk>", "<eos>"]
    assert flat(Words(), b"\n", b"Don't go.\n", b"\n", b" \n", b"So-so\n") == ["Don't", "go", ".", "<eos>", "So", "-", "so"]
    source = flat(PythonSource(), b"\n", b"    x1 **= 2.5e-3 -> y  # it's ok\n")
    assert source == ["x1", "**=", "2.5e-3", "->", "y", "#", "it", "'", "s", "ok", "<eos>"]
    assert flat(Bytes(), b"a\xff\n") == ["a", "\xff", "\n"]
    assert flat(ByteNumbers(), b"a\xff\nb") == ["97", "255", "<eos>", "98"]


def test_vocabulary_is_ordered_by_frequency_and_maps_the_rest_to_unk(tmp_path: Path) -> None:
    made = Vocabulary.from_counts(Counter({"b": 5, "a": 5, "c": 1, "d": 9, "<eos>": 3, "<unk>": 2}), limit=5, minimum=2)
    assert made.symbols == ["<eos>", "<unk>", "d", "a", "b"] and made.counts == [3, 3, 9, 5, 5]
    made.save(tmp_path / "v.json")
    read = Vocabulary.load(tmp_path / "v.json")
    assert read.symbols == made.symbols and read.fingerprint == made.fingerprint
    assert [read.index[s] for s in ("d", "c", "zzz")] == [2, 1, 1]
    (tmp_path / "v.json").write_text("{")
    with pytest.raises(UserError, match="prepare"):
        Vocabulary.load(tmp_path / "v.json")


def test_smallest_integer_type() -> None:
    assert [smallest_type(n).itemsize for n in (2, 256, 257, 65_536, 65_537)] == [1, 1, 2, 2, 4]


def test_corpus_is_memory_mapped_and_whole(text_folder: Path, tmp_path: Path) -> None:
    dataset = Folder(str(text_folder), Words())
    built(dataset, tmp_path)
    corpus = Corpus(tmp_path)
    text = corpus.split("train")
    assert isinstance(text.tokens, np.memmap) and text.tokens.dtype.itemsize == 1
    for number, document in enumerate(dataset.documents("train")):
        symbols = flat(Words(), *document.lines)
        ids = text.tokens[text.offsets[number] : text.offsets[number + 1]]
        assert [corpus.vocabulary.symbols[i] for i in ids] == symbols
    assert corpus.statistics["splits"]["train"]["tokens"] == len(text.tokens)
    (tmp_path / "train.bin").write_bytes(b"1234")
    with pytest.raises(UserError, match="truncated"):
        corpus.split("train")


def test_stdlib_is_real_text_split_by_name() -> None:
    whole, few = StandardLibrary(), StandardLibrary(modules=40)
    names = {split: {d.name for d in whole.documents(split)} for split in whole.splits()}
    assert sum(map(len, names.values())) > 300 and all(len(found) > 5 for found in names.values())
    assert not set.intersection(*names.values())
    for split in few.splits():
        assert {d.name for d in few.documents(split)} <= names[split]
    assert whole.fingerprint() == StandardLibrary().fingerprint() != few.fingerprint()


def test_folder_split_by_ratio_and_seed(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number}\n")
    one, other = Folder(str(tmp_path), Words(), ratio=0.1), Folder(str(tmp_path), Words(), ratio=0.1, seed=1)
    sizes = [len(one.files(split)) for split in ("train", "valid", "test")]
    assert sizes == [16, 2, 2] and one.files("valid") != other.files("valid")
    assert one.by_split == Folder(str(tmp_path), Words(), ratio=0.1).by_split


def test_wikitext_counts_and_documents(tmp_path: Path) -> None:
    place = SHARED / "data" / "wikitext-2"
    if not place.is_dir():
        pytest.skip(f"no WikiText at {place}")
    dataset = WikiText(2, str(tmp_path), str(place))
    assert dataset.splits() == ["valid", "test"]
    for split in dataset.splits():
        documents = list(dataset.documents(split))
        assert len(documents) == 60
        tokens = sum(len(flat(Whitespace(), *document.lines)) for document in documents)
        assert tokens == WikiText.published[split]


def test_wikitext_of_the_same_form_tells_why_counts_differ(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        text = " \n = One = \n \n = = Part = = \n a b <unk> \n where \n = 1 = \n \n = Two = \n \n c \n"
        (tmp_path / f"wiki.{split}.tokens").write_text(text)
    dataset = WikiText(103, str(tmp_path), str(tmp_path))
    assert [d.name for d in dataset.documents("train")] == ["One", "Two"]
    (tmp_path / "out").mkdir()
    built(dataset, tmp_path / "out")
    notes = Corpus(tmp_path / "out").statistics["notes"]
    assert len(notes) == 2 and "217,646" in notes[0] and "not the published" in notes[0]


def test_enwik8_form_is_split_90_5_5_by_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    (tmp_path / "enwik8").write_bytes(data)
    dataset = Enwik8(str(tmp_path), Bytes(), str(tmp_path))
    parts = {split: b"".join(next(dataset.documents(split)).lines) for split in dataset.splits()}
    assert parts["train"] + parts["valid"] + parts["test"] == data
    assert [len(parts[s]) for s in ("train", "valid", "test")] == [9216, 512, 512]
    (tmp_path / "out").mkdir()
    built(dataset, tmp_path / "out")
    corpus = Corpus(tmp_path / "out")
    assert corpus.statistics["characters"] and len(corpus.vocabulary) == 258
    assert "100,000,000" in corpus.statistics["notes"][0]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 17), st.integers(0, 20), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_every_token_is_scored_once_with_the_tokens_before_it(
    lengths: list[int], block: int, context: int, budget: int
) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    text = Split(np.arange(offsets[-1]) + 100, offsets)
    kept = allocate_tokens(np.array(lengths), budget)
    assert kept.sum() == min(budget, sum(lengths)) and (kept <= lengths).all()
    windows = cut(offsets, block, context, budget)
    assert windows.scored() == kept.sum()
    seen = []
    for i in range(len(windows)):
        batch = collate(text, windows, [i], SpecialIds(0, 0))
        row, length = batch.targets[0].tolist(), int(batch.length)
        assert batch.tokens[0, 1:length].tolist() == row[: length - 1]
        before = int(batch.tokens[0, 0])
        assert before == (0 if int(batch.start) == 0 else row[0] - 1), "<eos> before a document, else the token before"
        assert int((~batch.scored[0, :length]).sum()) <= context
        seen += [token for token, scored in zip(row, batch.scored[0].tolist(), strict=True) if scored]
    first = [100 + begin + i for begin, n in zip(offsets[:-1].tolist(), kept.tolist(), strict=True) for i in range(n)]
    assert seen == first


def test_padding_is_told_from_text() -> None:
    text = Split(np.arange(10) + 5, np.array([0, 7, 10]))
    batch = collate(text, cut(text.offsets, 4), [0, 1, 2], SpecialIds(0, 0))
    assert batch.length.tolist() == [4, 3, 3]
    assert batch.scored.sum() == 10 and not batch.scored[1, 3]
    assert batch.document.tolist() == [0, 0, 1] and batch.fresh.tolist() == [True, False, True]
    assert batch.start.tolist() == [0, 4, 0]


def test_budgets_of_tokens() -> None:
    assert [parse_token_count(t) for t in (None, 7, "100k", "2M", "1.5k", "12")] == [None, 7, 100_000, 2_000_000, 1500, 12]
    with pytest.raises(UserError, match="2M"):
        parse_token_count("many")


SEGMENTS = cut(np.array([0, 95, 130, 131, 400]), 10)
NEIGHBOURS = np.random.default_rng(0).permuted(np.tile(np.arange(len(SEGMENTS), dtype=np.int32), (len(SEGMENTS), 1)), axis=1)[
    :, :5
]
BATCHINGS = [Shuffled(4, 3), Consecutive(4, 4, 3), Consecutive(6, 3, 3), BM25(4, 5, 3), Streams(3, 4), Alternating(4, 2, 5, 3)]


@pytest.mark.parametrize("batching", BATCHINGS, ids=lambda b: type(b).__name__)
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_plan_uses_every_segment_once_and_is_deterministic(batching: object, epoch: int) -> None:
    plan = batching.plan(SEGMENTS, epoch, NEIGHBOURS)  # type: ignore[attr-defined]
    assert sorted(segment for batch in plan for segment in batch if segment >= 0) == list(range(len(SEGMENTS)))
    assert max(map(len, plan)) == batching.size  # type: ignore[attr-defined]
    assert plan == batching.plan(SEGMENTS, epoch, NEIGHBOURS)  # type: ignore[attr-defined]
    assert plan != batching.plan(SEGMENTS, epoch + 1, NEIGHBOURS)  # type: ignore[attr-defined]


def test_rows_of_streams_read_on() -> None:
    """The same row of the next batch has the document's next segment, or starts another one; rows end together."""
    plan = np.array(Streams(3, 0).plan(SEGMENTS, 0))
    assert plan.shape[1] == 3
    for row in plan.T:
        for a, b in pairwise(row):
            goes_on = b == a + 1 and SEGMENTS.document[a] == SEGMENTS.document[b]
            starts = SEGMENTS.start[b] == 0 and (a + 1 == len(SEGMENTS) or SEGMENTS.document[a + 1] != SEGMENTS.document[a])
            assert b < 0 or (a >= 0 and (goes_on or starts))
    lengths = np.bincount(SEGMENTS.document)
    assert len(plan) <= max(lengths.max(), -(-len(SEGMENTS) // 3) + 1)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_long_document_is_cut_into_rows(size: int) -> None:
    """Every row has its share, and a part starts anew where the row read something else before, on every epoch."""
    text = Split(np.arange(1000), np.array([0, 900, 1000]))
    segments = cut(text.offsets, 10)
    streams = Streams(size, 0)
    plans = [np.array(streams.plan(segments, epoch)) for epoch in (0, 1)]
    assert all((plan >= 0).sum() == len(segments) and len(plan) <= len(segments) / size + 11 for plan in plans)
    loader = PlannedLoader(text, segments, streams, None, len(plans[0]) + len(plans[1]), SpecialIds(0, 0))
    batches = list(loader)
    before = np.full(size, -2)
    for number, (batch, rows) in enumerate(zip(batches, np.concatenate(plans), strict=True)):
        goes_on = (rows == before + 1) & (segments.start[rows] > 0) & (number != len(plans[0]))
        assert batch.fresh[rows >= 0].tolist() == (~goes_on)[rows >= 0].tolist()
        before = rows
    loader.load_state_dict({"step": 3})
    assert all(
        torch.equal(a, b)
        for again, first in zip(loader, batches[3:], strict=True)
        for a, b in zip(again[:-1], first[:-1], strict=True)
    )


def test_a_row_without_a_segment_is_padding() -> None:
    text = Split(np.arange(400), np.array([0, 95, 130, 131, 400]))
    batch = collate(text, SEGMENTS, [-1, 3, -1], SpecialIds(0, 0))
    assert batch.length.tolist() == [0, 10, 0] and batch.fresh.tolist() == [True, False, True]
    assert batch.document.tolist() == [-1, 0, -1] and int(batch.scored.sum()) == 10 and batch.scored[1].all()


def test_alternating_batches_are_consecutive_and_of_neighbours_in_turn() -> None:
    """Neighbours of a segment are here those of the same rest by 7: no two of them follow one another."""
    count = len(SEGMENTS)
    neighbours = np.array(
        [[other for other in range(count) if other != own and other % 7 == own % 7][:5] for own in range(count)]
    )
    batches = Alternating(4, 4, 5, 0).plan(SEGMENTS, 0, neighbours)
    following = [sum(b - a == 1 for a, b in pairwise(batch)) for batch in batches]
    whole = [number for number, batch in enumerate(batches) if len(batch) == 4]
    assert sum(following[n] == 3 for n in whole if n % 2 == 0) > sum(following[n] == 3 for n in whole if n % 2)
    near = [sum((b - a) % 7 == 0 for a, b in pairwise(batch)) for batch in batches]
    assert sum(near[1::2]) > sum(near[::2])


def test_consecutive_batches_hold_runs_of_one_document() -> None:
    for batch in Consecutive(4, 4, 0).plan(SEGMENTS, 0):
        steps = [(b - a, SEGMENTS.document[b] == SEGMENTS.document[a]) for a, b in pairwise(batch)]
        broken = sum(step != (1, True) for step in steps)
        assert broken <= 2, "at most a run's end, a short run and another run's start share a batch of one run's size"


def test_loader_goes_on_where_it_stopped() -> None:
    text = Split(np.arange(400) % 200, np.array([0, 95, 130, 131, 400]))

    def loader() -> PlannedLoader:
        return PlannedLoader(text, SEGMENTS, Shuffled(7, 1), None, steps=20, special_ids=SpecialIds(0, 0))

    whole = [batch.segment.tolist() for batch in loader()]
    first, resumed = loader(), loader()
    steps = iter(first)
    begun = [next(steps).segment.tolist() for _ in range(9)]
    resumed.load_state_dict(first.state_dict())
    assert begun + [batch.segment.tolist() for batch in resumed] == whole and len(whole) == len(first) == 20


def lucene(segments: list[list[int]], query: list[int], k1: float, b: float) -> list[float]:
    """BM25 as Lucene has it: idf = log(1 + (N - df + 1/2) / (df + 1/2)), in plain loops."""
    mean = sum(map(len, segments)) / len(segments)
    scores = []
    for segment in segments:
        total = 0.0
        for term in query:
            df = sum(term in other for other in segments)
            tf = segment.count(term)
            total += math.log(1 + (len(segments) - df + 0.5) / (df + 0.5)) * tf / (tf + k1 * (1 - b + b * len(segment) / mean))
        scores.append(total)
    return scores


def drawn_segments(number: int, longest: int, words: int) -> list[np.ndarray]:
    """Words by Zipf's law; the second segment is the first again."""
    random = np.random.default_rng(1)
    segments = [random.zipf(1.4, random.integers(10, longest)) % words for _ in range(number)]
    return [segments[0], *segments[:-1]]


@pytest.mark.parametrize("backend", [Fast(), Sparse()])
def test_neighbours_are_lucenes(backend: Backend) -> None:
    segments = drawn_segments(25, 30, 50)
    backend.fit(segments)
    found = backend.nearest(list(range(25)), 5)
    lists = [segment.tolist() for segment in segments]
    for i in range(25):
        scores = lucene(lists, lists[i], 0.9, 0.4)
        best = sorted((j for j in range(25) if j != i), key=lambda j: -scores[j])[:5]
        assert i not in found[i]
        assert np.allclose([scores[j] for j in found[i]], [scores[j] for j in best], rtol=1e-4)
    assert found[0, 0] == 1 and found[1, 0] == 0


def test_fast_neighbours_are_those_of_bm25s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several blocks of queries and of segments, the last not full; by scores: ties may stand in any order."""
    from bm25s import BM25
    from bm25s.tokenization import Tokenized

    monkeypatch.setattr(bm25, "ROWS", 100)
    monkeypatch.setattr(bm25, "COLUMNS", 128)
    segments = drawn_segments(700, 200, 2000)
    fast = bm25.index_of(segments, 0.9, 0.4)
    assert 0 < fast.frequent < 1000 and len(fast.blocks) == 6
    number, score = bm25.nearest(fast, np.arange(700), 20)
    terms, ids = np.unique(np.concatenate(segments), return_inverse=True)
    lists = [part.tolist() for part in np.split(ids, np.cumsum([len(own) for own in segments])[:-1])]
    other = BM25(k1=0.9, b=0.4, method="lucene", backend="numba")
    vocabulary = {str(term): i for i, term in enumerate(terms)}
    other.index((lists, vocabulary), show_progress=False)
    asked = Tokenized(ids=lists, vocab=vocabulary)
    found, scores = other.retrieve(asked, k=21, show_progress=False)
    for i in range(700):
        without = [(s, j) for s, j in zip(scores[i], found[i], strict=True) if j != i][:20]
        np.testing.assert_allclose(score[i], [s for s, _ in without], rtol=1e-4)
        assert {j for s, j in without if s > score[i, -1] * 1.001} <= {*number[i]}
    np.testing.assert_array_equal(score, -np.sort(-score, axis=1))


def test_the_okapi_variant_is_rank_bm25s() -> None:
    segments = drawn_segments(60, 80, 100)
    fast, sparse, reference = Fast(1.5, 0.75, okapi=True), Sparse(1.5, 0.75, okapi=True), Reference()
    for backend in (fast, sparse, reference):
        backend.fit(segments)
    for i in range(60):
        scores = reference.index.get_scores(reference.ids[i])
        best = scores[reference.nearest([i], 10)[0]]
        for backend in (fast, sparse):
            np.testing.assert_allclose(scores[backend.nearest([i], 10)[0]], best, rtol=1e-4)


def test_reference_backend_agrees_on_a_clear_case_and_drops_the_query_only() -> None:
    segments = [np.array(s) for s in ([1, 2, 3], [1, 2, 3], [7, 8], [3, 9, 9], [20, 21], [22, 23], [24, 25])]
    for backend in (Fast(), Sparse(), Reference()):
        backend.fit(segments)
        found = backend.nearest([0, 1, 3], 3)
        assert found[0, 0] == 1 and found[1, 0] == 0, "a duplicate stands first, whichever comes first in the list"
        assert all(query not in row for query, row in zip([0, 1, 3], found, strict=True))


@pytest.mark.parametrize("exclude", EXCLUDE)
def test_neighbours_leave_out_what_is_excluded(exclude: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All backends find the best of what is left: segments of other documents, or none that are near copies."""
    monkeypatch.setattr(bm25, "ROWS", 7)
    monkeypatch.setattr(bm25, "COLUMNS", 16)
    segments = drawn_segments(60, 40, 300)
    document = np.arange(60) // 4
    numbers, found = list(range(60)), []
    for backend in (Fast(), Sparse()):
        backend.fit(segments)
        found.append(backend.nearest(numbers, 8, *excluded_ranges(numbers, document, exclude)))
    np.testing.assert_array_equal(*found)
    lists = [segment.tolist() for segment in segments]
    for i in range(60):
        scores = lucene(lists, lists[i], 0.9, 0.4)
        left = [j for j in range(60) if j != i and scores[j] > 0]
        if exclude == "document":
            left = [j for j in left if document[j] != document[i]]
        if exclude == "near_copies":
            left = [j for j in left if scores[j] <= NEAR * scores[i]]
        best = sorted((scores[j] for j in left), reverse=True)[:8]
        own = [j for j in found[0][i] if j >= 0]
        assert {*own} <= {*left}
        np.testing.assert_allclose([scores[j] for j in own], best, rtol=1e-4)
    assert (1 in found[0][0]) == (exclude == "none"), "the second segment is a copy of the first"


def test_a_folder_is_filled_by_tokens(tmp_path: Path) -> None:
    """Whole files: valid first, then test, then train, as many tokens as asked for at least; a suffix chooses files."""
    for number in range(12):
        (tmp_path / f"{number:02d}.py").write_text("a b c d e\n" * 2)  # 12 tokens with the ends of lines
        (tmp_path / f"{number:02d}.txt").write_text("x\n")
    wanted: dict[str, int | str] = {"train": 40, "valid": 12, "test": 13}
    found = Folder(str(tmp_path), Whitespace(), suffix=".py", tokens=wanted)
    assert [len(found.files(split)) for split in ("valid", "test", "train")] == [1, 2, 4]
    every = [path for split in ("valid", "test", "train") for path in found.files(split)]
    assert len({*every}) == 7 and all(path.suffix == ".py" for path in every)
    with pytest.raises(UserError, match=r"dataset\.tokens\.valid"):
        Folder(str(tmp_path), Whitespace(), suffix=".py", tokens=wanted | {"test": 1000}).files("train")
    with pytest.raises(UserError, match="train, valid, test"):
        Folder(str(tmp_path), Whitespace(), tokens={"valid": 3})


def test_whole_documents_are_sampled() -> None:
    """A budget of tokens takes whole documents, the same ones each time; the last is cut where the budget ends."""
    lengths = np.array([40, 7, 300, 25, 60, 1])
    for budget in (1, 50, 90, 432, 10**6):
        kept = allocate_tokens(lengths, budget, "documents")
        whole = kept == lengths
        assert kept.sum() == min(budget, lengths.sum()) and ((kept > 0) & ~whole).sum() <= 1
        assert (kept == allocate_tokens(lengths, budget, "documents")).all()
    larger = allocate_tokens(lengths, 200, "documents")
    assert (larger >= allocate_tokens(lengths, 90, "documents")).all(), "a larger budget goes on where a smaller one ended"


@pytest.mark.parametrize("order, combined", [("shuffled", 1), ("kept", 1), ("kept", 4)])
def test_published_processes_side_by_side_or_one_after_the_other(order: str, combined: int) -> None:
    """batching.joined=false: each process's part of a step is a micro-batch of its own, in the order of ranks."""
    lengths = np.array([8] * 53 + [3])
    segments = Segments(lengths * 0, lengths * 0, np.cumsum(lengths) - lengths, lengths, lengths * 0)
    settings = {"size": 12, "order": order, "seed": 1, "processes": 4, "combined": combined}
    together, apart = (Published(**settings, joined=joined).plan(segments, 2) for joined in (True, False))
    assert len(apart) == 4 * len(together) and all(len(batch) <= 3 for batch in apart)
    for step, batch in enumerate(together):
        assert batch == [segment for part in apart[4 * step : 4 * step + 4] for segment in part]
