"""The tokenised corpus: memory-mapped ids and document offsets of each split, built by streaming."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trime.common.io import write_json
from trime.common.progress import Progress
from trime.data.datasets import Dataset, Document
from trime.data.notes import notes_on
from trime.data.tokenizers import Bytes, Tokenizer
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError

if TYPE_CHECKING:
    from trime.data.byte_pairs import BytePairs

FLUSH = 2**20  # tokens buffered before they are written
# Eight characters or more, in UTF-8: of Thai, Lao, Tibetan; Burmese; Khmer; Japanese; Chinese; rarer Chinese characters.
UNSPACED = re.compile(
    rb"(?:(?:\xe0[\xb8-\xbf]|\xe1[\x80-\x82]|\xe1[\x9e\x9f]|\xe3[\x81-\x83]|\xe3[\x90-\xbf]|[\xe4-\xe9][\x80-\xbf]"
    rb"|\xf0[\xa0-\xb3][\x80-\xbf])[\x80-\xbf]){8,}"
)


class Split(NamedTuple):
    """``tokens`` of all documents one after another; document i has those from offsets[i] to offsets[i+1]."""

    tokens: np.ndarray
    offsets: np.ndarray
    sources: Split | None = None  # in parallel text, whose documents are sentences: those that they translate

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def document(self, number: int) -> np.ndarray:
        """Return the tokens [n] of the document of this number."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]


class Corpus:
    """A prepared corpus on disk: ``SPLIT.bin`` and its offsets, names and sizes; the vocabulary; statistics."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.vocabulary = Vocabulary.load(folder / "vocabulary.json")
        self.statistics: dict[str, Any] = json.loads((folder / "statistics.json").read_text(encoding="utf-8"))

    def fingerprint(self, split: str) -> str:
        return content_hash(self.folder / f"{split}.bin")

    def split(self, name: str) -> Split:
        """Open a split as a memory map; UserError where there is no such split or its file is truncated."""
        if name not in self.statistics["splits"]:
            splits = ", ".join(self.statistics["splits"])
            where = f"dataset {self.statistics['name']} in {self.statistics['location']}"
            raise UserError(f"{where} has no split {name!r}, only {splits}: add its files there, or choose another split")
        path, dtype = self.folder / f"{name}.bin", np.dtype(self.statistics["dtype"])
        offsets = np.load(self.folder / f"{name}.offsets.npy")
        if path.stat().st_size != offsets[-1] * dtype.itemsize:
            raise UserError(f"{path} is truncated: delete {self.folder} and run stage prepare")
        return Split(np.memmap(path, dtype, "r"), offsets)

    def documents(self, split: str) -> Iterator[np.ndarray]:
        """Yield the tokens of each document of a split but those of white space."""
        text, symbols, eos = self.split(split), self.vocabulary.symbols, self.vocabulary.eos
        is_text = np.array([not symbol.isspace() and number != eos for number, symbol in enumerate(symbols)])
        for number in range(len(text.lengths)):
            tokens = text.document(number)
            yield tokens[is_text[tokens]]

    def text_sizes(self, split: str) -> np.ndarray | None:
        """Return the bytes of each document that tokens predict; None in a text that an older version prepared."""
        file = self.folder / f"{split}.sizes.npy"
        return np.load(file) if file.exists() else None

    def names(self, split: str) -> list[str]:
        file = self.folder / f"{split}.names.json"
        if not file.exists():  # prepared by an older version, without names
            return [f"document {number}" for number in range(len(self.split(split).lengths))]
        return json.loads(file.read_text(encoding="utf-8"))


def content_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


@dataclass
class TextCounts:
    """The bytes that were read of a text, and signs that it was misread."""

    bytes: int = 0
    without_white_space: bool = False  # any amount of it counts as one byte
    sizes: list[int] = field(default_factory=list)  # of each document: the bytes that tokens predict
    unreadable: Counter[str] = field(default_factory=Counter)  # lines that are not UTF-8, by document
    binary: Counter[str] = field(default_factory=Counter)  # lines that hold NUL
    unspaced: int = 0  # bytes of long runs in scripts without spaces between words


def symbol_stream(
    dataset: Dataset, split: str, action: str, counts: TextCounts | None = None
) -> Iterator[tuple[str | None, list[str]]]:
    """Yield lists of a split's symbols, the first of a document with its name, and show a progress bar in bytes."""
    total, counts = dataset.size(split), counts or TextCounts()
    with Progress(total=total, unit="B", unit_scale=True, desc=f"{action} {split}") as bar:
        for document in dataset.kept_documents(split):
            name: str | None = document.name
            for symbols in dataset.tokenizer.tokens(lines_with_progress(document, bar, counts, check=not dataset.characters)):
                yield name, symbols
                name = None
            if name is not None:  # a document without symbols
                counts.sizes.pop()


def lines_with_progress(document: Document, bar: Any, counts: TextCounts, check: bool) -> Iterator[bytes]:
    """Yield the lines of a document, update the progress bar and the counts; ``check`` whether lines are UTF-8."""
    counts.sizes.append(0)
    for line in document.lines:
        bar.update(len(line))
        counts.bytes += len(line)
        if counts.without_white_space:
            # Only str.split knows the white space of Unicode; undecodable bytes come back as they were.
            words = line.split() if line.isascii() else line.decode("utf-8", "surrogateescape").split()
            encoded = (word if isinstance(word, bytes) else word.encode("utf-8", "surrogateescape") for word in words)
            counts.sizes[-1] += sum(len(word) + 1 for word in encoded)
        else:
            counts.sizes[-1] += len(line)
        if check and b"\0" in line:
            counts.binary[document.name] += 1
        if check and not line.isascii():
            counts.unspaced += sum(map(len, UNSPACED.findall(line)))
            try:
                line.decode()
            except UnicodeDecodeError:
                counts.unreadable[document.name] += 1
        yield line


def symbol_counts(dataset: Dataset) -> Counter[str]:
    """Count each symbol in the training split; UserError where there is none."""
    if "train" not in dataset.splits():
        raise UserError(f"dataset {dataset.name} has no training split in {dataset.location}: its vocabulary is made from one")
    counts: Counter[str] = Counter()
    for _, symbols in symbol_stream(dataset, "train", "count"):
        counts.update(symbols)
    return counts


def training_vocabulary(dataset: Dataset, limit: int | None = 32000, minimum: int = 2, fairseq: bool = False) -> Vocabulary:
    """Return the training split's symbols: ``limit`` at most that occur ``minimum`` times (characters: once)."""
    # fairseq's dictionaries have further special symbols, and padding.
    make = Vocabulary.fairseq_from_counts if fairseq else Vocabulary.from_counts
    counts, least = symbol_counts(dataset), 1 if dataset.characters else minimum
    if dataset.own and isinstance(dataset.tokenizer, Bytes):  # published texts have their own number of symbols
        counts.update(dict.fromkeys(map(chr, range(256)), 0))
        least = 0  # those that train lacks are no <unk> either
    return make(counts, limit, least)


def learn_symbols(dataset: Dataset, tokenizer: BytePairs, limit: int | None, minimum: int) -> None:
    """Train a tokenizer on the training split of its dataset, under a progress bar; UserError where there is none."""
    if "train" not in dataset.splits():
        raise UserError(f"dataset {dataset.name} has no training split in {dataset.location}: its symbols are learned from one")
    with Progress(total=dataset.size("train"), unit="B", unit_scale=True, desc="learn train") as bar:
        read = (lines_with_progress(document, bar, TextCounts(), check=False) for document in dataset.kept_documents("train"))
        tokenizer.train(chain.from_iterable(read), limit, minimum)


def write_split(dataset: Dataset, split: str, vocabulary: Vocabulary, folder: Path) -> dict[str, Any]:
    """Write a split's ids, offsets, document names and sizes; return its statistics. UserError where it is empty."""
    dtype = np.min_scalar_type(len(vocabulary) - 1)
    lookup, offsets, names, written, unknown = vocabulary.index.__getitem__, [], [], 0, 0
    buffer: list[int] = []
    # Two spaces give the same symbols as one where the tokenizer drops white space.
    one, two = (list(chain.from_iterable(dataset.tokenizer.tokens([line]))) for line in (b"a b\n", b"a  b\n"))
    counts = TextCounts(without_white_space=one == two)  # models predict no white space that their tokenizer drops
    with open(folder / f"{split}.bin", "wb") as file:
        for name, symbols in symbol_stream(dataset, split, "encode", counts):
            if name is not None:
                offsets.append(written + len(buffer))
                names.append(name)
            buffer.extend(map(lookup, symbols))
            if len(buffer) >= FLUSH:
                written, unknown = written + len(buffer), unknown + flush(buffer, dtype, file, vocabulary.unknown)
        written, unknown = written + len(buffer), unknown + flush(buffer, dtype, file, vocabulary.unknown)
    if not written:
        raise UserError(f"split {split!r} of dataset {dataset.name} holds no tokens: put text into {dataset.location}")
    np.save(folder / f"{split}.offsets.npy", np.array([*offsets, written], np.int64))
    write_json(folder / f"{split}.names.json", names, indent=None, ensure_ascii=False)
    np.save(folder / f"{split}.sizes.npy", np.array(counts.sizes, np.int64))
    mean = round(written / len(offsets), 1)
    statistics = {"tokens": written, "bytes": counts.bytes, "documents": len(offsets), "mean_length": mean, "unknown": unknown}
    found = {"unreadable": dict(counts.unreadable), "binary": dict(counts.binary), "unspaced": counts.unspaced}
    return statistics | {name: count for name, count in found.items() if count}


def flush(buffer: list[int], dtype: np.dtype, file: Any, unknown: int) -> int:
    """Write and clear the buffer; return the number of unknown ids in it."""
    # The smallest type that holds the vocabulary: large corpora are read from disk.
    ids = np.array(buffer, dtype)
    ids.tofile(file)
    buffer.clear()
    return int((ids == unknown).sum())


def build_corpus(dataset: Dataset, folder: Path, vocabulary: Vocabulary) -> None:
    """Tokenise every split and write the corpus to ``folder``; UserError where there is none."""
    splits = dataset.splits()
    if not splits:
        raise UserError(f"dataset {dataset.name} holds no text: put files for train, valid and test into {dataset.location}")
    statistics = {split: write_split(dataset, split, vocabulary, folder) for split in splits}
    vocabulary.save(folder / "vocabulary.json")
    content = {
        "name": dataset.name,
        "location": str(dataset.location),
        "own": dataset.own,
        "characters": dataset.characters,
        "vocabulary": len(vocabulary),
        "dtype": np.min_scalar_type(len(vocabulary) - 1).str,
        "splits": statistics,
        "fingerprint": dataset.fingerprint(),
        "notes": [*notes_on(dataset, statistics)],
    }
    write_json(folder / "statistics.json", content)


def count_training_symbols(folder: Path) -> None:
    """Add the counts of the training split, if there is one, to a vocabulary that came without counts."""
    corpus = Corpus(folder)
    if "train" in corpus.statistics["splits"]:
        vocabulary, counts = corpus.vocabulary, np.zeros(len(corpus.vocabulary), np.int64)
        tokens = corpus.split("train").tokens
        for start in range(0, len(tokens), FLUSH):
            counts += np.bincount(tokens[start : start + FLUSH], minlength=len(counts))
        vocabulary.counts[:] = counts.tolist()
        vocabulary.save(folder / "vocabulary.json")


class VocabularySource(NamedTuple):
    """A vocabulary from outside the text: of another corpus, or of an imported or pretrained model."""

    name: str  # known before the vocabulary exists
    vocabulary: Callable[[], Vocabulary]
    tokenizer: Tokenizer | None = None  # None: the dataset's


def evenly_spaced(length: int, count: int) -> list[int]:
    """Return at most ``count`` different numbers below ``length``, the middles of as many equal parts."""
    return list(dict.fromkeys((2 * number + 1) * length // (2 * count) for number in range(count)))
