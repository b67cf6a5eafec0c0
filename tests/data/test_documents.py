"""Documents of one's own: layouts of folders, encodings, duplicates, symbols that are text, and the bytes tokens predict."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models, pre_tokenizers, trainers

from trime.data.byte_pairs import train_pieces
from trime.data.corpus import Corpus, build_corpus, symbol_counts
from trime.data.datasets import Dataset
from trime.data.datasets.base import SPLITS, lines_of
from trime.data.datasets.folder import Folder
from trime.data.duplicates import (
    describe_copies,
    describe_duplicates,
    describe_near_copies,
    find_copies,
    find_duplicates,
    find_near_copies,
)
from trime.data.segments import cut, scored_bytes
from trime.data.tokenizers import EOS, Bytes, PythonSource, Tokenizer, Whitespace, Words
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.models.pretrained.tokenizer import END, PADDING, UNKNOWN, encode_prompt, encode_template, encode_text, save_tokenizer
from trime.stages.generate import read_prompt
from trime.translation.pairs.folder import ParallelFolder
from trime.translation.pieces import JointBPE


def folder_of(place: Path, *names: str) -> Path:
    """Write a small text under each name below a folder, and return the folder."""
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"text of {name}\n")
    return place


def names_by_split(folder: Folder) -> dict[str, list[str]]:
    """Return the names of the documents of each split."""
    return {split: [document.name for document in folder.documents(split)] for split in SPLITS}


@pytest.mark.parametrize(
    "train, valid, test",
    [("Train", "Valid", "Test"), ("training", "validation", "testing"), ("TRAIN", "dev", "test"), ("train", "val", "test")],
)
def test_splits_are_known_by_their_usual_names(train: str, valid: str, test: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, f"{train}/a.txt", f"{train}/deep/b.TXT", f"{valid}/c.txt", f"{test}/d.txt", "more.txt")
    found = Folder(str(folder), Words())
    in_train = [f"{train}/a.txt", f"{train}/deep/b.TXT"]
    assert names_by_split(found) == {"train": in_train, "valid": [f"{valid}/c.txt"], "test": [f"{test}/d.txt"]}
    assert found.notes() == [f"train is {train}, valid is {valid}, test is {test}; left out: 1 files beside the splits"]


def test_what_is_no_text_is_left_out_and_counted(tmp_path: Path) -> None:
    texts = [f"{number}.txt" for number in range(4)]
    folder = folder_of(tmp_path / "text", *texts, ".git/x.txt", "._0.txt", ".DS_Store", "notes.md", "LICENSE")
    folder_of(folder, "outputs/runs/vanilla/log.txt", ".ipynb_checkpoints/0-checkpoint.txt")
    os.symlink(folder, folder / "loop")
    found = Folder(str(folder), Words(), suffix=".txt")
    found.lab_folders = (folder / "outputs",)
    assert sorted(name for names in names_by_split(found).values() for name in names) == texts
    assert found.notes()[0].startswith("4 .txt files, split at random (dataset.seed=0); left out: 4 hidden, 1 ")
    once = dict.fromkeys((".md", "without a suffix", "folders of the lab", "links to folders"), 1)
    assert found.layout.left_out == Counter({"hidden": 4} | once)


LINES = [f"paragraph {number} has a line .\n" for number in range(200)]


@pytest.mark.parametrize(
    "text, start",
    [
        ("\n".join(LINES), "paragraph"),
        ("".join(LINES), "paragraph"),
        (" ".join(f"word{number}" for number in range(40_000)), ""),
        ("自然语言处理研究如何让计算机理解人类语言" * 2000, ""),
        ("title\n" + "few words " * 20_000 + "\nend\n", ""),
    ],
)
def test_a_single_file_is_split_in_its_order(text: str, start: str, tmp_path: Path) -> None:
    """Each part is about its share, and nothing is lost: between paragraphs, or lines, or within a line between characters."""
    file = tmp_path / "input.txt"
    file.write_text(text)
    folder = Folder(str(file), Words(), ratio=0.1)
    parts = [b"".join(line for document in folder.documents(split) for line in document.lines) for split in SPLITS]
    assert b"".join(parts).decode() == text and all(part.decode().startswith(start) for part in parts)
    assert [round(len(part.decode()) / len(text), 1 if start else 2) for part in parts] == [0.8, 0.1, 0.1]
    assert [folder.size(split) for split in SPLITS] == [len(part) for part in parts]
    assert folder.notes()[0].endswith("within its lines") == (not start)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16-be"])
def test_text_is_read_by_its_byte_order_mark(encoding: str, tmp_path: Path) -> None:
    text = "Größe\u2028und\u0085Maß\r\n\nzwei\x1c\n"
    file, mark = tmp_path / "a.txt", "\ufeff" if encoding == "utf-16-be" else ""
    file.write_bytes((mark + text).encode(encoding))
    lines = [line.encode() for line in ("Größe\u2028und\u0085Maß\r\n", "\n", "zwei\x1c\n")]
    assert [*lines_of(file)] == [*lines_of(file.read_bytes())] == lines
    assert read_prompt(str(file)) == text, "a prompt is read as a corpus"


def test_sentences_end_at_newlines_alone(tmp_path: Path) -> None:
    (tmp_path / "train.de").write_text("Das\u2028Haus\x1c steht\nDer\u0085 Hund\n")
    (tmp_path / "train.en").write_bytes(b"The house stands\nThe\r dog\n")
    pairs = [("Das\u2028Haus\x1c steht", "The house stands"), ("Der\u0085 Hund", "The\r dog")]
    assert [*ParallelFolder(str(tmp_path), "de", "en").pairs("train")] == pairs


def test_symbols_written_in_a_text_are_text() -> None:
    (symbols,) = Whitespace().tokens([b"an <eos> in <pad> text\n"])
    assert symbols == ["an", "<", "eos", ">", "in", "<pad>", "text", "<eos>"]
    pieces = JointBPE.train(["the <unk> word", "a word"] * 5, 60)
    (found,) = pieces.tokens([b"the <unk> word"])
    assert "<unk>" not in found and pieces.text(found) == "the <unk> word"
    vocabulary = Vocabulary.fairseq_from_counts(Counter({"</s>": 3, "a": 9, "<eos>": 1}), None, 1)
    assert vocabulary.eos == vocabulary.index["<eos>"] == 2 and vocabulary.index["</s>"] == 5


def test_a_fairseq_dictionary_is_read_as_fairseq_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "dict.txt"
    file.write_bytes("a\u2028b 5\r\n\u0085 2\n<unk> 7 #fairseq:overwrite\nx y 1\n".encode())
    vocabulary = Vocabulary.from_dictionary(file)
    assert vocabulary.symbols[4:] == ["a\u2028b", "\u0085", "<unk>", "x y"] and vocabulary.counts[4:] == [5, 2, 7, 1]
    assert vocabulary.index["<unk>"] == 6 and vocabulary.unknown == vocabulary.index["nothing"] == 3
    for duplicate in ("a 1\nb 1\na 2\n", "</s> 1\n"):
        file.write_text(duplicate)
        with pytest.raises(UserError, match="twice"):
            Vocabulary.from_dictionary(file)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "words"])
def test_special_tokens_written_in_a_text_are_text(kind: str, tmp_path: Path) -> None:
    """Also where the vocabulary of the model has them among its words; a chat template means them as such."""
    special = [PADDING, END, UNKNOWN, "<|im_end|>"]
    trained, trainer = {
        "bpe": (Model(models.BPE()), trainers.BpeTrainer(vocab_size=300, special_tokens=special)),
        "unigram": (Model(models.Unigram()), trainers.UnigramTrainer(special_tokens=special, unk_token=UNKNOWN)),
        "words": (Model(models.WordLevel(unk_token=UNKNOWN)), trainers.WordLevelTrainer(special_tokens=special)),
    }[kind]
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit() if kind == "words" else pre_tokenizers.Metaspace()
    trained.train_from_iterator(["a text of some words, with <b> and </b> | marks im end s"] * 9, trainer)
    tokenizer = save_tokenizer(trained, tmp_path, unk_token=UNKNOWN)
    text = "a text </s> of <|im_end|> words"
    control = {1, 3}
    assert control <= {*encode_template(tokenizer, text)}
    assert control.isdisjoint(encode_text(tokenizer, text)) and control.isdisjoint(encode_prompt(tokenizer, text))


def test_byte_pairs_are_learned_within_the_letters_of_a_word() -> None:
    """A script without spaces has words of any length, on which training takes quadratic time: they are broken."""
    assert max(map(len, train_pieces(["a" * 20_000], 300).get_vocab())) <= 256


def build(dataset: Dataset, folder: Path, limit: int | None = None) -> None:
    """Build the corpus of a dataset."""
    folder.mkdir(exist_ok=True)
    build_corpus(dataset, folder, Vocabulary.from_counts(symbol_counts(dataset), limit, 1))


def test_without_a_seed_every_file_is_split_in_its_order(tmp_path: Path) -> None:
    """Ten files are ten documents of test; a file too short to be cut is train."""
    lines = [f"line {number} of the file .\n\n".encode() for number in range(30)]
    for number in range(10):
        (tmp_path / f"{number}.txt").write_bytes(b"".join(lines))
    (tmp_path / "short.txt").write_bytes(b"a")
    folder = Folder(str(tmp_path), Words(), ratio=0.1, seed=None)
    parts = {split: {document.name: b"".join(document.lines) for document in folder.documents(split)} for split in SPLITS}
    assert [len(parts[split]) for split in SPLITS] == [11, 10, 10]
    assert parts["train"]["3.txt"] + parts["valid"]["3.txt"] + parts["test"]["3.txt"] == b"".join(lines)
    assert parts["train"]["short.txt"] == b"a" and parts["test"]["3.txt"].startswith(b"line 27")
    assert folder.size("test") == sum(map(len, parts["test"].values()))


@pytest.mark.parametrize("tokenizer", [Words(), Bytes(), Whitespace(), PythonSource()])
def test_tokens_know_their_line_in_the_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Blank lines count, also where they have no tokens, and what was cut off before a document."""
    lines = [f"line{number} of it\n" + "\n" * (number % 3) for number in range(60)]
    (tmp_path / "a.txt").write_text("".join(lines))
    written = "".join(lines).splitlines()
    folder = Folder(str(tmp_path / "a.txt"), tokenizer, ratio=0.2)
    for split in SPLITS:
        (document,) = folder.documents(split)
        symbols = [symbol for some in tokenizer.tokens(document.lines) for symbol in some]
        (document,) = folder.documents(split)
        numbers = [*document.line_numbers(tokenizer)]
        assert len(numbers) == len(symbols) > 0
        for number, symbol in zip(numbers, symbols, strict=True):
            assert symbol in (EOS, "\n") or symbol in written[number - 1]
        assert numbers == sorted(numbers) and numbers[-1] <= len(written)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"one {number}\ntwo\n"}) + "\n" for number in range(9)))
    first = next(iter(Folder(str(rows), tokenizer, ratio=0.2).documents("train")))
    assert not [*first.line_numbers(tokenizer)], "a line of a row is no line of its file"


@pytest.mark.parametrize("tokenizer", [Words(), Bytes(), Whitespace()])
def test_bytes_are_those_that_scored_tokens_predict(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """White space that the tokenizer drops counts as one byte, and documents of a sample have their own bytes."""
    texts = ["one two three\n" * 20, "слово другое\n" * 50]
    sizes = {}
    for blank in (" ", " " * 10):
        text, folder = tmp_path / f"text{len(blank)}", tmp_path / f"corpus{len(blank)}"
        for split in SPLITS:
            (text / split).mkdir(parents=True)
            for number, each in enumerate(texts):
                (text / split / f"{number}.txt").write_text(each.replace(" ", blank))
        build(Folder(str(text), tokenizer), folder)
        corpus = Corpus(folder)
        offsets = corpus.split("test").offsets
        sizes[blank] = [round(scored_bytes(corpus, "test", cut(offsets, 16, 8))), *corpus.text_sizes("test")]
        first = cut(offsets, 16, 8).take(np.flatnonzero(cut(offsets, 16, 8).document == 0))
        assert round(scored_bytes(corpus, "test", first)) == sizes[blank][1]
    plain = [len(each.encode()) for each in texts]
    assert sizes[" "] == [sum(plain), *plain]
    assert (sizes[" " * 10] == sizes[" "]) is (not tokenizer.characters)
    (folder / "test.sizes.npy").unlink()  # prepared by an older version
    assert round(scored_bytes(Corpus(folder), "test", cut(offsets, 16))) == Corpus(folder).statistics["splits"]["test"]["bytes"]


def test_documents_that_are_also_in_another_text_are_found() -> None:
    """By all tokens or by the first ones; each copy counts, and empty documents are no copies."""
    one = [np.array(tokens, np.uint8) for tokens in ([1, 2, 3], [4, 5], [], [1, 2, 3], [1, 2])]
    other = [np.array(tokens, np.int32) for tokens in ([], [4, 5, 6], [1, 2, 3])]
    assert find_duplicates(one, other) == {0: 2, 3: 2}
    copies = find_copies([*one, np.array([], np.int64), np.array([], np.int64), one[1]])
    assert copies == {3: 0, len(one) + 2: 1}
    said = describe_copies(copies, np.ones(len(one) + 3), "test", [f"{number}.txt" for number in range(len(one) + 3)])
    assert said.startswith(f"test: 2 of {len(one) + 3} documents") and "3.txt of 0.txt" in said
    assert find_duplicates(one, other, 2) == {0: 2, 1: 1, 3: 2, 4: 2}
    note = describe_duplicates({0: 2}, np.array([3, 9]), "test", "train", ["a.txt", "b.txt"], ["x", "y", "copy.txt"])
    said = "test: 1 of 2 documents, with 25.0 % of its tokens, are also in train (for instance a.txt as copy.txt)"
    assert note.startswith(said)


def test_documents_most_of_which_is_in_another_text_are_found() -> None:
    """Wherever the passages stand there; short documents and those with a few words in common are none."""
    generator = np.random.default_rng(0)
    train = [generator.integers(0, 50, size) for size in (5, 900, 700)]
    edited = train[1][37:400].copy()
    edited[::60] = 60
    quoting = np.concatenate([generator.integers(0, 50, 300), train[2][100:200]])
    joined = np.concatenate([train[2][3:90], train[1][9:99]])
    documents = [edited, generator.integers(0, 50, 200), train[2][:9], quoting, joined]
    found = find_near_copies(documents, train, length=10)
    changed = np.zeros(len(edited), bool)
    changed[::60] = True
    assert [*found] == [0, 4] and found[4] > 0.8
    assert 1 - 19 * changed.mean() < found[0] < 1 - changed.mean(), "a change hides at most the passages around it"
    assert find_near_copies(documents, [], 10) == {} and find_near_copies([], train, 10) == {}
    note = describe_near_copies({0: 0.75}, np.array([1, 3]), "test", "train", ["a.txt", "b.txt"])
    assert "1 of 2 documents, with 25.0 % of its tokens, are near copies" in note and "a.txt with 75 %" in note


def test_the_documents_of_a_corpus_leave_white_space_out(tmp_path: Path) -> None:
    for split, text in (("train", "a  b\r\n\r\nc"), ("test", "a b\nc\n")):
        (tmp_path / f"{split}.txt").write_bytes(text.encode())
    for tokenizer in (Words(), Bytes()):
        build(Folder(str(tmp_path), tokenizer), tmp_path)
        corpus = Corpus(tmp_path)
        assert find_duplicates(corpus.documents("test"), corpus.documents("train")) == {0: 0}
