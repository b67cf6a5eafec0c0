"""A name that is newer than a decoder, with and without a memory of other files of its package: the picture of README.

The memory holds the files named; the page explains ``--file``, which it does not hold. Each occurrence of the name is a row:
its probability under the model alone and with memory (products over its tokens), and the file and line that gave most.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from benchmarks.measure import Measured
from trime.text_memory.memory import TextMemory
from trime.text_memory.page import write_page
from trime.text_memory.processor import ExplainedToken


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder of the decoder")
    parser.add_argument("--package", type=Path, required=True, help="folder that all files lie in")
    parser.add_argument("--stored", nargs="+", required=True, help="files and folders of the memory")
    parser.add_argument("--held-out", nargs="+", required=True, help="files that its weights are fitted to")
    parser.add_argument("--file", required=True, help="the file that is explained")
    parser.add_argument("--tokens", type=int, default=220, help="tokens of it that are explained, the first")
    parser.add_argument("--name", required=True, help="the name")
    parser.add_argument("--title", default="Where each token came from", help="of the page")
    parser.add_argument("--folder", type=Path, required=True, help="where the memory and the page are kept")


def measure(options: argparse.Namespace) -> Measured:
    """Return a row for each occurrence of the name, and write the page."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    memory = TextMemory(model, tokenizer, options.folder)
    memory.add([options.package / path for path in options.stored])
    print(memory.fit([options.package / path for path in options.held_out]))
    tokens = tokenizer((options.package / options.file).read_text(), return_tensors="pt")["input_ids"][:, : options.tokens]
    with torch.no_grad():
        alone = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    (explained,) = memory.explain(tokens)
    write_page(options.folder / "explained.html", options.title, explained, str(tokenizer.decode(tokens[0, :1])))
    found = places(options.name, explained)
    return Measured([row(options.name, explained, alone, place, len(memory)) for place in found], [])


def places(name: str, explained: list[ExplainedToken]) -> list[range]:
    """Return the tokens of each occurrence of a name that begins and ends with a token."""
    found = []
    for first in range(len(explained)):
        text = ""
        for end in range(first, len(explained)):
            text += explained[end].text
            if text.strip() == name:
                found.append(range(first, end + 1))
            if len(text.strip()) >= len(name):
                break
    return found


def row(name: str, explained: list[ExplainedToken], alone: torch.Tensor, place: range, stored: int) -> dict[str, object]:
    """Return what is known of one occurrence; ``explained`` begins with the second token, as ``alone`` [n] does."""
    memory, source, _ = explained[place[0]].sources[0]
    return {
        "name": name,
        "stored tokens": stored,
        "tokens": [explained[number].text for number in place],
        "alone": float(alone[place[0] : place[-1] + 1].sum().exp()),
        "with memory": math.prod(explained[number].probability for number in place),
        "source": f"{memory}: {Path(source.name).name}, line {source.line}",
    }
