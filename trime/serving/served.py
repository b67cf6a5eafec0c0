"""What an endpoint serves: a model that reads and continues texts, and says where each token came from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from trime.common.types import Float, Tensor
from trime.errors import UserError

LEAST = -9999.0  # log-probability that stands for minus infinity, which JSON does not have
Prompt = str | list[int] | list[dict[str, Any]]  # a text, token numbers, or a chat: messages with role and content


class ServedToken(NamedTuple):
    """A token's text, its log-probability in nats (None: nothing predicts it), and the likeliest ones in its place."""

    text: str
    log_probability: float | None
    likeliest: dict[str, float]

    @staticmethod
    def of(
        text: str, token: int, log_probability: Float[Tensor, " v"], likeliest: int, text_of: Callable[[list[int]], str]
    ) -> ServedToken:
        """Return a token of a distribution, with so many of the ``likeliest`` ones, whose texts ``text_of`` returns."""
        best, number = log_probability.topk(min(likeliest, len(log_probability)))
        named = {text_of([each]): max(LEAST, value) for each, value in zip(number.tolist(), best.tolist(), strict=True)}
        return ServedToken(text, max(LEAST, float(log_probability[token])), named)


class Place(NamedTuple):
    """A place that a memory has a token from; ``line`` is None where only a name is known."""

    memory: str
    file: str
    line: int | None
    text: str


class Explained(NamedTuple):
    """A token's probability, the parts of it by memory, where they have it from, and the stored run that it is copied in."""

    text: str
    probability: float
    parts: dict[str, float]  # of the memories alone
    sources: list[Place]
    run: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        share = sum(self.parts.values()) / max(self.probability, 1e-300)
        content = self._asdict() | {"sources": [place._asdict() for place in self.sources]}
        return content | {"share": min(1.0, max(0.0, share))}


@dataclass(frozen=True)
class Wanted:
    """What is asked of a model: how to write, how many of the ``likeliest`` tokens are named, and how many ``sources``."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    likeliest: int = 0
    sources: int = 0  # of each token; 0: nothing is explained
    expected: str | None = None  # a text that is likely to be written
    silent: frozenset[str] = frozenset()  # memories that propose nothing


class Reading(NamedTuple):
    """The tokens of a text that was read, and the last of them explained."""

    tokens: list[ServedToken]
    sources: list[Explained]


class Writing(NamedTuple):
    """A text that was written: whether it ended by itself, and its tokens explained."""

    text: str
    ended: bool
    sources: list[Explained]


class Served(ABC):
    """A model with a memory. ``name``: of the model; ``colours``: of its memories on a page; all calls come one by one."""

    name: str
    colours: dict[str, str]
    titles: dict[str, str] = {}  # of memories on a page, where their names do not say enough
    can_be_silent = False  # its memories, one by one
    longest: int | None = None  # tokens of prompt and answer together

    @abstractmethod
    def tokens(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt; UserError where it is none."""

    @abstractmethod
    def text(self, tokens: list[int]) -> str:
        """Return tokens as text."""

    @abstractmethod
    def read(self, prompt: Prompt, wanted: Wanted, explained: int) -> Reading:
        """Read a text; its last ``explained`` tokens are explained if ``wanted`` asks for sources."""

    @abstractmethod
    def write(self, prompt: Prompt, wanted: Wanted, take: Callable[[ServedToken, str], bool]) -> Writing:
        """Continue a prompt; ``take`` is given each token with the text so far, which only grows, and says whether to go on."""

    def infill(self, prompt: str, suffix: str) -> Prompt:
        """Return the prompt that asks for what stands between two texts; UserError where the model has not learned that."""
        raise UserError("this model cannot fill a gap between two texts: leave suffix out")

    def check_silent(self, silent: frozenset[str]) -> None:
        """Raise UserError unless these memories can be switched off."""
        if silent:
            raise UserError("the memories of this model cannot be switched off: leave silent out")
