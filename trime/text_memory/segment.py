"""One part of a text memory, which never changes: some documents, their suffix array, and the keys of their tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trime.common.io import checksum_of, checksum_of_file, new_array, partial_of, write_array, write_json
from trime.errors import UserError
from trime.text_memory.index import KeyIndex
from trime.token_memory.test.ngrams import SuffixArray

DESCRIPTION, TEXTS = "documents.json", "texts.bin"
BETWEEN = b"\xff"  # documents of TEXTS: no byte of UTF-8
COPIED = 2**16  # keys that are copied at a time


class Document(NamedTuple):
    """A document of a memory: its name, a checksum of its content, and how many tokens it has."""

    name: str
    checksum: str
    tokens: int


class Content(NamedTuple):
    """Documents one after another: ``line`` is that on which each token begins; key j is the context before token j.

    There are no keys where a memory has n-grams alone. The first token of a document has none: its row is zero. ``texts``:
    the documents in UTF-8, in which ``count`` and ``find`` search; None where they were not kept.
    """

    documents: list[Document]
    token: np.ndarray  # [n]
    line: np.ndarray  # [n]
    key: np.ndarray | None  # [n d]
    texts: list[bytes] | None = None


class Source(NamedTuple):
    """The place of a token: its document, its line, and its number among all tokens of its segment."""

    name: str
    line: int
    place: int


class Segment:
    """The segment in ``folder``, read through memory maps; UserError where a file is missing or damaged."""

    def __init__(self, folder: Path, vocabulary: int):
        self.folder = folder
        try:
            content = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
            if content.pop("checksum") != checksum_of(content):
                raise ValueError("documents.json is not as it was written")
            self.documents = [Document(*fields) for fields in content["documents"]]
            text, suffixes, self.line = (mapped(folder / f"{name}.npy") for name in ("text", "suffixes", "line"))
            for name, checksum in content["files"].items():
                if checksum_of_file(folder / name) != checksum:
                    raise ValueError(f"{name} is not as it was written")
            # A map stays readable when another process has merged this segment into another and removed it.
            texts = folder / TEXTS
            self.raw = np.memmap(texts, np.uint8, "r") if texts.exists() else None
            key = folder / "key.npy"
            self.key: np.ndarray | None = mapped(key) if key.exists() else None
            if len(text) != content["text"] or len(suffixes) != len(text) or len(self.line) != len(self):
                raise ValueError("its files are of different lengths")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{folder} is damaged or missing ({error}): copy the memory again, or delete its folder and add its texts again"
            ) from None
        starts = np.concatenate([[0], np.cumsum(np.bincount(text, minlength=vocabulary + 1))]).astype(np.int64)
        separators = self.offsets[1:] + np.arange(len(self.documents))  # behind each document in ``text``
        self.array = SuffixArray(text, suffixes, starts, separators)

    @cached_property
    def offsets(self) -> np.ndarray:
        """The first token of each document, and the end of the last [d + 1]."""
        return np.cumsum([0, *(document.tokens for document in self.documents)])

    @cached_property
    def index(self) -> KeyIndex:
        """The search of keys; UserError where the index is damaged."""
        assert self.key is not None
        return KeyIndex(self.folder, self.key, self.offsets[:-1])

    def __len__(self) -> int:
        return sum(document.tokens for document in self.documents)

    def tokens(self, first: int, last: int) -> np.ndarray:
        """Return some tokens of one document, given by their places."""
        document = int(np.searchsorted(self.offsets, first, "right")) - 1
        last = min(last, int(self.offsets[document + 1]))
        return np.asarray(self.array.text[first + document : last + document])

    def around(self, place: int, reach: int) -> np.ndarray:
        """Return a token with up to ``reach`` ones before and behind it in its document."""
        document = int(np.searchsorted(self.offsets, place, "right")) - 1
        first, last = max(place - reach, int(self.offsets[document])), place + reach + 1
        return self.tokens(first, last)

    def texts(self) -> list[bytes] | None:
        """Return the documents in UTF-8; None where an earlier version of this package has not kept them."""
        return None if self.raw is None else self.raw.tobytes().split(BETWEEN)

    def place_of_line(self, number: int, line: int) -> int:
        """Return the place of the first token that begins on a line of a document, or before it."""
        first, last = self.offsets[number], self.offsets[number + 1]
        return int(min(first + np.searchsorted(self.line[first:last], line), last - 1))

    def token(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens at some places."""
        return np.asarray(self.array.text[places + np.searchsorted(self.offsets, places, "right") - 1])

    def find(self, tokens: np.ndarray, limit: int) -> np.ndarray:
        """Return the places at which some tokens begin, at most ``limit``, evenly chosen."""
        array, (low, high) = self.array, self.array.range_of(tokens)
        chosen = np.unique(np.linspace(low, max(high - 1, low), min(limit, high - low)).astype(np.int64))
        return array.token_numbers(np.asarray(array.suffixes[chosen]).astype(np.int64))

    def source(self, place: int) -> Source:
        """Return the document, the line and the place of a token, given by its place."""
        document = int(np.searchsorted(self.offsets, place, "right")) - 1
        return Source(self.documents[document].name, int(self.line[place]), place)

    def content(self, names: Iterable[str]) -> Content:
        """Return the content of the documents with these names, whose keys are still on disk."""
        wanted = {*names}
        chosen = [number for number, document in enumerate(self.documents) if document.name in wanted]
        spans = [(int(self.offsets[number]), int(self.offsets[number + 1])) for number in chosen]
        token, line = (np.concatenate([read(*span) for span in spans]) for read in (self.tokens, lambda a, b: self.line[a:b]))
        whole = len(chosen) == len(self.documents)
        key = self.key if whole or self.key is None else np.concatenate([self.key[first:last] for first, last in spans])
        texts = self.texts()
        texts = texts and [texts[number] for number in chosen]
        return Content([self.documents[number] for number in chosen], token, line, key, texts)


def mapped(file: Path) -> np.ndarray:
    """Return an array that stays on disk; as a plain one, since each step on a ``memmap`` takes microseconds more."""
    return np.asarray(np.load(file, mmap_mode="r"))


def write_segment(folder: Path, contents: list[Content], vocabulary: int) -> None:
    """Write a segment of some contents, whole or not at all."""
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    documents = [document for content in contents for document in content.documents]
    offsets = np.cumsum([0, *(document.tokens for document in documents)])
    array = SuffixArray.build(np.concatenate([content.token for content in contents]), vocabulary, offsets)
    write_array(partial / "text.npy", array.text.astype(np.int32))
    write_array(partial / "suffixes.npy", array.suffixes)
    write_array(partial / "line.npy", np.concatenate([content.line for content in contents]).astype(np.int32))
    texts = [text for content in contents for text in content.texts or []]
    if len(texts) == len(documents):
        (partial / TEXTS).write_bytes(BETWEEN.join(texts))
    keys = [content.key for content in contents if content.key is not None]
    if keys:
        # Keys of a large memory do not fit into RAM twice: they are copied through a memory map.
        shape = (int(offsets[-1]), keys[0].shape[1])
        target = new_array(partial / "key.npy", keys[0].dtype, shape)
        first = 0
        for key in keys:
            for start in range(0, len(key), COPIED):
                part = key[start : start + COPIED]
                target[first : first + len(part)] = part
                first += len(part)
        target.flush()
        KeyIndex.build(partial, target, offsets[:-1])
    content: dict[str, Any] = {
        "documents": [[*document] for document in documents],
        "text": len(array.text),
        "files": {file.name: checksum_of_file(file) for file in sorted(partial.iterdir())},
    }
    write_json(partial / DESCRIPTION, content | {"checksum": checksum_of(content)})
    partial.replace(folder)
