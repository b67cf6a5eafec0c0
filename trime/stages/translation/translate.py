"""Artefact of stages tune and evaluate: beam search over a split with a row's mixture at every step, and BLEU (Appendix C)."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.data.corpus import evenly_spaced
from trime.data.parallel.corpus import ParallelCorpus
from trime.io import append_json_lines, read_json_lines
from trime.metrics import ResourceUsage
from trime.models.network import Network
from trime.pipeline.artefact import Artefact
from trime.pipeline.model_io import NETWORK, open_network
from trime.pipeline.processes import DEVICE, device_of
from trime.progress import Progress
from trime.stages.encode import Encode
from trime.stages.translation.translator import Translator
from trime.stages.tune import TunedRows

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
        references, results = corpus.references(self.encoded.split)[: self.config.translation.sentences], []
        for number in [*range(len(all_rows))][self.rows]:
            translator = self.translator(number)
            file, meter = folder / f"row-{number}.jsonl", ResourceUsage()
            done, texts = len(read_json_lines(file)), self.translate(file, translator, corpus, len(references))
            rate = round((len(texts) - done) / meter.seconds, 1) if len(texts) > done else None
            results.append(score_translations(texts, references) | {"sentences_per_second": rate})
        (folder / "bleu.json").write_text(json.dumps({"rows": results}, indent=1))

    def translator(self, number: int) -> Translator:
        """Return what translates the split by a row of the table, with the settings tuned for it."""
        corpus, row = self.encoded.corpus.corpus(), self.tune.rows()[number]
        assert isinstance(corpus, ParallelCorpus)
        index = self.tune.for_row(number).memories.sources.index
        nearest = index.knn_memory(self.encoded.summary()) if row.memories and index else None
        return Translator(self.network, row, nearest, corpus, self.config)

    @cached_property
    def network(self) -> Network:
        """The model that translates."""
        return open_network(self.encoded.model.path(), self.config)[0].to(device_of(self.config))

    def translate(self, file: Path, translator: Translator, corpus: ParallelCorpus, count: int) -> list[str]:
        """Return the translations of the first ``count`` sentences; a killed run resumes from those in ``file``."""
        split, texts = self.encoded.split, read_json_lines(file)
        with Progress(total=count, initial=len(texts), unit="sentence", desc=f"translate {split}") as bar:
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
        rows = [read_json_lines(self.path() / f"row-{number}.jsonl") for number in range(len(self.scores()))]
        references = corpus.references(split)[: len(rows[0])]
        return [
            [corpus.source_text(split, number), references[number], *(row[number] for row in rows)]
            for number in evenly_spaced(len(references), count)
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
