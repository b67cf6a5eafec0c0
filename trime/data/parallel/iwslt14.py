"""IWSLT'14 German to English (Cettolo et al. 2014): talks, split as the literature's preparation script splits them."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from trime.data.datasets.base import existing_folder
from trime.data.datasets.download import fetch
from trime.data.parallel.base import Lines, Pair
from trime.types import UserError

SOURCES = (
    "http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
    "https://wit3.fbk.eu/archive/2014-01/texts/de/en/de-en.tgz",
)
CHECKSUM = None  # neither source publishes one, and no copy known to be right was at hand to compute it from
TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
TAGGED = re.compile(r"<(title|description)>(.*)</\1>")
ABOUT = re.compile(r"\s*</?(url|talkid|keywords|speaker|reviewer|translator|doc|transcript|content)\b")
SEGMENT = re.compile(r"<seg[^>]*>(.*)</seg>")
PUBLISHED = 160_239  # training pairs that the preparation script leaves
EVERY = 23  # of so many training pairs the last one is for validation


class IWSLT14(Lines):
    """The raw archive's folder (train.tags.de-en.de, IWSLT14.TED.dev2010.de-en.de.xml and so on), or files train.de, valid.de …

    Read from ``path`` or downloaded to ``cache``, without a checksum: ``notes`` compares the number of training pairs with the
    published one, and a run on other text decides no cell of the ledger. Raw text is lower-cased if ``lower``, as published;
    but lengths are of words here, of Moses' tokens there, so that some other pairs are left out and validate.
    """

    def __init__(
        self,
        cache: str,
        path: str | None = None,
        source: str = "de",
        target: str = "en",
        longest: int = 175,
        ratio: float | None = 1.5,
        lower: bool = True,
        cut: bool = False,
        detokenize: bool = False,
    ):
        super().__init__(path, source, target, "iwslt14", longest, ratio, cut, detokenize)
        self.cache, self.lower = Path(cache) / "iwslt14", lower

    @cached_property
    def place(self) -> Path:
        """The folder that is named, or the one that is downloaded to."""
        if self.path is not None:
            return existing_folder(self.path, "dataset iwslt14")
        folder = self.cache / "de-en"
        if not folder.is_dir():
            archive, partial = fetch([*SOURCES], CHECKSUM, self.cache / "de-en.tgz"), self.cache / "de-en.partial"
            try:
                with tarfile.open(archive) as file:
                    file.extractall(partial, filter="data")
            except (tarfile.TarError, EOFError, OSError) as error:
                raise UserError(f"{archive} is no whole archive ({error}): delete it, or put the right one there") from None
            (partial / "de-en").replace(folder)
        return folder

    def fits(self, pair: Pair) -> bool:
        """Whether a pair is one to learn from; prepared files hold no others."""
        return not self.raw or super().fits(pair)

    def notes(self) -> list[str]:
        """Where the text is not the published one, by its number of training pairs."""
        count = sum(1 for _ in self.pairs("train"))
        if abs(count - PUBLISHED) < 0.02 * PUBLISHED:
            return []
        return [f"train: {count:,} pairs where {PUBLISHED:,} are published: the files are not the published ones"]

    @property
    def raw(self) -> bool:
        """Whether the archive's own files are there."""
        return (self.place / f"train.tags.de-en.{self.languages[0]}").is_file()

    def files(self, split: str) -> list[Path]:
        """The files of a split, source before target."""
        if not self.raw:
            return super().files(split)
        names = [f"IWSLT14.{name}.de-en.{{}}.xml" for name in TESTS] if split == "test" else ["train.tags.de-en.{}"]
        found = [self.place / name.format(language) for language in self.languages for name in names]
        if missing := [path.name for path in found if not path.is_file()]:
            raise UserError(f"{self.place} lacks {missing[0]}: unpack the whole archive there")
        return found

    def pairs(self, split: str) -> Iterator[Pair]:
        """Of raw text, tags and lines about the talks are left out; every 23rd training pair is a validation pair."""
        if not self.raw:
            yield from super().pairs(split)
            return
        files = self.files(split)
        source, target = files[: len(files) // 2], files[len(files) // 2 :]
        sides = [[sentence for path in part for sentence in sentences_of(path)] for part in (source, target)]
        if len(sides[0]) != len(sides[1]):
            raise UserError(f"{source[0]} and {target[0]} have not the same number of sentences: unpack the archive again")
        every = (Pair(*(side.lower() if self.lower else side for side in pair)) for pair in zip(*sides, strict=True))
        if split == "test":
            yield from every
            return
        kept = (pair for pair in every if all(pair) and self.fits(pair))
        for number, pair in enumerate(kept, 1):
            if (number % EVERY == 0) == (split == "valid"):
                yield pair


def sentences_of(path: Path) -> Iterator[str]:
    """The sentences of a file of the archive, without tags."""
    tests = path.suffix == ".xml"
    pattern = SEGMENT if tests else TAGGED
    for line in path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n"):
        found = pattern.search(line)
        if found:
            yield found[found.lastindex or 0].strip()
        elif not tests and not ABOUT.match(line):
            yield line.strip()
