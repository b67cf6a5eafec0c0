"""The published data: plain text, dictionaries, and ids as fairseq's preprocessing wrote them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from tests.golden.published import ROOT
from trime.data.corpus import Split
from trime.data.tokenizers import Whitespace
from trime.data.vocabulary import SpecialIds, Vocabulary

DATA = ROOT / "data"
TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # fairseq's codes


def corpora() -> list[str]:
    """Return the names of all corpora."""
    return sorted(path.parent.name for path in DATA.glob("*/dict.txt"))


def splits_of(folder: Path) -> list[str]:
    """Return the names of a corpus's splits."""
    return sorted(path.stem for path in (folder / "text").glob("*.txt"))


def ids_of(folder: Path, split: str) -> np.ndarray:
    """Return a split's ids: from fairseq's ``SPLIT.bin``, whose type is in ``SPLIT.idx``, or from ``ids.npz``."""
    if (folder / "ids.npz").is_file():
        with np.load(folder / "ids.npz") as file:
            return file[split]
    magic, version, code = struct.unpack("<9sQB", (folder / f"{split}.idx").read_bytes()[:18])
    assert magic == b"MMIDIDX\0\0" and version == 1, "not an index of fairseq's memory-mapped format"
    return np.fromfile(folder / f"{split}.bin", TYPES[code])


def dictionary(corpus: str) -> Vocabulary:
    """Return a corpus's published dictionary."""
    return Vocabulary.from_dictionary(DATA / corpus / "dict.txt")


def stream(corpus: str, split: str) -> tuple[Split, SpecialIds]:
    """Return a split of the published data as one document, read by our own tokenizer and dictionary."""
    vocabulary = dictionary(corpus)
    with open(DATA / corpus / "text" / f"{split}.txt", "rb") as file:
        symbols = [symbol for line in Whitespace().tokens(file) for symbol in line]
    ids = np.array([vocabulary.index[symbol] for symbol in symbols])
    return Split(ids, np.array([0, len(ids)])), vocabulary.special_ids
