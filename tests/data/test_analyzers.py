"""Analyzers for BM25: the English analyzer of the published pipeline, and the terms of vocabulary symbols."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.conftest import Tiny
from trime.data.neighbours import STOP_WORDS, TermTable, english
from trime.stages.graph import Graph

# Examples from Porter (1980), at least one of each step.
WORDS = "caresses ponies agreed plastered motoring hopping filing happy relational rational triplicate adjustable probate"
STEMS = "caress poni agre plaster motor hop file happi relat ration triplic adjust probat"


def test_words_are_stemmed_without_stop_words_and_possessives() -> None:
    assert english(f"{WORDS} controlling") == [*STEMS.split(), "control"]
    text = "The Dog's bone , and THE dogs ’ bones ( it was 10,000.5 @-@ fold ) ."
    assert english(text) == ["dog", "bone", "dog", "bone", "10,000.5", "fold"]
    assert english("well-known foo_bar don't U.K") == ["well", "known", "foo_bar", "don't", "u.k"]
    assert len(STOP_WORDS) == 33 and not english(" ".join(STOP_WORDS)) and not english("<> @,@ --- …")


def test_symbols_become_terms() -> None:
    """A segment of symbols has the terms of its text, whether a symbol has none, one or several."""
    symbols = ["dogs", "the", "well-known", "dog", ",", "Bones", "bone"]
    table = TermTable(symbols, english)
    stems = {}
    for number, symbol in enumerate(symbols):
        for term, stem in zip(table(np.array([number])), english(symbol), strict=True):
            assert stems.setdefault(int(term), stem) == stem
    tokens = np.array([1, 2, 4, 4, 5, 0, 3, 6, 2])
    text = english(" ".join(symbols[token] for token in tokens))
    assert [stems[term] for term in table(tokens).tolist()] == text and len(table(tokens[:0])) == 0


LINES = (
    "the of and to in a is that",
    "that is a in to and of the",
    "hounds chased ponies relating adjustable plasters happily now",
    "hound chases pony relates adjusting plastered happy today",
)


def nearest_lines(folder: Path, analyzer: str, tiny: Tiny, *more: str) -> list[int]:
    """Return the nearest neighbour of each line as a segment, -1 where there is none."""
    for split in ("train", "valid", "test"):
        (folder / "text" / split).mkdir(parents=True, exist_ok=True)
        (folder / "text" / split / "a.txt").write_text("\n".join(LINES) + "\n")
    overrides = [f"dataset.path={folder}/text", f"neighbours.analyzer={analyzer}", f"paths.data={folder}/{analyzer}", *more]
    config = tiny("experiment=trime_ext", "dataset=folder_words", "segments.length=8", "vocabulary.min_count=1", *overrides)
    graph = Graph(config)
    for artefact in [*graph.artefacts_of("prepare"), *graph.artefacts_of("pack")]:
        artefact.make()
    assert graph.pack is not None
    return graph.pack.table()[:, 0].tolist()


def test_neighbours_by_analyzer(tiny: Tiny, tmp_path: Path) -> None:
    """Lines that share only stop words are neighbours as raw tokens; those that share stems are for the English analyzer."""
    assert nearest_lines(tmp_path, "raw", tiny) == [1, 0, -1, -1]
    assert nearest_lines(tmp_path, "english", tiny) == [-1, -1, 3, 2]
