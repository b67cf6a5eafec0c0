"""What a question is, the template that asks it, and the exact match that judges an answer."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable


class Example(NamedTuple):
    """A question, the text that holds its answer, and every answer that counts."""

    name: str
    question: str
    context: str
    answers: tuple[str, ...]


@runtime_checkable
class Questions(Protocol):
    """Examples of a split, the same ones in the same order each time; ``draw`` draws anew what is random."""

    seed: int
    splits: ClassVar[tuple[str, ...]]  # those whose questions have answers

    def examples(self, split: str, draw: int = 0) -> Iterator[Example]: ...


def prompt(example: Example, question_first: bool = True) -> str:
    """Attendre section 4's template, with the question before or after the context."""
    parts = [f"Question: {example.question}", f"Context: {example.context}"]
    return "\n\n ".join([*(parts if question_first else reversed(parts)), "Answer:"])


ARTICLES = re.compile(r"\b(a|an|the)\b")
MARKS = set(string.punctuation + "‘’´`")


def normalized(answer: str) -> str:
    """As TriviaQA's official evaluation compares: lower case, no articles and marks, single spaces."""
    spaced = "".join(" " if mark in MARKS else mark for mark in answer.replace("_", " ").lower())
    return " ".join(ARTICLES.sub(" ", spaced).split())


def exact_match(answer: str, example: Example) -> bool:
    """Whether an answer is one of those that count."""
    return normalized(answer) in {normalized(one) for one in example.answers}
