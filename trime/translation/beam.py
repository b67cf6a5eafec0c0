"""Translation of sentences by beam search, with the mixture of a row at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trime.common.identity import Free
from trime.common.types import Bool, Contexts, Float, Int, Tensor, TokenPosition
from trime.data.corpus import Split
from trime.decoding.attribution import Attribution, expert_distributions, fitted_attribution, grid_attribution
from trime.decoding.generation import AttributedToken
from trime.models.network import Network
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.token_memory.search.datastore import KNNMemory
from trime.token_memory.test.base import Entries
from trime.training.hardware import Hardware
from trime.translation.encoder_decoder import DecoderCache, EncodedSource, EncoderDecoder
from trime.translation.pairs.corpus import ParallelCorpus

StepFunction = Callable[[Int[Tensor, " n"], Int[Tensor, " n"]], Float[Tensor, "n v"]]
MIN_PROBABILITY = torch.finfo(torch.float32).tiny  # so that the end of a sentence is never impossible


class Hypothesis(NamedTuple):
    """A translation without its end symbol, and its score."""

    tokens: list[int]
    score: float


class Beam(NamedTuple):
    """A beam of ``size`` hypotheses a sentence; ``length_penalty`` 1 scores by the mean log-probability, 0 by the sum."""

    size: int
    length_penalty: float
    min_length: int = 0  # of a hypothesis, in tokens (fairseq's --min-len)

    def search(self, step: StepFunction, start: int, end: int, longest: list[int], device: torch.device) -> list[Hypothesis]:
        """Return the best finished hypothesis of each sentence, of ``min_length`` to ``longest`` tokens.

        ``step`` returns the log-probabilities of each row's next token; its arguments are the rows of the previous call
        that are continued, and the tokens chosen for them. The first call has rows 0 to n - 1, ``size`` for each sentence.
        """
        k, sentences = self.size, list(range(len(longest)))
        rows = torch.arange(len(sentences) * k, device=device)
        tokens = torch.full((len(rows), 1), start, dtype=torch.long, device=device)
        score = torch.full((len(sentences), k), -torch.inf, dtype=torch.float64, device=device)
        score[:, 0] = 0  # at first all hypotheses of a sentence are the same
        finished: list[list[Hypothesis]] = [[] for _ in longest]
        for length in range(1, max(longest) + 2):
            must_end = torch.tensor([length > longest[sentence] for sentence in sentences], device=device)
            top, following = self.continuations(step(rows, tokens[:, -1]), length, must_end.repeat_interleave(k), end)
            total = (score[..., None] + top.view(len(sentences), k, -1)).flatten(1)
            best, cell = total.topk(2 * k, dim=1)
            parent, token = cell // top.shape[1], following.view(len(sentences), -1).gather(1, cell)
            active: list[int] = []
            continued: list[list[int]] = []
            for place, sentence in enumerate(sentences):
                ends = (token[place] == end).tolist()
                for candidate in range(k):
                    if ends[candidate] and best[place, candidate] > -torch.inf:
                        row = place * k + int(parent[place, candidate])
                        normalized = float(best[place, candidate]) / length**self.length_penalty
                        finished[sentence].append(Hypothesis(tokens[row, 1:].tolist(), normalized))
                if len(finished[sentence]) < k and length <= longest[sentence]:
                    active.append(place)
                    continued.append([candidate for candidate in range(2 * k) if not ends[candidate]][:k])
            if not active:
                break
            chosen = torch.tensor(continued, device=device)
            places = torch.tensor(active, device=device)[:, None]
            rows = (places * k + parent[places, chosen]).flatten()
            tokens = torch.cat([tokens[rows], token[places, chosen].flatten()[:, None]], 1)
            score, sentences = best[places, chosen], [sentences[place] for place in active]
        return [max(hypotheses, key=lambda hypothesis: hypothesis.score) for hypotheses in finished]

    def continuations(
        self, log_probs: Float[Tensor, "n v"], length: int, must_end: Bool[Tensor, " n"], end: int
    ) -> tuple[Float[Tensor, "n c"], Int[Tensor, "n c"]]:
        """Return the log-probabilities and tokens of the best continuations of each row; rows that must end have one."""
        if length <= self.min_length:
            log_probs = log_probs.index_fill(1, torch.tensor([end], device=log_probs.device), -torch.inf)
        top, following = log_probs.topk(min(2 * self.size, log_probs.shape[1]), dim=1)  # a sentence never needs more of one row
        if not must_end.any():
            return top, following
        end_only, ending = torch.full_like(top, -torch.inf), must_end[:, None]
        end_only[:, 0] = log_probs[:, end]
        return torch.where(ending, end_only, top), following.masked_fill(ending, end)


@dataclass(frozen=True)
class SearchSettings:
    """The settings of a beam search (Appendix C), and of the mixture at its every step."""

    beam: int
    length_penalty: float
    min_length: int
    max_length: tuple[float, ...]  # (a, b): at most a n + b pieces for n pieces of the source
    sentences: int | None  # of a split that are translated; None: all
    unweighted_external: bool
    scaled_interpolation: bool
    batch_size: Free[int]
    hardware: Free[Hardware]


class Translator:
    """Translates sentences by beam search under a row's mixture of vocabulary and one datastore."""

    def __init__(
        self,
        network: Network,
        row: MixtureSpec | FittedMixtureSpec,
        nearest: KNNMemory | None,
        corpus: ParallelCorpus,
        settings: SearchSettings,
    ):
        self.network, self.row, self.nearest, self.corpus = network, row, nearest, corpus
        self.device = next(network.parameters()).device
        self.mixture = row.mixture_on(self.device) if isinstance(row, FittedMixtureSpec) else None
        self.settings, self.autocast = settings, settings.hardware.autocast
        self.beam = Beam(settings.beam, settings.length_penalty, settings.min_length)

    def translate(self, source: Split, first: int, end: int) -> Iterator[list[str]]:
        """Yield the translations of the sentences from ``first`` to before ``end`` of a source text, batch by batch."""
        for start in range(first, end, self.settings.batch_size):
            numbers = range(start, min(start + self.settings.batch_size, end))
            sentences = [source.document(n).tolist() for n in numbers]
            yield [self.text(best.tokens) for best in self.search(sentences, torch.tensor(numbers))]

    def text(self, tokens: list[int]) -> str:
        return self.corpus.tokenizer.text([self.corpus.vocabulary.symbols[token] for token in tokens])

    @torch.no_grad()
    def search(self, sources: list[list[int]], numbers: Int[Tensor, " b"]) -> list[Hypothesis]:
        """Return the best translation of each sentence of a batch; ``numbers`` are their positions in the split."""
        numbers = numbers.to(self.device)
        backbone, special_ids = self.network.backbone, self.corpus.vocabulary.special_ids
        assert isinstance(backbone, EncoderDecoder)
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(source) for source in sources], True, special_ids.pad)
        with self.autocast():
            encoded = backbone.encode_source(padded.to(self.device))
        size = self.beam.size
        state: tuple[Tensor, EncodedSource, DecoderCache | None] = numbers, encoded, None  # of the sentences in progress

        def step(rows: Int[Tensor, " n"], tokens: Int[Tensor, " n"]) -> Float[Tensor, "n v"]:
            nonlocal state
            sentence, source, cache = state
            if len(rows) < size * len(sentence):  # some sentences are finished
                active = rows[::size] // size
                sentence, source = sentence[active], source.take(active)
            cache = None if cache is None else tuple(layer[:, rows] for layer in cache)
            with self.autocast():  # as contexts are encoded
                encoding, cache = backbone.step(source, tokens[:, None], cache)
            state = sentence, source, cache
            log_probability = self.log_probability(encoding.f[:, 0], encoding.g[:, 0], sentence.repeat_interleave(size))
            log_probability[:, special_ids.pad] = -torch.inf
            return log_probability

        limits = [int(self.settings.max_length[0] * len(source) + self.settings.max_length[1]) for source in sources]
        limits = [max(self.beam.min_length, min(limit, backbone.positions - 2)) for limit in limits]
        return self.beam.search(step, special_ids.eos, special_ids.eos, limits, self.device)

    @torch.no_grad()
    def steps(self, source: list[int], number: int) -> list[AttributedToken]:
        """Return each piece of a sentence's translation, with the attribution of its distribution and the entries used."""
        (best,) = self.search([source], torch.tensor([number]))
        target = torch.tensor([[self.corpus.vocabulary.special_ids.eos, *best.tokens[:-1]]], device=self.device)
        with self.autocast():
            encoding = self.network.backbone(torch.tensor([source], device=self.device), target)
        steps = []
        for place, token in enumerate(best.tokens):
            f, g = encoding.f[:, place], encoding.g[:, place]
            attribution, entries = self.attribution(self.logits(f), f, g, torch.tensor([number], device=self.device))
            parts = {name: part[0] for name, part in attribution.parts.items()}
            weights = {name: weight[0] for name, weight in attribution.weights.items()}
            seen = {name: Entries(*(column[0] for column in memory[:3])) for name, memory in entries.items()}  # not counts
            steps.append(AttributedToken(token, Attribution(parts, weights), seen))
        return steps

    def logits(self, f: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        return torch.nn.functional.linear(f.float(), self.network.head.weight)

    def log_probability(
        self, f: Float[Tensor, "n d"], g: Float[Tensor, "n d"], sentence: Int[Tensor, " n"]
    ) -> Float[Tensor, "n v"]:
        """Return log P of each next piece under the mixture; a datastore of the same split hides a sentence's own entries."""
        logits = self.logits(f)
        if self.nearest is None:
            return logits.log_softmax(1)
        attribution, _ = self.attribution(logits, f, g, sentence)
        if isinstance(self.row, FittedMixtureSpec) or not (self.settings.unweighted_external and self.row.joint):
            return attribution.probability.clamp(min=MIN_PROBABILITY).log()
        # The published decoder multiplies the vocabulary's probabilities by 1 - share, but not the memory's by share: the sum
        # is more than 1 (knn_lambda_type trime, get_normalized_probs).
        (memory,) = (part for name, part in attribution.parts.items() if name != "vocabulary")
        total = attribution.parts["vocabulary"] + memory / memory.sum(1, keepdim=True).clamp(min=MIN_PROBABILITY)
        return total.clamp(min=MIN_PROBABILITY).log()

    def attribution(
        self, logits: Float[Tensor, "n v"], f: Float[Tensor, "n d"], g: Float[Tensor, "n d"], sentence: Int[Tensor, " n"]
    ) -> tuple[Attribution, dict[str, Entries]]:
        """Return each context's probabilities by component, and its nearest entries but for those of its own sentence."""
        if self.nearest is None:
            return Attribution({"vocabulary": logits.softmax(1)}, {}), {}
        zeros = torch.zeros(len(g), dtype=torch.long, device=g.device)
        similarity, token, number = self.nearest.entries(Contexts(g.float(), zeros, TokenPosition(sentence, sentence, zeros)))
        (name,) = self.row.memories  # a translation has one memory
        entries = {name: Entries(similarity, token, number.to(token.device))}
        if isinstance(self.row, FittedMixtureSpec):
            assert self.mixture is not None
            experts = expert_distributions(self.row, logits, entries, g.shape[1], self.settings.scaled_interpolation)
            weights = self.mixture.log_weights(experts.total.float(), experts.total.new_empty(len(g), 0).float())
            return fitted_attribution(self.row, experts, weights), entries
        gate = self.network.gate_logits(f).double() if self.network.gate is not None else None
        return grid_attribution(self.row, logits, entries, g.shape[1], self.settings.scaled_interpolation, gate), entries
