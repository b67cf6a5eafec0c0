"""BM25 packing: the 20 nearest segments of whole segments, beside bm25s (numba) and rank_bm25, and how it grows.

Text: 32,000 words drawn by Zipf's law, of which each document of 100 segments has 300 that it prefers; or ``--path``, a folder
of text files, read as one stream of words. bm25s and rank_bm25 answer fewer queries, and only at the first size.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

from benchmarks.measure import Claim, Measured, alternately, ratio
from trime.data.neighbours import Fast, Reference
from trime.metrics import ResourceUsage, process_peak

WORDS, DOCUMENT, OWN, SHARE, K = 32_000, 100, 300, 0.15, 20
WHOLE = 690_000  # segments of 150 tokens: WikiText-103 in the 150M model's training (TRIME Table 9)
ASKED = {"bm25s": 20, "rank_bm25": 1}  # queries a round


class Bm25s:
    """bm25s with numba, Lucene's variant."""

    def fit(self, segments: list[np.ndarray]) -> None:
        from bm25s import BM25

        self.ids = [segment.tolist() for segment in segments]
        self.vocabulary = {str(word): word for word in range(WORDS + 1)}
        self.index = BM25(k1=0.9, b=0.4, method="lucene", backend="numba")
        self.index.index((self.ids, self.vocabulary), show_progress=False)

    def nearest(self, queries: list[int], k: int) -> np.ndarray:
        from bm25s.tokenization import Tokenized

        asked = Tokenized(ids=[self.ids[query] for query in queries], vocab=self.vocabulary)
        return self.index.retrieve(asked, k=k + 1, show_progress=False, n_threads=numba.config.NUMBA_NUM_THREADS)[0]


def drawn(tokens: int, length: int) -> np.ndarray:
    """Words by frequency, some of them by document."""
    random = np.random.default_rng(0)
    upto = np.cumsum(1 / np.arange(1, WORDS + 1))
    text = np.searchsorted(upto, random.random(tokens) * upto[-1]).astype(np.int32)
    documents = tokens // (length * DOCUMENT) + 1
    preferred = np.searchsorted(upto, (0.4 + 0.6 * random.random((documents, OWN))) * upto[-1]).astype(np.int32)
    where = np.flatnonzero(random.random(tokens) < SHARE)
    text[where] = preferred[where // (length * DOCUMENT), random.integers(0, OWN, len(where))]
    return text


def read(path: Path) -> np.ndarray:
    """The most frequent words of a folder's text, in its order."""
    words = [word for file in sorted(path.rglob("*.txt")) for word in re.findall(r"\w+|[^\w\s]", file.read_text("utf-8"))]
    number = {word: i for i, (word, _) in enumerate(Counter(words).most_common(WORDS))}
    return np.array([number[word] for word in words if word in number], np.int32)


def segments_of(path: Path | None, count: int, length: int) -> list[np.ndarray]:
    """That many segments, or as many as the text has."""
    text = read(path) if path else drawn(count * length, length)
    return np.array_split(text[: min(count, len(text) // length) * length], min(count, len(text) // length))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", type=Path, help="a folder of .txt files in place of drawn words")
    parser.add_argument("--sizes", nargs=2, action="append", type=int, metavar=("SEGMENTS", "LENGTH"), help="may be repeated")
    parser.add_argument("--queries", type=int, default=2048, help="a round")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Measured:
    """Beside the others at the first size, alone at the rest."""
    sizes = options.sizes or [(27_648, 512), (25_000, 150), (50_000, 150), (100_000, 150)]
    rows: list[dict[str, Any]] = []
    for number, (count, length) in enumerate(sizes):
        rows += of_size(segments_of(options.path, count, length), options, beside=number == 0)
    return Measured(rows, claims(rows))


def of_size(segments: list[np.ndarray], options: argparse.Namespace, beside: bool) -> list[dict[str, Any]]:
    """A row for each backend."""
    backends: dict[str, Any] = {"trime": Fast()} | ({"bm25s": Bm25s(), "rank_bm25": Reference()} if beside else {})
    rows, ways = dict[str, dict[str, Any]](), dict[str, Callable[[], Any]]()
    for name, backend in backends.items():
        meter, before = ResourceUsage(), process_peak()
        backend.fit(segments)
        first = len(segments) // 3  # queries follow each other, as in the stage pack
        asked = list(range(first, min(first + ASKED.get(name, options.queries), len(segments))))
        rows[name] = {"what": name, "segments": len(segments), "length": len(segments[0]), "index s": round(meter.seconds, 2)}
        rows[name] |= {"queries": len(asked)}
        ways[name] = lambda backend=backend, asked=asked: backend.nearest(asked, K)
        if name == "trime":
            ways[name]()
            rows[name]["extra MB"] = round(max(0, process_peak() - before) / 2**20, 1)
    found = alternately(ways, options.rounds, warmup=1)
    for name, own in found.items():
        each = [seconds / rows[name]["queries"] for seconds in own["rounds"]]
        rows[name]["ms a query"] = round(1000 * own["median_seconds"] / rows[name]["queries"], 4)
        ours = [seconds / rows["trime"]["queries"] for seconds in found["trime"]["rounds"]]
        rows[name] |= {"times trime": round(ratio(each, ours), 1)} if name != "trime" else {}
    return list(rows.values())


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """What is said of the figures; for the whole of WikiText-103, by the growth of the last rows."""
    times = {row["what"]: row["times trime"] for row in rows if "times trime" in row}
    first, last = rows[0], rows[-1]
    more = WHOLE / last["segments"]
    minutes = (last["index s"] * more + WHOLE * last["ms a query"] / 1000 * more) / 60
    return [
        Claim("time of a query over rank_bm25's", 1 / times["rank_bm25"], 1 / 5000),
        Claim("time of a query over bm25s's", 1 / times["bm25s"], 1 / 8),
        Claim(f"MB at {first['segments']:,} segments of {first['length']}", first["extra MB"], 1024),
        Claim(f"minutes at {WHOLE:,} segments of {last['length']}, by growth", minutes, 30),
        Claim(f"MB at {WHOLE:,} segments of {last['length']}, by growth", last["extra MB"] * more, 4096),
    ]
