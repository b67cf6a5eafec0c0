"""The texts in files and folders of any kind, as documents of plain text."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from trime.common.checks import short_repr
from trime.data.datasets.base import printable
from trime.data.datasets.files import Text, entries_of, find_texts, in_words, not_text, one_line_end, read_file
from trime.errors import UserError

log = logging.getLogger(__name__)


def read_texts(paths: str | Path | Iterable[str | Path], field: str = "text") -> Iterator[Text]:
    """Yield the documents in files and folders, as ``read_files`` reads them."""
    return chain.from_iterable(texts for _, texts in read_files(paths, field))


def files_of(places: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that ``read_files`` would look into, without reading them."""
    for place in places:
        yield from find_texts(entries_of(place), ("",)).files if place.is_dir() else [place]


def path_list(paths: Any) -> list[Path]:
    """Return one path, or several, as a list; UserError for anything else."""
    several = [paths] if isinstance(paths, str | Path) else [*paths] if isinstance(paths, Iterable) else [None]
    if not all(isinstance(path, str | Path) for path in several):
        raise UserError(f"{short_repr(paths)} is no path, nor several: pass files or folders, as str or Path")
    return [*map(Path, several)]


def read_files(paths: str | Path | Iterable[str | Path], field: str = "text") -> Iterator[tuple[str, list[Text]]]:
    """Yield the name of each file of text with its documents; ``field`` is the one that holds the text of rows.

    Names are absolute paths without links, with the row in a file of several. Lines end at a newline alone. Files are told
    apart by content: compressed (gzip, bzip2, xz, zstandard); in rows, each a document (.jsonl, Parquet, folders that the
    package datasets saved); or one document, in UTF-8, UTF-16 or UTF-32. Others are left out and named in a warning; so are
    hidden files and text memories. Raises UserError where a path does not exist, a file is damaged, or a row has no such field.
    """
    left_out, others, named, read = Counter[str](), list[Path](), dict[str, Path](), set[Path]()
    for path in path_list(paths):
        try:
            place = path.expanduser().resolve()
            found_any = place.exists()
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path} cannot be read ({error}): name another path") from None
        if not found_any:
            raise UserError(f"there is no file or folder {place}")
        found = find_texts(entries_of(place), ("",)) if place.is_dir() else None
        for file in [place] if found is None else sorted(found.files, key=Path.is_symlink):
            target = file.resolve()
            if file.is_symlink() and target in read:
                left_out["links to files that are read"] += 1
                continue
            if named.setdefault(name := printable(str(file)), file) != file:
                raise UserError(f"{name} is the name of two files, apart from what is not UTF-8 in it: rename one")
            read.add(target)
            texts = read_file(file, field)
            if texts is None:
                others.append(file)
            else:
                yield name, [text._replace(content=one_line_end(text.content)) for text in texts]
        left_out += found.left_out if found else Counter()
    if left_out or others:
        log.warning("left out: %s", in_words(left_out + not_text(others)))
