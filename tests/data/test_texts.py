"""Text as people have it: compressed, in rows, in other encodings, beside what is no text; read whole, or said."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from trime.data.datasets.folder import Folder
from trime.data.texts import read_texts
from trime.data.tokenizers import Words
from trime.errors import UserError

TEXT = "Ein Text über Gedächtnis.\nLine two of it.\n"


def rows(count: int, field: str = "text") -> list[dict[str, str]]:
    return [{"id": str(number), field: f"row number {number} of several\n"} for number in range(count)]


def zstandard(content: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").compress(content))


def parquet(folder: Path, records: list[dict[str, str]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(records), folder / "rows.parquet")


def saved_dataset(folder: Path, records: list[dict[str, str]]) -> None:
    """Write what ``datasets`` saves: a stream of Arrow, and files that describe it."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(records)
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text("{}")


@pytest.mark.parametrize(
    "name, packed",
    [
        ("a.txt", lambda content: content),
        ("NOTES.md", lambda content: b"\xef\xbb\xbf" + content),
        ("WINDOWS", lambda content: content.replace(b"\n", b"\r\n")),
        ("windows.gz", lambda content: gzip.compress(content.replace(b"\n", b"\r\n"))),
        ("wide.txt", lambda content: content.decode().encode("utf-16")),
        ("wider.log", lambda content: content.decode().encode("utf-32")),
        ("a.txt.gz", gzip.compress),
        ("twice.gz.gz", lambda content: gzip.compress(gzip.compress(content))),
        ("a.bz2", bz2.compress),
        ("a.rst.xz", lzma.compress),
        ("named.txt", zstandard),
    ],
)
def test_one_text_in_many_forms(name: str, packed: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(packed(TEXT.encode()))
    (text,) = read_texts(tmp_path)
    assert text.content == TEXT and text.name.startswith(str(tmp_path / name.split(".")[0]))
    (tmp_path / "more").mkdir()
    for number in range(3):
        (tmp_path / "more" / f"{number}.py").write_text("x = 1\n")
    dataset = Folder(str(tmp_path), Words(), seed=0)
    read = {document.name: b"".join(document.lines) for split in dataset.splits() for document in dataset.documents(split)}
    ends = b"\r\n" if "windows" in name.lower() else b"\n"
    assert read.pop(name) == TEXT.encode().replace(b"\n", ends) and len(read) == 3


@pytest.mark.parametrize("write", [parquet, saved_dataset, None])
@pytest.mark.parametrize("field", ["text", "content"])
def test_rows_are_documents(write: Callable[[Path, list[dict[str, str]]], None] | None, field: str, tmp_path: Path) -> None:
    """Of a file that is read alone some rows are valid and test; a field of another name is named."""
    if write is None:
        (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows(20, field))).encode()))
    else:
        write(tmp_path, rows(20, field))
    assert [text.content for text in read_texts(tmp_path, field)] == [row[field] for row in rows(20, field)]
    (file,) = (path for path in tmp_path.iterdir() if path.suffix != ".json")
    dataset = Folder(str(file), Words(), field=field, ratio=0.1)
    names = {split: [document.name for document in dataset.documents(split)] for split in dataset.splits()}
    assert [len(names[split]) for split in ("train", "valid", "test")] == [16, 2, 2] and len({*chain(*names.values())}) == 20
    with pytest.raises(UserError, match=f"no field 'other', but {', '.join(sorted(('id', field)))}"):
        list(read_texts(tmp_path, "other"))


def test_what_is_no_text_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("über".encode("latin1"))
    (tmp_path / "packed.tar.gz").write_bytes(gzip.compress(b"file\0\0\0"))
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "empty.txt").write_text(" \n")
    for number in range(4):
        (tmp_path / f"{number}.c").write_text("int x;\n")
    assert [bool(text.content.strip()) for text in read_texts(tmp_path)] == [True] * 4 + [False]
    dataset = Folder(str(tmp_path), Words(), seed=0)
    for said in (caplog.text, dataset.notes()[0]):
        assert "3 not text in UTF-8 (latin.txt, packed.tar.gz, picture.png" in said and "1 hidden" in said


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt.gz", gzip.compress(TEXT.encode(), mtime=0)[:-9], "damaged or truncated"),
        ("a.xz", lzma.compress(TEXT.encode())[:-9], "damaged or truncated"),
        ("a.zst", zstandard(TEXT.encode() * 99)[:-9], "damaged or truncated"),
        ("a.gz", gzip.compress(b"hello" * 1000, mtime=0)[:12] + b"\xff" * 40, "damaged or truncated"),
        ("a.jsonl", b"[" * 100_000, "line 1 is no JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2 is no JSON"),
        ("a.jsonl", b'{"text": 5}\n', "line 1 has int in field 'text', and no text"),
        ("a.jsonl", b"[1]\n", "line 1 is a list, and no object with a field 'text'"),
        ("a.parquet", b"PAR1\x15 and no more", "damaged or truncated"),
    ],
)
def test_damage_is_told_in_one_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        list(read_texts(tmp_path / name))
    assert "\n" not in str(raised.value) and name in str(raised.value)


@pytest.mark.parametrize("start", ["BZhang wrote", "PAR1 is a format", "ARROW1 is another"])
def test_text_that_begins_as_a_format_does_is_text(start: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(start)
    assert [text.content for text in read_texts(tmp_path)] == [start]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(b"PK\3\4\0\0" * 100)
    with pytest.raises(UserError, match="not text in UTF-8"):
        Folder(str(tmp_path / "a.docx"), Words())


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}')
    assert [text.content for text in read_texts(tmp_path)] == ["a\N{REPLACEMENT CHARACTER}b \N{GRINNING FACE}"]


def test_a_repository_with_tests_is_split_at_random(tmp_path: Path) -> None:
    """test/ beside other text and without train/ is a folder like others; so are test.py and train.py."""
    for name in ("a.py", "b.py", "train.py", "test.py", "test/test_a.py", "docs/index.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TEXT)
    dataset = Folder(str(tmp_path), Words(), seed=0)
    assert sum(len(dataset.files(split)) for split in ("train", "valid", "test")) == 6
    assert "split at random" in dataset.notes()[0]
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x.py").write_text(TEXT)
    assert Folder(str(tmp_path), Words()).notes()[0].startswith("train is train, test is test")
