"""Files that hold text, read by their content: compressed or not, in rows or as one document."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trime.data.datasets.base import printable, wide_encoding
from trime.errors import UserError, install_command

RECORDS = (".jsonl", ".ndjson")  # one JSON object a line, each a document
ARROW = (b"ARROW1", b"\xff\xff\xff\xff")  # how files and streams of Apache Arrow begin: those of the package datasets
DESCRIPTIONS = ("dataset_info.json", "dataset_dict.json", "state.json")  # beside them
PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstandard
NAMED = 5  # files that a message names
SAMPLE = 2**14  # bytes of a file that show whether it is text


class Found(NamedTuple):
    """The files that are documents, sorted by path, and counts of everything else, by a word for it."""

    files: list[Path]
    left_out: Counter[str]


class Text(NamedTuple):
    """A document: its name (the file, and the row within it where a file holds several) and its content."""

    name: str
    content: str


def entries_of(folder: Path) -> list[Path]:
    """Return what lies in a folder; UserError if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}): allow it, or remove it from the dataset") from None


def find_texts(entries: Iterable[Path], suffixes: tuple[str, ...], lab_folders: Collection[Path] = ()) -> Found:
    """Find files with one of the suffixes, in any case, among and below ``entries``; UserError at one that cannot be read."""
    # Nothing is left out silently: a user sees the counts in the notes of the text.
    files, left_out = [], Counter[str]()
    for path in entries:
        if path.name.startswith("."):  # .git, .ipynb_checkpoints, .DS_Store, and the ._NAME that macOS writes beside NAME
            left_out["hidden"] += 1
        elif path.is_dir() and path.is_symlink():  # it may lead out of the folder, or back into it
            left_out["links to folders"] += 1
        elif path.is_dir() and path.resolve() in lab_folders:
            left_out["folders of the lab"] += 1
        elif path.is_dir():
            below = find_texts(entries_of(path), suffixes, lab_folders)
            files += below.files
            left_out += below.left_out
        elif not path.name.lower().endswith(suffixes):
            left_out[path.suffix.lower() or "without a suffix"] += 1
        elif not path.is_file():
            raise UserError(f"{path} is not a regular file, but a pipe, a device or a broken link: remove it from the dataset")
        elif not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read (Permission denied): allow it, or remove it from the dataset")
        else:
            files.append(path)
    return Found(sorted(files), left_out)


def in_words(left_out: Counter[str]) -> str:
    """Return what was left out in words, the most frequent first."""
    return ", ".join(f"{count:,} {name}" for name, count in left_out.most_common()) or "nothing"


def is_text(file: Path) -> bool:
    """Return True if a file begins as UTF-8 text does, or with the byte order mark of UTF-16 or UTF-32."""
    with open(file, "rb") as content:
        start = content.read(SAMPLE)
    if wide_encoding(start):
        return True
    try:
        return "\0" not in getincrementaldecoder("utf-8")().decode(start)  # its last character may be cut
    except UnicodeDecodeError:
        return False


def is_plain(file: Path) -> bool:
    """Return whether a file is one document of text that need not be unpacked."""
    with open(file, "rb") as content:
        start = content.read(len(PACKED[0]) + 6)
    return not start.startswith((*PACKED, b"PAR1", *ARROW)) and not file.name.lower().endswith(RECORDS)


def read_file(file: Path, field: str) -> Iterator[Text] | None:
    """Return the documents of a file; None if it is not text, or describes the files of a dataset beside it."""
    name, content = printable(str(file)), file.read_bytes()
    if file.name in DESCRIPTIONS and any(file.parent.rglob("*.arrow")):
        return None
    while unpack := unpacker(content, file):
        name = name.removesuffix(Path(name).suffix)
        try:
            content = unpack(io.BytesIO(content)).read()
        except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
            raise UserError(f"{file} is damaged or truncated ({error}): copy it again, or leave it out") from None
    if content.startswith((b"PAR1", *ARROW)):
        return read_table(file, name, content, field)
    text = decoded(content)
    if text is None:
        return None
    if name.lower().endswith(RECORDS):
        return read_records(file, name, text, field)
    return iter([Text(name, text)] if text.strip() else [])


def unpacker(content: bytes, file: Path) -> Callable[[BinaryIO], Any] | None:
    """Return what opens compressed content, None if it is not compressed; UserError without the package for it."""
    openers: tuple[Callable[[BinaryIO], Any], ...]
    openers = (gzip.open, bz2.open, lzma.open, lambda packed: required("zstandard", file).open(packed))
    return next((opener for magic, opener in zip(PACKED, openers, strict=True) if content.startswith(magic)), None)


def decoded(content: bytes) -> str | None:
    """Return content as text: in UTF-8, or in the encoding of its byte order mark; None if it is neither."""
    try:
        text = content.decode(wide_encoding(content) or "utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.replace("\r\n", "\n")


def read_records(file: Path, name: str, text: str, field: str) -> Iterator[Text]:
    """Yield a document for each line, a JSON object."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{file}: line {number} is no JSON ({error}): mend or remove it") from None
            yield Text(f"{name}, line {number}", text_of(record, field, f"{file}: line {number}"))


def read_table(file: Path, name: str, content: bytes, field: str) -> Iterator[Text]:
    """Yield a document for each row of a Parquet or Arrow file."""
    arrow = required("pyarrow", file)
    try:
        if content.startswith(b"PAR1"):
            table = required("pyarrow.parquet", file).read_table(io.BytesIO(content))
        else:
            opened = arrow.ipc.open_file if content.startswith(ARROW[0]) else arrow.ipc.open_stream
            table = opened(io.BytesIO(content)).read_all()
    except (OSError, ValueError) as error:  # pyarrow's own errors are both
        raise UserError(f"{file} is damaged or truncated ({error}): copy it again, or leave it out") from None
    for number, row in enumerate(table.to_pylist(), 1):
        yield Text(f"{name}, row {number}", text_of(row, field, f"{file}: row {number}"))


def text_of(record: Any, field: str, where: str) -> str:
    """Return the text of a row; UserError where it has none of this name."""
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        has = ", ".join(sorted(record)) if isinstance(record, dict) else f"a {type(record).__name__}"
        raise UserError(f"{where} has no text in field {field!r}, but {has}: name the field that holds it")
    return str(record[field])


def required(module: str, file: Path) -> Any:
    """Import a module of an optional package; UserError if it is not installed."""
    package = module.partition(".")[0]
    if not find_spec(package):
        raise UserError(f"reading {file} needs the package {package}: {install_command('texts')}")
    return import_module(module)


def holds_text(file: Path, field: str) -> bool:
    """Return whether a file holds text; of a large plain one only the beginning is read."""
    if is_plain(file) and file.name not in DESCRIPTIONS:
        return is_text(file)
    return read_file(file, field) is not None


def not_text(files: list[Path]) -> Counter[str]:
    """Return the count of files that are not text, with their names and what may be wrong with them."""
    if not files:
        return Counter()
    names = ", ".join(printable(file.name) for file in files[:NAMED]) + (", …" if len(files) > NAMED else "")
    return Counter({f"not text in UTF-8 ({names}: iconv -f latin1 -t utf-8 converts other encodings)": len(files)})
