"""A text in which a memory must help: each document draws its words from a few of its own.

It writes train, valid and test of documents of LENGTH words, each drawn from OWN words that are the document's own out of
WORDS. Its rows are the perplexity of test that is possible with a window of so many words, where a word of the window has
probability 1 / OWN and the others share what is left, and the gates of the models that were trained below ``--outputs``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.measure import Measured

WORDS, OWN, LENGTH = 256, 16, 128
DOCUMENTS = {"train": 10_000, "valid": 200, "test": 200}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, required=True, help="where the text is written")
    parser.add_argument("--outputs", type=Path, nargs="*", default=[], help="paths.outputs of runs whose gates are read")


def measure(options: argparse.Namespace) -> Measured:
    """Write the text; return what is possible on it, and the gates of the models trained."""
    write(options.folder)
    rows = [
        {"what": "at best", "window": window, "perplexity": round(least_perplexity(window), 1)} for window in (8, 16, LENGTH)
    ]
    files = [file for place in options.outputs for file in sorted(place.glob("artefacts/fit-*/metrics.csv"))]
    return Measured([*rows, *filter(None, map(gates, files))], [])


def documents(split: str) -> list[list[int]]:
    """Return the words of a split's documents."""
    draw = random.Random(split)
    return [draw.choices(draw.sample(range(WORDS), OWN), k=LENGTH) for _ in range(DOCUMENTS[split])]


def write(folder: Path) -> None:
    """Write each split as rows of ``text.jsonl`` in a folder of its own."""
    for split in DOCUMENTS:
        (folder / split).mkdir(parents=True, exist_ok=True)
        rows = [json.dumps({"text": " ".join(f"w{word}" for word in words)}) + "\n" for words in documents(split)]
        (folder / split / "text.jsonl").write_text("".join(rows))


def least_perplexity(window: int) -> float:
    """Return the perplexity of test of the best prediction from the ``window`` words before each."""
    losses = []
    for words in documents("test"):
        for place, word in enumerate(words):
            seen = {*words[max(0, place - window) : place]}
            losses.append(-math.log(1 / OWN if word in seen else (OWN - len(seen)) / OWN / (WORDS - len(seen))))
    return math.exp(sum(losses) / len(losses))


def gates(metrics: Path) -> dict[str, Any]:
    """Return the mean gate of the heads of a layer with a memory, when training began and when it ended."""
    with metrics.open(newline="") as file:
        means = [
            mean(own)
            for row in csv.DictReader(file)
            if (own := [float(row[key]) for key in row if "/gate/" in key and row[key]])
        ]
    return (
        {"what": "gate", "fit": metrics.parent.name, "first": round(means[0], 3), "last": round(means[-1], 3)} if means else {}
    )
