"""Documents: how few are split, which are in two texts, and the bytes that their tokens predict."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from trime.data.corpus import Corpus, build_corpus, symbol_counts
from trime.data.datasets import Dataset
from trime.data.datasets.base import SPLITS
from trime.data.datasets.folder import Folder
from trime.data.notes import describe_duplicates, find_duplicates
from trime.data.segments import cut, scored_bytes
from trime.data.tokenizers import ByteNumbers, Bytes, Tokenizer, Whitespace, Words, metric_of
from trime.data.vocabulary import Vocabulary


def build(dataset: Dataset, folder: Path, limit: int | None = None) -> None:
    """Build the corpus of a dataset."""
    folder.mkdir(exist_ok=True)
    build_corpus(dataset, folder, Vocabulary.from_counts(symbol_counts(dataset), limit, 1))


def test_without_a_seed_every_file_is_split_in_its_order(tmp_path: Path) -> None:
    """Ten files are ten documents of test; a file too short to be cut is train."""
    lines = [f"line {number} of the file .\n\n".encode() for number in range(30)]
    for number in range(10):
        (tmp_path / f"{number}.txt").write_bytes(b"".join(lines))
    (tmp_path / "short.txt").write_bytes(b"a")
    folder = Folder(str(tmp_path), Words(), ratio=0.1, seed=None)
    parts = {split: {document.name: b"".join(document.lines) for document in folder.documents(split)} for split in SPLITS}
    assert [len(parts[split]) for split in SPLITS] == [11, 10, 10]
    assert parts["train"]["3.txt"] + parts["valid"]["3.txt"] + parts["test"]["3.txt"] == b"".join(lines)
    assert parts["train"]["short.txt"] == b"a" and parts["test"]["3.txt"].startswith(b"line 27")
    assert folder.size("test") == sum(map(len, parts["test"].values()))


def test_few_documents_and_many_unknown_tokens_are_said_with_the_setting_that_mends_them(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / "text" / f"{number}.txt").write_text("a line\n\n" * 30)
    for seed, ratio in ((0, 0.1), (None, 0.1)):
        folder = tmp_path / str(seed)
        build(Folder(str(tmp_path / "text"), Words(), ratio=ratio, seed=seed), folder)
        notes = "\n".join(Corpus(folder).statistics["notes"])
        assert ("valid has 1 document, test has 1 document" in notes and "dataset.seed=null" in notes) is (seed == 0)
    assert re.search(r"[\d.]+ % of train, .* of test are <unk>.*dataset=folder_pieces", notes) is None
    wide = tmp_path / "wide"
    build(Folder(str(tmp_path / "text"), Words(), ratio=0.1), wide, limit=3)
    assert re.search(r"% of test are <unk>.*dataset=folder_pieces", "\n".join(Corpus(wide).statistics["notes"]))


@pytest.mark.parametrize("tokenizer", [Words(), Bytes(), Whitespace()])
def test_bytes_are_those_that_scored_tokens_predict(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """White space that the tokenizer drops counts as one byte, and documents of a sample have their own bytes."""
    texts = ["one two three\n" * 20, "слово другое\n" * 50]
    sizes = {}
    for blank in (" ", " " * 10):
        text, folder = tmp_path / f"text{len(blank)}", tmp_path / f"corpus{len(blank)}"
        for split in SPLITS:
            (text / split).mkdir(parents=True)
            for number, each in enumerate(texts):
                (text / split / f"{number}.txt").write_text(each.replace(" ", blank))
        build(Folder(str(text), tokenizer), folder)
        corpus = Corpus(folder)
        offsets = corpus.split("test").offsets
        sizes[blank] = [round(scored_bytes(corpus, "test", cut(offsets, 16, 8))), *corpus.text_sizes("test")]
        first = cut(offsets, 16, 8).take(np.flatnonzero(cut(offsets, 16, 8).document == 0))
        assert round(scored_bytes(corpus, "test", first)) == sizes[blank][1]
    plain = [len(each.encode()) for each in texts]
    assert sizes[" "] == [sum(plain), *plain]
    assert (sizes[" " * 10] == sizes[" "]) is (not tokenizer.characters)
    (folder / "test.sizes.npy").unlink()  # prepared by an older version
    assert round(scored_bytes(Corpus(folder), "test", cut(offsets, 16))) == Corpus(folder).statistics["splits"]["test"]["bytes"]


def test_the_metric_of_bytes_is_bits_per_byte() -> None:
    metrics = [metric_of(tokenizer, tokenizer.characters) for tokenizer in (Words(), Bytes(), ByteNumbers())]
    assert metrics == ["perplexity", "bits/byte", "bits/char"]


def test_documents_that_are_also_in_another_text_are_found() -> None:
    """By all tokens or by the first ones; each copy counts, and empty documents are no copies."""
    one = [np.array(tokens, np.uint8) for tokens in ([1, 2, 3], [4, 5], [], [1, 2, 3], [1, 2])]
    other = [np.array(tokens, np.int32) for tokens in ([], [4, 5, 6], [1, 2, 3])]
    assert find_duplicates(one, other) == {0: 2, 3: 2}
    assert find_duplicates(one, other, 2) == {0: 2, 1: 1, 3: 2, 4: 2}
    note = describe_duplicates({0: 2}, np.array([3, 9]), "test", "train", ["a.txt", "b.txt"], ["x", "y", "copy.txt"])
    assert note.startswith(
        "test: 1 of 2 documents, with 25.0 % of its tokens, are also in train (for instance a.txt as copy.txt)"
    )


def test_the_documents_of_a_corpus_leave_white_space_out(tmp_path: Path) -> None:
    for split, text in (("train", "a  b\r\n\r\nc"), ("test", "a b\nc\n")):
        (tmp_path / f"{split}.txt").write_bytes(text.encode())
    for tokenizer in (Words(), Bytes()):
        build(Folder(str(tmp_path), tokenizer), tmp_path)
        corpus = Corpus(tmp_path)
        assert find_duplicates(corpus.documents("test"), corpus.documents("train")) == {0: 0}
