"""The tokenised corpus: memory-mapped ids and document offsets of each split, built streaming."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from trime.data.datasets import Dataset, Document
from trime.data.tokenizers import Tokenizer
from trime.data.vocabulary import Vocabulary
from trime.types import UserError

FLUSH = 2**20  # tokens held before they are written
STRANGE = 0.3  # of a split's tokens unknown: something is wrong


class Split(NamedTuple):
    """A split: ``tokens`` of all documents one after the other, document i at offsets[i] to offsets[i+1]."""

    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


class Corpus:
    """A prepared corpus on disk."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.vocabulary = Vocabulary.load(folder / "vocabulary.json")
        self.statistics: dict[str, Any] = json.loads((folder / "statistics.json").read_text())

    def fingerprint(self, split: str) -> str:
        """Names the tokens of a split, wherever they came from."""
        return content_hash(self.folder / f"{split}.bin")

    def split(self, name: str) -> Split:
        """The memory-mapped split."""
        if name not in self.statistics["splits"]:
            there = ", ".join(self.statistics["splits"])
            where = f"dataset {self.statistics['name']} in {self.statistics['place']}"
            raise UserError(f"{where} has no split {name!r}, but {there}: put it there, or choose another")
        path, dtype = self.folder / f"{name}.bin", np.dtype(self.statistics["dtype"])
        offsets = np.load(self.folder / f"{name}.offsets.npy")
        if path.stat().st_size != offsets[-1] * dtype.itemsize:
            raise UserError(f"{path} is truncated: delete {self.folder} and run stage prepare")
        return Split(np.memmap(path, dtype, "r"), offsets)

    def names(self, split: str) -> list[str]:
        """What the documents of a split are called."""
        file = self.folder / f"{split}.names.json"
        if not file.exists():  # it was prepared before names were kept
            return [f"document {number}" for number in range(len(self.split(split).lengths))]
        return json.loads(file.read_text())


def content_hash(path: Path) -> str:
    """Names a file by its bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def smallest_type(size: int) -> np.dtype:
    """The smallest unsigned type that holds ids below ``size``."""
    return next(np.dtype(kind) for kind in ("u1", "u2", "u4") if size <= 2 ** (8 * np.dtype(kind).itemsize))


def pieces(
    dataset: Dataset, split: str, what: str, unreadable: Counter[str] | None = None
) -> Iterator[tuple[str | None, list[str]]]:
    """Symbols over a split, with the name of the document that they begin, under a progress bar in bytes.

    ``unreadable`` counts each document's lines that are not UTF-8, unless its bytes are the symbols.
    """
    total = dataset.size(split)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"{what} {split}", mininterval=1) as bar:
        for document in dataset.documents(split):
            begun: str | None = document.name
            for symbols in dataset.tokenizer.tokens(watched(document, bar, None if dataset.characters else unreadable)):
                yield begun, symbols
                begun = None


def watched(document: Document, bar: Any, unreadable: Counter[str] | None) -> Iterator[bytes]:
    """The lines of a document, each told to the progress bar."""
    for line in document.lines:
        bar.update(len(line))
        if unreadable is not None and not line.isascii() and not is_utf8(line):
            unreadable[document.name] += 1
        yield line


def is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def counted(dataset: Dataset) -> Counter[str]:
    """How often each symbol occurs in the training split."""
    if "train" not in dataset.splits():
        raise UserError(f"dataset {dataset.name} has no training split in {dataset.place}: a vocabulary needs one")
    counts: Counter[str] = Counter()
    for _, symbols in pieces(dataset, "train", "count"):
        counts.update(symbols)
    return counts


def write_split(dataset: Dataset, split: str, vocabulary: Vocabulary, folder: Path) -> dict[str, Any]:
    """Writes a split's ids and offsets; returns its statistics."""
    dtype = smallest_type(len(vocabulary))
    lookup, offsets, names, written, unknown = vocabulary.index.__getitem__, [], [], 0, 0
    buffer: list[int] = []
    unreadable: Counter[str] = Counter()
    with open(folder / f"{split}.bin", "wb") as file:
        for begun, symbols in pieces(dataset, split, "encode", unreadable):
            if begun is not None:
                offsets.append(written + len(buffer))
                names.append(begun)
            buffer.extend(map(lookup, symbols))
            if len(buffer) >= FLUSH:
                written, unknown = written + len(buffer), unknown + flush(buffer, dtype, file, vocabulary.unknown)
        written, unknown = written + len(buffer), unknown + flush(buffer, dtype, file, vocabulary.unknown)
    if not written:
        raise UserError(f"split {split!r} of dataset {dataset.name} holds no tokens: put text into {dataset.place}")
    np.save(folder / f"{split}.offsets.npy", np.array([*offsets, written], np.int64))
    (folder / f"{split}.names.json").write_text(json.dumps(names, ensure_ascii=False))
    mean = round(written / len(offsets), 1)
    found = {"tokens": written, "documents": len(offsets), "mean_length": mean, "unknown": unknown}
    return found | ({"unreadable": dict(unreadable)} if unreadable else {})


def flush(buffer: list[int], dtype: np.dtype, file: Any, unknown: int) -> int:
    """Writes and clears the buffer; returns how many unknown ids it held."""
    ids = np.array(buffer, dtype)
    ids.tofile(file)
    buffer.clear()
    return int((ids == unknown).sum())


def build_corpus(dataset: Dataset, folder: Path, vocabulary: Vocabulary) -> None:
    """Tokenises every split into ``folder``."""
    splits = dataset.splits()
    statistics = {split: write_split(dataset, split, vocabulary, folder) for split in splits}
    vocabulary.save(folder / "vocabulary.json")
    content = {
        "name": dataset.name,
        "place": str(dataset.place),
        "characters": dataset.characters,
        "vocabulary": len(vocabulary),
        "dtype": smallest_type(len(vocabulary)).str,
        "splits": statistics,
        "notes": [*dataset.notes(), *differences(dataset, statistics), *doubts(statistics)],
    }
    (folder / "statistics.json").write_text(json.dumps(content, indent=1))


def doubts(statistics: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A sentence for each split that may have been read wrongly."""
    for name, split in statistics.items():
        if split["unknown"] > STRANGE * split["tokens"]:
            share = 100 * split["unknown"] / split["tokens"]
            yield f"{name}: {share:.0f} % of the tokens are unknown: is it cut by the tokenizer of the vocabulary's text?"
        if unreadable := split.get("unreadable"):
            found = f"{sum(unreadable.values()):,} lines of {len(unreadable):,} documents, as {next(iter(unreadable))},"
            yield f"{name}: {found} are no UTF-8: what cannot be read became U+FFFD; iconv -f latin1 -t utf-8 converts"


def differences(dataset: Dataset, statistics: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each split whose count is not the published one."""
    return [
        f"{split}: {statistics[split]['tokens']:,} tokens where {count:,} are published: {dataset.why_counts_differ}"
        for split, count in dataset.published.items()
        if split in statistics and statistics[split]["tokens"] != count
    ]


class VocabularySource(NamedTuple):
    """Where a text's ids come from, if not from the text itself: another corpus, or an imported or pretrained model."""

    name: str  # of the vocabulary, known before it is made
    vocabulary: Callable[[], Vocabulary]
    tokenizer: Tokenizer | None = None  # null: the dataset's own
