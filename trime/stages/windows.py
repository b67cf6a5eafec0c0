"""Windows: which part of a split is encoded, and how it is cut and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig

from trime.common.identity import Free
from trime.data.corpus import Corpus
from trime.data.segments import Segments, cut, cut_lines, document_offsets, parse_token_count


@dataclass(frozen=True)
class Portion:
    """The part of a split that is encoded, and for what.

    ``section``: evaluate (contexts and masses are stored, for scoring) or datastore (contexts alone). ``tokens``: a budget of
    scored tokens, None for all; ``sample``: whether it is spent on the starts of documents or on whole ones. ``dtype``: of
    the stored encodings.
    """

    section: str
    split: str
    tokens: int | None
    sample: str
    dtype: str

    @property
    def for_datastore(self) -> bool:
        """Whether contexts are encoded to be searched, rather than scored."""
        return self.section == "datastore"

    @classmethod
    def of(cls, config: DictConfig, section: str, split: str) -> Portion:
        """Return the portion that a section of the configuration asks for."""
        settings = config[section]
        tokens = parse_token_count(settings.tokens)
        sample = settings.get("sample", "starts") if tokens else "starts"  # one name for all tokens, so that they have one hash
        return cls(section, split, tokens, sample, settings.dtype)


@dataclass(frozen=True, kw_only=True)
class TextWindows:
    """Windows of ``block`` tokens, each read with the ``context`` tokens before it.

    Each token costs (block + context) / block tokens that are read. ``lines``: a window is as many whole lines as fit.
    """

    bounded: bool = True  # windows end with their document
    sorted: bool = False  # they are read from shortest to longest rather than in the order of the text
    block: int
    context: int
    lines: bool
    section: Free[str]  # whose settings these are

    @classmethod
    def of(cls, config: DictConfig, for_datastore: bool = False) -> TextWindows:
        """Return the windows of evaluated text, or of a datastore's text, which may have a block and a context of its own."""
        evaluate, own = config.evaluate, config.datastore if for_datastore else {}
        sizes = {name: evaluate[name] if own.get(name) is None else own[name] for name in ("block", "context")}
        return cls(
            **sizes,
            lines=evaluate.lines and not for_datastore,
            section="evaluate" if sizes == {name: evaluate[name] for name in sizes} else "datastore",
            bounded=evaluate.bounded,
            sorted=config.compatibility.sorted_windows,
        )

    def lengths(self) -> dict[str, int]:
        """Return the tokens that a model reads at once, by the settings that decide it; none if the text does."""
        return {f"{self.section}.block + {self.section}.context": self.block + self.context}

    def cut(self, corpus: Corpus, portion: Portion) -> Segments:
        """Return the windows of a portion of a corpus, in the order in which they are read."""
        text = corpus.split(portion.split)
        offsets = document_offsets(text, self.bounded)
        sizes = self.block, self.context, portion.tokens, portion.sample
        windows = cut_lines(text, offsets, corpus.vocabulary.eos, *sizes) if self.lines else cut(offsets, *sizes)
        if self.context or not self.sorted:
            return windows
        return windows.take(np.argsort(windows.length, kind="stable"))  # so the published code reads windows without context

    def check(self, corpus: Corpus, description: dict[str, Any]) -> None:
        """Raise UserError if a model, by its description, cannot read the corpus."""
        return
