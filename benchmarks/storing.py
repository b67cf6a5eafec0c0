"""How fast a memory of one's own texts takes them in: tokens that ``add`` stores and that ``fit`` reads, a second.

The first texts of a folder are stored, one of the next is fitted to; with nearest neighbours and without.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import trime
from benchmarks.measure import Measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a folder of a causal language model and its tokenizer")
    parser.add_argument("--texts", type=Path, required=True, help="a folder of texts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--characters", type=int, default=80_000, help="of texts to store; half as many to fit to")


def measure(options: argparse.Namespace) -> Measured:
    """Store texts and fit to others, with the model's contexts and by n-grams alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).to(options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = "".join(file.read_text(errors="replace") for file in sorted(options.texts.rglob("*.txt")))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        stored, held_out = Path(folder, "stored.txt"), Path(folder, "held_out.txt")
        stored.write_text(text[: options.characters])
        held_out.write_text(text[options.characters : options.characters * 3 // 2])
        for knn in (True, False):
            memory = trime.TextMemory(model, tokenizer, f"{folder}/memory{knn}", knn=knn)
            row: dict[str, Any] = {"memories": "all" if knn else "without kNN", "model": Path(options.model).name}
            for name, call, path in (("add", memory.add, stored), ("fit", memory.fit, held_out)):
                started = time.perf_counter()
                call([path])
                seconds = time.perf_counter() - started
                tokens = len(memory) if name == "add" else len(tokenizer(held_out.read_text())["input_ids"])
                row |= {f"{name}, tokens": tokens, f"{name}, tokens/s": round(tokens / seconds)}
            rows.append(row)
    return Measured(rows, [])
