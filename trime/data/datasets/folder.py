"""Your own text: a folder of files, split by subfolders, by ratio and seed, or by numbers of tokens; or a single file."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from trime.data.datasets.base import SPLITS, Dataset, Document, existing_folder, lines_of, printable
from trime.data.datasets.cutting import Cut, cut_text
from trime.data.datasets.found import Found, counted, entries_of, find_texts, readable_suffix
from trime.data.segments import parse_token_count
from trime.data.tokenizers import Tokenizer
from trime.errors import UserError
from trime.urls import local_copy

ALIASES = {  # names of a split's folder or file, in any case
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev", "development"),
    "test": ("test", "testing"),
}


class Layout(NamedTuple):
    """The files of each split, how they were chosen, in words, what was left out, and whether every file is in all splits."""

    files: dict[str, list[Path]]
    choice: str
    left_out: Counter[str]
    is_cut: bool = False


class Folder(Dataset):
    """Files that end in ``suffix``, each a document, in ``train/ valid/ test/``, or in one folder split at random by ``seed``.

    ``suffix`` may be a list, and means small and capital letters alike. A split may also be a single file ``train.txt``, and
    have another name of ``ALIASES``. Hidden files, links to folders and what the lab writes are left out. ``ratio`` is the
    share of files for valid and for test; or ``tokens`` is the minimum number of tokens of each split, in whole files (None:
    all that remain): valid is filled first, then test, then train with the rest. If ``path`` is a file, its end is test and
    the part before it valid, by ``ratio`` of its bytes (``cut_text``). ``seed=None`` cuts every file of a folder so, those too
    short for it excepted, which are train; ``seed=auto`` does it where valid and test would have a single file each, and is 0
    otherwise. Without a ``name``, it is that of the folder or file.
    """

    def __init__(
        self,
        path: str | None,
        tokenizer: Tokenizer,
        name: str | None = None,
        ratio: float = 0.05,
        seed: int | str | None = 0,
        suffix: str | list[str] = ".txt",
        tokens: dict[str, int | str] | None = None,
    ):
        file = local_copy(path or "")
        self.is_file = file.is_file()
        self.location = file if self.is_file else existing_folder(path, f"dataset {name or 'folder'}")
        self.name, self.own = name or printable(self.location.resolve().stem), name is None
        if isinstance(seed, str) and seed != "auto":
            raise UserError(f"dataset.seed={seed}: choose a whole number, null or auto")
        self.tokenizer, self.ratio, self.seed = tokenizer, ratio, seed
        self.suffixes = tuple(each.lower() for each in ([suffix] if isinstance(suffix, str) else suffix))
        self.suffix = " or ".join(self.suffixes)  # as messages name it
        if tokens is not None and (not isinstance(tokens, dict) or {*tokens} != {*SPLITS}):
            raise UserError(
                f"dataset {self.name}: tokens={tokens} must give a number of tokens for each of {', '.join(SPLITS)}"
            )
        self.tokens = tokens
        self.characters = tokenizer.characters

    @cached_property
    def by_split(self) -> dict[str, list[Path]]:
        """The files of each split; UserError where there are too few to split."""
        return {split: [Path(self.location)] for split in SPLITS} if self.is_file else self.layout.files

    @property
    def is_cut(self) -> bool:
        """Whether every file is cut into train, valid and test."""
        return self.is_file or self.layout.is_cut

    @cached_property
    def layout(self) -> Layout:
        """How the folder was read; UserError where it holds no text, or its splits lie further below."""
        entries = entries_of(Path(self.location))
        named = {
            split: [path for path in entries if self.is_readable(path) and self.split_of(path) == split] for split in SPLITS
        }
        if any(named.values()):
            return self.layout_by_names(entries, named)
        files, left_out = self.find(entries)
        if len(files) < 3:
            raise UserError(
                f"{self.location} holds {self.described(len(files), entries, left_out)}put in at least 3, or train/, valid/ "
                "and test/; a single file is split by paragraphs (dataset.path=FILE)"
            )
        remark = self.inner_splits(files)
        seed, few = (0 if self.seed == "auto" else self.seed), self.held_out(files) == 1
        if not self.tokens and (seed is None or (self.seed == "auto" and few)):
            advice = ", for they are few (dataset.seed=0 holds out whole files)" if self.seed == "auto" else ""
            choice = f"{len(files):,} {self.suffix} files, each split in its order (dataset.ratio={self.ratio}){advice}{remark}"
            return Layout(dict.fromkeys(SPLITS, files), choice, left_out, is_cut=True)
        random.Random(seed).shuffle(files)
        parts = self.split_by_tokens(files, self.tokens) if self.tokens else self.split_by_ratio(files)
        by_split = {split: sorted(part) for split, part in zip(SPLITS, parts, strict=True)}
        return Layout(by_split, f"{len(files):,} {self.suffix} files, split at random (dataset.seed={seed}){remark}", left_out)

    def layout_by_names(self, entries: list[Path], named: dict[str, list[Path]]) -> Layout:
        """Read the entries that have the names of splits; UserError if one split has two names, or none has a file."""
        found = {path: self.find(entries_of(path) if path.is_dir() else [path]) for paths in named.values() for path in paths}
        taken = {split: [path for path in paths if found[path].files] for split, paths in named.items()}
        for split, paths in taken.items():
            if len(paths) > 1:
                names = " and ".join(printable(path.name) for path in paths)
                raise UserError(f"{self.location} has both {names} for {split}: leave one of them")
        others = self.find(path for path in entries if path not in found)
        left_out = sum((each.left_out for each in found.values()), others.left_out)
        if others.files:
            left_out["files beside the splits"] += len(others.files)
        if not any(taken.values()):
            names = ", ".join(printable(path.name) for path in found)
            raise UserError(f"{self.location}: {names} hold {self.described(0, entries, left_out)}put text there")
        by_split = {split: [file for path in paths for file in found[path].files] for split, paths in taken.items()}
        names = ", ".join(f"{split} is {printable(path.name)}" for split, paths in taken.items() for path in paths)
        missing = ", no ".join(["", *(split for split in SPLITS if not taken[split])])
        return Layout(by_split, names + missing, left_out)

    def is_readable(self, path: Path) -> bool:
        """Return True for a folder, and for a file with the suffix of the dataset's files."""
        return path.is_dir() or path.name.lower().endswith(self.suffixes)

    def split_of(self, path: Path) -> str | None:
        """Return the split that a folder or file is named for."""
        name = path.name.lower()
        stem = next((name.removesuffix(suffix) for suffix in self.suffixes if name.endswith(suffix)), name)
        return next((split for split in SPLITS if stem in ALIASES[split]), None)

    def find(self, entries: Iterable[Path]) -> Found:
        """Find the files of the dataset among some entries of the folder."""
        return find_texts(entries, self.suffixes, {path.resolve() for path in self.lab_folders})

    def described(self, count: int, entries: list[Path], left_out: Counter[str]) -> str:
        """Return the number of files, what else was found, and the setting that reads it, as the middle of a message."""
        suffix = readable_suffix(entries, left_out)
        remedy = f"set dataset.suffix={suffix} to read those, or " if suffix else ""
        return f"{count} {self.suffix} files{f' beside {counted(left_out)}' if left_out else ''}: {remedy}"

    def inner_splits(self, files: list[Path]) -> str:
        """Return a remark where folders further below are named for splits; UserError if all files lie in such folders."""
        location = Path(self.location)
        siblings: dict[Path, set[str]] = {}  # by folder, the splits that entries of it are named for
        is_inside = []
        for file in files:
            places = [*file.parents][: len(file.relative_to(location).parts) - 1]
            named = [path for path in (*reversed(places), file) if self.split_of(path)][:1]
            is_inside.append(bool(named))
            for path in named:
                siblings.setdefault(path.parent, set()).add(path.name)
        folder = next((place for place, names in siblings.items() if len(names) > 1), None)
        if folder is None:
            return ""
        names = ", ".join(sorted(siblings[folder]))
        if all(is_inside):
            raise UserError(f"{location} holds no train/, valid/ or test/, but {folder} has {names}: set dataset.path={folder}")
        return f", although {folder} has {names}"

    @property
    def more_documents(self) -> str:  # type: ignore[override]
        if self.is_cut:
            return "name a folder of more files"
        return "raise dataset.ratio, or set dataset.seed=null, which takes the end of every file of one folder"

    def held_out(self, files: list[Path]) -> int:
        """Return the number of files of valid, and of test, by ``ratio``."""
        return max(1, round(self.ratio * len(files)))

    def split_by_ratio(self, files: list[Path]) -> tuple[list[Path], list[Path], list[Path]]:
        """Return the files of train, valid and test by ``ratio``."""
        held_out = self.held_out(files)
        return files[2 * held_out :], files[:held_out], files[held_out : 2 * held_out]

    def split_by_tokens(self, files: list[Path], tokens: dict[str, int | str]) -> tuple[list[Path], list[Path], list[Path]]:
        """Return the files of train, valid and test by ``tokens``; UserError where none remain for train."""
        remaining = iter(files)
        valid, test, train = (
            self.take_files(remaining, parse_token_count(tokens[split])) for split in ("valid", "test", "train")
        )
        if not train:
            raise UserError(f"{self.location} has no files left for train: lower dataset.tokens.valid and .test")
        return train, valid, test

    def take_files(self, files: Iterator[Path], tokens: int | None) -> list[Path]:
        """Take the next files until they have so many tokens; None: all that remain."""
        if tokens is None:
            return [*files]
        taken: list[Path] = []
        while tokens > 0 and (path := next(files, None)):
            taken.append(path)
            tokens -= sum(map(len, self.tokenizer.tokens(lines_of(path))))
        return taken

    def size(self, split: str) -> int:
        if not self.is_cut:
            return super().size(split)
        return sum(self.part_size(path, split) for path in self.files(split))

    def part_size(self, path: Path, split: str) -> int:
        """Return the bytes of a split's part of a file."""
        first, last = self.cuts[path].parts[split]
        return last - first

    def files(self, split: str) -> list[Path]:
        return self.by_split[split]

    def notes(self) -> list[str]:
        """Return how the text was split, and what was left out."""
        if self.is_file:
            within = ", within its lines" if self.within_lines else ""
            return [f"{printable(Path(self.location).name)} is split in its order (dataset.ratio={self.ratio}){within}"]
        return [f"{self.layout.choice}; left out: {counted(self.layout.left_out)}"]

    def fingerprint(self) -> str:
        """Return a hash of every file's name and content, and of splits within lines."""
        return super().fingerprint() + (" within lines" if self.within_lines else "")

    def documents(self, split: str) -> Iterator[Document]:
        for path in self.files(split):
            name = printable(path.name if self.is_file else str(path.relative_to(self.location)))
            if not self.is_cut:
                yield Document(name, lines_of(path))
            elif self.part_size(path, split):
                yield Document(name, self.lines_of_part(path, split))

    def lines_of_part(self, path: Path, split: str) -> Iterator[bytes]:
        """Yield the lines of a split's part of a file."""
        first, last = self.cuts[path].parts[split]
        position = 0
        for line in lines_of(path):
            if part := line[max(first - position, 0) : max(last - position, 0)]:
                yield part
            position += len(line)

    @cached_property
    def cuts(self) -> dict[Path, Cut]:
        """Where every file is cut; UserError if none can be."""
        cuts = {path: cut_text([*lines_of(path)], self.ratio) for path in self.files("train")}
        if not any(cuts.values()):
            raise UserError(f"{self.location} cannot be split: it needs at least 3 words, or name a folder of files")
        return {path: cut or whole(path) for path, cut in cuts.items()}

    @property
    def within_lines(self) -> bool:
        """Whether a file is cut within a line."""
        return self.is_cut and any(cut.within_lines for cut in self.cuts.values())


def whole(path: Path) -> Cut:
    """Leave a file whole, as train."""
    size = sum(map(len, lines_of(path)))
    return Cut({"train": (0, size), "valid": (size, size), "test": (size, size)}, False)
