"""Memory in ``generate``: a logits processor; and prompts that end within a token, whose last word is written again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from trime.common.types import Bool, Float, Int, Tensor
from trime.errors import UserError
from trime.scoring.mixtures.adaptive import Adaptive
from trime.scoring.mixtures.experts import folds, log_mixture
from trime.text_memory.decoder import ANCHOR, Decoder
from trime.text_memory.experts import TEMPERATURES, Candidates, Experts, Neighbours, Run
from trime.text_memory.prompts import Prompt
from trime.text_memory.segment import Source
from trime.text_memory.worth import Scored

MODEL = "model"  # the name of the model's part of a probability
FOLDS = 8
NOISE = 0.02  # nats: a feature that varies less, as of an untrained model, holds rounding errors


class Prediction(NamedTuple):
    """The next token: its log-probabilities, the weight of each expert, and what the memories propose."""

    log_probability: Float[Tensor, " v"]
    weight: np.ndarray  # [e]
    candidates: Candidates


class ReadToken(NamedTuple):
    """A token of a text: the tokens before it, its context's neighbours, and what was predicted there."""

    token: int
    before: np.ndarray
    found: Neighbours | None
    own: float  # the model's log-probability of the token
    prediction: Prediction
    experts: Experts


class ExplainedToken(NamedTuple):
    """A token of a text: its probability, the parts of it by memory, and where the memories have it from.

    ``run``: the run of at least 8 stored tokens that it is in, the same object for all of them.
    """

    token: int
    text: str
    probability: float
    parts: dict[str, float]  # of the model and of each memory; they sum to the probability
    sources: list[tuple[str, Source, str]]  # memory, place, and the text there
    run: Run | None = None


def confidence(log_probability: Float[Tensor, "n v"]) -> Float[Tensor, "n 2"]:
    """Return a model's confidence in its next token: the largest log-probability, and the entropy in nats."""
    entropy = -(log_probability.exp() * log_probability.clamp(min=-100)).sum(1)
    return torch.stack([log_probability.amax(1), entropy], 1)


def fit_weights(scored: Scored, counts: list[bool], seed: int) -> tuple[Adaptive, Float[Tensor, " n"]]:
    """Return a mixture that is fitted to texts, and the log-probability of each token under a fit without its fold."""
    mixture = Adaptive(TEMPERATURES, history=[], least_deviation=NOISE)
    fold = folds(scored.masses.document, FOLDS, seed)
    return mixture, mixture.fit(scored.masses, fold, counts, seed, scored.features)


def mixed(mixture: Adaptive, scored: Scored) -> Float[Tensor, " n"]:
    """Return the log-probability of each token of a text under the mixture."""
    return log_mixture(mixture.log_weights(scored.masses.total, scored.features), scored.masses.log_probability)


@torch.no_grad()
def predict(
    experts: Experts,
    mixture: Adaptive,
    tokens: np.ndarray,
    log_probability: Float[Tensor, "1 v"],
    found: Neighbours | None,
) -> Prediction:
    """Return the distribution of the next token after a text; ``found``: what ``experts.nearest`` returned for its context."""
    total, candidates = experts.next_token(tokens, found)
    weight = mixture.log_weights(total, confidence(log_probability).cpu())[0].double().exp().numpy()
    shares = torch.from_numpy(weight[candidates.expert] * candidates.probability).to(log_probability)
    probability = weight[0] * log_probability[0].exp()
    probability.index_add_(0, torch.from_numpy(candidates.token).to(log_probability.device), shares)
    return Prediction(probability.log(), weight, candidates)


def parts_of(experts: Experts, predicted: Prediction, token: int, log_probability: float) -> dict[str, float]:
    """Return the parts of a token's probability: the model's, and each memory's."""
    weight, candidates = predicted.weight, predicted.candidates
    parts, first = {MODEL: float(weight[0] * np.exp(log_probability))}, 1
    proposed = candidates.token == token
    for name, size in experts.sizes.items():
        chosen = proposed & (candidates.expert >= first) & (candidates.expert < first + size)
        parts[name] = float((weight[candidates.expert[chosen]] * candidates.probability[chosen]).sum())
        first += size
    return parts


class Place(NamedTuple):
    """A place of each row: what neighbours are searched by, and the model's own logits, where these are kept."""

    query: Float[Tensor, "b d"]
    own: Float[Tensor, "b v"] | None


class MemoryProcessor:
    """A logits processor: returns log-probabilities of model and memories together for each row of a batch or beam.

    It uses what is stored when it is made. Tokens that other processors exclude stay excluded. ``healed``: for each prompt,
    the text that its continuation must begin with; there the model's own logits count, as no other processor has a say in
    what was given.
    """

    def __init__(
        self,
        decoder: Decoder,
        scaled: Callable[[Tensor], Tensor],
        experts: Experts,
        mixture: Adaptive,
        healed: list[str] | None = None,
    ):
        self.decoder, self.scaled, self.experts, self.mixture = decoder, scaled, experts, mixture
        self.healed, self.begin = healed, 0
        self.result: Float[Tensor, "b v"] | None = None  # that was returned last
        self.place: Place | None = None  # of a draft; None: the context that the output layer has just read counts
        self.found: Neighbours | None = None  # of the last row
        self.continued: Int[Tensor, "b l"] | None = None  # the rows that were last continued

    @torch.no_grad()
    def __call__(self, input_ids: Int[Tensor, "b l"], scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        queries, own = self.place or Place(self.scaled(self.last_contexts(input_ids)), self.decoder.calls.scores)
        rests = self.rests(input_ids)
        if any(rests):
            is_given = torch.tensor([bool(rest) for rest in rests], device=scores.device)
            assert own is not None
            scores = torch.where(is_given[:, None], own.to(scores), scores)
        log_probability = scores.float().log_softmax(-1)
        rows = []
        for row, tokens in enumerate(input_ids.cpu().numpy().astype(np.int64)):
            before = self.decoder.without_padding(tokens)
            self.found = self.experts.nearest(queries[row : row + 1])
            rows.append(predict(self.experts, self.mixture, before, log_probability[row : row + 1], self.found))
        result = torch.stack([each.log_probability for each in rows]).masked_fill(scores == -torch.inf, -torch.inf)
        for row, rest in enumerate(rests):
            if rest and (allowed := self.begins(rest)):
                excluded = torch.ones(scores.shape[1], dtype=torch.bool, device=scores.device)
                excluded[torch.tensor(allowed, device=scores.device)] = False
                result[row].masked_fill_(excluded, -torch.inf)
        self.result = result
        return result

    def last_contexts(self, input_ids: Int[Tensor, "b l"]) -> Float[Tensor, "b d"]:
        """Return the contexts that the output layer has just read; UserError where they are not those of these rows."""
        (last, calls), before, self.continued = self.decoder.take_last(), self.continued, input_ids
        goes_on = before is not None and torch.equal(before, input_ids[:, :-1])  # a prompt may be read in parts
        if goes_on and calls > 1:
            raise UserError(
                "the model is called more than once for a token: leave out guidance_scale and such processors, and make a new "
                "memory.processor() for each generate"
            )
        if last is None or len(last) != len(input_ids):
            raise UserError("the memory's own model must generate, one token at a time: by sampling, greedily or with beams")
        return self.decoder.finite(last[:, -1].float())

    def rests(self, input_ids: Int[Tensor, "b l"]) -> list[str]:
        """Return for each row what is left of the text that its continuation must begin with."""
        if self.healed is None:
            return [""] * len(input_ids)
        self.begin = self.begin or input_ids.shape[1]
        repeats = len(input_ids) // len(self.healed)  # beams, or several continuations of a prompt
        written = [self.decoder.text_of(tokens) for tokens in input_ids[:, self.begin :].tolist()]
        rests = [self.healed[row // repeats][len(text) :] for row, text in enumerate(written)]
        if not any(rests):
            self.healed = None  # nothing of it is left, in any row, from here on
        return rests

    def begins(self, rest: str) -> list[int]:
        """Return the tokens that hold all of a text, and more, and those with which the tokenizer would begin it."""
        # Any other beginning of the rest would leave letters that neither the model nor a memory has seen so cut. What
        # follows blanks may take the last of them, and is no blank: an indentation stays as deep as it is.
        begun = self.decoder.inside(rest + ANCHOR if rest.isspace() else rest)[0]
        allowed = [begun] if rest.startswith(self.decoder.text_of([begun])) else []
        return allowed + self.decoder.pieces.that_begin_with(rest)


class AfterPrompt:
    """A processor of the user's own, which is not asked while a prompt's last word is written again."""

    def __init__(self, processor: Any, memory: MemoryProcessor):
        self.processor, self.memory = processor, memory

    def __call__(self, input_ids: Int[Tensor, "b l"], scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        return scores if all(self.memory.rests(input_ids)) else self.processor(input_ids, scores)


class StopAfterPrompt:
    """A stopping criterion: a row ends where its new text, or the prompt's end with some of it, holds one of ``stops``."""

    def __init__(self, stops: list[str], prompts: list[Prompt], decoder: Decoder):
        self.stops, self.prompts, self.decoder = stops, prompts, decoder
        self.begin = max(len(prompt.tokens) for prompt in prompts)

    def __call__(self, input_ids: Int[Tensor, "b l"], scores: Any, **_: Any) -> Bool[Tensor, " b"]:
        repeats = len(input_ids) // len(self.prompts)
        written = enumerate(input_ids[:, self.begin :].tolist())
        rows = [self.ends(self.prompts[row // repeats], tokens) for row, tokens in written]
        return torch.tensor(rows, device=input_ids.device)

    def ends(self, prompt: Prompt, tokens: list[int]) -> bool:
        longest = max(map(len, self.stops))
        # A token has a letter at least, but for parts of characters: the end of the prompt is in so many of its last ones.
        given = self.decoder.text_of(prompt.tokens[-longest:]) + prompt.end
        text = given + self.decoder.text_of(tokens)[len(prompt.end) :]
        return any(text.find(stop, max(0, len(given) - len(stop) + 1)) >= 0 for stop in self.stops)


class StreamAfterPrompt:
    """Hands tokens on to a streamer as if the prompt's last word had been given, and not written again.

    One that has a method ``note`` is told of every token, with the log-probabilities that ``memory`` gave before it.
    """

    def __init__(self, streamer: Any, prompt: Prompt, decoder: Decoder, memory: MemoryProcessor | None):
        self.streamer, self.prompt, self.decoder, self.memory = streamer, prompt, decoder, memory
        self.note = getattr(streamer, "note", None)
        self.written: list[int] | None = None  # in place of the last word

    def put(self, tokens: Tensor) -> None:
        if self.written is None:
            given = torch.from_numpy(self.prompt.tokens)
            end = torch.tensor(self.decoder.inside(self.prompt.end) if self.prompt.end else [], dtype=torch.long)
            self.streamer.put(torch.cat([given, end])[None])
            self.written = []
            return
        if self.note:
            self.note(tokens, None if self.memory is None or self.memory.result is None else self.memory.result[0])
        if len(self.decoder.text_of(self.written)) >= len(self.prompt.end):
            self.streamer.put(tokens)
            return
        self.written += tokens.flatten().tolist()
        if more := self.decoder.text_of(self.written)[len(self.prompt.end) :]:
            self.streamer.put(torch.tensor(self.decoder.inside(more)))

    def end(self) -> None:
        self.streamer.end()
