"""The embedded default corpus: the Python standard library's own source on this machine."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from trime.data.datasets.base import SPLITS, Dataset, Document, lines_of
from trime.data.tokenizers import PythonSource

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


class StandardLibrary(Dataset):
    """One document a module, without tests (and idlelib and lib2to3, which some systems leave out).

    A module's split is decided by a hash of its name: 90 % train, 5 % valid, 5 % test. ``modules``
    limits how many are used, the first by that hash, for quick looks.
    """

    name = "stdlib"

    def __init__(self, modules: int | None = None):
        self.place = Path(sysconfig.get_path("stdlib"))
        self.tokenizer = PythonSource()
        self.modules = modules

    @cached_property
    def by_split(self) -> dict[str, list[Path]]:
        names = sorted(self.sources(), key=self.draw)[: self.modules]
        splits: dict[str, list[Path]] = {split: [] for split in SPLITS}
        for path in sorted(names):
            # The same bytes decide the split whatever the limit, so that small runs keep it.
            ratio = self.draw(path) * 997 % 1
            splits["train" if ratio < 0.9 else "valid" if ratio < 0.95 else "test"].append(self.place / path)
        return splits

    def sources(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.place):
            folders[:] = sorted(set(folders) - LEFT_OUT)
            yield from (Path(folder, name).relative_to(self.place) for name in names if name.endswith(".py"))

    @staticmethod
    def draw(path: Path) -> float:
        """A number in [0, 1) from the module's name alone."""
        return int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest()[:6], "big") / 2**48

    def files(self, split: str) -> list[Path]:
        return [path for path in self.by_split[split] if path.stat().st_size]

    def documents(self, split: str) -> Iterator[Document]:
        for path in self.files(split):
            yield Document(path.relative_to(self.place).as_posix(), lines_of(path))

    def notes(self) -> list[str]:
        return [f"source files of Python {platform.python_version()}"]
