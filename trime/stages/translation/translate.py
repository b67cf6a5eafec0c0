"""Artefact of stages tune and evaluate: beam search over a split with a row's mixture at every step, and BLEU (Appendix C)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from trime.data.corpus import Split
from trime.data.parallel.corpus import ParallelCorpus
from trime.evaluation.attribution import expert_distributions, fitted_attribution, grid_attribution
from trime.evaluation.beam import Beam
from trime.evaluation.fitted_rows import FittedMixtureSpec
from trime.evaluation.rows import MixtureSpec
from trime.io import append_json_lines, read_json_lines
from trime.memory.base import Entries
from trime.memory.retrieval.datastore import KNNMemory
from trime.metrics import ResourceUsage
from trime.models.backbones.encoder_decoder import DecoderCache, EncodedSource, EncoderDecoder
from trime.models.network import Network
from trime.pipeline.artefact import Artefact
from trime.pipeline.model_io import NETWORK, open_network
from trime.pipeline.precision import autocast
from trime.pipeline.processes import DEVICE, device_of
from trime.stages.encode import Encode
from trime.stages.tune import TunedRows
from trime.types import Contexts, Float, Int, Tensor, TokenPosition

MIN_PROBABILITY = torch.finfo(torch.float32).tiny  # so that the end of a sentence is never impossible
ALONE = (
    "beam",
    "length_penalty",
    "min_length",
    "max_length",
    "sentences",
)  # of translation: what decides texts of the model alone
SEARCH = (*ALONE, "unweighted_external")  # and of the model with memories


class Translate(Artefact):
    """Translations of a split by some rows of a table, in ``row-N.jsonl``, and their BLEU, in ``bleu.json``."""

    kind = "translate"
    summary_file = "bleu.json"
    depends_on = (*(f"translation.{name}" for name in SEARCH), "evaluate.scaled_interpolation")
    unhashed = ("translation.batch_size", *NETWORK, *DEVICE)

    def __init__(self, config: DictConfig, encoded: Encode, tune: TunedRows, rows: slice = slice(None)):
        super().__init__(config)
        self.encoded, self.tune, self.rows = encoded, tune, rows

    @property
    def stage(self) -> str:
        return "evaluate" if self.encoded.split == "test" else "tune"

    def needs(self) -> list[Artefact]:
        return [self.encoded, self.tune]

    def settings(self) -> Any:
        return super().settings() | {"rows": [self.rows.start, self.rows.stop]}

    def build(self, folder: Path) -> None:
        corpus, all_rows = self.encoded.corpus.corpus(), self.tune.rows()
        assert isinstance(corpus, ParallelCorpus)
        network, _ = open_network(self.encoded.model.path(), self.config)
        network.to(device_of(self.config))
        references, results = corpus.references(self.encoded.split)[: self.config.translation.sentences], []
        for number, row in [*enumerate(all_rows)][self.rows]:
            index = self.tune.for_row(number).memories.sources.index
            nearest = index.knn_memory(self.encoded.summary()) if row.memories and index else None
            translator = Translator(network, row, nearest, corpus, self.config)
            file, meter = folder / f"row-{number}.jsonl", ResourceUsage()
            done, texts = len(read_json_lines(file)), self.translate(file, translator, corpus, len(references))
            rate = round((len(texts) - done) / meter.seconds, 1) if len(texts) > done else None
            results.append(score_translations(texts, references) | {"sentences_per_second": rate})
        (folder / "bleu.json").write_text(json.dumps({"rows": results}, indent=1))

    def translate(self, file: Path, translator: Translator, corpus: ParallelCorpus, count: int) -> list[str]:
        """Return the translations of the first ``count`` sentences; a killed run resumes from those in ``file``."""
        split, texts = self.encoded.split, read_json_lines(file)
        with tqdm(total=count, initial=len(texts), unit="sentence", desc=f"translate {split}", mininterval=1) as bar:
            for new in translator.translate(corpus.sources.split(split), len(texts), count):
                append_json_lines(file, new)
                texts += new
                bar.update(len(new))
        return texts

    def scores(self) -> list[dict[str, Any]]:
        """Return BLEU of every row."""
        return self.summary()["rows"]

    def bleu_statistics(self, number: int) -> list[list[int]]:
        """Return the statistics of BLEU for each translation of a row, as ``bleu_statistics`` does."""
        corpus = self.encoded.corpus.corpus()
        assert isinstance(corpus, ParallelCorpus)
        texts = read_json_lines(self.path() / f"row-{number}.jsonl")
        return bleu_statistics(texts, corpus.references(self.encoded.split)[: len(texts)])

    def examples(self, count: int) -> list[list[str]]:
        """Return sentences that are spread over the split, each with its source, its reference and every row's translation."""
        corpus, split = self.encoded.corpus.corpus(), self.encoded.split
        assert isinstance(corpus, ParallelCorpus)
        source, symbols, eos = corpus.sources.split(split), corpus.vocabulary.symbols, corpus.vocabulary.special_ids.eos
        rows = [read_json_lines(self.path() / f"row-{number}.jsonl") for number in range(len(self.scores()))]
        references = corpus.references(split)[: len(rows[0])]
        chosen = dict.fromkeys((2 * number + 1) * len(references) // (2 * count) for number in range(count))
        return [
            [corpus.tokenizer.text([symbols[token] for token in source.document(number) if token != eos]), references[number]]
            + [row[number] for row in rows]
            for number in chosen
        ]


def bleu_statistics(texts: list[str], references: list[str]) -> list[list[int]]:
    """Return for each text its matching n-grams, all its n-grams (n = 1 to 4), its length and the reference's length."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(effective_order=True)
    scores = [metric.sentence_score(text, [reference]) for text, reference in zip(texts, references, strict=True)]
    return [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]


def score_translations(texts: list[str], references: list[str]) -> dict[str, Any]:
    """Return corpus BLEU with its signature (Post 2018)."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    result = metric.corpus_score(texts, [references])
    return {"bleu": round(result.score, 2), "signature": str(metric.get_signature()), "sentences": len(texts)}


class Translator:
    """Translates sentences by beam search under a row's mixture of vocabulary and external memory."""

    def __init__(
        self,
        network: Network,
        row: MixtureSpec | FittedMixtureSpec,
        nearest: KNNMemory | None,
        corpus: ParallelCorpus,
        config: DictConfig,
    ):
        self.network, self.row, self.nearest, self.corpus = network, row, nearest, corpus
        self.device = next(network.parameters()).device
        self.mixture = row.mixture_on(self.device) if isinstance(row, FittedMixtureSpec) else None
        search = config.translation
        self.beam, self.max_length = Beam(search.beam, search.length_penalty, search.min_length), search.max_length
        self.scaled, self.unweighted = config.evaluate.scaled_interpolation, search.unweighted_external
        self.batch_size, self.autocast = search.batch_size, partial(autocast, self.device, config)

    def translate(self, source: Split, first: int, end: int) -> Iterator[list[str]]:
        """Yield the translations of the sentences from ``first`` to before ``end`` of a source text, batch by batch."""
        for start in range(first, end, self.batch_size):
            numbers = range(start, min(start + self.batch_size, end))
            sentences = [source.document(n).tolist() for n in numbers]
            yield self(sentences, torch.tensor(numbers))

    @torch.no_grad()
    def __call__(self, sources: list[list[int]], numbers: Int[Tensor, " b"]) -> list[str]:
        """Return the translations of a batch of sentences; ``numbers`` are their positions in the split."""
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

        limits = [int(self.max_length[0] * len(source) + self.max_length[1]) for source in sources]
        limits = [max(self.beam.min_length, min(limit, backbone.positions - 2)) for limit in limits]
        best = self.beam.search(step, special_ids.eos, special_ids.eos, limits, self.device)
        symbols = self.corpus.vocabulary.symbols
        return [self.corpus.tokenizer.text([symbols[token] for token in hypothesis.tokens]) for hypothesis in best]

    def log_probability(
        self, f: Float[Tensor, "n d"], g: Float[Tensor, "n d"], sentence: Int[Tensor, " n"]
    ) -> Float[Tensor, "n v"]:
        """Return log P of each next piece under the mixture; a datastore of the same split hides a sentence's own entries.

        ``translation.unweighted_external``: the published decoder multiplies the vocabulary's probabilities by 1 - share, but
        not the joined memory's by share, so that the sum is more than 1 (knn_lambda_type trime, get_normalized_probs).
        """
        logits = torch.nn.functional.linear(f.float(), self.network.head.weight)  # type: ignore[arg-type]
        if self.nearest is None:
            return logits.log_softmax(1)
        zeros = torch.zeros(len(g), dtype=torch.long, device=g.device)
        similarity, token, number = self.nearest.entries(Contexts(g.float(), zeros, TokenPosition(sentence, sentence, zeros)))
        entries = {"external": Entries(similarity, token, number.to(token.device))}
        if isinstance(self.row, FittedMixtureSpec):
            assert self.mixture is not None
            experts = expert_distributions(self.row, logits, entries, g.shape[1], self.scaled)
            weights = self.mixture.log_weights(experts.total.float(), experts.total.new_empty(len(g), 0).float())
            return fitted_attribution(self.row, experts, weights).probability.clamp(min=MIN_PROBABILITY).log()
        gate = self.network.gate_logits(f).double() if self.network.gate is not None else None
        parts = grid_attribution(self.row, logits, entries, g.shape[1], self.scaled, gate)
        if not (self.unweighted and self.row.joint):
            return parts.probability.clamp(min=MIN_PROBABILITY).log()
        memory = parts.parts["external"]
        total = parts.parts["vocabulary"] + memory / memory.sum(1, keepdim=True).clamp(min=MIN_PROBABILITY)
        return total.clamp(min=MIN_PROBABILITY).log()
