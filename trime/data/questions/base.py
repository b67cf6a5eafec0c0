"""The interface of question sets, the prompt template, and the exact match of answers."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

SEPARATOR = "\n\n "
ARTICLES = re.compile(r"\b(a|an|the)\b")
MARKS = set(string.punctuation + "‘’´`")


class Example(NamedTuple):
    """A question, the text that holds its answer, and all accepted answers."""

    name: str
    question: str
    context: str
    answers: tuple[str, ...]
    depth: float | None = None  # place of the answer in the context, from 0 to 1, if that is known


@runtime_checkable
class Questions(Protocol):
    """A set of questions; the examples of a split are the same in every pass with the same ``draw``."""

    seed: int
    splits: ClassVar[tuple[str, ...]]  # splits whose questions have answers

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]:
        """Yield the examples of a split; ``draw`` numbers the random draws."""

    def fingerprint(self, split: str) -> str:
        """Return a hash of the files that a split is read from; empty where it is built in or fetched."""


def prompt_parts(example: Example, order: str = "first") -> tuple[str, str]:
    """Return a prompt (Attendre section 4) up to the context's end and after it; the question comes first, last or both."""
    question, context = f"Question: {example.question}", f"Context: {example.context}"
    before = [] if order == "last" else [question]
    after = [] if order == "first" else [question]
    return SEPARATOR.join([*before, context]), SEPARATOR.join(["", *after, "Answer:"])


def prompt(example: Example, order: str = "first") -> str:
    return "".join(prompt_parts(example, order))


def normalize(answer: str) -> str:
    """Normalize an answer as TriviaQA's official evaluation: lower case, no articles and marks, single spaces."""
    spaced = "".join(" " if mark in MARKS else mark for mark in answer.replace("_", " ").lower())
    return " ".join(ARTICLES.sub(" ", spaced).split())


def exact_match(answer: str, example: Example) -> bool:
    """Return True if an answer is one of the accepted ones after normalization."""
    return normalize(answer) in {normalize(accepted) for accepted in example.answers}


def contains_answer(answer: str, example: Example) -> bool:
    """Return True if an answer contains an accepted one after normalization, as whole words."""
    words = f" {normalize(answer)} "
    return any(f" {normalize(accepted)} " in words for accepted in example.answers)
