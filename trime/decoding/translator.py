"""Translation of sentences by beam search, with the mixture of a row at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trime.common.identity import Free
from trime.common.types import Contexts, Float, Int, Tensor, TokenPosition
from trime.data.corpus import Split
from trime.data.parallel.corpus import ParallelCorpus
from trime.decoding.attribution import Attribution, expert_distributions, fitted_attribution, grid_attribution
from trime.decoding.beam import Beam, Hypothesis
from trime.decoding.generation import AttributedToken
from trime.memory.inference.base import Entries
from trime.memory.retrieval.datastore import KNNMemory
from trime.models.backbones.encoder_decoder import DecoderCache, EncodedSource, EncoderDecoder
from trime.models.network import Network
from trime.scoring.fitted_mixture_spec import FittedMixtureSpec
from trime.scoring.mixture_spec import MixtureSpec
from trime.training.hardware import Hardware

MIN_PROBABILITY = torch.finfo(torch.float32).tiny  # so that the end of a sentence is never impossible


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
