"""From text to batches: tokenizers, vocabulary, datasets, segments, batching policies, neighbours."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import SHARED
from trime import BM25Neighbours
from trime.data import bm25
from trime.data.batching.policies import BM25, Alternating, Consecutive, Shuffled, Streams
from trime.data.batching.published import Published
from trime.data.corpus import Corpus, Split, build_corpus, symbol_counts, training_vocabulary
from trime.data.datasets import Dataset
from trime.data.datasets.base import SPLITS
from trime.data.datasets.enwik8 import Enwik8
from trime.data.datasets.folder import Folder
from trime.data.datasets.stdlib import StandardLibrary
from trime.data.datasets.wikitext import WikiText
from trime.data.module import PlannedLoader, WindowLoader
from trime.data.neighbours import NEAR, Exclude, RankBM25, excluded_ranges
from trime.data.segments import Segments, allocate_tokens, collate, cut, cut_lines, parse_token_count
from trime.data.tokenizers import ByteNumbers, Bytes, PythonSource, Whitespace, Words
from trime.data.vocabulary import SpecialIds, Vocabulary
from trime.errors import UserError


def tokenize(tokenizer: object, *lines: bytes) -> list[str]:
    """Return the symbols of some lines."""
    return [token for piece in tokenizer.tokens(lines) for token in piece]  # type: ignore[attr-defined]


def build(dataset: Dataset, folder: Path) -> None:
    """Build the corpus of a dataset, with every symbol of its training split in the vocabulary."""
    build_corpus(dataset, folder, Vocabulary.from_counts(symbol_counts(dataset), None, 1))


def test_tokenizers() -> None:
    assert tokenize(Whitespace(), b" = A = \n", b"\n", b"b <unk>\n") == ["=", "A", "=", "<eos>", "<eos>", "b", "<unk>", "<eos>"]
    assert tokenize(Words(), b"\n", b"Don't go.\n", b"\n", b" \n", b"So-so\n") == ["Don't", "go", ".", "<eos>", "So", "-", "so"]
    source = tokenize(PythonSource(), b"\n", b"    x1 **= 2.5e-3 -> y  # it's ok\n")
    assert source == ["x1", "**=", "2.5e-3", "->", "y", "#", "it", "'", "s", "ok", "<eos>"]
    assert tokenize(Bytes(), b"a\xff\n") == ["a", "\xff", "\n"]
    assert tokenize(ByteNumbers(), b"a\xff\nb") == ["97", "255", "<eos>", "98"]


@pytest.mark.parametrize(
    "text", ["मैं हिन्दी में लिखता हूँ", "தமிழ் மொழி தமிழர்களின்", unicodedata.normalize("NFD", "élève à été"), "می‌خواهم بروم"]
)
def test_marks_belong_to_their_letters(text: str) -> None:
    """Vowel signs, accents of their own, and what joins letters: a word is one, in prose and in a program's comments."""
    assert tokenize(Words(), text.encode()) == text.split()
    assert tokenize(PythonSource(), text.encode()) == [*text.split(), "<eos>"]


def test_vocabulary_is_ordered_by_frequency_and_maps_the_rest_to_unk(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_counts(Counter({"b": 5, "a": 5, "c": 1, "d": 9, "<eos>": 3, "<unk>": 2}), limit=5, minimum=2)
    assert vocabulary.symbols == ["<eos>", "<unk>", "d", "a", "b"] and vocabulary.counts == [3, 3, 9, 5, 5]
    vocabulary.save(tmp_path / "v.json")
    loaded = Vocabulary.load(tmp_path / "v.json")
    assert loaded.symbols == vocabulary.symbols and loaded.fingerprint == vocabulary.fingerprint
    assert [loaded.index[s] for s in ("d", "c", "zzz")] == [2, 1, 1]
    (tmp_path / "v.json").write_text("{")
    with pytest.raises(UserError, match="prepare"):
        Vocabulary.load(tmp_path / "v.json")


def test_corpus_is_memory_mapped_and_whole(text_folder: Path, tmp_path: Path) -> None:
    dataset = Folder(str(text_folder), Words())
    build(dataset, tmp_path)
    corpus = Corpus(tmp_path)
    text = corpus.split("train")
    assert isinstance(text.tokens, np.memmap) and text.tokens.dtype.itemsize == 1
    for number, document in enumerate(dataset.documents("train")):
        symbols = tokenize(Words(), *document.lines)
        ids = text.tokens[text.offsets[number] : text.offsets[number + 1]]
        assert [corpus.vocabulary.symbols[i] for i in ids] == symbols
    assert corpus.statistics["splits"]["train"]["tokens"] == len(text.tokens)
    (tmp_path / "train.bin").write_bytes(b"1234")
    with pytest.raises(UserError, match="truncated"):
        corpus.split("train")


def test_stdlib_is_real_text_split_by_name() -> None:
    full, limited = StandardLibrary(), StandardLibrary(modules=40)
    names = {split: {d.name for d in full.documents(split)} for split in full.splits()}
    assert sum(map(len, names.values())) > 300 and all(len(documents) > 5 for documents in names.values())
    assert not set.intersection(*names.values())
    for split in limited.splits():
        assert {d.name for d in limited.documents(split)} <= names[split]
    assert full.fingerprint() == StandardLibrary().fingerprint() != limited.fingerprint()


def test_no_document_of_stdlib_is_a_near_copy_of_an_earlier_one() -> None:
    """The rule, written again with sets: a quarter of a document's words at most lies in runs of 12 that an earlier one has."""
    dataset, seen, dropped, kept = StandardLibrary(), set[tuple[str, ...]](), 0, dict.fromkeys(SPLITS, 0)
    for split in ("test", "valid", "train"):
        names = {document.name for document in dataset.kept_documents(split)}
        for document in dataset.documents(split):
            words = re.findall(r"\w+", b"".join(document.lines).decode("utf-8", "replace"))
            words += [""] * (12 - len(words))
            runs = [tuple(words[place : place + 12]) for place in range(len(words) - 11)]
            copied = {place + offset for place, run in enumerate(runs) if run in seen for offset in range(12)}
            assert (document.name in names) == (len(copied) <= 0.25 * len(words)), document.name
            if document.name in names:
                seen.update(runs)
                kept[split] += 1
            else:
                dropped += 1
    assert kept["valid"] >= 30 and kept["test"] >= 30 and dropped > 50
    assert f"{dropped:,} near copies left out" in dataset.notes()[1]
    everything = StandardLibrary(copies="say")
    assert len(everything.notes()) == 1
    assert sum(1 for split in SPLITS for _ in everything.kept_documents(split)) > sum(kept.values())


def test_near_copies_of_own_text_are_dropped_where_training_text_repeats_test(tmp_path: Path) -> None:
    story = " ".join(f"word{number}" for number in range(60))
    texts = {"train/a": story, "train/b": "short text", "train/c": " ".join(f"other{n}" for n in range(60))}
    texts |= {"valid/v": "short text", "test/t": story + " and an end"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(text + "\n")
    folder = Folder(str(tmp_path), Words(), copies="drop")
    kept = [document.name for split in SPLITS for document in folder.kept_documents(split)]
    assert kept == ["train/c.txt", "valid/v.txt", "test/t.txt"]
    assert "2 near copies left out" in folder.notes()[1] and folder.size("train") == len(texts["train/c"]) + 1
    (tmp_path / "train" / "c.txt").unlink()
    folder = Folder(str(tmp_path), Words(), copies="drop")
    with pytest.raises(UserError, match="train holds near copies of other documents only"):
        [*folder.kept_documents("train")]
    with pytest.raises(UserError, match="choose one of say, drop"):
        Folder(str(tmp_path), Words(), copies="remove")


def test_folder_split_by_ratio_and_seed(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number}\n")
    one, other = Folder(str(tmp_path), Words(), ratio=0.1), Folder(str(tmp_path), Words(), ratio=0.1, seed=1)
    sizes = [len(one.files(split)) for split in ("train", "valid", "test")]
    assert sizes == [16, 2, 2] and one.files("valid") != other.files("valid")
    assert one.layout == Folder(str(tmp_path), Words(), ratio=0.1).layout


def test_valid_may_be_called_dev(tmp_path: Path) -> None:
    for name in ("train", "dev", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text(name)
    with pytest.raises(UserError, match=r"both dev\.txt and valid\.txt"):
        Folder(str(tmp_path), Words()).files("valid")
    (tmp_path / "valid.txt").unlink()
    for name in ("small.train.txt", "small.test.txt"):
        (tmp_path / name).write_text(name)
    assert [file.name for file in Folder(str(tmp_path), Words()).files("train")] == ["train.txt"], "the plain name counts"


@pytest.mark.parametrize(
    "names",
    [
        {"train": ["wiki.train.tokens"], "valid": ["wiki.valid.tokens"], "test": ["wiki.test.tokens"]},
        {"train": ["news-2024_train.txt"], "valid": ["news-2024_dev.txt"], "test": ["news-2024_test.txt.gz"]},
        {"train": ["train.csv"], "valid": ["dev.csv"], "test": ["test.csv"]},
        {"train": ["train_clean.txt"], "valid": ["valid_clean.txt"], "test": []},
        {"train": ["qa1_train.txt", "qa2_train.txt"], "valid": [], "test": ["qa1_test.txt", "qa2_test.txt"]},
        {"train": [f"train-0000{n}-of-00002.txt" for n in range(2)], "valid": ["validation-00000-of-00001.txt"], "test": []},
    ],
)
def test_files_may_be_named_as_data_is_published(names: dict[str, list[str]], tmp_path: Path) -> None:
    """A name and a part's number may stand beside the split's; a readme beside all is none of the text."""
    data = tmp_path / "data"
    data.mkdir()
    for file in (*(name for of_split in names.values() for name in of_split), "README.md"):
        (data / file).write_text(file)
    folder = Folder(str(data), Words())
    assert {split: [path.name for path in folder.files(split)] for split in SPLITS} == names
    (tmp_path / "README.md").write_text("what it is")
    with pytest.raises(UserError, match=f"set dataset.path={data}"):
        Folder(str(tmp_path), Words()).files("train")
    (data / names["train"][-1]).unlink()
    if "of-00002" in names["train"][-1]:
        for copy in (None, "train-00004-of-00002.txt", "train-00000-of-00003.txt"):
            if copy:
                (data / copy).write_text(copy)
            with pytest.raises(UserError, match=r"of the 2 parts of train|has both train-00000-of-00002\.txt and"):
                Folder(str(data), Words()).files("train")


def test_names_that_are_not_of_splits(tmp_path: Path) -> None:
    """Of other splits too, and with most of the text, or they are names of documents; rows in JSON are told from text."""
    for name in ("how_to_test.md", "train-1.txt", "b.py", "trained.md", "run_train.py", "run_test.py"):
        (tmp_path / name).write_text(name * (100 if name == "b.py" else 1))
    assert "6 text files, split at random" in Folder(str(tmp_path), Words()).notes()[0]
    (tmp_path / "b.py").unlink()
    for name in ("train.json", "test.json"):
        (tmp_path / name).write_text('[{"text": "a"}]' * 100)
    with pytest.raises(UserError, match="both run_train.py and train.json|as a line of train.jsonl".replace(".", r"\.")):
        Folder(str(tmp_path), Words()).files("train")


def test_bytes_that_train_lacks_are_known(text_folder: Path) -> None:
    vocabulary = training_vocabulary(Folder(str(text_folder), Bytes()))
    assert len(vocabulary) == 258 and len({vocabulary.index[chr(byte)] for byte in range(256)}) == 256


@pytest.mark.parametrize("ratio", [20, 0.5, 0, -0.1, "0.1"])
def test_a_ratio_leaves_train_something(ratio: object, text_folder: Path) -> None:
    with pytest.raises(UserError, match=r"dataset\.ratio"):
        Folder(str(text_folder), Words(), ratio=ratio)  # type: ignore[arg-type]


def test_wikitext_counts_and_documents(tmp_path: Path) -> None:
    place = SHARED / "data" / "wikitext-2"
    if not place.is_dir():
        pytest.skip(f"no WikiText at {place}")
    dataset = WikiText(2, str(tmp_path), str(place))
    assert dataset.splits() == ["valid", "test"]
    for split in dataset.splits():
        documents = list(dataset.documents(split))
        assert len(documents) == 60
        tokens = sum(len(tokenize(Whitespace(), *document.lines)) for document in documents)
        assert tokens == WikiText.published[split]


def test_wikitext_with_other_line_ends_has_the_same_documents(tmp_path: Path) -> None:
    text = " \n = Title A = \n \n some text \n \n = Title B = \n \n more text \n"
    (tmp_path / "train.txt").write_bytes(text.replace("\n", "\r\n").encode())
    assert [document.name for document in WikiText(103, "unused", str(tmp_path)).documents("train")] == ["Title A", "Title B"]


def test_enwik8_form_is_split_90_5_5_by_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    (tmp_path / "enwik8").write_bytes(data)
    dataset = Enwik8(str(tmp_path), Bytes(), str(tmp_path))
    parts = {split: b"".join(next(dataset.documents(split)).lines) for split in dataset.splits()}
    assert parts["train"] + parts["valid"] + parts["test"] == data
    assert [len(parts[s]) for s in ("train", "valid", "test")] == [9216, 512, 512]
    (tmp_path / "out").mkdir()
    build(dataset, tmp_path / "out")
    corpus = Corpus(tmp_path / "out")
    assert corpus.statistics["characters"] and len(corpus.vocabulary) == 258
    assert "100,000,000" in corpus.statistics["notes"][0]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 17), st.integers(0, 20), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_every_token_is_scored_once(lengths: list[int], block: int, context: int, budget: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    text = Split(np.arange(offsets[-1]) + 100, offsets)
    allocated = allocate_tokens(np.array(lengths), budget)
    assert allocated.sum() == min(budget, sum(lengths)) and (allocated <= lengths).all()
    windows = cut(offsets, block, context, budget)
    assert windows.scored() == allocated.sum()
    scored_tokens = []
    for i in range(len(windows)):
        batch = collate(text, windows, [i], SpecialIds(0, 0))
        row, length = batch.targets[0].tolist(), int(batch.length)
        assert batch.tokens[0, 1:length].tolist() == row[: length - 1]
        before = int(batch.tokens[0, 0])
        assert before == (0 if int(batch.start) == 0 else row[0] - 1), "<eos> before a document, else the token before"
        assert int((~batch.scored[0, :length]).sum()) <= context
        scored_tokens += [token for token, scored in zip(row, batch.scored[0].tolist(), strict=True) if scored]
    expected = [100 + begin + i for begin, n in zip(offsets[:-1].tolist(), allocated.tolist(), strict=True) for i in range(n)]
    assert scored_tokens == expected


def test_padding_is_masked() -> None:
    """At the end of short rows, and in rows without a segment."""
    text = Split(np.arange(10) + 5, np.array([0, 7, 10]))
    batch = collate(text, cut(text.offsets, 4), [0, 1, 2, -1], SpecialIds(0, 0))
    assert batch.length.tolist() == [4, 3, 3, 0]
    assert batch.scored.sum() == 10 and not batch.scored[1, 3] and batch.scored[0].all()
    assert batch.document.tolist() == [0, 0, 1, -1] and batch.fresh.tolist() == [True, False, True, True]
    assert batch.start.tolist()[:3] == [0, 4, 0]


def test_budgets_of_tokens() -> None:
    assert [parse_token_count(t) for t in (None, 7, "100k", "2M", "1.5k", "12")] == [None, 7, 100_000, 2_000_000, 1500, 12]
    with pytest.raises(UserError, match="2M"):
        parse_token_count("many")


SEGMENTS = cut(np.array([0, 95, 130, 131, 400]), 10)
EVERY = np.tile(np.arange(len(SEGMENTS), dtype=np.int32), (len(SEGMENTS), 1))
NEIGHBOURS = np.random.default_rng(0).permuted(EVERY, axis=1)[:, :5]
BATCHINGS = [Shuffled(4, 3), Consecutive(4, 4, 3), Consecutive(6, 3, 3), BM25(4, 5, 3), Streams(3, 4), Alternating(4, 2, 5, 3)]


@pytest.mark.parametrize("batching", BATCHINGS, ids=lambda b: type(b).__name__)
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_plan_uses_every_segment_once_and_is_deterministic(batching: object, epoch: int) -> None:
    plan = batching.plan(SEGMENTS, epoch, NEIGHBOURS)  # type: ignore[attr-defined]
    assert sorted(segment for batch in plan for segment in batch if segment >= 0) == list(range(len(SEGMENTS)))
    assert max(map(len, plan)) == batching.size  # type: ignore[attr-defined]
    assert plan == batching.plan(SEGMENTS, epoch, NEIGHBOURS)  # type: ignore[attr-defined]
    assert plan != batching.plan(SEGMENTS, epoch + 1, NEIGHBOURS)  # type: ignore[attr-defined]


def test_rows_of_streams_are_contiguous() -> None:
    """A row of the next batch continues the document of the same row, or starts another one; rows end together."""
    plan = np.array(Streams(3, 0).plan(SEGMENTS, 0))
    assert plan.shape[1] == 3
    for row in plan.T:
        for a, b in pairwise(row):
            continues = b == a + 1 and SEGMENTS.document[a] == SEGMENTS.document[b]
            starts = SEGMENTS.start[b] == 0 and (a + 1 == len(SEGMENTS) or SEGMENTS.document[a + 1] != SEGMENTS.document[a])
            assert b < 0 or (a >= 0 and (continues or starts))
    lengths = np.bincount(SEGMENTS.document)
    assert len(plan) <= max(lengths.max(), -(-len(SEGMENTS) // 3) + 1)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_long_document_is_split_over_rows(size: int) -> None:
    """Every row has its share, and a part is fresh where the row read something else before, in every epoch."""
    text = Split(np.arange(1000), np.array([0, 900, 1000]))
    segments = cut(text.offsets, 10)
    streams = Streams(size, 0)
    plans = [np.array(streams.plan(segments, epoch)) for epoch in (0, 1)]
    assert all((plan >= 0).sum() == len(segments) and len(plan) <= len(segments) / size + 11 for plan in plans)
    batches = list(PlannedLoader(text, segments, streams, None, len(plans[0]) + len(plans[1]), SpecialIds(0, 0)))
    before = np.full(size, -2)
    for number, (batch, rows) in enumerate(zip(batches, np.concatenate(plans), strict=True)):
        continues = (rows == before + 1) & (segments.start[rows] > 0) & (number != len(plans[0]))
        assert batch.fresh[rows >= 0].tolist() == (~continues)[rows >= 0].tolist()
        before = rows


def test_alternating_batches_are_consecutive_and_of_neighbours_in_turn() -> None:
    """The neighbours of a segment are here congruent modulo 7, so that no two of them are consecutive."""
    count = len(SEGMENTS)
    congruent = [[other for other in range(number % 7, count, 7) if other != number] for number in range(count)]
    neighbours = np.array([others[:5] for others in congruent])
    batches = Alternating(4, 4, 5, 0).plan(SEGMENTS, 0, neighbours)
    following = [sum(b - a == 1 for a, b in pairwise(batch)) for batch in batches]
    full = [number for number, batch in enumerate(batches) if len(batch) == 4]
    assert sum(following[n] == 3 for n in full if n % 2 == 0) > sum(following[n] == 3 for n in full if n % 2)
    near = [sum((b - a) % 7 == 0 for a, b in pairwise(batch)) for batch in batches]
    assert sum(near[1::2]) > sum(near[::2])


def test_consecutive_batches_hold_runs_of_one_document() -> None:
    for batch in Consecutive(4, 4, 0).plan(SEGMENTS, 0):
        steps = [(b - a, SEGMENTS.document[b] == SEGMENTS.document[a]) for a, b in pairwise(batch)]
        broken = sum(step != (1, True) for step in steps)
        assert broken <= 2, "at most a run's end, a short run and another run's start share a batch of one run's size"


def test_loader_resumes_where_it_stopped() -> None:
    text = Split(np.arange(400) % 200, np.array([0, 95, 130, 131, 400]))

    def loader() -> PlannedLoader:
        return PlannedLoader(text, SEGMENTS, Shuffled(7, 1), None, steps=20, special_ids=SpecialIds(0, 0))

    uninterrupted = [batch.segment.tolist() for batch in loader()]
    first, resumed = loader(), loader()
    steps = iter(first)
    before = [next(steps).segment.tolist() for _ in range(9)]
    resumed.load_state_dict(first.state_dict())
    assert before + [batch.segment.tolist() for batch in resumed] == uninterrupted
    assert len(uninterrupted) == len(first) == 20


def lucene_scores(segments: list[list[int]], query: list[int], k1: float, b: float) -> list[float]:
    """Return Lucene's BM25 scores, idf = log(1 + (N - df + 1/2) / (df + 1/2)), computed in plain loops."""
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


def random_segments(number: int, longest: int, words: int) -> list[np.ndarray]:
    """Draw segments of words by Zipf's law; the second segment is a copy of the first."""
    random = np.random.default_rng(1)
    segments = [random.zipf(1.4, random.integers(10, longest)) % words for _ in range(number)]
    return [segments[0], *segments[:-1]]


def test_fast_neighbours_are_those_of_bm25s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare by scores, since ties may be in any order, over several blocks, the last not full."""
    from bm25s import BM25
    from bm25s.tokenization import Tokenized

    monkeypatch.setattr(bm25, "ROWS", 100)
    monkeypatch.setattr(bm25, "COLUMNS", 128)
    segments = random_segments(700, 200, 2000)
    fast = bm25.index_of(segments, 0.9, 0.4)
    assert 0 < fast.frequent < 1000 and len(fast.blocks) == 6
    number, score = bm25.nearest(fast, np.arange(700), 20)
    terms, ids = np.unique(np.concatenate(segments), return_inverse=True)
    lists = [part.tolist() for part in np.split(ids, np.cumsum([len(segment) for segment in segments])[:-1])]
    other = BM25(k1=0.9, b=0.4, method="lucene", backend="numba")
    vocabulary = {str(term): i for i, term in enumerate(terms)}
    other.index((lists, vocabulary), show_progress=False)
    queries = Tokenized(ids=lists, vocab=vocabulary)
    retrieved, scores = other.retrieve(queries, k=21, show_progress=False)
    for i in range(700):
        without = [(s, j) for s, j in zip(scores[i], retrieved[i], strict=True) if j != i][:20]
        np.testing.assert_allclose(score[i], [s for s, _ in without], rtol=1e-4)
        assert {j for s, j in without if s > score[i, -1] * 1.001} <= {*number[i]}
    np.testing.assert_array_equal(score, -np.sort(-score, axis=1))


def test_the_last_segments_may_have_no_terms() -> None:
    """As those of ``<eos>`` alone, or of stop words."""
    segments = [np.array(terms, dtype=np.int64) for terms in ([1, 2, 3], [2, 3, 4], [], [1, 2, 9], [])]
    fast, reference = BM25Neighbours(), RankBM25()
    fast.fit(segments)
    reference.fit(segments)
    found = fast.nearest([*range(5)], 2).tolist()
    assert found == reference.nearest([*range(5)], 2).tolist() and found[4] == [-1, -1]


@pytest.mark.parametrize("exclude", get_args(Exclude))
def test_neighbours_leave_out_what_is_excluded(exclude: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best remaining segments are found: of other documents, or without near copies."""
    monkeypatch.setattr(bm25, "ROWS", 7)
    monkeypatch.setattr(bm25, "COLUMNS", 16)
    segments = random_segments(60, 40, 300)
    document = np.arange(60) // 4
    numbers, backend = list(range(60)), BM25Neighbours()
    backend.fit(segments)
    found = backend.nearest(numbers, 8, *excluded_ranges(numbers, document, exclude))
    lists = [segment.tolist() for segment in segments]
    for i in range(60):
        scores = lucene_scores(lists, lists[i], 0.9, 0.4)
        candidates = [j for j in range(60) if j != i and scores[j] > 0]
        if exclude == "document":
            candidates = [j for j in candidates if document[j] != document[i]]
        if exclude == "near_copies":
            candidates = [j for j in candidates if scores[j] <= NEAR * scores[i]]
        best = sorted((scores[j] for j in candidates), reverse=True)[:8]
        neighbours = [j for j in found[i] if j >= 0]
        assert {*neighbours} <= {*candidates}
        np.testing.assert_allclose([scores[j] for j in neighbours], best, rtol=1e-4)
    assert (1 in found[0]) == (exclude == "none"), "the second segment is a copy of the first"


def test_a_folder_is_split_by_tokens(tmp_path: Path) -> None:
    """Valid, test and train, in this order, take whole files up to their numbers of tokens; the suffix selects files."""
    for number in range(12):
        (tmp_path / f"{number:02d}.py").write_text("a b c d e\n" * 2)  # 12 tokens with the ends of lines
        (tmp_path / f"{number:02d}.txt").write_text("x\n")
    tokens: dict[str, int | str] = {"train": 40, "valid": 12, "test": 13}
    folder = Folder(str(tmp_path), Whitespace(), suffix=".py", tokens=tokens)
    assert [len(folder.files(split)) for split in ("valid", "test", "train")] == [1, 2, 4]
    paths = [path for split in ("valid", "test", "train") for path in folder.files(split)]
    assert len({*paths}) == 7 and all(path.suffix == ".py" for path in paths)
    with pytest.raises(UserError, match=r"dataset\.tokens\.valid"):
        Folder(str(tmp_path), Whitespace(), suffix=".py", tokens=tokens | {"test": 1000}).files("train")
    with pytest.raises(UserError, match="train, valid, test"):
        Folder(str(tmp_path), Whitespace(), tokens={"valid": 3})


def test_whole_documents_are_sampled() -> None:
    """A budget takes the same whole documents each time; the last one is cut where the budget ends."""
    lengths = np.array([40, 7, 300, 25, 60, 1])
    for budget in (300, 310, 350, 432, 10**6):
        allocated = allocate_tokens(lengths, budget, "documents")
        complete = allocated == lengths
        assert allocated.sum() == min(budget, lengths.sum()) and ((allocated > 0) & ~complete).sum() <= 1
        assert (allocated == allocate_tokens(lengths, budget, "documents")).all()
    larger = allocate_tokens(lengths, 400, "documents")
    assert (larger >= allocate_tokens(lengths, 300, "documents")).all(), "a larger budget continues where a smaller one ended"


LONGER = [[5000, 4000, 6000, 3000, 7000], [5000, 100, 6000], [5000], [50, 5000], [5000, 5001], [10**6, 10, 20, 30]]


@pytest.mark.parametrize("lengths", LONGER, ids=str)
def test_documents_longer_than_the_budget_are_scored_in_their_middle(lengths: list[int]) -> None:
    """The whole budget is spent, on several documents where there are several, and once on each token."""
    offsets, budget = np.concatenate([[0], np.cumsum(lengths)]), 1000
    text = Split(np.arange(offsets[-1]), offsets)
    windows = cut(offsets, 64, 32, budget, "documents")
    by_lines = cut_lines(text, offsets, -1, 64, 32, budget, "documents")
    for found in (windows, by_lines):
        first = found.document_offset + found.start + found.context
        scored = np.concatenate([np.arange(a, a + n) for a, n in zip(first, found.length - found.context, strict=True)])
        assert found.scored() == budget == len({*scored.tolist()})
        assert len({*found.document.tolist()}) >= min(len(lengths), 2)
        assert (found.document_offset + found.start >= offsets[found.document]).all()
        for number in {*found.document.tolist()}:
            held, length = scored[(scored >= offsets[number]) & (scored < offsets[number + 1])], lengths[number]
            assert (np.diff(held) == 1).all(), "one part of each document"
            assert held[0] == offsets[number] + ((length - len(held)) // 2 if length > budget else 0)


def test_no_state_is_carried_into_the_middle_of_a_document() -> None:
    """A document's first window is fresh for a model that reads window after window, wherever it begins."""
    text = Split(np.arange(8000), np.array([0, 5000, 8000]))
    windows = cut(text.offsets, 100, 0, 1000, "documents")
    batches = [*WindowLoader(text, windows, [[number] for number in range(len(windows))], SpecialIds(0, 0))]
    fresh = [bool(batch.fresh) for batch in batches]
    assert min(int(batch.start) for batch in batches) > 0 and len({*windows.document.tolist()}) == 2
    assert fresh == [True, *(np.diff(windows.document) != 0).tolist()]


@pytest.mark.parametrize("order, combined", [("shuffled", 1), ("kept", 1), ("kept", 4)])
def test_published_processes_joined_or_one_by_one(order: str, combined: int) -> None:
    """With batching.joined=false each process's part of a step is a micro-batch of its own, in the order of ranks."""
    lengths = np.array([8] * 53 + [3])
    segments = Segments(lengths * 0, lengths * 0, np.cumsum(lengths) - lengths, lengths, lengths * 0)
    settings = {"size": 12, "order": order, "seed": 1, "processes": 4, "combined": combined}
    joined, separate = (Published(**settings, joined=joined).plan(segments, 2) for joined in (True, False))
    assert len(separate) == 4 * len(joined) and all(len(batch) <= 3 for batch in separate)
    for step, batch in enumerate(joined):
        assert batch == [segment for part in separate[4 * step : 4 * step + 4] for segment in part]
