"""Near copies: documents that repeat earlier ones, word for word; ``dataset.copies=drop`` leaves them out."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view

RUN = 12  # words in a row that count as copied, whatever is between them
COPIED = 0.25  # share of copied words above which a document is a near copy
WORD = re.compile(r"\w+")


def copied_shares_in_order(texts: Iterable[bytes]) -> list[float]:
    """Return for each text the share of its words in runs of ``RUN`` words that an earlier text has, too.

    Texts with a share above ``COPIED`` are near copies, with which later ones are not compared. A text of fewer words is
    one run.
    """
    runs = [run_hashes(text) for text in texts]
    # Only hashes of several texts can be found again: the set that grows with the texts holds only these.
    hashes, counts = np.unique(np.concatenate([np.zeros(0, np.uint64), *map(np.unique, runs)]), return_counts=True)
    repeated, known, shares = hashes[counts > 1], set[int](), list[float]()
    for of_text in runs:
        place = np.searchsorted(repeated, of_text).clip(max=max(0, len(repeated) - 1))
        places = np.flatnonzero(repeated[place] == of_text) if len(repeated) else place[:0]
        found = of_text[places].tolist()
        starts = places[[number in known for number in found]] if found else places
        shares.append(covered_share(starts, RUN, len(of_text) + RUN - 1))
        if shares[-1] <= COPIED:
            known.update(found)
    return shares


def run_hashes(text: bytes) -> np.ndarray:
    """Return a hash of 64 bits of the ``RUN`` words at each place of a text; one of fewer words is padded."""
    words = np.array(
        [xxhash.xxh3_64_intdigest(word.encode()) for word in WORD.findall(text.decode("utf-8", "replace"))], np.uint64
    )
    words = np.pad(words, (0, max(0, RUN - len(words))))
    return hashes_of(sliding_window_view(words, RUN))


def hashes_of(passages: np.ndarray) -> np.ndarray:
    """Return a hash of 64 bits of each passage [n l] of tokens."""
    length: int = passages.shape[1]
    # A factor that is odd loses no bit of its token.
    factors = np.random.default_rng(0).integers(1, 2**63, length, dtype=np.uint64) | np.uint64(1)
    result = np.zeros(len(passages), np.uint64)
    for column in range(length):
        result += (passages[:, column].astype(np.uint64) + np.uint64(1)) * factors[column]
    return result


def covered_share(starts: np.ndarray, length: int, size: int) -> float:
    """Return the share of ``size`` tokens that lie in runs of ``length`` tokens, which begin at ``starts``."""
    # One more where a run begins and one less behind its end: the running sum counts the runs over a token.
    covered = np.zeros(size + 1, np.int64)
    np.add.at(covered, starts, 1)
    np.add.at(covered, starts + length, -1)
    return float((np.cumsum(covered)[:-1] > 0).mean())
