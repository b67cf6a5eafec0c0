"""Notes on a prepared text that a user should read: how it differs from the published one, and signs that it was misread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view

from trime.data.datasets import Dataset
from trime.data.datasets.copies import covered_share, hashes_of

FEW_DOCUMENTS = 10  # number of documents below which a bootstrap draws parts of documents
MANY_UNKNOWN = 0.02  # share of unknown tokens above which results are much too good
MAX_UNKNOWN = 0.3  # share of unknown tokens above which a split was probably tokenised wrongly
MAX_UNSPACED = 0.1  # share of bytes in scripts without spaces above which words are no measure of a text
COPIED = 0.5  # share of a document that is also in another text, above which it counts as a near copy
PASSAGE = 64  # bytes of the passages that are compared
PHRASE = "自然语言处理很有意思"  # a sentence without spaces, to see whether a tokenizer takes it for one word
MISREAD = {  # by the name of its count: what is wrong with lines, and how to mend it
    "unreadable": "are not UTF-8, undecodable bytes became U+FFFD: "
    "iconv -f latin1 -t utf-8 converts files, with the name of their encoding in place of latin1",
    "binary": "hold NUL bytes, as binary files do and UTF-16 without a byte order mark: "
    "leave such files out, or convert them (iconv -f utf-16le -t utf-8)",
}


def notes_on(dataset: Dataset, statistics: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the notes on a prepared text with these statistics of its splits."""
    yield from dataset.notes()
    for name, count in dataset.published.items():
        if name in statistics and statistics[name]["tokens"] != count:
            found = statistics[name]["tokens"]
            yield f"{name}: {found:,} tokens where {count:,} are published: {dataset.count_difference_reason}"
    for name, split in statistics.items():
        if split["unknown"] > MAX_UNKNOWN * split["tokens"]:
            share = 100 * split["unknown"] / split["tokens"]
            yield f"{name}: {share:.0f} % of the tokens are unknown: check that the tokenizer is that of the vocabulary's text"
        for kind, problem in MISREAD.items():
            if misread := split.get(kind):
                lines = f"{sum(misread.values()):,} lines of {len(misread):,} documents"
                yield f"{name}: {lines} (for instance {next(iter(misread))}) {problem}"
    documents = {name: split["documents"] for name, split in statistics.items() if name != "train"}
    if dataset.own and min(documents.values(), default=FEW_DOCUMENTS) < FEW_DOCUMENTS:
        few = ", ".join(f"{name} has {count} document{'s' * (count > 1)}" for name, count in documents.items())
        yield (
            f"{few}: below {FEW_DOCUMENTS}, intervals are over parts of documents and do not say how results vary "
            f"between documents: {dataset.more_documents}"
        )
    yield from unsuitable_words(dataset, statistics)


def unsuitable_words(dataset: Dataset, statistics: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield notes where byte pairs or bytes would suit a text better than words do."""
    shares = {name: split["unknown"] / split["tokens"] for name, split in statistics.items()}
    # A published text comes with its vocabulary, and with as many unknown tokens.
    if not dataset.published and max(shares.values(), default=0) > MANY_UNKNOWN:
        unknown = ", ".join(f"{100 * share:.1f} % of {name}" for name, share in shares.items())
        yield (
            f"{unknown} are <unk>, which is easy to predict, so that perplexity and bits per byte are too low: "
            "dataset=folder (byte pairs) or folder_bytes has none, vocabulary.min_count=1 or a larger "
            "vocabulary.max_size has fewer"
        )
    splits = statistics.values()
    share = sum(split.get("unspaced", 0) for split in splits) / sum(split["bytes"] for split in splits)
    if share > MAX_UNSPACED and any(PHRASE in symbols for symbols in dataset.tokenizer.tokens([PHRASE.encode()])):
        yield (
            f"{100 * share:.0f} % of the text is in a script without spaces between words (Chinese, Japanese, Thai …), so that "
            "whole phrases are taken for words: dataset=folder (byte pairs) or folder_bytes suits it"
        )


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
