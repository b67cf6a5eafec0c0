"""What a memory of texts is worth to a real decoder, beside what people do instead: the best passages in the prompt.

Texts that the model has not seen are stored; weights are fitted to others, and scored are others again. A text is scored in
windows. For passages in the prompt, the tokens before a window ask BM25 for the best passages of the stored texts, which
are read before it. Then tokens are generated with and without the memory, in turn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rank_bm25 import BM25Okapi

from benchmarks.measure import Claim, Measured, alternately, ratio
from trime.common.types import Int, Tensor
from trime.scoring.mixtures.experts import concat_masses
from trime.text_memory.decoder import Decoder, Read
from trime.text_memory.memory import TextMemory
from trime.text_memory.mixing import mixed

WINDOW, BEFORE, PASSAGE, PASSAGES = 256, 512, 256, 3  # tokens of a scored window, before it, of a passage; how many of them
GENERATED, ROUNDS = 32, 7
BOUND = 1.15  # of a token with memory, in tokens without


class Prompted(Decoder):
    """A decoder that reads the best passages of some texts before each window of a text; none without texts."""

    def __init__(self, model: Any, tokenizer: Any, stored: list[np.ndarray]):
        super().__init__(model, tokenizer, WINDOW, BEFORE)
        parts = [text[first : first + PASSAGE] for text in stored for first in range(0, len(text), PASSAGE)]
        self.passages, self.index = parts, BM25Okapi([part.tolist() for part in parts]) if parts else None

    def read(self, tokens: Int[Tensor, " _"], logits: bool) -> Iterator[Read]:
        for first in range(0, len(tokens) - 1, self.window):
            begin, end = max(0, first - self.overlap), min(first + self.window, len(tokens) - 1)
            inputs, asked = [torch.tensor(self.start, dtype=torch.long)], tokens[max(0, first - WINDOW) : first + 1].tolist()
            if self.index is not None:
                best = np.argsort(-self.index.get_scores(asked))[:PASSAGES]
                inputs += [torch.from_numpy(self.passages[number]) for number in best]
            yield self.read_window(torch.cat([*inputs, tokens[begin:end]]), end - first, logits)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a folder of a causal language model and its tokenizer")
    parser.add_argument("--dtype", default="bfloat16")
    for name in ("stored", "held-out", "test"):
        parser.add_argument(f"--{name}", type=Path, nargs="+", required=True, help=f"files or folders of the {name} text")
    parser.add_argument("--memory", type=Path, default=Path("outputs/decoder-memory"), help="the memory's folder")


def measure(options: argparse.Namespace) -> Measured:
    """Return bits per byte alone, with passages, with memory and with both; and the time of a token with memory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval().to(options.device)
    memory = TextMemory(model, tokenizer, options.memory)
    memory.add(options.stored)
    print(memory.fit(options.held_out))
    stored = [
        segment.tokens(int(first), int(last))
        for segment in memory.store.segments()
        for first, last in zip(segment.offsets, segment.offsets[1:], strict=False)
    ]
    rows = []
    for passages in (False, True):
        memory.decoder = Prompted(model, tokenizer, [text.astype(np.int64) for text in stored] if passages else [])
        texts = memory.held_out(options.test, "text")
        scored, mixture = memory.read_all(texts, memory.experts()), memory.mixture()
        alone = concat_masses([each.masses for each in scored]).log_probability[:, 0]
        with_memory = torch.cat([mixed(mixture, each) for each in scored])
        size = sum(len(text.content.encode()) for text in texts)
        for name, losses in (("", -alone), ("memory", -with_memory)):
            row: dict[str, Any] = {
                "beside the text": ", ".join(filter(None, [f"{PASSAGES} passages" * passages, name])) or "nothing"
            }
            row |= {"tokens": len(losses), "perplexity": round(math.exp(losses.double().mean()), 3)}
            rows.append(row | {"bits per byte": round(float(losses.double().sum()) / math.log(2) / size, 4)})
    times = token_times(memory, model, tokenizer)
    return Measured([*rows, *times], [Claim("a token with memory, in tokens without", times[1]["times nothing"], BOUND)])


def token_times(memory: TextMemory, model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the milliseconds of a generated token without and with the memory, in turn."""
    memory.decoder = Decoder(model, tokenizer, WINDOW, BEFORE)
    inputs = tokenizer("def read(self, name):\n    return", return_tensors="pt").to(model.device)
    settings = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False, "pad_token_id": 0}
    processor = memory.processor()
    contestants = {
        "nothing": lambda: model.generate(**inputs, **settings),
        "memory": lambda: model.generate(**inputs, **settings, logits_processor=[processor]),
    }
    timed = alternately(contestants, ROUNDS, warmup=2)
    factor = ratio(timed["memory"]["rounds"], timed["nothing"]["rounds"])
    return [
        {
            "beside the text": f"{name}, generating",
            "stored tokens": len(memory),
            "ms a token": round(1000 * each["median_seconds"] / GENERATED, 1),
        }
        | ({"times nothing": factor} if name == "memory" else {})
        for name, each in timed.items()
    ]
