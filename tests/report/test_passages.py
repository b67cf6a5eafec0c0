"""The picture of passages: every token on the colour of the memory that contributed most to it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from trime.report.canvas import memory_colours
from trime.report.page import sample_sections
from trime.report.passages import WIDTH, Entry, Sample, SampledToken, entry_lines, passage_lines, save_passages

COLOURS = memory_colours(["vocabulary", "local", "external"])


def token(shown: str, entry: str = "", **parts: float) -> SampledToken:
    """Return a token with the parts of its probability; ``entry`` is the memory of its only entry."""
    share = parts.get(entry, 0.0)
    entries = [Entry(memory=entry, share=share, text="what stood before", place="a.txt, token 7")] if entry else []
    return SampledToken(text=shown.strip(), shown=shown, probability=sum(parts.values()), parts=parts, entries=entries)


@pytest.fixture()
def sample() -> Sample:
    return Sample(
        document="a.txt",
        row="trime",
        before="what was\nread before",
        tokens=[
            token("the", vocabulary=0.3, local=0.0, external=0.0),
            token(" $cat$", "external", vocabulary=0.1, local=0.1, external=0.3),
            token("↵\n", vocabulary=0.0, local=0.5, external=0.0),
            token("sat", "local", vocabulary=0.1, local=0.5, external=0.1),
            token(" " + "long" * WIDTH, vocabulary=0.1, local=0.2, external=0.1),
            token(" 漢", vocabulary=0.0, local=0.0, external=0.0),
        ],
    )


def test_tokens_stand_on_the_colour_of_their_largest_memory(sample: Sample) -> None:
    """The paper is as opaque as the memories' share is large; lines break where the text does, and where they are full."""
    lines = passage_lines(sample)
    assert [piece.text for line in lines[:2] for piece in line] == ["a.txt", "what was read before"]
    placed = [[piece.text[:6] for piece in line] for line in lines[2:]]
    assert placed == [["the", " $cat$", "↵"], ["sat"], [" longl"], [" 漢"]]
    assert all(sum(len(piece.text) for piece in line) <= WIDTH for line in lines)
    the, cat, _ = lines[2]
    assert the.share == 0 and cat.paper == COLOURS["external"] and cat.share == pytest.approx(0.85 * 0.8)
    assert lines[3][0].paper == COLOURS["local"] and sample.tokens[-1].share == 0


def test_the_best_entry_of_a_word_is_named(sample: Sample) -> None:
    """Words alone are named, the one that owes most to memories first."""
    ((name, said),) = [line for line in entry_lines(sample) if line]
    assert name.text == " sat " and name.paper == COLOURS["local"]
    assert said.text == " p = 0.70: 0.50 local, …what stood before (a.txt, token 7)"
    assert entry_lines(sample.model_copy(update={"tokens": sample.tokens[:1]})) == []


def test_the_colour_the_part_and_the_entry_are_of_one_memory() -> None:
    """A memory whose mass is spread over many neighbours is the largest, though another's single entry is larger."""
    spread = token("word", "local", vocabulary=0.01, local=0.02, external=0.08)
    neighbour = Entry(memory="external", share=0.0003, text="a neighbour", place="b.txt, token 9")
    update = {"agreeing": {"external": (612, 1024)}, "entries": [*spread.entries, neighbour]}
    spread = spread.model_copy(update=update)
    sample = Sample(document="a", row="r", before="", tokens=[spread])
    (_, (name, said)) = entry_lines(sample)
    assert name.paper == COLOURS["external"]
    assert said.text == " p = 0.11: 0.08 external (612 of 1,024 agree), …a neighbour (b.txt, token 9)"
    (section,) = sample_sections([sample], "Test text")
    (content,) = section.passages[0]["tokens"]
    assert content["colour"] == COLOURS["external"] and content["entries"][0].memory == "external"
    assert content["split"] == "vocabulary 0.0100, local 0.0200, external 0.0800 (612 of 1,024 agree)"


def test_a_picture_is_drawn_of_any_text(sample: Sample, tmp_path: Path) -> None:
    """Letters that the font lacks, and signs of formulas, are neither errors nor warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save_passages([sample, sample], "two passages", tmp_path / "passages.png")
    assert path.stat().st_size > 5000
    assert {file.suffix for file in tmp_path.iterdir()} == {".png", ".svg", ".pdf"}
