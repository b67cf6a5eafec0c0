"""Requests in the form of OpenAI's API: what is followed, and what is refused because it would change the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trime.errors import UserError
from trime.serving.served import Prompt, Served, Wanted

SOURCES = 3  # of each token, if any are asked for
LONG = 1024  # tokens of an answer in a chat, unless another number is asked for
# Settings that are not followed, and the values under which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "top_k": (0, -1),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
}
IGNORED = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}  # say nothing about the text
Words = Annotated[str, Field(max_length=1_000_000)]
Tokens = list[Annotated[int, Field(ge=0)]]
Request = TypeVar("Request", bound="Asked")


class Content(BaseModel):
    """A part of a message, or a prediction: text alone is read."""

    type: Literal["text", "content"] = "text"
    text: str | None = None
    content: str | list[Content] | None = None


class StreamOptions(BaseModel):
    include_usage: bool = False


class Asked(BaseModel):
    """What both kinds of requests have. ``sources``, for each token, its memories, and ``silent``, memories to switch off,
    are this project's own; ``sources=N`` explains at most the last N tokens of an echoed prompt.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=16)] = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prediction: Content | None = None
    sources: bool | Annotated[int, Field(ge=0)] = False
    silent: list[str] = []

    @property
    def stops(self) -> list[str]:
        """The texts before which an answer ends."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def explained(self) -> int:
        """How many of the last tokens of an echoed prompt are explained."""
        return 2**31 if self.sources is True else int(self.sources)

    def check(self) -> None:
        """Raise UserError for a setting that would be dropped."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in IGNORED and value not in NEUTRAL.get(name, ()):
                raise UserError(f"{name} is not followed here: leave it out")

    def wanted(self, again: int, max_tokens: int, likeliest: int) -> Wanted:
        """Return what is wanted of the model; ``again``: how often this prompt was continued before."""
        seed = None if self.seed is None else self.seed + again
        sources, silent = SOURCES * bool(self.sources), frozenset(self.silent)
        expected = text_of(self.prediction.content) if self.prediction else None
        return Wanted(max_tokens, self.temperature, self.top_p, seed, likeliest, sources, expected, silent)


class AskedCompletion(Asked):
    """A request of /v1/completions."""

    prompt: Words | list[Words] | Tokens | list[Tokens] = ""
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    suffix: Words | None = None

    def prompts(self, served: Served) -> list[Prompt]:
        """Return the prompts."""
        given: Any = self.prompt
        several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        if not self.suffix:
            return several
        if self.echo or not all(isinstance(prompt, str) for prompt in several):
            raise UserError("suffix goes with a prompt of text, and without echo")
        return [served.infill(prompt, self.suffix) for prompt in several]

    @property
    def likeliest(self) -> int | None:
        """How many tokens are named at each place; None: log-probabilities are not asked for."""
        return self.logprobs


class AskedChat(Asked):
    """A request of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False

    def prompts(self, served: Served) -> list[Prompt]:
        """Return the chat, whose messages have text alone."""
        messages = []
        for message in self.messages:
            if unknown := {name for name, value in message.items() if value} - {"role", "content"}:
                raise UserError(f"messages: {', '.join(sorted(unknown))} is not followed here: a message has role and content")
            messages.append({"role": message.get("role"), "content": text_of(message.get("content"))})
        return [messages]

    @property
    def likeliest(self) -> int | None:
        """How many tokens are named at each place; None: log-probabilities are not asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


def text_of(content: Any) -> str:
    """Return the text of a message or of a prediction; UserError where there is something else in it."""
    if isinstance(content, str):
        return content
    parts = [part.model_dump() if isinstance(part, Content) else part for part in content or []]
    if not parts or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise UserError("content: this model reads text alone: pass a text, or parts of the type text")
    return "".join(part["text"] for part in parts)


def parsed(kind: type[Request], body: bytes) -> Request:
    """Return a request; UserError in one line where it is none, or asks for what is not followed."""
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"] if isinstance(part, str) and part.islower())
        raise UserError(": ".join(filter(None, [name, " ".join(first["msg"].split())]))) from None
    asked.check()
    return asked
