"""Where an entry of a memory comes from: its text, and its place in the stored text."""

from __future__ import annotations

from trime.stages.memories import StoredMemory

CONTEXT = 8  # tokens shown before the token of an entry


class StoredText:
    """The text that a memory is read from."""

    def __init__(self, memory: StoredMemory):
        self.memory, self.corpus, self.tokenizer = memory, memory.text.corpus(), memory.text.dataset.tokenizer

    def locate(self, number: int) -> tuple[str, str]:
        """Return the text of an entry up to its target, and its place; only the number if the text is not available."""
        place = self.memory.place(number)
        if place is None:  # a datastore of another run
            return "", f"entry {number:,}"
        document, position = place
        tokens = self.corpus.split(self.memory.split).document(document)[max(0, position - CONTEXT) : position + 1].tolist()
        words = self.tokenizer.text([self.corpus.vocabulary.symbols[token] for token in tokens])
        return words, f"{self.corpus.names(self.memory.split)[document]}, token {position:,}"
