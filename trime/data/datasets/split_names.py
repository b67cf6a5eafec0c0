"""Folders and files that are named for a split, as people and published data name them."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ALIASES = {  # names of a split's folder or file, in any case
    "train": ("train", "training", "trainset"),
    "valid": ("valid", "validation", "val", "dev", "development", "validset", "valset", "devset"),
    "test": ("test", "testing", "testset"),
}
WORDS = "|".join(chain(*ALIASES.values()))
PACKED = r"(\.(gz|bz2|xz|zst))?"
PLAIN = re.compile(rf"({WORDS})(\.(txt|md|raw|tokens|jsonl|ndjson|parquet|arrow))?{PACKED}")
# As in wiki.train.tokens, train_set, train-00000-of-00002.parquet and test.en; not contest or trained.
WITH_MORE = re.compile(
    rf"((?P<prefix>.+)[\W_])?(?P<word>{WORDS})"
    rf"(?P<part>[\W_](?P<number>\d+)(-of-(?P<parts>\d+))?(?=\.|$))?(?P<rest>[\W_].*?)?{PACKED}"
)


class Name(NamedTuple):
    """The split that a folder or file is named for, and the rest of its name."""

    split: str
    word: str  # as it is written
    is_plain: bool  # nothing but a split's name
    prefix: str | None
    rest: str  # what follows the split, without the number of a part
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
