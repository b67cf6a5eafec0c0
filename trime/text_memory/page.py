"""A text with its sources as one HTML file: tokens are coloured by memory, and a click shows the passages they came from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from trime.common.io import write_atomically
from trime.text_memory.experts import DOCUMENT, NEIGHBOURS, TEXT
from trime.text_memory.mixing import MODEL, ExplainedToken

TITLES = {
    MODEL: "the model",
    TEXT: "n-grams of the memory",
    DOCUMENT: "n-grams of this text",
    NEIGHBOURS: "neighbours in the memory",
}
COLOURS = {TEXT: "#E69F00", DOCUMENT: "#009E73", NEIGHBOURS: "#56B4E9"}  # of Okabe and Ito: told apart by colour-blind eyes


def write_page(file: str | Path, title: str, tokens: Sequence[ExplainedToken], given: str = "") -> Path:
    """Write explained tokens after the text ``given``, and return the file."""
    shown = []
    # Names are paths: what all have in common is said once.
    parents = {os.path.dirname(place.name) for token in tokens for _, place, _ in token.sources}
    common = os.path.commonpath(parents) if parents and all(map(os.path.isabs, parents)) else ""
    root = f"{common}/" if common not in ("", "/") else ""
    for token in tokens:
        of_memories = {name: part for name, part in token.parts.items() if name != MODEL}
        largest = max(of_memories, key=lambda name: of_memories[name])
        share = sum(of_memories.values()) / max(token.probability, 1e-12)
        # What gave most comes first.
        sources = sorted(token.sources, key=lambda found: -of_memories[found[0]])
        shown.append(
            {
                "text": token.text,
                "shown": repr(token.text),
                "colour": COLOURS[largest],
                "share": f"{share:.2f}",
                "probability": f"{token.probability:.3f}",
                "parts": [(name, f"{part:.3f}") for name, part in token.parts.items()],
                "sources": [
                    {
                        "memory": TITLES[name],
                        "colour": COLOURS[name],
                        "name": place.name.removeprefix(root),
                        "line": place.line,
                        "text": around,
                    }
                    for name, place, around in sources
                ],
            }
        )
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    content = {"title": title, "tokens": shown, "given": given, "titles": TITLES, "colours": COLOURS, "root": root}
    write_atomically(Path(file), environment.get_template("explained.html").render(content))
    return Path(file)
