"""prepare for parallel text: tokenizes both languages into shared pieces, sentence by sentence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from trime.common.components import build
from trime.common.identity import Free
from trime.common.io import write_json
from trime.data.corpus import build_corpus, symbol_counts
from trime.data.datasets import Dataset
from trime.data.tokenizers import Tokenizer
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.stages.prepare import Prepare, log_statistics
from trime.translation.import_checkpoint import Dictionaries
from trime.translation.pairs.base import Parallel, Side
from trime.translation.pairs.corpus import CUT, PIECES, ParallelCorpus
from trime.translation.pieces import JointBPE, PresegmentedText


@dataclass(frozen=True, eq=False, repr=False)
class PreparePairs(Prepare):
    """The parallel corpus of a dataset, in its own vocabularies or in an imported model's ``dictionaries``."""

    joined_dictionary: bool = False  # both languages share one
    dictionaries: Free[Dictionaries | None] = None

    def identity(self) -> Any:
        dictionaries = {"dictionaries": self.dictionaries.fingerprints} if self.dictionaries else {}
        return super().identity() | {"languages": self.text.languages} | dictionaries

    @cached_property
    def text(self) -> Parallel:
        """The parallel text; UserError if the dataset is not parallel text."""
        text = build(self.described, "dataset")
        if not isinstance(text, Parallel):
            raise UserError("this experiment translates: choose dataset=phrases, multi30k, iwslt14 or parallel")
        if text.detokenize and not text.cut:
            raise UserError(
                "dataset.detokenize=true is for text that comes in pieces of Moses' tokens: set dataset.cut=true too"
            )
        return text

    @cached_property
    def dataset(self) -> Dataset:
        """The target side as a dataset."""
        return Side(self.text, 1, PresegmentedText())

    def build(self, folder: Path) -> None:
        text, tokenizer = self.text, self.tokenizer(folder)
        source, target = (Side(text, side, tokenizer) for side in (0, 1))
        vocabularies = self.dictionaries
        if not vocabularies:  # one for both languages, or one for each (fairseq-preprocess with --joined-dictionary or without)
            counts = [symbol_counts(source), symbol_counts(target)]
            counts = [counts[0] + counts[1]] if self.joined_dictionary else counts
            # Each counter is read once, for its count of line ends is taken out.
            learned = [Vocabulary.fairseq_from_counts(count, None, 1) for count in counts]
            vocabularies = Dictionaries(learned[0], learned[-1])
        (folder / "source").mkdir(exist_ok=True)
        build_corpus(source, folder / "source", vocabularies.source)
        build_corpus(target, folder, vocabularies.target)
        # BLEU compares with the text as people wrote it; of text that comes in pieces, as the tokenizer joins them.
        for split in target.splits():
            references = [pair.target if not text.cut else tokenizer.text(pair.target.split()) for pair in text.pairs(split)]
            write_json(folder / f"{split}.references.json", references, indent=None, ensure_ascii=False)
        log_statistics(folder)

    def tokenizer(self, folder: Path) -> Tokenizer:
        """Return the tokenizer of the text, after writing it to ``folder``."""
        if self.text.cut:
            detokenizer = {"moses": self.text.languages[1] if self.text.detokenize else None}
            write_json(folder / CUT, detokenizer, indent=None)
            return PresegmentedText(**detokenizer)
        if self.dictionaries:
            raise UserError(
                "a released checkpoint reads Moses' tokens in pieces of its own BPE codes: prepare the text as fairseq's "
                "prepare-iwslt14.sh does and set dataset.cut=true"
            )
        # Joint pieces of both languages, so that names and numbers are cut alike.
        pieces = JointBPE.train(chain.from_iterable(self.text.pairs("train")), self.vocabulary.max_size)  # type: ignore[arg-type]
        pieces.save(folder / PIECES)
        return pieces

    def corpus(self) -> ParallelCorpus:
        """Return the finished corpus."""
        return ParallelCorpus(self.path())
