"""Windows of a translation experiment: a target sentence each, read with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trime.data.corpus import Corpus
from trime.data.parallel.corpus import ParallelCorpus, first_sentences
from trime.data.segments import Segments
from trime.errors import UserError
from trime.stages.windows import Portion, Windows


@dataclass(frozen=True)
class SentenceWindows(Windows):
    """Windows of one target sentence each, read with its source, as many as fit in the budget."""

    def cut(self, corpus: Corpus, portion: Portion) -> Segments:
        return first_sentences(corpus.split(portion.split), portion.tokens)

    def check(self, corpus: Corpus, description: dict[str, Any]) -> None:
        assert isinstance(corpus, ParallelCorpus)
        if description.get("source_fingerprint") not in (None, corpus.sources.vocabulary.fingerprint):
            raise UserError("the model was trained with another source dictionary: set dataset= to the text it was trained on")
