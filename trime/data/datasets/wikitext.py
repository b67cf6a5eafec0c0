"""WikiText-2 and WikiText-103 (Merity et al. 2017): word level, ``<unk>`` already in place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import ClassVar

from trime.data.datasets.base import SPLITS, Dataset, Document, existing_folder, lines_of
from trime.data.datasets.download import fetch_folder
from trime.data.tokenizers import Whitespace
from trime.errors import UserError

TITLE = re.compile(rb" = [^=].* = \r?\n?$")
DIGESTS = {2: "md5:542ccefacc6c27f945fb54453812b3cd", 103: "md5:9ddaacaf6af0710eda8c456decff7832"}
SOURCES = (
    "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-{size}-v1.zip",
    "https://wikitext.smerity.com/wikitext-{size}-v1.zip",
)


class WikiText(Dataset):
    """A document starts at a line `` = Title = `` after a blank line (formulas have such lines too); ``<eos>`` after each line.

    ``documents`` limits the number of training documents, for quick trials. The text is read from ``path`` (files
    ``wiki.train.tokens`` or ``train.txt``, and so on) or downloaded to ``cache``.
    """

    published: ClassVar[dict[str, int]] = {"valid": 217_646, "test": 245_569}
    count_difference_reason = "the files are not the published ones, or were shortened or tokenised again"

    def __init__(self, size: int, cache: str, path: str | None = None, documents: int | None = None):
        if size not in DIGESTS:
            raise UserError(f"there is no WikiText-{size}: choose dataset=wikitext2 or dataset=wikitext103")
        self.name, self.version, self.path, self.cache = f"wikitext{size}", size, path, Path(cache)
        self.tokenizer, self.first = Whitespace(), documents

    @cached_property
    def location(self) -> Path:  # type: ignore[override]
        if self.path is not None:
            return existing_folder(self.path, f"dataset {self.name}")
        name, urls = f"wikitext-{self.version}", [source.format(size=self.version) for source in SOURCES]
        return fetch_folder(urls, DIGESTS[self.version], self.cache / f"{name}-v1.zip", self.cache / name) / name

    def files(self, split: str) -> list[Path]:
        names = [self.location / f"wiki.{split}.tokens", self.location / f"{split}.txt"]
        return [path for path in names if path.is_file()][:1]

    def splits(self) -> list[str]:
        splits = [split for split in SPLITS if self.files(split)]
        if not splits:
            raise UserError(f"{self.location} holds no wiki.train.tokens or train.txt (valid, test): put them there")
        return splits

    def documents(self, split: str) -> Iterator[Document]:
        return islice(self.all_documents(split), self.first if split == "train" else None)

    def all_documents(self, split: str) -> Iterator[Document]:
        """Yield every document of a split, named by its first line with text without the title's marks."""
        for path in self.files(split):
            lines: list[bytes] = []  # of the current document
            for line in chain(lines_of(path), [b""]):
                starts = TITLE.match(line) and any(map(bytes.strip, lines)) and not lines[-1].strip()
                if starts or not line:
                    title = next(filter(bytes.strip, lines), b"")
                    yield Document(title.decode("utf-8", "replace").strip(" =\r\n"), lines)
                    lines = []
                lines.append(line)
