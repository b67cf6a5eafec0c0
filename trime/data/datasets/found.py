"""The text files below a folder, and a count of everything else that lies there, so that nothing is left out silently."""

from __future__ import annotations

import os
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from trime.data.datasets.base import wide_encoding
from trime.errors import UserError

SAMPLE = 2**14  # bytes of a file that show whether it is text
RECORDS = (".json", ".jsonl")  # whose text is a field among others: advised only where there is nothing else


class Found(NamedTuple):
    """The files that are documents, in the order of their paths, and the number of things left out, by a word for them."""

    files: list[Path]
    left_out: Counter[str]


def entries_of(folder: Path) -> list[Path]:
    """Return what lies in a folder; UserError if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}): allow it, or remove it from the dataset") from None


def find_texts(entries: Iterable[Path], suffixes: tuple[str, ...], lab_folders: Collection[Path] = ()) -> Found:
    """Find the files with one of the suffixes, in any case, among ``entries`` and below their folders.

    Hidden files and folders, links to folders and ``lab_folders`` are left out. UserError at a file that cannot be read.
    """
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


def counted(left_out: Counter[str]) -> str:
    """Return what was left out in words, the most frequent first."""
    return ", ".join(f"{count:,} {name}" for name, count in left_out.most_common()) or "nothing"


def readable_suffix(entries: Iterable[Path], left_out: Counter[str]) -> str | None:
    """Return the most frequent suffix of left-out files that hold text, as the first one shows; None if there is none."""
    files = find_texts(entries, ("",)).files
    suffixes = sorted((suffix for suffix, _ in left_out.most_common()), key=RECORDS.__contains__)
    firsts = ((suffix, next((file for file in files if file.suffix.lower() == suffix), None)) for suffix in suffixes)
    return next((suffix for suffix, first in firsts if first and is_text(first)), None)


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
