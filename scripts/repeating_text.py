"""Write a text in which only a memory can help: ``python -m scripts.repeating_text FOLDER``.

Each document is a passage of words drawn at random, again and again, so that all but the first can be read off the one
before, but from no window that is shorter than the passage.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

WORDS, PASSAGE, TIMES, DOCUMENTS = 500, 192, 6, {"train": 1500, "valid": 40, "test": 40}


def main(folder: Path) -> None:
    """Write train, valid and test as folders of documents."""
    draw = random.Random(0)
    words = [f"w{number:03d}" for number in range(WORDS)]
    for split, count in DOCUMENTS.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            passage = " ".join(draw.choices(words, k=PASSAGE))
            (folder / split / f"{number:04d}.txt").write_text(f"{passage}\n" * TIMES)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
