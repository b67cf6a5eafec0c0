"""A text in which a memory must help: each document draws its words from a few of its own.

``python -m benchmarks.own_words FOLDER`` writes train, valid and test of documents of LENGTH words, each drawn from OWN words
that are the document's own out of WORDS. It prints the perplexity of test that is possible with a window of so many words:
a word of the window has probability 1 / OWN, and the others share what is left.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

WORDS, OWN, LENGTH = 256, 16, 128
DOCUMENTS = {"train": 10_000, "valid": 200, "test": 200}


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
    for window in (8, 16, LENGTH):
        print(f"at best with a window of {window} words: {least_perplexity(window):.1f}")
