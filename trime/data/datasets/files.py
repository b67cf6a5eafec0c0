"""Files that hold text, read by their content: compressed or not, in rows or as one document."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import zlib
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from trime.data.datasets.base import printable, wide_encoding
from trime.errors import UserError, install_command

RECORDS = (".jsonl", ".ndjson")  # one JSON object a line, each a document
ARROW = (b"ARROW1\0\0", b"\xff\xff\xff\xff")  # how files and streams of Apache Arrow begin: those of the package datasets
DESCRIPTIONS = ("dataset_info.json", "dataset_dict.json", "state.json")  # beside them
PARQUET = b"PAR1\x15"
PACKED = {  # how files begin; a text may begin with BZh or PAR1
    "gzip": re.compile(rb"\x1f\x8b"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\0"),
    "zstandard": re.compile(rb"\x28\xb5\x2f\xfd"),
}
MEMORY = "memory.json"  # in the folder of a text memory
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
    """List a folder; UserError if it cannot be read."""
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
        elif path.is_dir() and is_text_memory(path):
            left_out["text memories"] += 1
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
    """Describe the files that were left out, the most frequent reason first."""
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


def packing(content: bytes) -> str | None:
    """Return the compression of a file's content, None if there is none."""
    return next((name for name, start in PACKED.items() if start.match(content)), None)


def is_plain(file: Path) -> bool:
    """Return whether a file is one document of text that need not be unpacked."""
    with open(file, "rb") as content:
        start = content.read(16)
    return not (packing(start) or start.startswith((PARQUET, *ARROW)) or file.name.lower().endswith(RECORDS))


def read_file(file: Path, field: str) -> Iterator[Text] | None:
    """Return the documents of a file; None if it is not text, or describes the files of a dataset beside it."""
    name, inner, content = printable(str(file)), file.name.lower(), file.read_bytes()
    if file.name in DESCRIPTIONS and any(file.parent.rglob("*.arrow")):
        return None
    while packing(content):
        inner, content = inner.rpartition(".")[0], unpack_content(content, file)
    if content.startswith((PARQUET, *ARROW)):
        return read_table(file, name, content, field)
    text = decode_text(content)
    if text is None:
        return None
    if inner.endswith(RECORDS):
        return read_records(file, name, text, field)
    return iter([Text(name, text)])


def unpack_content(content: bytes, file: Path) -> bytes:
    """Return the content of compressed data; UserError where it is damaged, or without the package that reads it."""
    unpack: dict[str, Callable[[bytes], bytes]]
    unpack = {"gzip": gzip.decompress, "bzip2": bz2.decompress, "xz": lzma.decompress, "zstandard": partial(unzstd, file)}
    try:
        return unpack[str(packing(content))](content)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{file} is damaged or truncated ({error}): copy it again, or leave it out") from None


def unzstd(file: Path, content: bytes) -> bytes:
    """Return the content of zstandard's frames; ValueError where the last is not whole."""
    zstandard, parts = import_optional("zstandard", file), []
    while content:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            parts.append(frame.decompress(content))
        except zstandard.ZstdError as error:
            raise ValueError(error) from None
        if not frame.eof:
            raise ValueError("it ends too early")
        content = frame.unused_data
    return b"".join(parts)


def decode_text(content: bytes) -> str | None:
    """Return content as text: in UTF-8, or in the encoding of its byte order mark; None if it is neither."""
    try:
        text = content.decode(wide_encoding(content) or "utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def read_records(file: Path, name: str, text: str, field: str) -> Iterator[Text]:
    """Yield a document for each line, a JSON object."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}: line {number} is no JSON ({error}): mend or remove it") from None
            yield Text(f"{name}, line {number}", text_of(record, field, f"{file}: line {number}"))


def read_table(file: Path, name: str, content: bytes, field: str) -> Iterator[Text]:
    """Yield a document for each row of a Parquet or Arrow file."""
    arrow = import_optional("pyarrow", file)
    try:
        if content.startswith(PARQUET):
            table = import_optional("pyarrow.parquet", file).read_table(io.BytesIO(content))
        else:
            opened = arrow.ipc.open_file if content.startswith(ARROW[0]) else arrow.ipc.open_stream
            table = opened(io.BytesIO(content)).read_all()
    except (OSError, ValueError) as error:  # pyarrow's own errors are both
        raise UserError(f"{file} is damaged or truncated ({error}): copy it again, or leave it out") from None
    for number, row in enumerate(table.to_pylist(), 1):
        yield Text(f"{name}, row {number}", text_of(row, field, f"{file}: row {number}"))


def text_of(record: Any, field: str, where: str) -> str:
    """Return the text of a row; UserError where it has none of this name."""
    if isinstance(record, dict) and isinstance(record.get(field), str):
        return whole_characters(record[field])
    if not isinstance(record, dict):
        raise UserError(f"{where} is a {type(record).__name__}, and no object with a field {field!r}: mend or remove it")
    if field in record:
        raise UserError(f"{where} has {type(record[field]).__name__} in field {field!r}, and no text: mend or remove it")
    raise UserError(f"{where} has no field {field!r}, but {', '.join(sorted(record))}: name the one that holds the text")


def whole_characters(text: str) -> str:
    """Return a text with U+FFFD in place of half a pair of JSON's escapes, which is no character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def one_line_end(text: str) -> str:
    """Return a text whose lines end only at a newline, and without a byte order mark."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def is_text_memory(folder: Path) -> bool:
    """Return whether a folder is that of a text memory."""
    try:
        content = json.loads((folder / MEMORY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"identity", "segments"} <= content.keys()


def import_optional(module: str, file: Path) -> Any:
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
    """Return the count of files that are not text, with their names and a remedy."""
    if not files:
        return Counter()
    names = ", ".join(printable(file.name) for file in files[:NAMED]) + (", …" if len(files) > NAMED else "")
    return Counter({f"not text in UTF-8 ({names}: iconv -f latin1 -t utf-8 converts other encodings)": len(files)})


ALIASES = {  # names of a split's folder or file, in any case
    "train": ("train", "training", "trainset"),
    "valid": ("valid", "validation", "val", "dev", "development", "validset", "valset", "devset"),
    "test": ("test", "testing", "testset"),
}
WORDS = "|".join(chain(*ALIASES.values()))
COMPRESSED = r"(\.(gz|bz2|xz|zst))?"
PLAIN = re.compile(rf"({WORDS})(\.(txt|md|raw|tokens|jsonl|ndjson|parquet|arrow))?{COMPRESSED}")
# As in wiki.train.tokens, train_set, train-00000-of-00002.parquet and test.en; not contest or trained.
WITH_MORE = re.compile(
    rf"((?P<prefix>.+)[\W_])?(?P<word>{WORDS})"
    rf"(?P<part>[\W_](?P<number>\d+)(-of-(?P<parts>\d+))?(?=\.|$))?(?P<rest>[\W_].*?)?{COMPRESSED}"
)


class Name(NamedTuple):
    """The split that a folder or file is named for, and the rest of its name."""

    split: str
    word: str  # as it is written
    is_plain: bool  # nothing but a split's name
    prefix: str | None
    rest: str  # the end of the name, after the split and without the number of a part
    part: int | None
    parts: int | None  # how many files the split has, if the name of each tells

    @property
    def key(self) -> tuple[str | None, str]:
        """The common part of the names of several splits of a text."""
        return self.prefix, self.rest


def name_of(path: Path, suffixes: tuple[str, ...]) -> Name | None:
    """Return the name of a folder or file that is named for a split; ``suffixes``: of files, as the user names them."""
    name = path.name.lower()
    found = WITH_MORE.fullmatch(name)
    if found is None:
        return None
    split = next(split for split, words in ALIASES.items() if found["word"] in words)
    numbers = (int(found[each]) if found[each] else None for each in ("number", "parts"))
    if path.is_dir():
        is_plain = name.partition(".")[0] == found["word"]
    else:
        is_plain = bool(PLAIN.fullmatch(name)) or any(name == f"{found['word']}{suffix}" for suffix in suffixes if suffix)
    return Name(split, found["word"], is_plain, found["prefix"], found["rest"] or "", *numbers)
