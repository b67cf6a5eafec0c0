"""A text with its sources as one HTML file: tokens are coloured by memory, and a click shows the passages they came from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from trime.common.io import write_atomically
from trime.report.passages import Annotated, Source, rendered
from trime.text_memory import segment
from trime.text_memory.experts import DOCUMENT, NEIGHBOURS, TEXT
from trime.text_memory.processor import MODEL, ExplainedToken

TITLES = {
    MODEL: "the model",
    TEXT: "n-grams of the memory",
    DOCUMENT: "n-grams of this text",
    NEIGHBOURS: "neighbours in the memory",
}
COLOURS = {TEXT: "#E69F00", DOCUMENT: "#009E73", NEIGHBOURS: "#56B4E9"}  # of Okabe and Ito: told apart by colour-blind eyes


def write_page(file: str | Path, title: str, tokens: Sequence[ExplainedToken], given: str = "") -> Path:
    """Write explained tokens after the text ``given``, and return the file."""
    # Names are paths: what all have in common is said once.
    parents = {os.path.dirname(place.name) for token in tokens for _, place, _ in token.sources}
    common = os.path.commonpath(parents) if parents and all(map(os.path.isabs, parents)) else ""
    root = f"{common}/" if common not in ("", "/") else ""
    shown = [as_shown(token, root) for token in tokens]
    colours = {TITLES[name]: colour for name, colour in COLOURS.items()}
    copied = []
    for _, same in groupby(tokens, key=lambda token: id(token.run) if token.run else None):
        if run := (together := [*same])[0].run:
            copied.append((run.tokens, place_of(run.source, root), "".join(token.text for token in together)))
    content = {"title": title, "tokens": shown, "given": given, "colours": colours, "root": root, "copied": copied}
    write_atomically(Path(file), rendered("explained.html", **content))
    return Path(file)


def place_of(source: segment.Source, root: str) -> str:
    return f"{source.name.removeprefix(root)}, line {source.line}"


def as_shown(token: ExplainedToken, root: str) -> Annotated:
    """Return a token as pages show it, what gave most first; names of its sources do without ``root``."""
    of_memories = {name: part for name, part in token.parts.items() if name != MODEL}
    largest = max(of_memories, key=lambda name: of_memories[name])
    sources = [
        Source(TITLES[name], COLOURS[name], place_of(place, root), around)
        for name, place, around in sorted(token.sources, key=lambda found: -of_memories[found[0]])
    ]
    parts = [(TITLES[name], f"{part:.3f}", "") for name, part in token.parts.items()]
    if token.run:
        parts.append(("in a copied run", f"{token.run.tokens} tokens", place_of(token.run.source, root)))
    share = sum(of_memories.values()) / max(token.probability, 1e-12)
    return Annotated(token.text, repr(token.text), f"{token.probability:.3f}", f"{share:.2f}", COLOURS[largest], parts, sources)
