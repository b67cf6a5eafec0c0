"""Windows: which part of a split is encoded, and how it is cut and read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig

from trime.common.types import Batch
from trime.data.corpus import Corpus
from trime.data.module import WindowLoader
from trime.data.segments import Segments, cut, cut_lines, document_offsets, parse_token_count
from trime.lab.settings import Configured
from trime.stages.model_io import window_sizes


class Portion(NamedTuple):
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
    def from_config(cls, config: DictConfig, section: str, split: str) -> Portion:
        """Return the portion that a section of the configuration asks for."""
        settings = config[section]
        tokens = parse_token_count(settings.tokens)
        sample = settings.get("sample", "starts") if tokens else "starts"  # one name for all tokens, so that they have one hash
        return cls(section, split, tokens, sample, settings.dtype)


class Windows(Configured, ABC):
    """How a split is cut into windows, and how these are read."""

    def settings_of(self, portion: Portion) -> Any:
        """Return the settings on which the windows of a portion depend."""
        return self.settings()

    @abstractmethod
    def cut(self, corpus: Corpus, portion: Portion) -> Segments:
        """Return the windows of a portion of a corpus, in the order in which they are read."""

    def loader(self, corpus: Corpus, split: str, windows: Segments, plan: list[list[int]]) -> Iterable[Batch]:
        """Return the batches of a plan, whose numbers are those of windows."""
        return WindowLoader(corpus.split(split), windows, plan, corpus.vocabulary.special_ids)

    def check(self, corpus: Corpus, description: dict[str, Any]) -> None:
        """Raise UserError if a model, by its description, cannot read the corpus."""


class TextWindows(Windows):
    """Windows of ``evaluate.block`` tokens, each read with the ``evaluate.context`` tokens before it.

    The text of a datastore may have windows of its own (``datastore.block``, ``datastore.context``): each of its tokens costs
    (block + context) / block tokens that are read.
    """

    depends_on = (
        *("evaluate.block", "evaluate.context", "evaluate.bounded", "evaluate.lines"),
        "compatibility.sorted_windows",
    )
    unhashed = ("datastore.block", "datastore.context")  # settings_of has them, as those of a datastore's windows

    def settings_of(self, portion: Portion) -> Any:
        settings = self.settings()
        block, context = window_sizes(self.config, portion.for_datastore)
        return settings | {"evaluate": settings["evaluate"] | {"block": block, "context": context}}

    def cut(self, corpus: Corpus, portion: Portion) -> Segments:
        text, evaluate = corpus.split(portion.split), self.config.evaluate
        offsets = document_offsets(text, evaluate.bounded)
        block, context = window_sizes(self.config, portion.for_datastore)
        sizes = block, context, portion.tokens, portion.sample
        by_lines = evaluate.lines and not portion.for_datastore
        windows = cut_lines(text, offsets, corpus.vocabulary.eos, *sizes) if by_lines else cut(offsets, *sizes)
        if context or not self.config.compatibility.sorted_windows:
            return windows
        return windows.take(np.argsort(windows.length, kind="stable"))  # so the published code reads windows without context
