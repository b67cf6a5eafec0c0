"""A language of parallel text as a dataset, whose documents are sentences; and the pieces that both languages share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trime.data.datasets.base import SPLITS, Dataset, Document
from trime.data.parallel.base import Parallel
from trime.data.tokenizers import EOS, UNKNOWN, Tokenizer
from trime.types import UserError


class Side(Dataset):
    """The sentences of one language (0: source, 1: target), each a document of a line."""

    def __init__(self, text: Parallel, side: int, tokenizer: Tokenizer):
        self.text, self.side, self.tokenizer = text, side, tokenizer
        self.name, self.place = text.name, text.place

    def files(self, split: str) -> list[Path]:
        return self.text.files(split)

    def size(self, split: str) -> int:
        return sum(path.stat().st_size for path in self.files(split)[self.side :][:1])

    def documents(self, split: str) -> Iterator[Document]:
        for number, pair in enumerate(self.text.pairs(split), 1):
            yield Document(f"sentence {number}", [pair[self.side].encode()])

    def notes(self) -> list[str]:
        return self.text.notes()


def sentences(text: Parallel, split: str) -> Iterator[str]:
    """Both languages, pair by pair."""
    for pair in text.pairs(split):
        yield from pair


def splits_of(text: Parallel) -> list[str]:
    """Those that there are."""
    return [split for split in SPLITS if text.files(split)]


def installed() -> None:
    """UserError where what translation needs is not."""
    for package in ("tokenizers", "sacrebleu"):
        if find_spec(package) is None:
            raise UserError(f"translation needs {package}: pip install 'trime[mt]'")


class Cut:
    """Sentences that are pieces already, as subword-nmt cuts them: @@ where a word goes on.

    ``moses`` is the language whose Moses detokenizer makes text of their words (fairseq's ``--tokenizer moses``); null: none.
    """

    def __init__(self, moses: str | None = None):
        self.detokenizer = None if moses is None else detokenizer(moses)

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            yield [*line.decode("utf-8", "replace").split(), EOS]

    def text(self, symbols: list[str]) -> str:
        words = re.sub(r"@@( |$)", "", " ".join(symbol for symbol in symbols if symbol != EOS))
        return words if self.detokenizer is None else self.detokenizer.detokenize(words.split())


def detokenizer(language: str) -> Any:
    """Return Moses' detokenizer of a language; UserError where sacremoses is not installed."""
    if find_spec("sacremoses") is None:
        raise UserError("dataset.detokenize=true needs sacremoses: pip install 'trime[mt]'")
    from sacremoses import MosesDetokenizer

    return MosesDetokenizer(lang=language)


class Joint:
    """Byte-pair pieces that both languages share; a word's first piece begins with the mark of a space."""

    def __init__(self, pieces: Any):
        self.pieces = pieces  # a tokenizers.Tokenizer

    @classmethod
    def learned(cls, texts: Iterable[str], limit: int) -> Joint:
        """At most ``limit`` pieces; marks stand alone."""
        installed()
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        pieces = Tokenizer(models.BPE(unk_token=UNKNOWN))
        pieces.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
        pieces.decoder = decoders.Metaspace()
        pieces.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=limit, special_tokens=[UNKNOWN], show_progress=False))
        return cls(pieces)

    @classmethod
    def load(cls, file: Path) -> Joint:
        """Those of a prepared text."""
        installed()
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(file)))

    def save(self, file: Path) -> None:
        """A JSON file."""
        self.pieces.save(str(file))

    def tokens(self, lines: Iterable[bytes]) -> Iterator[list[str]]:
        for line in lines:
            yield [*self.pieces.encode(line.decode("utf-8", "replace")).tokens, EOS]

    def text(self, symbols: list[str]) -> str:
        return self.pieces.decoder.decode([symbol for symbol in symbols if symbol != EOS])
