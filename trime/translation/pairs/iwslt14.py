"""IWSLT'14 German to English (Cettolo et al. 2014): talks, split as by the preparation script of the literature."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from trime.common.io import locked
from trime.data.datasets.base import existing_folder
from trime.data.datasets.download import fetch
from trime.errors import UserError
from trime.translation.pairs.base import Pair
from trime.translation.pairs.folder import ParallelFolder

SOURCES = (
    "http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
    "https://wit3.fbk.eu/archive/2014-01/texts/de/en/de-en.tgz",
)
CHECKSUM = None  # neither source publishes one, and no verified copy was available to compute it
TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
TAGGED = re.compile(r"<(title|description)>(.*)</\1>")
ABOUT = re.compile(r"\s*</?(url|talkid|keywords|speaker|reviewer|translator|doc|transcript|content)\b")
SEGMENT = re.compile(r"<seg[^>]*>(.*)</seg>")
PUBLISHED = 160_239  # training pairs after the preparation script
EVERY = 23  # every 23rd training pair is a validation pair


class IWSLT14(ParallelFolder):
    """The raw archive's folder (train.tags.de-en.de, IWSLT14.TED.dev2010.de-en.de.xml and so on), or files train.de, valid.de …

    Read from ``path`` or downloaded to ``cache``, without a checksum: ``notes`` compares the number of training pairs with the
    published one. Raw text is lower-cased if ``lower``, as published;
    but lengths are counted in words instead of Moses' tokens, so that slightly different pairs are left out and validated.
    """

    def __init__(
        self,
        cache: str,
        path: str | None = None,
        source: str = "de",
        target: str = "en",
        max_words: int = 175,
        ratio: float | None = 1.5,
        lower: bool = True,
        cut: bool = False,
        detokenize: bool = False,
    ):
        super().__init__(path, source, target, "iwslt14", max_words, ratio, cut, detokenize)
        self.cache, self.lower = Path(cache) / "iwslt14", lower

    @cached_property
    def location(self) -> Path:
        """The folder named by ``path``, or the downloaded one; UserError where the archive is broken."""
        if self.path is not None:
            return existing_folder(self.path, "dataset iwslt14")
        folder, partial = self.cache / "de-en", self.cache / "de-en.partial"
        self.cache.mkdir(parents=True, exist_ok=True)
        with locked(self.cache / ".lock", f"downloading {folder}"):
            if folder.is_dir():
                return folder
            archive = fetch([*SOURCES], CHECKSUM, self.cache / "de-en.tgz")
            try:
                with tarfile.open(archive) as file:
                    file.extractall(partial, filter="data")
            except (tarfile.TarError, EOFError, OSError) as error:
                raise UserError(f"{archive} is not a complete archive ({error}): delete it, or put another there") from None
            return (partial / "de-en").replace(folder)

    @property
    def raw(self) -> bool:
        """Whether the folder holds the archive's raw files; prepared ones are cleaned and filtered already."""
        return (self.location / f"train.tags.de-en.{self.languages[0]}").is_file()

    def fits(self, pair: Pair) -> bool:
        return not self.raw or super().fits(pair)

    def notes(self) -> list[str]:
        """Return a remark where the number of training pairs shows that the text is not the published one."""
        count = sum(1 for _ in self.pairs("train"))
        if abs(count - PUBLISHED) < 0.02 * PUBLISHED:
            return []
        return [f"train: {count:,} pairs where {PUBLISHED:,} are published: the files are not the published ones"]

    def files(self, split: str) -> list[Path]:
        """Return the files of a split, source before target; UserError where one is missing."""
        if not self.raw:
            return super().files(split)
        names = [f"IWSLT14.{name}.de-en.{{}}.xml" for name in TESTS] if split == "test" else ["train.tags.de-en.{}"]
        paths = [self.location / name.format(language) for language in self.languages for name in names]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise UserError(f"{self.location} lacks {missing[0]}: unpack the whole archive there")
        return paths

    def pairs(self, split: str) -> Iterator[Pair]:
        """Yield the pairs of a split; raw text loses its tags and lines about the talks."""
        if not self.raw:
            yield from super().pairs(split)
            return
        files = self.files(split)
        source, target = files[: len(files) // 2], files[len(files) // 2 :]
        sides = [[sentence for path in files for sentence in sentences_of(path)] for files in (source, target)]
        if len(sides[0]) != len(sides[1]):
            raise UserError(f"{source[0]} and {target[0]} have different numbers of sentences: unpack the archive again")
        pairs = (Pair(*(side.lower() if self.lower else side for side in pair)) for pair in zip(*sides, strict=True))
        if split == "test":
            yield from pairs
            return
        filtered = (pair for pair in pairs if all(pair) and self.fits(pair))
        for number, pair in enumerate(filtered, 1):
            if (number % EVERY == 0) == (split == "valid"):
                yield pair


def sentences_of(path: Path) -> Iterator[str]:
    """Yield the sentences of a file of the archive, without tags."""
    is_xml = path.suffix == ".xml"
    pattern = SEGMENT if is_xml else TAGGED
    for line in path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n"):
        match = pattern.search(line)
        if match:
            yield match[match.lastindex or 0].strip()
        elif not is_xml and not ABOUT.match(line):
            yield line.strip()
