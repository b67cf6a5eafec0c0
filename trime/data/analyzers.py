"""Analyzers for BM25: raw tokens, or English terms as in the published pipeline's search engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np

LUCENE = """a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to
was will with"""
STOP_WORDS = frozenset(LUCENE.split())  # of English
# Letters joined by . ' : and digits by . , ; ' are one word (Unicode annex 29, the rules that Lucene's tokenizer follows).
WORD = re.compile(r"\w+(?:(?:(?<=[^\W\d_])[.'’:·](?=[^\W\d_])|(?<=\d)[.,;'’](?=\d))\w+)*")
POSSESSIVE = re.compile(r"['’][sS]$")


def english(text: str) -> list[str]:
    """Return the terms of a text as Lucene's EnglishAnalyzer does, the default of Pyserini.

    Words lose their possessive, are lower-cased and Porter-stemmed; stop words are removed.
    """
    from snowballstemmer import stemmer

    words = (POSSESSIVE.sub("", word).lower() for word in WORD.findall(text))
    return stemmer("porter").stemWords([word for word in words if word not in STOP_WORDS])


class TermTable:
    """A map from vocabulary symbols to terms, which turns segments of token ids into segments of term ids.

    A symbol may have no term (a stop word, punctuation) or several (``well-known``); symbols with the same stem share one.
    """

    def __init__(self, symbols: Iterable[str], analyze: Callable[[str], list[str]]):
        numbers: dict[str, int] = {}
        terms = [[numbers.setdefault(term, len(numbers)) for term in analyze(symbol)] for symbol in symbols]
        self.count = np.array([len(symbol_terms) for symbol_terms in terms])
        self.start = np.cumsum(self.count) - self.count
        self.flat = np.array([number for symbol_terms in terms for number in symbol_terms], np.int64)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Return the term ids of token ids, in order."""
        count = self.count[tokens]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return self.flat[np.repeat(self.start[tokens], count) + within]
