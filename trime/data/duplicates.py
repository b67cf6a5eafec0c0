"""Documents of one text that are in another text too, whole or for the most part, and the notes on them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view

from trime.data.corpus import Corpus
from trime.data.datasets.copies import covered_share, hashes_of
from trime.data.notes import COPIED

PASSAGE = 64  # bytes of the passages that are compared


def copies_within(corpus: Corpus, split: str) -> Iterator[str]:
    """Yield a note if documents of a split are copies of one another."""
    if split in corpus.statistics["splits"] and (copies := find_copies([*corpus.documents(split)])):
        yield describe_copies(copies, corpus.split(split).lengths, split, corpus.names(split))


def duplicates_of(
    corpus: Corpus, split: str, others: Corpus, other_split: str, hides_own: bool = False, drops_copies: bool = False
) -> Iterator[str]:
    """Yield notes if documents of a split, or most of them, are in another split of the text, or in another text.

    ``hides_own``: the other text is that of a datastore, which hides each document from itself if it is the same split.
    ``drops_copies``: near copies were left out of the corpus.
    """
    is_same = corpus.folder == others.folder
    exist = split in corpus.statistics["splits"] and other_split in others.statistics["splits"]
    if not exist or (is_same and split == other_split):
        return
    if hides_own and corpus.fingerprint(split) == others.fingerprint(other_split):
        return
    where = other_split if is_same else f"{other_split} of {others.statistics['name']}"
    names, lengths = (corpus.names(split), others.names(other_split)), corpus.split(split).lengths
    if found := find_duplicates(corpus.documents(split), others.documents(other_split)):
        yield describe_duplicates(found, lengths, split, where, *names)
    if is_same and drops_copies:
        return  # none is left, by its rule
    size = corpus.statistics["splits"][split]
    length = math.ceil(PASSAGE * size["tokens"] / max(size["bytes"], 1))
    copies = find_near_copies([*corpus.documents(split)], others.documents(other_split), length)
    if near := {number: share for number, share in copies.items() if number not in found}:
        yield describe_near_copies(near, lengths, split, where, names[0])


def find_duplicates(documents: Iterable[np.ndarray], others: Iterable[np.ndarray], length: int | None = None) -> dict[int, int]:
    """Map the numbers of documents that are in another text too to those there; compare all tokens, or the first ``length``."""

    def hash_of(tokens: np.ndarray) -> int:
        return xxhash.xxh3_128_intdigest(tokens[:length].astype(np.int32).tobytes())

    # One hash of 128 bits for each document stays in memory; the other text is read once. Documents without tokens equal none.
    numbers, found = defaultdict(list), {}
    for number, document in enumerate(documents):
        numbers[hash_of(document)].append(number)
    for other, document in enumerate(others):
        if len(document):
            found.update(dict.fromkeys(numbers.pop(hash_of(document), []), other))
    return dict(sorted(found.items()))


def find_copies(documents: list[np.ndarray]) -> dict[int, int]:
    """Map the numbers of documents to the first one of the same tokens; empty ones, and the first ones, are left out."""
    return {number: first for number, first in find_duplicates(documents, documents).items() if number != first}


def describe_copies(copies: dict[int, int], lengths: np.ndarray, split: str, names: list[str]) -> str:
    """Return a note on a split's documents, of ``lengths`` [d], that are copies of others in it."""
    share, (one, two) = 100 * lengths[[*copies]].sum() / lengths.sum(), next(iter(copies.items()))
    return (
        f"{split}: {len(copies):,} of {len(lengths):,} documents, with {share:.1f} % of its tokens, are copies of others in it "
        f"(for instance {names[one]} of {names[two]}): intervals count them as further evidence; leave them out"
    )


def find_near_copies(documents: list[np.ndarray], others: Iterable[np.ndarray], length: int) -> dict[int, float]:
    """Map the numbers of documents most of which is in another text, in passages of ``length`` tokens, to the share that is."""
    return {number: share for number, share in copied_shares(documents, others, length).items() if share > COPIED}


def copied_shares(documents: list[np.ndarray], others: Iterable[np.ndarray], length: int) -> dict[int, float]:
    """Map the numbers of documents of at least ``length`` tokens to the share of each that lies in passages of another text.

    The other text is cut into passages of ``length`` tokens, which are looked for at every place of the documents: a copy of
    2 ``length`` - 1 tokens holds one, wherever it begins.
    """
    searched = {number: document for number, document in enumerate(documents) if len(document) >= length}
    passages = {number: hashes_of(sliding_window_view(document, length)) for number, document in searched.items()}
    known = np.unique(np.concatenate([*passages.values(), np.zeros(0, np.uint64)]))
    copied = np.zeros(len(known), bool)
    for other in others if len(known) else []:
        found = hashes_of(other[: len(other) // length * length].reshape(-1, length))
        place = np.searchsorted(known, found).clip(max=len(known) - 1)
        copied[place[known[place] == found]] = True
    shares = {}
    for number, document in searched.items():
        starts = np.flatnonzero(copied[np.searchsorted(known, passages[number])])
        shares[number] = covered_share(starts, length, len(document))
    return shares


def describe_duplicates(
    found: dict[int, int], lengths: np.ndarray, split: str, other: str, names: list[str], other_names: list[str] | None = None
) -> str:
    """Return a note on a split's documents, of ``lengths`` [d], that are in another text too: number, share, some names."""
    share = 100 * lengths[[*found]].sum() / lengths.sum()
    advice = "results are not those of new text; remove these documents from one of the two"
    pairs = [f"{names[one]}{f' as {other_names[two]}' if other_names else ''}" for one, two in islice(found.items(), 3)]
    return (
        f"{split}: {len(found):,} of {len(lengths):,} documents, with {share:.1f} % of its tokens, are also in {other} "
        f"(for instance {', '.join(pairs)}): {advice if share >= 0.1 else 'too few to change results'}"
    )


def describe_near_copies(shares: dict[int, float], lengths: np.ndarray, split: str, other: str, names: list[str]) -> str:
    """Return a note on a split's documents, of ``lengths`` [d], most of which is in another text: number, share, some names."""
    share = 100 * lengths[[*shares]].sum() / lengths.sum()
    worst = sorted(shares, key=lambda number: -shares[number])[:3]
    pairs = ", ".join(f"{names[number]} with {100 * shares[number]:.0f} %" for number in worst)
    return (
        f"{split}: {len(shares):,} of {len(lengths):,} documents, with {share:.1f} % of its tokens, are near copies, with "
        f"more than half of their text in {other} (for instance {pairs}): results are better than on new text"
    )
