"""BM25 packing: finding the 20 nearest segments of every segment, beside bm25s (numba) and rank_bm25, and how it scales.

The text is of 32,000 words drawn by Zipf's law, and each document of 100 segments has 300 words that it prefers; or it is read
from the text files of a folder, ``--path``, as one stream of words. bm25s and rank_bm25 run fewer queries, and only at the
first size.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np

from benchmarks.measure import Claim, Measured, alternately, ratio
from trime.common.metrics import ResourceUsage, process_peak
from trime.data.neighbours import BM25, RankBM25

WORDS, DOCUMENT, OWN, SHARE, K = 32_000, 100, 300, 0.15, 20
WHOLE = 690_000  # segments of 150 tokens: WikiText-103 in the 150M model's training (TRIME Table 9)
QUERIES = {"bm25s": 20, "rank_bm25": 1}  # queries per round


class Bm25s:
    """bm25s with numba, in Lucene's variant."""

    def fit(self, segments: list[np.ndarray]) -> None:
        """Index segments of word numbers."""
        import bm25s

        self.ids = [segment.tolist() for segment in segments]
        self.vocabulary = {str(word): word for word in range(WORDS + 1)}
        self.index = bm25s.BM25(k1=0.9, b=0.4, method="lucene", backend="numba")
        self.index.index((self.ids, self.vocabulary), show_progress=False)

    def nearest(self, queries: list[int], k: int) -> np.ndarray:
        """Return the k nearest segments of some segments, and each segment itself."""
        from bm25s.tokenization import Tokenized

        tokens = Tokenized(ids=[self.ids[query] for query in queries], vocab=self.vocabulary)
        return self.index.retrieve(tokens, k=k + 1, show_progress=False, n_threads=numba.get_num_threads())[0]


def sample_words(tokens: int, length: int) -> np.ndarray:
    """Sample words by Zipf's law, a share of them from those that their document prefers."""
    random = np.random.default_rng(0)
    cumulative = np.cumsum(1 / np.arange(1, WORDS + 1))
    text = np.searchsorted(cumulative, random.random(tokens) * cumulative[-1]).astype(np.int32)
    documents = tokens // (length * DOCUMENT) + 1
    preferred = np.searchsorted(cumulative, (0.4 + 0.6 * random.random((documents, OWN))) * cumulative[-1]).astype(np.int32)
    replaced = np.flatnonzero(random.random(tokens) < SHARE)
    text[replaced] = preferred[replaced // (length * DOCUMENT), random.integers(0, OWN, len(replaced))]
    return text


def read_words(path: Path) -> np.ndarray:
    """Return the words of a folder's text files in order, without all but the most frequent ones."""
    words = [word for file in sorted(path.rglob("*.txt")) for word in re.findall(r"\w+|[^\w\s]", file.read_text("utf-8"))]
    number = {word: i for i, (word, _) in enumerate(Counter(words).most_common(WORDS))}
    return np.array([number[word] for word in words if word in number], np.int32)


def segments_of(path: Path | None, count: int, length: int) -> list[np.ndarray]:
    """Return a number of segments, or as many as the text has."""
    text = read_words(path) if path else sample_words(count * length, length)
    return np.array_split(text[: min(count, len(text) // length) * length], min(count, len(text) // length))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", type=Path, help="a folder of .txt files in place of sampled words")
    parser.add_argument("--sizes", nargs=2, action="append", type=int, metavar=("SEGMENTS", "LENGTH"), help="repeatable")
    parser.add_argument("--queries", type=int, default=2048, help="queries per round")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Measured:
    """Measure all backends at the first size, the project's own at the others."""
    sizes = options.sizes or [(27_648, 512), (25_000, 150), (50_000, 150), (100_000, 150)]
    rows: list[dict[str, Any]] = []
    for number, (count, length) in enumerate(sizes):
        rows += measure_size(segments_of(options.path, count, length), options, compare=number == 0)
    return Measured(rows, claims(rows))


def measure_size(segments: list[np.ndarray], options: argparse.Namespace, compare: bool) -> list[dict[str, Any]]:
    """Return a row for each backend."""
    backends: dict[str, Any] = {"trime": BM25()} | ({"bm25s": Bm25s(), "rank_bm25": RankBM25()} if compare else {})
    rows, contestants = dict[str, dict[str, Any]](), dict[str, Callable[[], Any]]()
    for name, backend in backends.items():
        meter, before = ResourceUsage(), process_peak()
        backend.fit(segments)
        first = len(segments) // 3  # queries follow each other, as in the stage pack
        queries = list(range(first, min(first + QUERIES.get(name, options.queries), len(segments))))
        rows[name] = {"what": name, "segments": len(segments), "length": len(segments[0]), "index s": round(meter.seconds, 2)}
        rows[name] |= {"queries": len(queries)}
        contestants[name] = partial(backend.nearest, queries, K)
        if name == "trime":
            contestants[name]()
            rows[name]["extra MB"] = round(max(0, process_peak() - before) / 2**20, 1)
    results = alternately(contestants, options.rounds, warmup=1)
    for name, result in results.items():
        per_query = [seconds / rows[name]["queries"] for seconds in result["rounds"]]
        rows[name]["ms a query"] = round(1000 * result["median_seconds"] / rows[name]["queries"], 4)
        ours = [seconds / rows["trime"]["queries"] for seconds in results["trime"]["rounds"]]
        rows[name] |= {"times trime": round(ratio(per_query, ours), 1)} if name != "trime" else {}
    return list(rows.values())


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims; those for all of WikiText-103 are extrapolated from the last row."""
    times = {row["what"]: row["times trime"] for row in rows if "times trime" in row}
    first, last = rows[0], rows[-1]
    factor = WHOLE / last["segments"]
    minutes = (last["index s"] * factor + WHOLE * last["ms a query"] / 1000 * factor) / 60
    return [
        Claim("time of a query over rank_bm25's", 1 / times["rank_bm25"], 1 / 5000),
        Claim("time of a query over bm25s's", 1 / times["bm25s"], 1 / 8),
        Claim(f"MB at {first['segments']:,} segments of {first['length']}", first["extra MB"], 1024),
        Claim(f"minutes at {WHOLE:,} segments of {last['length']}, by growth", minutes, 30),
        Claim(f"MB at {WHOLE:,} segments of {last['length']}, by growth", last["extra MB"] * factor, 4096),
    ]
