"""The built-in default corpus: the source of the Python standard library on this machine."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from trime.common.checks import check_choice
from trime.data.datasets.base import COPIES, SPLITS, Dataset, Document, lines_of
from trime.data.tokenizers import PythonSource

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


class StandardLibrary(Dataset):
    """One document per module, without tests (and idlelib and lib2to3, which some systems leave out).

    A hash of its name decides a module's split: 82 % train, 9 % valid, 9 % test. ``modules`` limits the number of
    modules, the first by that hash, for quick trials. ``copies=drop`` leaves out near copies, such as most encodings.
    """

    name = "stdlib"

    def __init__(self, modules: int | None = None, copies: str = "drop"):
        check_choice("dataset.copies", copies, COPIES)
        self.location = Path(sysconfig.get_path("stdlib"))
        self.tokenizer = PythonSource()
        self.modules, self.copies = modules, copies

    @cached_property
    def by_split(self) -> dict[str, list[Path]]:
        paths: list[Path] = []
        for folder, folders, names in os.walk(self.location):
            folders[:] = sorted(set(folders) - LEFT_OUT)
            paths += [Path(folder, name).relative_to(self.location) for name in names if name.endswith(".py")]
        hashes = {path: hashlib.sha256(path.as_posix().encode()).digest() for path in paths}
        number = {path: int.from_bytes(digest[:6], "big") / 2**48 for path, digest in hashes.items()}  # in [0, 1)
        splits: dict[str, list[Path]] = {split: [] for split in SPLITS}
        for path in sorted(sorted(paths, key=number.__getitem__)[: self.modules]):
            # The same hash decides the split whatever the limit, so that modules keep it in small runs.
            ratio = number[path] * 997 % 1
            splits["train" if ratio < 0.82 else "valid" if ratio < 0.91 else "test"].append(self.location / path)
        return splits

    def files(self, split: str) -> list[Path]:
        return [path for path in self.by_split[split] if path.stat().st_size]

    def documents(self, split: str) -> Iterator[Document]:
        for path in self.files(split):
            yield Document(path.relative_to(self.location).as_posix(), lines_of(path), 1)

    def notes(self) -> list[str]:
        return [f"source files of Python {platform.python_version()}", *self.copies_note()]
