"""Byte pairs of one's own text: every text is read and written back whole, and nothing is unknown."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import Tiny
from trime.data.byte_pairs import BytePairs
from trime.data.corpus import Corpus, build_corpus
from trime.data.datasets.folder import Folder
from trime.data.segments import cut, scored_bytes
from trime.data.vocabulary import Vocabulary
from trime.lab.runner import run
from trime.stages.graph import Graph

TEXT = ["the cat sat on the mat\n", "  and the  naïve dog\tran — to 東京\n", "\n"]
LINES = [line.encode() for line in TEXT]


@pytest.fixture()
def learned() -> BytePairs:
    """Return byte pairs learned from a few lines."""
    pairs = BytePairs()
    pairs.train(LINES * 5, 320, 2)
    return pairs


def test_text_comes_back_as_it_was(learned: BytePairs, tmp_path: Path) -> None:
    """Also text of bytes that were never seen, and by what was saved."""
    learned.save(tmp_path / "pieces.json")
    again = BytePairs()
    again.saved = lambda: tmp_path / "pieces.json"
    for lines in (LINES, ["ü, 猫 and \u2028 Zebra\n".encode()]):
        symbols = [symbol for part in learned.tokens(lines) for symbol in part]
        assert again.text([symbol for part in again.tokens(lines) for symbol in part]) == b"".join(lines).decode()
        assert {*symbols} <= {*learned.pieces.get_vocab()}
    assert 256 < len(learned.pieces.get_vocab()) <= 318 and "Ġthe" in learned.pieces.get_vocab()


def test_bytes_of_a_part_are_exact(learned: BytePairs, text_folder: Path, tmp_path: Path) -> None:
    """Whatever letters it has: a character of a symbol is a byte."""
    (text_folder / "test" / "0.txt").write_text("the cat sat\n" * 5 + "東京の猫\n" * 5)
    dataset = Folder(str(text_folder), learned)
    build_corpus(dataset, tmp_path, Vocabulary.from_counts(Counter(dict.fromkeys(learned.pieces.get_vocab(), 0)), None, 0))
    corpus = Corpus(tmp_path)
    text, symbols = corpus.split("test"), corpus.vocabulary.symbols
    for segments in (cut(text.offsets, 8).take([number]) for number in range(3)):
        first = int((segments.document_offset + segments.start)[0])
        scored = text.tokens[first + int(segments.context[0]) : first + int(segments.length[0])]
        assert scored_bytes(corpus, "test", segments) == pytest.approx(sum(len(symbols[token]) for token in scored))


def test_a_run_on_byte_pairs(tiny: Tiny, text_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No token is unknown, other text is read in the same pieces, and a prompt is continued in letters."""
    own = ["dataset=folder", f"dataset.path={text_folder}", "vocabulary.max_size=320"]
    other = ["dataset@evaluate.dataset=folder_words", f"evaluate.dataset.path={text_folder}"]
    for words in (own, [*own, *other]):
        config = tiny("experiment=trime", *words)
        run(config)
        graph = Graph(config)
        results = json.loads((graph.run_folder / "results.json").read_text())
        dataset = results.get("evaluation_dataset", results["dataset"])
        assert {*dataset["unknown"].values()} == {0.0} and dataset["vocabulary"] <= 320
        per_byte = results["metrics"]["test"][-1]["bits_per_byte"]
        assert per_byte * dataset["bytes"]["test"] / dataset["tokens"]["test"] > per_byte
    fresh = Graph(tiny("experiment=trime", *own)).corpus
    assert fresh.dataset.tokenizer.text(["Ġthe", "Ġcat"]) == " the cat"
    config = tiny("experiment=trime", *own, "stages=[generate]", "generate.max_new_tokens=5")
    (text_folder / "prompt").write_text("the cat")
    config.prompt_file = f"{text_folder}/prompt"
    capsys.readouterr()
    run(config)
    assert "Ġ" not in capsys.readouterr().out
