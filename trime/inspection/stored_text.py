"""Where an entry of a memory comes from: its text, and its place in the text of the datastore."""

from __future__ import annotations

import numpy as np

from trime.memory.base import Memory
from trime.memory.external import ExternalMemory
from trime.memory.ngrams import TextNgrams
from trime.memory.retrieval.datastore import Datastore
from trime.plan.language_model import Plan

CONTEXT = 8  # tokens shown before the token of an entry


def entry_sources(plan: Plan, memories: dict[str, Memory]) -> dict[str, StoredText]:
    """Return the stored text for each memory whose entries are not from the text that is being written."""
    sources: dict[str, StoredText] = {}
    for name, memory in memories.items():
        if isinstance(memory, ExternalMemory):
            sources[name] = DatastoreText(plan, memory.nearest.store)
        if isinstance(memory, TextNgrams):
            sources[name] = StoredText(plan)
    return sources


class StoredText:
    """The stored text, in which entries are numbered by token."""

    def __init__(self, plan: Plan):
        self.corpus, self.tokenizer = plan.stored_corpus.corpus(), plan.stored_corpus.dataset.tokenizer
        self.split = plan.config.datastore.split

    def locate(self, number: int) -> tuple[str, str]:
        """Return the text up to a token of the split, and the place of that token: its document and position."""
        text = self.corpus.split(self.split)
        document = int(np.searchsorted(text.offsets, number, side="right")) - 1
        begin = int(text.offsets[document])
        ids = text.tokens[max(begin, number - CONTEXT) : number + 1].tolist()
        words = self.tokenizer.text([self.corpus.vocabulary.symbols[token] for token in ids])
        return words, f"{self.corpus.names(self.split)[document]}, token {number - begin:,}"


class DatastoreText(StoredText):
    """The text of which a datastore was made, in which entries are numbered as in the datastore."""

    def __init__(self, plan: Plan, store: Datastore):
        assert plan.index is not None
        self.store = store
        super().__init__(plan)
        information = plan.index.store_summary()
        self.split = information["split"]
        self.known = information["text"] == self.corpus.fingerprint(self.split)
        self.position = self.store.keys.shards.column("position")

    def locate(self, number: int) -> tuple[str, str]:
        """Return the text of an entry up to its target, and its place; only the number if the text is not available."""
        document, position = int(self.store.document[number]), int(self.position[number])
        if not self.known:  # a datastore of another run, whose text is not available
            return "", f"entry {number:,}"
        return super().locate(int(self.corpus.split(self.split).offsets[document]) + position)
