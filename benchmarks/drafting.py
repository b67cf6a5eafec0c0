"""Text written with drafts from a memory, beside the plain model, prompt lookup of transformers, and the memory without drafts.

Each text is cut in three, as by ``decoder_memory``: most is stored, weights are fitted to some of the rest, and prompts are
windows of the rest of it. The ways take turns at each prompt, greedily and sampled.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.decoder_memory import add_text_arguments, cut, texts_of
from benchmarks.measure import Claim, Measured
from trime.report.canvas import Panel, save_panels
from trime.text_memory.drafting import Drafting
from trime.text_memory.memory import WEIGHTS, TextMemory

PLAIN, LOOKUP, DRAFTS, MEMORY, BOTH = "plain", "plain, prompt lookup", "plain, drafts", "memory", "memory, drafts"
WAYS = (PLAIN, LOOKUP, DRAFTS, MEMORY, BOTH)
COLOURS = dict(zip(WAYS, ("#5c6773", "#CC79A7", "#56B4E9", "#009E73", "#E69F00"), strict=True))
SAMPLED = {"do_sample": True, "temperature": 0.8}
PLACES = [(8, "right at 9 and on"), (4, "right at 5 to 8"), (2, "right at 3 and 4"), (1, "right at 2"), (0, "right at 1")]
LOOKED_UP = 8  # tokens that prompt lookup drafts
# On code, in times of the speed of each: greedy against the plain model and the memory without drafts, and sampled.
BOUNDS = {(PLAIN, "greedy"): 1 / 1.5, (MEMORY, "greedy"): 1 / 1.8, (PLAIN, "sampled"): 1 / 1.3}


class Written(NamedTuple):
    """A continuation: seconds in all and to the first token, calls of the model, and the tokens."""

    seconds: float
    first: float
    calls: int
    tokens: list[int]


class Clock:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.begun, self.first, self.puts = time.perf_counter(), 0.0, 0

    def put(self, tokens: Any) -> None:
        self.puts += 1
        if self.puts == 2:  # the prompt comes first
            self.first = time.perf_counter() - self.begun

    def end(self) -> None:
        self.puts = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    parser.add_argument("--prompts", type=int, default=10, help="prompts of each text")
    parser.add_argument("--prompt", type=int, default=400, help="tokens of a prompt")
    parser.add_argument("--written", type=int, default=64, help="tokens that are written")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="of writing, the first being compared with")
    parser.add_argument("--code", nargs="*", default=[], help="names of the texts that are code, which claims are about")


def measure(options: argparse.Namespace) -> Measured:
    """Return a row for each text, decoding and way."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval().to(options.device)
    tokenizer, rows = AutoTokenizer.from_pretrained(options.model), []
    for path in options.texts:
        folder = options.folder / f"{path.stem}-{options.characters}"
        cut(path, folder / "texts", options.characters)
        memory = TextMemory(model, tokenizer, folder / f"{Path(options.model).name}-{options.dtype}")
        memory.add(folder / "texts" / "stored")
        if not (memory.folder / WEIGHTS).exists():
            print(memory.fit(folder / "texts" / "held_out"))
        rows += rows_of_text(path.stem, memory, folder, options)
    claims = [
        Claim(f"{BOTH}, {decoding}: time on code, in that of {way}", worst(rows, way, decoding, options.code), bound)
        for (way, decoding), bound in BOUNDS.items()
        if {way, BOTH} <= {*options.ways}
    ]
    return Measured(rows, claims)


def worst(rows: list[dict[str, Any]], way: str, decoding: str, code: list[str]) -> float | None:
    """Return the largest time with memory and drafts on a text of code, in that of another way; None where there is none."""
    times = {(row["text"], row["way"]): row["ms a token"] for row in rows if row["decoding"] == decoding}
    return max((times[text, BOTH] / times[text, way] for text in code), default=None)


def rows_of_text(text: str, memory: TextMemory, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a text: medians over its prompts."""
    prompts = [*prompts_of(memory, folder, options)]
    write(memory, prompts[0], BOTH, options.written, {"do_sample": False})  # what is compiled or loaded at first
    rows = []
    for decoding, settings in (("greedy", {"do_sample": False}), ("sampled", SAMPLED)):
        of_way: dict[str, list[Written]] = {way: [] for way in options.ways}
        tried = Counter[tuple[str, int, bool]]()
        for number, prompt in enumerate(prompts):
            for way in np.random.default_rng(number).permutation(options.ways).tolist():
                torch.manual_seed(number)
                written, drafting = write(memory, prompt, way, options.written, settings)
                of_way[way].append(written)
                if drafting and way == BOTH:
                    tried += drafting.tried
        for way, texts in of_way.items():
            plain = of_way.get(way.split(",")[0])
            same = plain and sum(one.tokens == other.tokens for one, other in zip(texts, plain, strict=True))
            count = sum(len(one.tokens) for one in texts)
            rows.append(
                {
                    "text": text,
                    "decoding": decoding,
                    "way": way,
                    "stored tokens": len(memory),
                    "prompts": len(prompts),
                    "ms a token": round(1000 * median(one.seconds / len(one.tokens) for one in texts), 2),
                    "calls a token": round(sum(one.calls for one in texts) / count, 3),
                    "ms to the first token": round(1000 * median(one.first for one in texts), 1),
                    "the same text": same,
                }
                | (shares_of(tried) if way == BOTH else {})
            )
    return rows


def shares_of(tried: Counter[tuple[str, int, bool]]) -> dict[str, str]:
    """Return how many drafted tokens were right, by their source and by their place in the draft."""
    right, drafted = Counter[str](), Counter[str]()
    for (source, place, is_right), count in tried.items():
        for name in (f"right of {source}", next(name for first, name in PLACES if place >= first)):
            drafted[name] += count
            right[name] += count * is_right
    return {name: f"{right[name]} of {drafted[name]}" for name in drafted}


def prompts_of(memory: TextMemory, folder: Path, options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield prompts [1 l]: windows of the texts that are neither stored nor fitted to, from all of them in turn."""
    windows = [
        text.tokens[first : first + options.prompt]
        for first in range(0, 10**6, 2 * options.prompt)
        for text in texts_of(memory, folder, "test")
        if first + options.prompt <= len(text.tokens)
    ]
    for window in windows[: options.prompts]:
        yield torch.from_numpy(window)[None].to(options.device)


def write(
    memory: TextMemory, prompt: torch.Tensor, way: str, count: int, settings: dict[str, Any]
) -> tuple[Written, Drafting | None]:
    """Continue a prompt in one of the ways."""
    clock, drafting, model = Clock(), None, memory.decoder.model
    given: dict[str, Any] = {"streamer": clock}
    if way in (DRAFTS, BOTH):
        drafting = memory.drafting(mix=way == BOTH, streamer=clock)
        given["custom_generate"] = drafting
    elif way == MEMORY:
        given["logits_processor"] = [memory.processor()]
    elif way == LOOKUP:
        given = {"prompt_lookup_num_tokens": LOOKED_UP}
    calls = Calls()
    hook = model.register_forward_pre_hook(calls)
    begin = clock.begun = time.perf_counter()
    length = {"max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **length, **given, **settings)
    seconds = time.perf_counter() - begin
    hook.remove()
    return Written(seconds, clock.first, calls.number, output[0, prompt.shape[1] :].tolist()), drafting


class Calls:
    """Counts the calls of a module."""

    number = 0

    def __call__(self, module: Any, inputs: Any) -> None:
        self.number += 1


def draw(rows: list[dict[str, Any]], file: Path) -> Path:
    """Draw for each decoding the speed of each way on each text, in that of the first one, over the tokens of a call."""
    headline = "Speed by tokens a call: what a draft costs is how far a point lies below the line"
    decodings = dict.fromkeys(row["decoding"] for row in rows)
    panels: list[Panel] = [
        partial(draw_decoding, rows=[row for row in rows if row["decoding"] == decoding], has_key=not number)
        for number, decoding in enumerate(decodings)
    ]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(save_panels(panels, Path(folder) / file.name, headline, height=3.2), file)
    return file


def draw_decoding(axis: Any, rows: list[dict[str, Any]], has_key: bool) -> None:
    """Draw the panel of a decoding; on the line a call takes as long as one of the first way without a draft."""
    base, *ways = dict.fromkeys(row["way"] for row in rows)
    times = {row["text"]: row["ms a token"] for row in rows if row["way"] == base}
    farthest = 1.1 * max(1 / row["calls a token"] for row in rows)
    axis.plot([0, farthest], [0, farthest], color=COLOURS[base], lw=0.8)
    for way in ways:
        points = [(1 / row["calls a token"], times[row["text"]] / row["ms a token"]) for row in rows if row["way"] == way]
        axis.plot(*zip(*points, strict=True), "o", color=COLOURS[way], ms=6, alpha=0.8, label=way)
    if has_key:
        axis.legend(loc="upper left", fontsize=8, frameon=False)
    axis.set_xlim(0, farthest)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("tokens a call")
    axis.set_ylabel("times the plain model's speed" if base == PLAIN else f"times the speed of {base}")
    axis.set_title(f"{rows[0]['decoding']}, {len(times)} texts")
