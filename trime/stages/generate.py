"""generate: continue a prompt with the model and memories of an experiment, and explain where each token came from."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

from trime.common.io import plain, write_json
from trime.data.datasets.base import lines_of
from trime.decoding.explanation import GeneratedToken, extend_shown
from trime.errors import UserError
from trime.lab.stage import Stage
from trime.report.passages import part_texts
from trime.stages.graph import Graph
from trime.stages.samples import open_writer


def generate(graph: Graph) -> None:
    """Print the continuation of a prompt while it is generated, and write generated-*.json.

    With ``explain``, print a line for each token with its probability and the contributions to it, then the entries that
    contributed most, and the whole text beneath.
    """
    prompt, writer = read_prompt(graph.config.prompt_file), open_writer(graph)
    ids = writer.read(prompt)
    print(f"generate: prompt of {len(ids):,} tokens; {writer.label}", flush=True)
    tokens: list[GeneratedToken] = []
    shown = ""
    for token in writer.write():
        tokens.append(token)
        if graph.config.explain:
            parts = "  ".join(part_texts(token.parts, token.agreeing))
            entries = [f"\n      {e['share']:.4f} {e['memory']}: … {e['text']} ({e['place']})" for e in token.entries]
            print(f"{token.text!r:<16} {token.probability:.4f} = {parts}{''.join(entries)}", flush=True)
        else:
            new, shown = extend_shown(shown, writer.text(writer.written))
            print(new, end="", flush=True)
    text = writer.text([*ids, *writer.written])
    if graph.config.explain:
        print(f"\n{writer.text(writer.written)}", flush=True)
    content = {"prompt": prompt, "text": text, "model": writer.label, "tokens": [token._asdict() for token in tokens]}
    # The name depends on all that decides the text, so that no other text overwrites it.
    settings = {name: plain(graph.config[name]) for name in ("generate", "seed", "model", "eviction", "explain")}
    file = writer.folder / f"generated-{sha256(json.dumps([prompt, settings]).encode()).hexdigest()[:8]}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, content, ensure_ascii=False)
    print(f"\n\ngenerated: {file}")


def read_prompt(file: str | None) -> str:
    """Return the text of a file, or of standard input if None; UserError if it is empty or not text."""
    try:
        content = sys.stdin.buffer.read() if file is None else Path(file).expanduser().read_bytes()
        text = b"".join(lines_of(content)).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt_file={file} cannot be read as text: {error}") from None
    if not text.strip():
        raise UserError("the prompt is empty: name a text file, prompt_file=FILE, or write the prompt to standard input")
    return text


GENERATE = Stage("generate", report=generate)
