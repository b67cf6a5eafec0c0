"""translate: beam search over a split with a row's mixture at every step, and what sacrebleu makes of it (Appendix C)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from trime.evaluation.attribution import expert_distributions, fitted_attribution, grid_attribution
from trime.evaluation.beam import Beam
from trime.evaluation.fitted_rows import FittedRow
from trime.evaluation.rows import Row
from trime.io import complete_lines, plain
from trime.memory.base import Entries
from trime.memory.retrieval.datastore import KNNMemory
from trime.metrics import ResourceUsage
from trime.models.backbones.encoder_decoder import DecoderCache, EncodedSource, EncoderDecoder
from trime.models.network import Network
from trime.pipeline.artefact import Artefact
from trime.pipeline.model_io import open_network
from trime.pipeline.processes import device_of
from trime.pipeline.training import resolved_precision
from trime.stages.encode import Encode
from trime.stages.translation.pairs import ParallelCorpus
from trime.stages.tune import Tune
from trime.types import Contexts, Float, Int, Tensor, TokenPosition

MIN_PROBABILITY = torch.finfo(torch.float32).tiny  # of a probability: the end of a sentence is never impossible
SEARCH_SETTINGS = (
    "beam",
    "penalty",
    "shortest",
    "longest",
    "sentences",
    "unweighted_external",
)  # settings that decide translations


class Translate(Artefact):
    """``row-N.jsonl``: translations of a split by some rows of a table; ``bleu.json``: what sacrebleu makes of them."""

    kind = "translate"

    def __init__(self, config: DictConfig, encoded: Encode, tune: Tune, rows: slice = slice(None)):
        super().__init__(config)
        self.encoded, self.tune, self.rows = encoded, tune, rows
        self.stage = "evaluate" if encoded.split == "test" else "tune"  # type: ignore[misc]

    def needs(self) -> list[Artefact]:
        return [self.encoded, self.tune]

    def settings(self) -> Any:
        asked = {name: plain(self.config.translation[name]) for name in SEARCH_SETTINGS}
        return asked | {"rows": [self.rows.start, self.rows.stop]}

    def build(self, folder: Path) -> None:
        corpus, every = self.encoded.corpus.corpus(), self.tune.rows()
        assert isinstance(corpus, ParallelCorpus)
        network, _ = open_network(self.encoded.model.path(), self.config)
        network.to(device_of(self.config))
        references, rows = corpus.references(self.encoded.split)[: self.config.translation.sentences], []
        for number, row in [*enumerate(every)][self.rows]:
            index = self.tune.for_row(number).memories.sources.index
            nearest = index.knn_memory(self.encoded.information()) if row.memories and index else None
            translator = Translator(network, row, nearest, corpus, self.config)
            file, meter = folder / f"row-{number}.jsonl", ResourceUsage()
            before, texts = len(read_translations(file)), self.texts(file, translator, corpus, len(references))
            rate = round((len(texts) - before) / meter.seconds, 1) if len(texts) > before else None
            rows.append(scores(texts, references) | {"sentences_per_second": rate})
        (folder / "bleu.json").write_text(json.dumps({"rows": rows}, indent=1))

    def texts(self, file: Path, translator: Translator, corpus: ParallelCorpus, count: int) -> list[str]:
        """The translations of the first sentences; a killed run goes on."""
        split, size = self.encoded.split, self.config.translation.sentences_at_once
        source, found = corpus.sources.split(split), read_translations(file)
        with tqdm(total=count, initial=len(found), unit="sentence", desc=f"translate {split}", mininterval=1) as bar:
            for start in range(len(found), count, size):
                numbers = range(start, min(start + size, count))
                read = [source.tokens[source.offsets[n] : source.offsets[n + 1]].tolist() for n in numbers]
                new = translator(read, torch.tensor(numbers))
                with open(file, "a", encoding="utf-8") as out:
                    out.write("".join(json.dumps(text, ensure_ascii=False) + "\n" for text in new))
                found += new
                bar.update(len(new))
        return found

    def results(self) -> list[dict[str, Any]]:
        """BLEU of every row."""
        return self.read("bleu.json")["rows"]

    def statistics(self, number: int) -> list[list[int]]:
        """Return what BLEU is made of for each translation of a row: n-grams that match and all (n = 1 to 4), lengths."""
        corpus = self.encoded.corpus.corpus()
        assert isinstance(corpus, ParallelCorpus)
        texts = read_translations(self.path() / f"row-{number}.jsonl")
        return statistics(texts, corpus.references(self.encoded.split)[: len(texts)])


def read_translations(file: Path) -> list[str]:
    """The translations that a file holds."""
    return [json.loads(line) for line in complete_lines(file)]


def statistics(texts: list[str], references: list[str]) -> list[list[int]]:
    """Matching and all n-grams (n = 1 to 4), length and the reference's, of each text."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(effective_order=True)
    found = [metric.sentence_score(*pair) for pair in zip(texts, ([own] for own in references), strict=True)]
    return [[*own.counts, *own.totals, own.sys_len, own.ref_len] for own in found]


def scores(texts: list[str], references: list[str]) -> dict[str, Any]:
    """Corpus BLEU with its signature (Post 2018)."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    result = metric.corpus_score(texts, [references])
    return {"bleu": round(result.score, 2), "signature": str(metric.get_signature()), "sentences": len(texts)}


class Translator:
    """Sources to the most likely translations under a row's mixture of vocabulary and external memory."""

    def __init__(
        self, network: Network, row: Row | FittedRow, nearest: KNNMemory | None, corpus: ParallelCorpus, config: DictConfig
    ):
        self.network, self.row, self.nearest, self.corpus = network, row, nearest, corpus
        self.device = next(network.parameters()).device
        self.mixture = row.mixture_on(self.device) if isinstance(row, FittedRow) else None
        asked = config.translation
        self.beam, self.longest = Beam(asked.beam, asked.penalty, asked.shortest), asked.longest
        self.scaled, self.unweighted = config.evaluate.scaled_interpolation, asked.unweighted_external
        self.mixed = self.device.type == "cuda" and resolved_precision(config).startswith("bf16")

    @torch.no_grad()
    def __call__(self, sources: list[list[int]], numbers: Int[Tensor, " b"]) -> list[str]:
        """Translations of some sentences, side by side; ``numbers``: which of their split they are."""
        numbers = numbers.to(self.device)
        backbone, special_ids = self.network.backbone, self.corpus.vocabulary.special_ids
        assert isinstance(backbone, EncoderDecoder)
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(own) for own in sources], True, special_ids.pad)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):
            read = backbone.encode_source(padded.to(self.device))
        size = self.beam.size
        held: tuple[Tensor, EncodedSource, DecoderCache | None] = (
            numbers,
            read,
            None,
        )  # of which sentences, their sources, what came before

        def step(rows: Int[Tensor, " n"], tokens: Int[Tensor, " n"]) -> Float[Tensor, "n v"]:
            nonlocal held
            sentence, own, before = held
            if len(rows) < size * len(sentence):  # some are done
                going = rows[::size] // size
                sentence, own = sentence[going], own.take(going)
            before = None if before is None else tuple(layer[:, rows] for layer in before)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):  # as contexts are encoded
                encoding, after = backbone.step(own, tokens[:, None], before)
            held = sentence, own, after
            found = self.log_probability(encoding.f[:, 0], encoding.g[:, 0], sentence.repeat_interleave(size))
            found[:, special_ids.pad] = -torch.inf
            return found

        most = [int(self.longest[0] * len(own) + self.longest[1]) for own in sources]
        most = [max(self.beam.shortest, min(one, backbone.positions - 2)) for one in most]
        best = self.beam.search(step, special_ids.eos, special_ids.eos, most, self.device)
        symbols = self.corpus.vocabulary.symbols
        return [self.corpus.tokenizer.text([symbols[token] for token in own.tokens]) for own in best]

    def log_probability(
        self, f: Float[Tensor, "n d"], g: Float[Tensor, "n d"], sentence: Int[Tensor, " n"]
    ) -> Float[Tensor, "n v"]:
        """Of each next piece, memory and all; a datastore of the same split hides the sentence's own entries.

        ``translation.unweighted_external``: the published decoder multiplies the vocabulary's probabilities by 1 - share, but
        not the joined memory's by share, so that the sum is more than 1 (knn_lambda_type trime, get_normalized_probs).
        """
        logits = torch.nn.functional.linear(f.float(), self.network.head.weight)  # type: ignore[arg-type]
        if self.nearest is None:
            return logits.log_softmax(1)
        none = torch.zeros(len(g), dtype=torch.long, device=g.device)
        similarity, token, number = self.nearest.entries(Contexts(g.float(), none, TokenPosition(sentence, sentence, none)))
        found = {"external": Entries(similarity, token, number.to(token.device))}
        if isinstance(self.row, FittedRow):
            assert self.mixture is not None
            experts = expert_distributions(self.row, logits, found, g.shape[1], self.scaled)
            weights = self.mixture.log_weights(experts.total.float(), experts.total.new_empty(len(g), 0).float())
            return fitted_attribution(self.row, experts, weights).probability.clamp(min=MIN_PROBABILITY).log()
        gate = self.network.gate_logits(f).double() if self.network.gate is not None else None
        parts = grid_attribution(self.row, logits, found, g.shape[1], self.scaled, gate)
        if not (self.unweighted and self.row.joint):
            return parts.probability.clamp(min=MIN_PROBABILITY).log()
        memory = parts.parts["external"]
        whole = parts.parts["vocabulary"] + memory / memory.sum(1, keepdim=True).clamp(min=MIN_PROBABILITY)
        return whole.clamp(min=MIN_PROBABILITY).log()
