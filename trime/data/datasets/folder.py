"""Your own text: a folder of files, split by subfolders, by ratio and seed, or by numbers of tokens; or a single file."""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

from trime.common.checks import check_choice, check_number
from trime.common.urls import local_copy
from trime.data.datasets.base import COPIES, SPLITS, Dataset, Document, existing_folder, lines_of, printable
from trime.data.datasets.files import (
    Found,
    Name,
    entries_of,
    find_texts,
    holds_text,
    in_words,
    is_plain,
    is_text,
    name_of,
    not_text,
    read_file,
)
from trime.data.segments import parse_token_count
from trime.data.tokenizers import Tokenizer
from trime.errors import UserError

RECORDS = (".json", ".jsonl")  # their text is one field among others: advised only where there is nothing else
BESIDE = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|dataset_?(card|infos?))\b.*", re.I
)  # files that may lie beside folders of splits
WORD = re.compile(rb"(?<=\s)\S")
CHARACTER = re.compile(rb"(?<!^)[^\x80-\xbf\s]")  # the first byte of one in UTF-8
SHORT = 10_000  # bytes of a text that is cut between its lines, however unequal they are


class Cut(NamedTuple):
    """The cuts of a text: each split's (first byte, byte after its last) and first line; whether a cut lies within a line."""

    shares: dict[str, tuple[int, int]]
    within_lines: bool = False
    first_lines: dict[str, int] | None = None


class Layout(NamedTuple):
    """The files of each split, their choice in words, counts of files left out, and whether every file is in all splits."""

    files: dict[str, list[Path]]
    choice: str
    left_out: Counter[str]
    is_cut: bool = False


class Folder(Dataset):
    """Files of text, each a document, in ``train/ valid/ test/``, or in one folder split at random by ``seed``.

    Every file is read that holds text, whatever its name; compressed ones too, and those whose rows are documents with the text
    in ``field`` (.jsonl, Parquet, what the package datasets saves). ``suffix`` takes only files that end so; it may be a list,
    and means small and capital letters alike. A split may also be a single file ``train.txt``, have another name of
    ``ALIASES``, something before it (``wiki.train.tokens``), or several files (``train-00000-of-00002.parquet``). Hidden
    files, links to folders and what the lab writes are left out. ``ratio`` is the share of files for valid and for test; or
    ``tokens`` is the minimum number of tokens of each split, in whole files (None: all that remain): valid is filled first,
    then test, then train with the rest. If ``path`` is a file, its end is test and the text before it valid, by ``ratio`` of
    its bytes (``cut_text``). ``seed=None`` cuts every file of a folder like this, except those too short for it, which are
    train; ``seed=auto`` does it where valid and test would have a single file each, and is 0 otherwise. Without a ``name``, it
    is that of the folder or file. ``copies=drop`` leaves out documents that are near copies of others (``near_copies``).
    """

    def __init__(
        self,
        path: str | None,
        tokenizer: Tokenizer,
        name: str | None = None,
        ratio: float = 0.05,
        seed: int | str | None = 0,
        suffix: str | list[str] | None = None,
        tokens: dict[str, int | str] | None = None,
        field: str = "text",
        copies: str = "say",
    ):
        file = local_copy(path or "")
        self.is_file = file.is_file()
        self.location: Path = file if self.is_file else existing_folder(path, f"dataset {name or 'folder'}")
        self.name, self.own = name or printable(self.location.resolve().stem), name is None
        if isinstance(seed, str) and seed != "auto":
            raise UserError(f"dataset.seed={seed}: choose a whole number, null or auto")
        check_number("dataset.ratio", ratio, above=0, at_most=0.45)
        check_choice("dataset.copies", copies, COPIES)
        self.copies = copies
        self.tokenizer, self.ratio, self.seed = tokenizer, ratio, seed
        self.any, self.field = suffix is None, field
        self.suffixes = tuple(each.lower() for each in ([suffix or ""] if isinstance(suffix, str | None) else suffix))
        self.suffix = "text" if self.any else " or ".join(self.suffixes)  # as messages name it
        if tokens is not None and (not isinstance(tokens, dict) or {*tokens} != {*SPLITS}):
            raise UserError(
                f"dataset {self.name}: tokens={tokens} must give a number of tokens for each of {', '.join(SPLITS)}"
            )
        self.tokens, self.characters = tokens, tokenizer.characters
        self._holds_text = dict[Path, bool]()  # of files whose content was looked at, which packed ones must be unpacked for
        if self.is_file and not holds_text(file, field):
            raise UserError(
                f"{file} is not text in UTF-8: convert it (iconv -f latin1 -t utf-8, for instance), or name another"
            )

    @cached_property
    def layout(self) -> Layout:
        """The files of each split; UserError where the folder holds no text, or its splits lie further below."""
        if self.is_file:
            return Layout({split: [self.location] for split in SPLITS}, "", Counter(), is_cut=True)
        entries = entries_of(self.location)
        readable = [path for path in entries if path.is_dir() or path.name.lower().endswith(self.suffixes)]
        named = self.splits_among(readable)
        # A repository's test/ is no split if there is no train/ and text beside it.
        of_splits = {path for paths in named.values() for path in paths}
        beside = self.any and not named["train"] and self.find(path for path in entries if path not in of_splits).files
        return self.split_by_names(entries, named) if of_splits and not beside else self.split_by_share(entries)

    def split_by_names(self, entries: list[Path], named: dict[str, list[Path]]) -> Layout:
        """Read the entries that have the names of splits; UserError if one split has two names, or none has a file."""
        found = {path: self.find(entries_of(path) if path.is_dir() else [path]) for paths in named.values() for path in paths}
        taken = {split: [path for path in paths if found[path].files] for split, paths in named.items()}
        for split, paths in taken.items():
            self.check_parts(split, paths)
        others = self.find(path for path in entries if path not in found)
        left_out = sum((each.left_out for each in found.values()), others.left_out)
        if others.files:
            left_out["files beside the splits"] += len(others.files)
        if not any(taken.values()):
            names = ", ".join(printable(path.name) for path in found)
            raise UserError(f"{self.location}: {names} hold {self.describe(0, entries, left_out)}put text there")
        by_split = {split: [file for path in paths for file in found[path].files] for split, paths in taken.items()}
        all_of = {
            split: " to ".join(printable(path.name) for path in (*paths[:1], *paths[1:][-1:])) for split, paths in taken.items()
        }
        names = ", ".join(f"{split} is {name}" for split, name in all_of.items() if name)
        missing = ", no ".join(["", *(split for split in SPLITS if not taken[split])])
        return Layout(by_split, names + missing, left_out)

    def split_by_share(self, entries: list[Path]) -> Layout:
        """Split files at random by ``tokens`` or ``ratio``, or cut each of them; UserError where there are fewer than 3."""
        files, left_out = self.find(entries)
        if len(files) < 3:
            raise UserError(
                f"{self.location} holds {self.describe(len(files), entries, left_out)}put in at least 3, or train/, valid/ "
                "and test/; a single file is split by paragraphs (dataset.path=FILE)"
            )
        remark, held_out = self.inner_splits(files), min(max(1, round(self.ratio * len(files))), (len(files) - 1) // 2)
        seed = 0 if self.seed == "auto" else self.seed
        if not self.tokens and (seed is None or (self.seed == "auto" and held_out == 1)):
            advice = ", for they are few (dataset.seed=0 holds out whole files)" if self.seed == "auto" else ""
            choice = f"{len(files):,} {self.suffix} files, each split in its order (dataset.ratio={self.ratio}){advice}{remark}"
            return Layout(dict.fromkeys(SPLITS, files), choice, left_out, is_cut=True)
        random.Random(seed).shuffle(files)
        if not self.tokens:
            train, valid, test = files[2 * held_out :], files[:held_out], files[held_out : 2 * held_out]
            by_split = {"train": sorted(train), "valid": sorted(valid), "test": sorted(test)}
        else:  # fill valid, then test, then train with files until each has its number of tokens
            remaining, by_split = iter(files), {split: [] for split in SPLITS}
            for split in ("valid", "test", "train"):
                missing = parse_token_count(self.tokens[split])
                while (missing is None or missing > 0) and (path := next(remaining, None)):
                    by_split[split].append(path)
                    missing = missing and missing - sum(
                        len(each) for text in self.texts(path) for each in self.tokenizer.tokens(text.lines)
                    )
            if not by_split["train"]:
                raise UserError(f"{self.location} has no files left for train: lower dataset.tokens.valid and .test")
            by_split = {split: sorted(paths) for split, paths in by_split.items()}
        return Layout(by_split, f"{len(files):,} {self.suffix} files, split at random (dataset.seed={seed}){remark}", left_out)

    def splits_among(self, paths: Iterable[Path]) -> dict[str, list[Path]]:
        """Return those folders and files, of some that lie side by side, that are named for each split.

        Names with more than the split's count where train has one of the same kind, and where these hold most of the text.
        """
        paths = [*paths]
        names = {path: name for path in paths if (name := name_of(path, self.suffixes))}
        taken = [path for path, name in names.items() if name.is_plain]
        if not any(names[path].split == "train" for path in taken):
            by_key: dict[tuple[str | None, str], set[str]] = {}
            for name in names.values():
                by_key.setdefault(name.key, set()).add(name.split)
            more = [path for path, name in names.items() if {"train"} < by_key[name.key]]
            if more and 2 * self.size_of(more) >= self.size_of(paths):  # or they are two of many, as data-training.md may be
                taken = more
        return {split: [path for path in taken if names[path].split == split] for split in SPLITS}

    def size_of(self, paths: Iterable[Path]) -> int:
        """Return the bytes of text in folders and files."""
        return sum(file.stat().st_size for file in self.find(paths).files)

    def check_parts(self, split: str, paths: list[Path]) -> None:
        """Raise UserError unless what is named for a split is one folder or file, or all its parts; one for each prefix."""
        by_prefix: dict[str | None, dict[Path, Name]] = {}
        for path in paths:
            if name := name_of(path, self.suffixes):
                by_prefix.setdefault(name.prefix, {})[path] = name
        for names in by_prefix.values():
            first, *_ = names.values()
            if len({(name.word, name.rest, name.parts, name.part is None) for name in names.values()}) > 1:
                both = " and ".join(printable(path.name) for path in [*names][:2])
                raise UserError(
                    f"{self.location} has both {both} for {split}: leave one of them, or make folders train/, valid/ and test/"
                )
            numbers = {name.part for name in names.values()}
            if first.parts is not None and numbers not in ({*range(first.parts)}, {*range(1, first.parts + 1)}):
                raise UserError(f"{self.location} has {len(names)} of the {first.parts} parts of {split}: get all of them")
            if rows := next((path.name for path in names if first.rest.startswith(".json") and ".json" in path.suffixes), None):
                raise UserError(
                    f"{self.location / rows} would be read as a single text in JSON: write each row as a line of {split}.jsonl "
                    "or give the file a name that is not that of a split"
                )

    def find(self, entries: Iterable[Path]) -> Found:
        """Find the files of the dataset among some entries of the folder."""
        found = find_texts(entries, self.suffixes, {path.resolve() for path in self.lab_folders})
        if not self.any:
            return found
        self._holds_text |= {file: holds_text(file, self.field) for file in found.files if file not in self._holds_text}
        others = [file for file in found.files if not self._holds_text[file]]
        return Found([file for file in found.files if file not in {*others}], found.left_out + not_text(others))

    def describe(self, count: int, entries: list[Path], left_out: Counter[str]) -> str:
        """Return the number of files, what else was found, and the suffix to set if that is text: the middle of a message."""
        files, remedy = find_texts(entries, ("",)).files, ""
        for suffix in sorted((suffix for suffix, _ in left_out.most_common()), key=RECORDS.__contains__):
            first = next((file for file in files if file.suffix.lower() == suffix), None)
            if first and is_text(first):
                remedy = f"set dataset.suffix={suffix} to read those, or "
                break
        beside = f" beside {in_words(left_out)}" if left_out else ""
        return f"{count} {self.suffix} files{beside}: {remedy}"

    def inner_splits(self, files: list[Path]) -> str:
        """Return a remark where folders further below are named for splits; UserError if all files lie in such folders."""
        entries: dict[Path, set[Path]] = {}  # of each folder, those that files of the text are, or lie in
        for file in files:
            for path in (file, *file.parents):
                if path == self.location:
                    break
                entries.setdefault(path.parent, set()).add(path)
        splits = {folder: self.splits_among(sorted(paths)) for folder, paths in entries.items()}
        # Two of them side by side are splits that lie one level too deep.
        places = {
            folder: [*filter(None, found.values())] for folder, found in splits.items() if sum(map(bool, found.values())) > 1
        }
        if not places:
            return ""
        inside = {*chain.from_iterable(chain.from_iterable(places.values()))}
        outside = [file for file in files if not BESIDE.fullmatch(file.name) and inside.isdisjoint((file, *file.parents))]
        folder = min(places, key=lambda place: (len(place.parts), place))
        names = ", ".join(sorted(printable(paths[0].name) for paths in places[folder]))
        if not outside:
            raise UserError(
                f"{self.location} holds no train/, valid/ or test/, but {folder} has {names}: set dataset.path={folder}"
            )
        return f", although {folder} has {names}"

    def texts(self, path: Path) -> list[Document]:
        """Return the documents of a file."""
        name = printable(path.name if self.is_file else str(path.relative_to(self.location)))
        if is_plain(path):
            return [Document(name, lines_of(path), 1)]
        rows = [*(read_file(path, self.field) or [])]
        names = [name] if len(rows) == 1 else [f"{name},{row.name.rpartition(',')[2]}" for row in rows]
        contents = (lines_of(row.content.encode("utf-8", "replace")) for row in rows)
        return [*map(Document, names, contents)]

    @cached_property
    def cuts(self) -> dict[Path, Cut]:
        """The cuts of every file, in bytes, or in rows where it has several; UserError if none can be cut."""
        cuts = {}
        for path in self.files("train"):
            texts = self.texts(path)
            cuts[path] = cut_text([*texts[0].lines], self.ratio) if len(texts) == 1 else cut_rows(len(texts), self.ratio)
        if all(first == end for cut in cuts.values() for first, end in [cut.shares["test"]]):
            raise UserError(f"{self.location} cannot be split: it needs at least 3 words, or name a folder of files")
        return cuts

    @property
    def within_lines(self) -> str:
        """A remark where a file is cut within a line."""
        return " within lines" if self.layout.is_cut and any(cut.within_lines for cut in self.cuts.values()) else ""

    @property
    def more_documents(self) -> str:  # type: ignore[override]
        if self.layout.is_cut:
            return "name a folder of more files"
        return "raise dataset.ratio, or set dataset.seed=null, which takes the end of every file of one folder"

    def files(self, split: str) -> list[Path]:
        return self.layout.files[split]

    def full_size(self, split: str) -> int:
        if not self.layout.is_cut:
            return super().full_size(split)
        return sum(end - first for path in self.files(split) for first, end in [self.cuts[path].shares[split]])

    def documents(self, split: str) -> Iterator[Document]:
        for path in self.files(split):
            texts = self.texts(path)
            if not self.layout.is_cut:
                yield from texts
                continue
            first, end = self.cuts[path].shares[split]
            if len(texts) > 1:
                yield from texts[first:end]
            elif first < end:
                starts = self.cuts[path].first_lines if is_plain(path) else None
                yield Document(texts[0].name, lines_between(texts[0].lines, first, end), starts[split] if starts else None)

    def notes(self) -> list[str]:
        """Describe the split of the text and the files that were left out."""
        if self.is_file:
            within = ", within its lines" if self.within_lines else ""
            return [
                f"{printable(self.location.name)} is split in its order (dataset.ratio={self.ratio}){within}",
                *self.copies_note(),
            ]
        return [f"{self.layout.choice}; left out: {in_words(self.layout.left_out)}", *self.copies_note()]

    def fingerprint(self) -> str:
        return super().fingerprint() + self.within_lines


def lines_between(lines: Iterable[bytes], first: int, end: int) -> Iterator[bytes]:
    """Yield the lines of a text from one byte to before another; the first and the last of them may be incomplete."""
    position = 0
    for line in lines:
        if text := line[max(first - position, 0) : max(end - position, 0)]:
            yield text
        position += len(line)


def cut_rows(count: int, ratio: float) -> Cut:
    """Cut rows into train, valid and test, the latter two with ``ratio`` of them each; all are train if they are too few."""
    held_out = max(1, round(ratio * count)) if count > 2 else 0
    valid, test = count - 2 * held_out, count - held_out
    return Cut({"train": (0, valid), "valid": (valid, test), "test": (test, count)})


def cut_text(lines: list[bytes], ratio: float) -> Cut:
    """Cut a text into train, valid and test, the latter two with ``ratio`` of its bytes each; all train if it is too short."""
    ends = [*accumulate(map(len, lines))]
    text, size = b"".join(lines), sum(map(len, lines))
    # Paragraphs stay whole where there are several.
    after_blank = [ends[n - 1] for n in range(1, len(lines)) if lines[n].strip() and not lines[n - 1].strip()]
    between_lines = after_blank if len(after_blank) > 1 else ends[:-1]
    # Lines so long that train would get less than half its share are cut between words, or, without any, between characters.
    within_lines = ([match.start() for match in pattern.finditer(text)] for pattern in (WORD, CHARACTER))
    for places in chain([between_lines], within_lines):
        if len(places) < 2:
            continue
        valid = min(max(bisect_right(places, (1 - 2 * ratio) * size) - 1, 0), len(places) - 2)
        test = max(bisect_right(places, (1 - ratio) * size) - 1, valid + 1)
        if places[valid] >= (1 - 2 * ratio) / 2 * size or size <= SHORT:
            shares = {"train": (0, places[valid]), "valid": (places[valid], places[test]), "test": (places[test], size)}
            first_lines = {split: 1 + text.count(b"\n", 0, first) for split, (first, _) in shares.items()}
            return Cut(shares, places is not between_lines, first_lines)
    return Cut({"train": (0, size), "valid": (size, size), "test": (size, size)}, first_lines=dict.fromkeys(SPLITS, 1))
