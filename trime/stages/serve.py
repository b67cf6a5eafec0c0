"""serve: an endpoint for an experiment's model and its last row's memories, with a page that explains texts."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import torch

from trime.common.checks import check_in_vocabulary
from trime.decoding.explanation import GeneratedToken, extend_shown, in_common
from trime.decoding.generation import AttributedToken
from trime.errors import UserError
from trime.lab.stage import Stage
from trime.report.canvas import memory_colours
from trime.report.run_result import VOCABULARY
from trime.serving.served import Explained, Place, Prompt, Reading, Served, ServedToken, Wanted, Writing
from trime.serving.server import serve
from trime.stages.graph import Graph
from trime.stages.samples import Writer, open_writer

TINY = 1e-300  # the smallest probability, so that its logarithm is a number


class ServedWriter(Served):
    """A writer behind an endpoint: it continues running text, and its memories can be switched off."""

    can_be_silent = True

    def __init__(self, writer: Writer):
        self.writer = writer
        self.name = writer.graph.config.name
        self.colours = memory_colours([VOCABULARY, *writer.memories])
        del self.colours[VOCABULARY]

    def tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.writer.token_ids(prompt)
        if not all(isinstance(token, int) for token in prompt):
            raise UserError("this model continues running text and has no chat template: ask /v1/completions")
        tokens = [token for token in prompt if isinstance(token, int)]
        check_in_vocabulary("prompt", torch.tensor(tokens), len(self.writer.vocabulary))
        return tokens

    def text(self, tokens: list[int]) -> str:
        return self.writer.text(tokens)

    def check_silent(self, silent: frozenset[str]) -> None:
        if unknown := silent - self.colours.keys():
            raise UserError(f"there is no memory {', '.join(sorted(unknown))}: choose from {', '.join(self.colours)}")

    def begin(self, wanted: Wanted) -> None:
        """Begin another text, with the memories that are wanted."""
        settings = {"max_new_tokens": wanted.max_tokens, "temperature": wanted.temperature, "top_p": wanted.top_p}
        self.writer.restart(settings | {"entries": wanted.sources})
        self.writer.continuation.silent = wanted.silent

    @torch.no_grad()
    def read(self, prompt: Prompt, wanted: Wanted, explained: int) -> Reading:
        self.begin(wanted)
        tokens = self.tokens(prompt)
        served, sources, shown = list[ServedToken](), list[Explained](), ""
        for number, step in enumerate(self.writer.steps_of(tokens), 1):
            new, shown = extend_shown(shown, self.text(tokens[:number]))
            served.append(self.served(step, new, wanted.likeliest))
            if wanted.sources and number > len(tokens) - explained:
                sources.append(as_explained(self.writer.describe_step(step, wanted.sources), new))
        return Reading(served, sources)

    def served(self, step: AttributedToken, text: str, likeliest: int) -> ServedToken:
        """Return a step's token as it is served."""
        log_probability = step.attribution.probability[: len(self.writer.vocabulary)].clamp(min=TINY).log()
        return ServedToken.of(text, step.token, log_probability, likeliest, self.text)

    def write(self, prompt: Prompt, wanted: Wanted, take: Callable[[ServedToken, str], bool]) -> Writing:
        self.begin(wanted)
        before = self.tokens(prompt)
        self.writer.continuation.read(before)
        given = whole = shown = self.text(before)
        text, sources = "", list[Explained]()
        seed = secrets.randbelow(2**31) if wanted.seed is None else wanted.seed
        for step in self.writer.steps(seed):
            last, whole = whole, self.text(before + self.writer.written)
            new, shown = extend_shown(shown, whole)
            if wanted.sources:
                sources.append(as_explained(self.writer.describe_step(step, wanted.sources), new))
            # A tokenizer may join the last token to the next one: what two texts have in common stays as it is.
            text = longer(text, continued(given, whole[: in_common(last, whole)]))
            if not take(self.served(step, new, wanted.likeliest), text):
                break
        return Writing(longer(text, continued(given, whole)), False, sources)


def continued(given: str, whole: str) -> str:
    """Return what a whole text has behind a given one, whose end a tokenizer may have written otherwise."""
    return whole[in_common(given, whole) :]


def longer(text: str, other: str) -> str:
    """Return the other text if it goes on from a text, else the text itself."""
    return other if other.startswith(text) else text


def as_explained(token: GeneratedToken, text: str) -> Explained:
    """Return a token as the endpoint explains it; ``text``: what it adds to the text before it."""
    parts = {name: part for name, part in token.parts.items() if name != VOCABULARY}
    sources = []
    for entry in token.entries:
        file, _, line = entry["place"].rpartition(", line ")
        number = int(line.replace(",", "")) if file else None
        sources.append(Place(entry["memory"], file or entry["place"], number, entry["text"]))
    return Explained(text, token.probability, parts, sources)


def serve_run(graph: Graph) -> None:
    """Serve the last row of an experiment."""
    served = ServedWriter(open_writer(graph))
    serve(served, graph.config.serve.host, graph.config.serve.port)


SERVE = Stage("serve", report=serve_run)
