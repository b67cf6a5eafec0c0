"""Prompts of questions as tokens: the model's chat template, solved examples, and where the question stands."""

from __future__ import annotations

from typing import Any, NamedTuple

from trime.config.schema import Answering
from trime.data.questions.base import SEPARATOR, Example, prompt, prompt_parts
from trime.errors import UserError
from trime.models.pretrained.tokenizer import encode_text, prompt_frame


class Prompt(NamedTuple):
    """The tokens of a prompt: as far as the end of the text, which questions about the same text may share, and the rest."""

    shared: list[int]
    rest: list[int]

    @property
    def tokens(self) -> list[int]:
        """Return the whole prompt."""
        return self.shared + self.rest


class PromptMaker:
    """Makes the prompts of a model, with the settings ``answering`` and ``solved`` questions before each.

    With ``answering.order=last`` the shared part is everything before the question; otherwise nothing is shared. ``is_guided``:
    the question decides what is kept of the text before it, so that the two are also told apart where it comes first as well.
    """

    def __init__(self, tokenizer: Any, settings: Answering, solved: list[Example], is_guided: bool = False):
        self.tokenizer, self.settings, self.is_split = tokenizer, settings, is_guided or settings.order == "last"
        before, self.after = prompt_frame(tokenizer, settings.chat_template)
        shown = [f"{prompt(example, settings.order)} {example.answers[0]}{SEPARATOR}" for example in solved]
        self.before = before + encode_text(tokenizer, "".join(shown))

    def __call__(self, example: Example) -> Prompt:
        """Return the prompt of an example, or as much of the end of its own text as ``max_prompt_tokens`` leaves."""
        before, after = prompt_parts(example, self.settings.order)
        parts = (before, after) if self.is_split else ("", before + after)
        text, rest = (encode_text(self.tokenizer, part) for part in parts)
        excess = self.excess(len(text) + len(rest))
        text, rest = text[excess:], rest[max(0, excess - len(text)) :]
        return Prompt(self.before + text, rest + self.after) if self.is_split else Prompt([], self.before + rest + self.after)

    def excess(self, length: int) -> int:
        """Return how many tokens of a text and its question are not read; UserError if no room for any is left."""
        limit, frame = self.settings.max_prompt_tokens, len(self.before) + len(self.after)
        if limit is None:
            return 0
        if limit <= frame:
            raise UserError(f"answering.max_prompt_tokens={limit}: chat template and examples have {frame} tokens, raise it")
        return max(0, length - (limit - frame))
