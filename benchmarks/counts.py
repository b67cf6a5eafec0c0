"""How long a text memory searches the stored text, letter by letter, and that it counts what ``str.count`` does."""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import trime
from benchmarks.attendre import decoder_like_smollm2
from benchmarks.measure import Claim, Measured, alternately
from tests.helpers.decoders import tokenizer_of
from trime.data.texts import read_files

TEXTS = ("self.name", "def forward(", "class ", " return", "elf", "):\n        ", "nowhere at all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--packages", nargs="+", default=["hydra", "pydantic", "pytorch_lightning"], help="installed ones")
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Measured:
    """Store the files of each package without keys, and search them."""
    rows, wrong = [], 0
    model = decoder_like_smollm2(options.device, layers=1)
    for package in options.packages:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        files = sorted(Path(spec.origin).parent.rglob("*.py"))
        with tempfile.TemporaryDirectory() as place:
            memory = trime.TextMemory(model, tokenizer_of(Path(place)), Path(place) / "memory", knn=False)
            memory.add(files)
            texts = [text.content for _, found in read_files(files, "text") for text in found if text.name in {*memory.names}]
            wrong += sum(memory.count(text) != sum(each.count(text) for each in texts) for text in TEXTS)
            calls: dict[str, Callable[[str], Any]] = {"count": memory.count, "find": memory.find, "next": memory.next}
            turns = {name: partial(call, "self.name") for name, call in calls.items()}
            results = alternately(turns, options.rounds, warmup=1)
            row = {
                "package": package,
                "files": len(memory.names),
                "MB": round(sum(len(each.encode()) for each in texts) / 1e6, 1),
            }
            row |= {f"ms a {name}": round(1000 * result["median_seconds"], 2) for name, result in results.items()}
            rows.append(row | {"occurrences": memory.count("self.name")})
    return Measured(
        rows, [Claim(f"counts of {len(TEXTS)} texts in each package that differ from str.count", float(wrong), 0.0)]
    )
