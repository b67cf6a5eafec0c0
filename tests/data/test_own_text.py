"""A user's own text: layouts of folders, what is left out and said, encodings, lines, and symbols that are text."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models, pre_tokenizers, trainers

from trime.common.io import hash_of_files
from trime.data.byte_pairs import JointBPE, train_pieces
from trime.data.corpus import Corpus, build_corpus
from trime.data.datasets.base import SPLITS, lines_of
from trime.data.datasets.folder import Folder
from trime.data.parallel.folder import ParallelFolder
from trime.data.tokenizers import Bytes, Tokenizer, Whitespace, Words
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.models.pretrained.tokenizer import END, PADDING, UNKNOWN, encode_prompt, encode_template, encode_text, save_tokenizer
from trime.stages.generate import read_prompt


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
    assert names_by_split(found) == {
        "train": [f"{train}/a.txt", f"{train}/deep/b.TXT"],
        "valid": [f"{valid}/c.txt"],
        "test": [f"{test}/d.txt"],
    }
    assert found.notes() == [f"train is {train}, valid is {valid}, test is {test}; left out: 1 files beside the splits"]


def test_what_is_no_text_is_left_out_and_counted(tmp_path: Path) -> None:
    texts = [f"{number}.txt" for number in range(4)]
    folder = folder_of(tmp_path / "text", *texts, ".git/x.txt", "._0.txt", ".DS_Store", "notes.md", "LICENSE")
    folder_of(folder, "outputs/runs/vanilla/log.txt", ".ipynb_checkpoints/0-checkpoint.txt")
    os.symlink(folder, folder / "loop")
    found = Folder(str(folder), Words())
    found.lab_folders = (folder / "outputs",)
    assert sorted(name for names in names_by_split(found).values() for name in names) == texts
    assert found.notes()[0].startswith("4 .txt files, split at random (dataset.seed=0); left out: 4 hidden, 1 ")
    assert found.layout.left_out == Counter(
        {"hidden": 4, ".md": 1, "without a suffix": 1, "folders of the lab": 1, "links to folders": 1}
    )


def test_a_folder_without_such_files_says_what_reads_the_others(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a.md", "b.md", "c.md", "d.rst")
    for number in range(5):
        (folder / f"{number}.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(UserError, match=r"0 \.txt files beside 5 \.gz, 3 \.md, 1 \.rst: set dataset\.suffix=\.md"):
        Folder(str(folder), Words()).splits()
    both = Folder(str(folder), Words(), suffix=[".md", ".rst"])
    assert sum(len(both.files(split)) for split in SPLITS) == 4
    (folder / "train").mkdir()
    with pytest.raises(UserError, match=r"train hold 0 \.txt files beside .*set dataset\.suffix=\.md"):
        Folder(str(folder), Words()).splits()


def test_splits_further_below_are_not_pooled(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, *(f"corpus/{split}/{number}.txt" for split in SPLITS for number in range(2)))
    with pytest.raises(UserError, match=f"set dataset.path={folder / 'corpus'}"):
        Folder(str(folder), Words()).splits()
    folder_of(folder, "README.txt")
    assert (
        f"at random (dataset.seed=0), although {folder / 'corpus'} has test, train, valid"
        in Folder(str(folder), Words()).notes()[0]
    )


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, "a.txt", "b.txt", "c.txt")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "b.txt")
    with pytest.raises(UserError, match=r"b\.txt cannot be read"):
        Folder(str(folder), Words()).splits()


@pytest.mark.parametrize(
    "line",
    [
        " ".join(f"word{number}" for number in range(40_000)),
        "自然语言处理研究如何让计算机理解人类语言" * 2000,
        "title\n" + "few words " * 20_000 + "\nend\n",
    ],
)
def test_a_single_line_is_split_within(line: str, tmp_path: Path) -> None:
    file = tmp_path / "line.txt"
    file.write_text(line)
    folder = Folder(str(file), Words())
    parts = [b"".join(line for document in folder.documents(split) for line in document.lines).decode() for split in SPLITS]
    assert "".join(parts) == line, "cut between characters, not within them"
    assert [round(len(part) / len(line), 2) for part in parts] == [0.9, 0.05, 0.05]
    assert folder.notes()[0].endswith("within its lines")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16-be"])
def test_text_is_read_by_its_byte_order_mark(encoding: str, tmp_path: Path) -> None:
    text = "Größe\u2028und\u0085Maß\r\n\nzwei\x1c\n"
    file, mark = tmp_path / "a.txt", "\ufeff" if encoding == "utf-16-be" else ""
    file.write_bytes((mark + text).encode(encoding))
    lines = [line.encode() for line in ("Größe\u2028und\u0085Maß\r\n", "\n", "zwei\x1c\n")]
    assert [*lines_of(file)] == [*lines_of(file.read_bytes())] == lines


def test_utf_16_has_another_fingerprint_than_the_junk_it_was_read_as(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train.txt")
    (folder / "train.txt").write_bytes("Wörter".encode("utf-16"))
    assert Folder(str(folder), Words()).fingerprint() != hash_of_files([("train", folder / "train.txt")])


def test_sentences_end_at_newlines_alone(tmp_path: Path) -> None:
    (tmp_path / "train.de").write_text("Das\u2028Haus\x1c steht\nDer\u0085 Hund\n")
    (tmp_path / "train.en").write_bytes(b"The house stands\nThe\r dog\n")
    assert [*ParallelFolder(str(tmp_path), "de", "en").pairs("train")] == [
        ("Das\u2028Haus\x1c steht", "The house stands"),
        ("Der\u0085 Hund", "The\r dog"),
    ]


@pytest.mark.parametrize(
    "text, is_said",
    [("自然语言处理研究如何让计算机理解人类语言", True), ("ภาษาไทยเขียนโดยไม่มีการเว้นวรรค", True), ("自然 语言 处理", False)],
)
@pytest.mark.parametrize("tokenizer", [Words(), Whitespace(), Bytes()])
def test_scripts_without_spaces_are_no_words(text: str, is_said: bool, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "text", "train.txt", "valid.txt", "test.txt")
    (folder / "train.txt").write_text(f"{text}\n" * 50)
    out = tmp_path / "out"
    out.mkdir()
    build_corpus(Folder(str(folder), tokenizer), out, Vocabulary(["<eos>", "<unk>"], [0, 0]))
    notes = Corpus(out).statistics["notes"]
    assert any("without spaces" in note and "folder_pieces" in note for note in notes) == (is_said and not tokenizer.characters)


def test_binary_files_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "text", "train.txt", "valid.txt", "test.txt")
    (folder / "test.txt").write_bytes("UTF-16 without a mark\n".encode("utf-16-le"))
    out = tmp_path / "out"
    out.mkdir()
    build_corpus(Folder(str(folder), Words()), out, Vocabulary(["<eos>", "<unk>"], [0, 0]))
    assert any("test: " in note and "test.txt" in note and "NUL" in note for note in Corpus(out).statistics["notes"])


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


def test_a_prompt_is_read_as_a_corpus(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    for encoding in ("utf-8-sig", "utf-16"):
        file.write_bytes("Größe\r\nund".encode(encoding))
        assert read_prompt(str(file)) == "Größe\r\nund"


def test_byte_pairs_are_learned_within_the_letters_of_a_word() -> None:
    """A script without spaces has words of any length, on which training takes quadratic time: they are broken."""
    assert max(map(len, train_pieces(["a" * 20_000], 300).get_vocab())) <= 256


def test_a_few_files_are_split_each_in_its_order(tmp_path: Path) -> None:
    """Ten files would be one document of test; whole ones are held out on request, and of thirty or more."""
    for number in range(30):
        (tmp_path / f"{number:02d}.txt").write_text("".join(f"line {line} of {number}\n\n" for line in range(40)))
    many = Folder(str(tmp_path), Words(), seed="auto")
    assert many.layout == Folder(str(tmp_path), Words(), seed=0).layout and not many.layout.is_cut
    for number in range(10, 30):
        (tmp_path / f"{number:02d}.txt").unlink()
    few, whole = Folder(str(tmp_path), Words(), seed="auto"), Folder(str(tmp_path), Words(), seed=0)
    assert len([*few.documents("test")]) == 10 and len([*whole.documents("test")]) == 1
    assert "10 .txt files, each split in its order" in few.notes()[0] and "dataset.seed=0 holds out whole" in few.notes()[0]
    assert few.fingerprint() != whole.fingerprint()
    with pytest.raises(UserError, match=r"dataset\.seed=some"):
        Folder(str(tmp_path), Words(), seed="some")
