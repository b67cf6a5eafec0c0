"""Does the attention that a memory has kept foretell whether it answers? Numbers hidden in novels, read by a real model.

The questions are those of ``table=passkey``. A model that keeps everything tells how much attention the last token of a prompt
pays each earlier one, in every layer. A policy's retained mass is how much of it is on entries that its memories hold when the
prompt has been read; beside it stand the share of layers that hold the number's own tokens, and whether the model, reading with
that policy, answers. The last row has rank correlations with the share of answers, over the policies.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from scipy.stats import spearmanr

from benchmarks.measure import Measured
from trime.common.progress import Progress
from trime.config.compose import compose_config
from trime.data.questions.base import Example, contains_answer
from trime.kv.answering import Answerer, DecoderSession, greedy
from trime.models.pretrained.tokenizer import load_tokenizer
from trime.stages.answer import Prompt
from trime.stages.graph import Graph
from trime.stages.train_small import batched

POLICIES = ("sink", "lfa", "tova", "snapkv", "lra_sum", "lra_last", "lru", "fifo", "h2o", "lra_max", "key_norm")
BATCH = 4  # prompts that are read at once
COLUMNS = ("retained", "number")  # that may foretell the answers


class Kept(NamedTuple):
    """What was left of a question's text when a policy had read it, and whether the answer was right."""

    retained: float
    number: float
    right: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--background", type=Path, required=True, help="a folder of novels")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--words", type=int, default=720, help="of each text")
    parser.add_argument("--memory", type=int, default=512, help="entries of each layer")
    parser.add_argument("--policies", nargs="+", default=[*POLICIES], help="files of conf/eviction")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, as on the command line of cli.py")
    parser.add_argument("--data", type=Path, default=Path("data"), help="where the model is, or is converted to")


def graph_of(options: argparse.Namespace, policy: str, size: int, top_k: int | None) -> Graph:
    """Return the graph of answering with a policy."""
    config = compose_config(
        *("table=passkey", f"questions.words={options.words}", f"questions.background={options.background.absolute()}"),
        *(f"questions.count={options.questions}", f"model.memory_size={size}", f"eviction={policy}", "logger=none"),
        *(f"paths.data={options.data}", f"trainer.accelerator={'cpu' if options.device == 'cpu' else 'gpu'}"),
        *options.set,
        *([] if top_k is None else [f"model.top_k={top_k}"]),
    )
    return Graph(config)


@torch.no_grad()
def measure(options: argparse.Namespace) -> Measured:
    """Read every question with everything kept, and with each policy."""
    plans = {policy: graph_of(options, policy, options.memory, None) for policy in options.policies}
    first = next(iter(plans.values()))
    examples = first.answer.examples()
    tokenizer = load_tokenizer(first.config.model.name)
    make_prompt = first.answer.prompts(tokenizer)
    asked = [(example, make_prompt(example)) for example in examples]
    longest = max(len(made.tokens) for _, made in asked)
    batches = [*batched(asked, BATCH)]
    whole = graph_of(options, "fifo", longest + 1, longest + 1)
    with Progress(total=len(asked) * (1 + len(plans)), unit="question", desc="retained") as bar:
        _, answerer = whole.answer.model()
        reference = [part for batch in batches for part in attention_of(answerer, batch, bar)]
        found = {policy: kept_by(graph, batches, reference, bar) for policy, graph in plans.items()}
    rows: list[dict[str, Any]] = [
        {
            "policy": policy,
            "questions": len(kept),
            "retained": round(mean(one.retained for one in kept), 4),
            "number": round(mean(one.number for one in kept), 4),
            "contained": round(mean(one.right for one in kept), 4),
        }
        for policy, kept in found.items()
    ]
    correlations = {name: rank_correlation([row[name] for row in rows], [row["contained"] for row in rows]) for name in COLUMNS}
    return Measured([*rows, {"policy": "rank correlation with contained", "questions": len(asked), **correlations}], [])


def rank_correlation(one: list[float], other: list[float]) -> float | None:
    """Return Spearman's correlation; None if either is the same for all."""
    if min(len({*one}), len({*other})) == 1:
        return None
    return round(float(spearmanr(one, other).statistic), 3)


def session_of(answerer: Answerer, batch: list[tuple[Example, Prompt]], record_attention: bool) -> DecoderSession:
    """Read the prompts of a batch."""
    reading = answerer.start([made.shared for _, made in batch], record_attention)
    session = reading.ask([made.rest for _, made in batch])
    assert isinstance(session, DecoderSession)
    return session


def attention_of(answerer: Answerer, batch: list[tuple[Example, Prompt]], bar: Any) -> list[list[torch.Tensor]]:
    """Return for each prompt the attention of its last token to each of its tokens, layer by layer."""
    traces = session_of(answerer, batch, True).reader.cache.traces()
    bar.update(len(batch))
    return [
        [torch.zeros(len(made.tokens)).index_add(0, *filled(trace.position[row], trace.share[row])) for trace in traces]
        for row, (_, made) in enumerate(batch)
    ]


def filled(position: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions and attention of the slots that are not empty."""
    return position[position >= 0].cpu(), share[position >= 0].float().cpu()


def kept_by(
    graph: Graph, batches: list[list[tuple[Example, Prompt]]], reference: list[list[torch.Tensor]], bar: Any
) -> list[Kept]:
    """Return what a policy kept of each prompt."""
    kept: list[Kept] = []
    tokenizer, answerer = graph.answer.model()
    for batch in batches:
        session = session_of(answerer, batch, False)
        held = [[layer[row][layer[row] >= 0].cpu() for layer in session.kept] for row in range(len(batch))]
        answers = greedy(session, tokenizer.eos_token_id, graph.config.answering.max_new_tokens)
        for (example, made), layers, answer in zip(batch, held, answers, strict=True):
            attention = reference[len(kept)]
            number = torch.tensor(number_places(tokenizer, example, made), dtype=torch.long)
            shares = [float(weight[place].sum() / weight.sum()) for weight, place in zip(attention, layers, strict=True)]
            numbers = [float(torch.isin(number, place).sum()) / max(1, len(number)) for place in layers]
            text = tokenizer.decode(answer, skip_special_tokens=True)
            kept.append(Kept(mean(shares), mean(numbers), contains_answer(text, example)))
        bar.update(len(batch))
    return kept


def number_places(tokenizer: Any, example: Example, made: Prompt) -> list[int]:
    """Return the positions of the number's tokens in a prompt."""
    texts = [tokenizer.decode([token]) for token in made.tokens]
    places: list[int] = []
    for begin in answer_places(texts, example.answers):
        length = 0
        for place in range(begin, len(texts)):
            places.append(place)
            length += len(texts[place].strip())
            if length >= len(example.answers[0]):
                break
    return places


def answer_places(texts: list[str], answers: tuple[str, ...]) -> list[int]:
    """Return the positions of the tokens with which an accepted answer begins, in any case and spacing of its letters."""
    # Compared letter by letter, because tokens cut words anywhere and a tokenizer may change blanks and case.
    owners = [position for position, text in enumerate(texts) for letter in text if not letter.isspace()]
    letters = "".join(letter.lower()[:1] for text in texts for letter in text if not letter.isspace())
    wanted = {"".join(answer.lower().split()) for answer in answers} - {""}
    places = {owners[found.start()] for answer in wanted for found in re.finditer(re.escape(answer), letters)}
    return sorted(places)
