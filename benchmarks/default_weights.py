"""The weights of a memory before its first fit, and what they lose to a fit: on stored texts, or on texts held out.

Each text is cut in three, as by ``decoder_memory``, and read by each model. The weights of a row were fitted to the other texts
under the other models; those that the package keeps, to all of them (``--write``).
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoder_memory import cut, texts_of, together
from benchmarks.measure import Measured
from trime.common.io import write_tensors
from trime.text_memory.experts import DOCUMENT, NEIGHBOURS, TEMPERATURES, TEXT, Experts
from trime.text_memory.held_out import from_stored
from trime.text_memory.memory import DEFAULT, DEFAULT_NGRAMS, TextMemory
from trime.text_memory.processor import fit_weights, mixed
from trime.text_memory.worth import Scored

PARTS = ("held_out", "test")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="folders of causal language models")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="folders or files, a text each")
    parser.add_argument("--characters", type=int, default=100_000, help="of a text that are used, at most")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path, default=Path("outputs/default-weights"), help="for memories")
    parser.add_argument("--write", action="store_true", help="write the package's weights")


def measure(options: argparse.Namespace) -> Measured:
    """Return the perplexity of each text under each model: alone, with weights of others, and with weights of its own."""
    read, experts = {}, None
    for model in options.models:
        for text in options.texts:
            read[model.name, text.stem], experts = read_parts(model, text, options)
    assert experts is not None
    rows = []
    for (model, text), parts in read.items():
        others = [each[part] for key, each in read.items() if key[0] != model and key[1] != text for part in PARTS]
        losses = {
            "alone": -parts["test"].masses.log_probability[:, 0],
            "weights of others": -mixed(fit_weights(renumbered(others), experts.counts, 0)[0], parts["test"]),
            "fit()": -mixed(fit_weights(parts["stored"], experts.counts, 0)[0], parts["test"]),
            "fit(held out)": -mixed(fit_weights(parts["held_out"], experts.counts, 0)[0], parts["test"]),
        }
        perplexity = {name: round(math.exp(loss.double().mean()), 3) for name, loss in losses.items()}
        rows.append({"model": model, "text": text, "tokens": len(losses["alone"]), **perplexity})
    if options.write:
        everything = renumbered([each[part] for each in read.values() for part in PARTS])
        write_weights(everything, experts)
    return Measured(rows, [])


def read_parts(model: Path, text: Path, options: argparse.Namespace) -> tuple[dict[str, Scored], Experts]:
    """Return what model and memories predict in some stored documents, each hidden, and in each part that is not stored."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = options.folder / f"{text.stem}-{options.characters}"
    cut(text, folder / "texts", options.characters)
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=options.dtype).eval().to(options.device)
    memory = TextMemory(decoder, AutoTokenizer.from_pretrained(model), folder / model.name)
    memory.add(folder / "texts" / "stored")
    experts = memory._experts()
    parts = {part: together(memory._read_all(texts_of(memory, folder, part))) for part in PARTS}
    return parts | {"stored": together(memory._read_all(from_stored(memory.decoder, experts, seed=0)))}, experts


def renumbered(several: list[Scored]) -> Scored:
    """Return texts as one whose documents have numbers of their own."""
    first, result = 0, []
    for each in several:
        result.append(each._replace(masses=each.masses._replace(document=each.masses.document + first)))
        first += int(each.masses.document.max()) + 1
    return together(result)


def write_weights(scored: Scored, experts: Experts) -> None:
    """Write the weights that the package keeps: for all memories, and for n-grams without neighbours."""
    of_ngrams, counts = experts.chosen(scored.masses, {TEXT, DOCUMENT})
    kinds: dict[Path, tuple[Scored, list[bool], list[str]]] = {
        DEFAULT: (scored, experts.counts, [TEXT, DOCUMENT, NEIGHBOURS]),
        DEFAULT_NGRAMS: (scored._replace(masses=of_ngrams), counts, [TEXT, DOCUMENT]),
    }
    for file, (masses, of_counts, memories) in kinds.items():
        note: dict[str, Any] = {"memories": memories, "temperatures": TEMPERATURES}
        state: dict[str, torch.Tensor] = fit_weights(masses, of_counts, 0)[0].state()
        write_tensors(file, state, note)
