"""Documents that occur in two texts, such as those of test that are also in train."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import islice

import numpy as np
import xxhash


def find_duplicates(documents: Iterable[np.ndarray], others: Iterable[np.ndarray], length: int | None = None) -> dict[int, int]:
    """Return which documents of a text are also in another one, as a map from their numbers to those in the other.

    Documents are equal if their tokens are, the first ``length`` of them if that is given; a document without tokens equals
    none. Memory holds one hash for each document of the first text, and the other text is read once.
    """
    numbers, found = defaultdict(list), {}
    for number, document in enumerate(documents):
        numbers[hash_of_tokens(document, length)].append(number)
    for other, document in enumerate(others):
        if len(document):
            found.update(dict.fromkeys(numbers.pop(hash_of_tokens(document, length), []), other))
    return dict(sorted(found.items()))


def hash_of_tokens(tokens: np.ndarray, length: int | None) -> int:
    """Return a hash of 128 bits of the first ``length`` tokens, or of all."""
    return xxhash.xxh3_128_intdigest(tokens[:length].astype(np.int32).tobytes())


def describe_duplicates(
    found: dict[int, int], lengths: np.ndarray, split: str, other: str, names: list[str], other_names: list[str] | None = None
) -> str:
    """Return a note on the documents of a split [d] that are also in another text: their number, share, and some names.

    ``other_names`` are those of the other text's documents, if they are known.
    """
    share = 100 * lengths[[*found]].sum() / lengths.sum()
    advice = "results are not those of new text; remove these documents from one of the two"
    pairs = [f"{names[one]}{f' as {other_names[two]}' if other_names else ''}" for one, two in islice(found.items(), 3)]
    return (
        f"{split}: {len(found):,} of {len(lengths):,} documents, with {share:.1f} % of its tokens, are also in {other} "
        f"(for instance {', '.join(pairs)}): {advice if share >= 0.1 else 'too few to change results'}"
    )
