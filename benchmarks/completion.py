"""What a memory of texts is worth in writing: lines of code that a decoder completes, and names that a text has not held yet.

Texts are cut, stored and fitted as by ``decoder_memory``, whose ``--folder`` is used. Lines follow a prompt that ends after
their indentation. Names are those that a text holds for the first time, and that occur in the memory. Each is read with and
without the memory, and with and without the best BM25 passages of the stored part in the prompt. What is finished of a text
is kept in the folder, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Collection, Iterator
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from benchmarks.decoder_memory import BEFORE, PASSAGES, WINDOW, Prompted, add_text_arguments, cut, finished, stored_texts
from benchmarks.measure import Measured
from trime.common.progress import Progress
from trime.common.types import Bool, Float, Int, Tensor
from trime.report.bootstrap import draw_counts
from trime.scoring.mixtures.adaptive import Adaptive
from trime.text_memory.decoder import Decoder
from trime.text_memory.experts import TEMPERATURES
from trime.text_memory.memory import WEIGHTS, TextMemory
from trime.text_memory.processor import predict

LINES, SHOWN, BATCH = 4, 1500, 8  # lines that are completed, characters before them, prompts of a batch
LONGEST = 20 * LINES  # tokens that are written
NAME = re.compile(r"[^\W\d]\w{3,}")
MEMORIES = ("none", "all")
BESIDE = ("nothing", f"{PASSAGES} passages")

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    parser.add_argument("--places", type=int, default=50, help="lines of each text of Python that are completed")


def measure(options: argparse.Namespace) -> Measured:
    """Return how well lines and names are predicted with and without memory and passages, by text and over all texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval().to(options.device)
    lines: dict[str, list[Row]] = {}
    names: dict[str, list[Row]] = {}
    for path in options.texts:
        folder = options.folder / f"{path.stem}-{options.characters}"
        cut(path, folder / "texts", options.characters)
        memory = TextMemory(model, tokenizer, folder / "memory")
        memory.add(folder / "texts" / "stored")
        if not (folder / "memory" / WEIGHTS).exists():
            memory.fit(folder / "texts" / "held_out")
        names[path.stem] = finished(folder / "names.json", lambda m=memory, f=folder: name_rows(m, f / "texts"))  # type: ignore[misc]
        texts = [file.read_text() for file in sorted((folder / "texts" / "test").glob("*.py"))]
        if places := lines_to_complete(texts, options.places):
            file = folder / f"lines-{options.places}.json"
            lines[path.stem] = finished(file, lambda m=memory, p=places: line_rows(m, p))  # type: ignore[misc]
    return Measured([*summaries(lines, of_lines), *summaries(names, of_names)], [])


def name_rows(memory: TextMemory, folder: Path) -> list[Row]:
    """Return the rank of the first token of each new name in each test text, by what the prediction is made with."""
    words = {word for file in (folder / "stored").iterdir() for word in NAME.findall(file.read_text())}
    model, tokenizer, rows = memory.decoder.model, memory.decoder.tokenizer, []
    for beside in BESIDE:
        memory.decoder = Prompted(model, tokenizer, stored_texts(memory)) if beside != "nothing" else plain(memory)
        for file in Progress(sorted((folder / "test").iterdir()), unit="text", desc=f"names beside {beside}"):
            text = file.read_text()
            tokens = memory.decoder.encode(text)
            ends = [end for _, end in tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping]
            first = len(tokens) - len(ends)
            places = {first + int(np.searchsorted(ends, place, "right")) for place in new_names(text, words)}
            for place, *both in predicted(memory, tokens, places):
                ranks = [1 + int((each > each[tokens[place]]).sum()) for each in both]
                rows += [
                    {"beside the text": beside, "memories": name, "rank": rank}
                    for name, rank in zip(MEMORIES, ranks, strict=True)
                ]
    return rows


def new_names(text: str, stored: Collection[str]) -> list[int]:
    """Return where names begin that a text holds for the first time, and the memory holds.

    A name has a capital letter or an underscore, and is not also stored in small letters, as the first word of a sentence is.
    """
    first: dict[str, int] = {}
    for match in NAME.finditer(text):
        first.setdefault(match[0], match.start())
    chosen = (name for name in first if name in stored and ("_" in name or name.lower() not in stored))
    return [first[name] for name in chosen]


def predicted(memory: TextMemory, tokens: np.ndarray, places: Collection[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield some places of a text, with the log-probabilities of every token there: the model's, and those with memory."""
    experts, mixture, first = memory._experts(), memory._mixture(), 1
    for context, log_probability in memory.decoder.read(torch.from_numpy(tokens), logits=True):
        assert log_probability is not None
        queries = memory._scaled(context)
        for place in sorted(place for place in places if first <= place < first + len(context)):
            row = slice(place - first, place - first + 1)
            with_memory = predict(experts, mixture, tokens[:place], log_probability[row], experts.nearest(queries[row]))
            yield place, log_probability[row][0], with_memory.log_probability
        first += len(context)


def plain(memory: TextMemory) -> Decoder:
    return Decoder(memory.decoder.model, memory.decoder.tokenizer, WINDOW, BEFORE)


def lines_to_complete(texts: list[str], places: int) -> list[tuple[str, str]]:
    """Return prompts that end after the indentation of a line, and the lines that follow, evenly over the texts."""
    found = []
    for text in texts:
        lines = text.splitlines(keepends=True)
        for number in range(10, len(lines) - LINES):
            line = lines[number].lstrip(" ")
            if len(line.strip()) >= 8 and not line.startswith(("#", '"', "import ", "from ")):
                indent = lines[number][: len(lines[number]) - len(line)]
                before = "".join(lines[:number])[-SHOWN:]
                found.append((before[before.find("\n") + 1 :] + indent, line + "".join(lines[number + 1 : number + LINES])))
    return [found[int(place)] for place in np.linspace(0, len(found) - 1, min(places, len(found)))]


class ModelAlone(Adaptive):
    """A mixture that leaves all weight to the model: prompts are continued as with memory, whose predictions are not used."""

    def log_weights(self, total: Tensor, history: Tensor) -> Tensor:
        return torch.full_like(total, -torch.inf).index_fill(1, torch.tensor([0]), 0)


class Written(StoppingCriteria):
    """Stops a row when its lines are written."""

    def __init__(self, decoder: Decoder):
        self.decoder, self.begin = decoder, 0

    def __call__(self, input_ids: Int[Tensor, "b l"], scores: Float[Tensor, "b v"], **_: Any) -> Bool[Tensor, " b"]:
        self.begin = self.begin or input_ids.shape[1] - 1
        ends = [self.decoder.text_of(row).count("\n") >= LINES for row in input_ids[:, self.begin :].tolist()]
        return torch.tensor(ends, device=input_ids.device)


def line_rows(memory: TextMemory, places: list[tuple[str, str]]) -> list[Row]:
    """Return for each place, and each way to write: what was written, how like the text it is, and the nats of the text."""
    prompted = Prompted(memory.decoder.model, memory.decoder.tokenizer, stored_texts(memory))
    memory.decoder = plain(memory)
    memory.decoder.window = 2**20  # passages, prompt and lines are read at once, as in generation
    mixtures, rows = {"none": ModelAlone(TEMPERATURES), "all": memory._mixture()}, []
    for beside in BESIDE:
        prompts = [before for before, _ in places]
        if beside != "nothing":
            asked = [prompted.encode(prompt)[-WINDOW:].tolist() for prompt in prompts]
            passages = [prompted.text_of(torch.cat(prompted.best(each)).tolist()) for each in asked]
            prompts = [f"{passage}\n{prompt}" for passage, prompt in zip(passages, prompts, strict=True)]
        nats = [
            nats_of(memory, prompt, wanted) for prompt, (_, wanted) in zip(Progress(prompts, desc="read"), places, strict=True)
        ]
        for column, (name, mixture) in enumerate(mixtures.items()):
            memory._mixture = lambda chosen=mixture: chosen  # type: ignore[method-assign,misc]
            for first in Progress(range(0, len(prompts), BATCH), unit="batch", desc=f"complete: {beside}, {name}"):
                batch = range(first, min(first + BATCH, len(prompts)))
                stop = StoppingCriteriaList([Written(memory.decoder)])
                texts = memory.generate([prompts[n] for n in batch], max_new_tokens=LONGEST, stopping_criteria=stop)
                for number, text in zip(batch, texts, strict=True):
                    row = {"beside the text": beside, "memories": name, "place": number, "nats": nats[number][column]}
                    rows.append(row | compared(text, places[number][1]) | {"written": text, "wanted": places[number][1]})
        memory._mixture = lambda: mixtures["all"]  # type: ignore[method-assign]
    return rows


def nats_of(memory: TextMemory, prompt: str, wanted: str) -> list[float]:
    """Return the summed loss of the lines after a prompt, under the model and with memory."""
    begun, tokens = memory.decoder.encode(prompt), memory.decoder.encode(prompt + wanted)
    shared = sum(1 for _ in takewhile(bool, (one == other for one, other in zip(begun, tokens, strict=False))))
    found = predicted(memory, tokens, range(shared, len(tokens)))
    sums = np.sum([[float(each[tokens[place]]) for each in both] for place, *both in found], axis=0)
    return [-float(each) for each in sums]


def compared(written: str, wanted: str) -> Row:
    """Return whether the first line and all are right, and how similar they are (1: the same text)."""
    result: Row = {"bytes": len(wanted.encode())}
    for label, count in (("line", 1), (f"{LINES} lines", LINES)):
        one, other = ("\n".join(line.rstrip() for line in text.splitlines()[:count]) for text in (written, wanted))
        result |= {f"{label} right": float(one == other)}
        result |= {f"{label} similar": SequenceMatcher(None, one, other, autojunk=False).ratio()}
    return result


def summaries(rows: dict[str, list[Row]], summary: Any) -> list[Row]:
    """Return the summary of each text's rows, and of all, by what the prediction is made with; with memory, beside without."""
    result = []
    together = {**rows, f"{len(rows)} texts": [row for each in rows.values() for row in each]}
    for text, each in together.items():
        for beside in BESIDE:
            without = [row for row in each if (row["beside the text"], row["memories"]) == (beside, MEMORIES[0])]
            for name in MEMORIES:
                chosen = [row for row in each if (row["beside the text"], row["memories"]) == (beside, name)]
                row = {"text": text, "beside the text": beside, "memories": name}
                result.append(row | summary(chosen, None if name == MEMORIES[0] else without))
    return result


def of_lines(rows: list[Row], without: list[Row] | None) -> Row:
    """Return the means over places, and the difference to the same places without memory with its interval."""
    columns = [f"{label} {kind}" for label in ("line", f"{LINES} lines") for kind in ("right", "similar")]
    result: Row = {"places": len(rows)} | {column: round(mean(rows, column), 3) for column in columns}
    result["bits a byte"] = round(sum(row["nats"] for row in rows) / math.log(2) / sum(row["bytes"] for row in rows), 3)
    if without is not None:
        for column in (columns[0], columns[-1]):
            change = np.array([one[column] - other[column] for one, other in zip(rows, without, strict=True)])
            result[f"{column}, less without"] = interval(change)
    return result


def of_names(rows: list[Row], without: list[Row] | None) -> Row:
    """Return how often the right token is the first, or among the first ten, and its median rank."""
    ranks = np.array([row["rank"] for row in rows])
    result: Row = {"names": len(ranks), "first": round(float((ranks == 1).mean()), 3)}
    result |= {"in the first ten": round(float((ranks <= 10).mean()), 3), "median rank": float(np.median(ranks))}
    if without is not None:
        result["first, less without"] = interval((ranks == 1) - np.array([row["rank"] == 1 for row in without], float))
    return result


def mean(rows: list[Row], column: str) -> float:
    return float(np.mean([row[column] for row in rows]))


def interval(change: np.ndarray) -> str:
    """Return a mean with the interval of 95 % of its bootstrap draws."""
    draws = draw_counts(len(change))[0] @ change / len(change)
    low, high = np.percentile(draws, [2.5, 97.5])
    return f"{change.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
