"""Text as people have it: files are read by their content, whatever their name, as documents of plain text."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import logging
import lzma
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trime.data.datasets.base import printable, wide_encoding
from trime.data.datasets.folder import entries_of, find_texts, in_words
from trime.errors import UserError

log = logging.getLogger(__name__)

RECORDS = (".jsonl", ".ndjson")  # one JSON object a line, each a document
HUGGING_FACE = ("dataset_info.json", "dataset_dict.json")  # in a folder that datasets wrote with save_to_disk
NAMED = 5  # files that a message names


class Text(NamedTuple):
    """A document: its name (the file, and the row within it where a file holds several) and its content."""

    name: str
    content: str


def read_texts(paths: str | Path | Iterable[str | Path], field: str = "text") -> Iterator[Text]:
    """Yield the documents in files and folders; ``field`` is the one that holds the text of .jsonl, .parquet and datasets.

    Files are told apart by content: compressed (gzip, bzip2, xz, zstandard), Parquet, UTF-8, UTF-16, UTF-32. Others are left
    out and named in a warning, as are hidden files. Raises UserError where a path does not exist, a file is damaged, or a row
    has no such field.
    """
    left_out, not_text = Counter[str](), list[str]()
    for path in [Path(paths)] if isinstance(paths, str | Path) else map(Path, paths):
        place = path.expanduser()
        if not place.exists():
            raise UserError(f"there is no file or folder {place}")
        found = find_texts(entries_of(place), ("",)) if place.is_dir() and not is_dataset(place) else None
        for file in [place] if found is None else found.files:
            texts = read_dataset(file, field) if file.is_dir() else read_file(file, field)
            if texts is None:
                not_text.append(printable(str(file)))
            else:
                yield from texts
        left_out += found.left_out if found else Counter()
    if not_text:
        names = ", ".join(not_text[:NAMED]) + (", …" if len(not_text) > NAMED else "")
        left_out[f"not text ({names}): convert other encodings to UTF-8 (iconv -f latin1 -t utf-8)"] = len(not_text)
    if left_out:
        log.warning("left out: %s", in_words(left_out))


def read_file(file: Path, field: str) -> Iterator[Text] | None:
    """Return the documents of a file; None if it is not text."""
    name, content = printable(str(file)), file.read_bytes()
    while unpack := unpacker(content, file):
        name = name.removesuffix(file.suffix)
        try:
            content = unpack(io.BytesIO(content)).read()
        except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
            raise UserError(f"{file} is damaged or truncated ({error}): copy it again, or leave it out") from None
    if content.startswith(b"PAR1"):
        return read_parquet(file, name, content, field)
    text = decoded(content)
    if text is None:
        return None
    if name.lower().endswith(RECORDS):
        return read_records(file, name, text, field)
    return iter([Text(name, text)] if text.strip() else [])


def unpacker(content: bytes, file: Path) -> Callable[[BinaryIO], Any] | None:
    """Return what opens compressed content, None if it is not compressed; UserError without the package for it."""
    kinds: dict[bytes, Callable[[BinaryIO], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
    if content.startswith(b"\x28\xb5\x2f\xfd"):
        return required("zstandard", file).open
    return next((opener for magic, opener in kinds.items() if content.startswith(magic)), None)


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


def read_parquet(file: Path, name: str, content: bytes, field: str) -> Iterator[Text]:
    """Yield a document for each row."""
    parquet = required("pyarrow.parquet", file)
    try:
        table = parquet.ParquetFile(io.BytesIO(content))
        for number, row in enumerate((row for batch in table.iter_batches() for row in batch.to_pylist()), 1):
            yield Text(f"{name}, row {number}", text_of(row, field, str(file)))
    except (OSError, ValueError) as error:  # pyarrow's own errors are both
        raise UserError(f"{file} is damaged or truncated ({error}): copy it again, or leave it out") from None


def is_dataset(folder: Path) -> bool:
    """Return whether the package datasets wrote a folder."""
    return any((folder / name).is_file() for name in HUGGING_FACE)


def read_dataset(folder: Path, field: str) -> Iterator[Text]:
    """Yield a document for each row of a dataset that the package datasets saved, of all its splits."""
    saved = required("datasets", folder).load_from_disk(str(folder))
    for split, rows in saved.items() if hasattr(saved, "items") else [("", saved)]:
        for number, row in enumerate(rows, 1):
            yield Text(f"{folder}{split and f', {split}'}, row {number}", text_of(row, field, str(folder)))


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
        raise UserError(f"reading {file} needs the package {package}: pip install {package}")
    return import_module(module)
