"""Translation: fit on sentence pairs, K by BLEU on valid, beam search with the external memory at every step (Appendix C)."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from trime.data.module import TextModule
from trime.data.segments import count_of
from trime.memory.datastore import Nearest
from trime.metrics import Meter
from trime.models.network import Network
from trime.models.translation import EncoderDecoder
from trime.stages.artefact import Artefact, plain, whole_lines
from trime.stages.datastore import GivenStore, Index, uses_external
from trime.stages.encode import Encode
from trime.stages.evaluate import Evaluate
from trime.stages.fit import Fit
from trime.stages.model_folder import open_network
from trime.stages.pack import Pack
from trime.stages.pairs import (
    EncodePairs,
    PackSentences,
    PairLoader,
    PairWindows,
    ParallelCorpus,
    PreparePairs,
    first_sentences,
    sentence_segments,
)
from trime.stages.plan import Plan
from trime.stages.processes import device_of, share_of
from trime.stages.training import resolved_precision
from trime.stages.tune import Tune
from trime.tasks.beam import Beam
from trime.tasks.rows import Row
from trime.tasks.spread import Entries, spread
from trime.tasks.translation import Translation
from trime.types import Contexts, Float, Int, Place, Tensor, UserError

EVERY, ALL_BUT_LAST, LAST = slice(None), slice(0, -1), slice(-1, None)  # rows of a table


class FitTranslation(Fit):
    """The trained translation model."""

    def settings(self) -> Any:
        return super().settings() | {"smoothing": self.config.translation.smoothing}

    def data(self, corpus: Any, carries: bool) -> TextModule:
        """Training batches in planned order, and the first sentences of the validation split."""
        config, share = self.config, share_of(self.config)
        batching = instantiate(config.batching, _convert_="all")
        text, valid, ends = corpus.split("train"), corpus.split("valid"), corpus.vocabulary.ends
        neighbours, steps = self.pack.neighbours() if self.pack else None, config.train.updates * config.train.accumulate
        loader = PairLoader(corpus, text, sentence_segments(text), batching, neighbours, steps, ends, share)
        held = first_sentences(valid, count_of(config.train.validate_tokens))
        size = max(1, batching.tokens // int(held.length.max()))
        plan = [list(range(start, min(start + size, len(held)))) for start in range(0, len(held), size)]
        return TextModule(loader, PairWindows(corpus, "valid", held, plan, share))

    def task(self, network: Network) -> Translation:
        own = super().task(network)
        given = (own.memory, own.training_, own.optimizer_factory, own.schedule)
        return Translation(network, *given, smoothing=self.config.translation.smoothing)


class Translate(Artefact):
    """``row-N.jsonl``: translations of a split by some rows of a table; ``bleu.json``: what sacrebleu makes of them."""

    kind = "translate"

    def __init__(self, config: DictConfig, encoded: EncodePairs, tune: Tune, rows: slice = EVERY):
        super().__init__(config)
        self.encoded, self.tune, self.rows = encoded, tune, rows
        self.stage = "evaluate" if encoded.split == "test" else "tune"  # type: ignore[misc]

    def needs(self) -> list[Artefact]:
        return [self.encoded, self.tune]

    def settings(self) -> Any:
        asked = {name: plain(self.config.translation[name]) for name in ("beam", "penalty", "longest", "sentences")}
        return asked | {"rows": [self.rows.start, self.rows.stop]}

    def build(self, folder: Path) -> None:
        corpus, tune = self.encoded.corpus.corpus(), self.tune.chosen()
        assert isinstance(corpus, ParallelCorpus)
        network, _ = open_network(self.encoded.model.path(), self.config)
        network.to(device_of(self.config))
        references, rows = corpus.references(self.encoded.split)[: self.config.translation.sentences], []
        for number, row in enumerate(tune.rows()[self.rows]):
            nearest = tune.index.nearest(self.encoded.information()) if row.memories and tune.index else None
            translator = Translator(network, row, nearest, corpus, self.config)
            file, meter = folder / f"row-{number}.jsonl", Meter()
            before, texts = len(whole_lines(file)), self.texts(file, translator, corpus, len(references))
            rate = round((len(texts) - before) / meter.seconds, 1) if len(texts) > before else None
            rows.append(scores(texts, references) | {"sentences_per_second": rate})
        (folder / "bleu.json").write_text(json.dumps({"rows": rows}, indent=1))

    def texts(self, file: Path, translator: Translator, corpus: ParallelCorpus, count: int) -> list[str]:
        """The translations of the first sentences; a killed run goes on."""
        split, size = self.encoded.split, self.config.translation.sentences_at_once
        source, found = corpus.sources.split(split), [json.loads(line) for line in whole_lines(file)]
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

    def found(self) -> list[dict[str, Any]]:
        """BLEU of every row."""
        return json.loads((self.path() / "bleu.json").read_text())["rows"]


def scores(texts: list[str], references: list[str]) -> dict[str, Any]:
    """Corpus BLEU with its signature (Post 2018)."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    result = metric.corpus_score(texts, [references])
    return {"bleu": round(result.score, 2), "signature": str(metric.get_signature()), "sentences": len(texts)}


class Translator:
    """Sources to the most likely translations under a row's mixture of vocabulary and external memory."""

    def __init__(self, network: Network, row: Row, nearest: Nearest | None, corpus: ParallelCorpus, config: DictConfig):
        self.network, self.row, self.nearest, self.corpus = network, row, nearest, corpus
        asked = config.translation
        self.beam, self.longest = Beam(asked.beam, asked.penalty), asked.longest
        self.scaled = config.evaluate.scaled_interpolation
        self.device = next(network.parameters()).device
        self.mixed = self.device.type == "cuda" and resolved_precision(config).startswith("bf16")

    @torch.no_grad()
    def __call__(self, sources: list[list[int]], numbers: Int[Tensor, " b"]) -> list[str]:
        """Translations of some sentences, side by side; ``numbers``: which of their split they are."""
        numbers = numbers.to(self.device)
        backbone, ends = self.network.backbone, self.corpus.vocabulary.ends
        assert isinstance(backbone, EncoderDecoder)
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(own) for own in sources], True, ends.pad)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):
            read = backbone.read(padded.to(self.device))
        state: list[Any] = [torch.arange(len(sources), device=self.device).repeat_interleave(self.beam.size), None]

        def step(rows: Int[Tensor, " n"], tokens: Int[Tensor, " n"]) -> Float[Tensor, "n v"]:
            sentence, before = state[0][rows], state[1]
            before = None if before is None else tuple(own[:, rows] for own in before)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):  # as contexts are encoded
                encoding, after = backbone.step(read.take(sentence), tokens[:, None], before)
            state[:] = sentence, after
            found = self.probability(encoding.f[:, 0], encoding.g[:, 0], numbers[sentence]).log()
            found[:, ends.pad] = -torch.inf
            return found

        most = [int(self.longest[0] * len(own) + self.longest[1]) for own in sources]
        most = [min(one, backbone.positions - 2) for one in most]
        best = self.beam.search(step, ends.eos, ends.eos, most, self.device)
        symbols = self.corpus.vocabulary.symbols
        return [self.corpus.tokenizer.text([symbols[token] for token in own.tokens]) for own in best]

    def probability(
        self, f: Float[Tensor, "n d"], g: Float[Tensor, "n d"], sentence: Int[Tensor, " n"]
    ) -> Float[Tensor, "n v"]:
        """Of each next piece, memory and all; a datastore of the same split hides the sentence's own entries."""
        logits = torch.nn.functional.linear(f.float(), self.network.head.weight).double()  # type: ignore[arg-type]
        if self.nearest is None:
            return logits.softmax(1)
        none = torch.zeros(len(g), dtype=torch.long, device=g.device)
        similarity, token, number = self.nearest.entries(Contexts(g.float(), none, Place(sentence, sentence, none)))
        found = {"external": Entries(similarity, token, number.to(token.device))}
        return spread(self.row, logits, found, g.shape[1], self.scaled).whole


class TuneByBleu(Tune):
    """``tuned.json`` at the K whose translations of valid have the highest BLEU, each with its own best temperatures.

    ``plain`` has the translations of all rows but the last; of that one there are some for each K.
    """

    kind, stage, format = "tune_bleu", "tune", 1

    def __init__(self, config: DictConfig, tunes: dict[int, Tune], plain: Translate, own: dict[int, Translate]):
        first = next(iter(tunes.values()))
        super().__init__(config, first.encoded, first.index)
        self.tunes, self.plain, self.own = tunes, plain, own

    def needs(self) -> list[Artefact]:
        return [*self.tunes.values(), self.plain, *self.own.values()]

    def settings(self) -> Any:
        return list(self.tunes)

    def build(self, folder: Path) -> None:
        found = {k: own.found()[0] for k, own in self.own.items()}
        best = max(found, key=lambda k: found[k]["bleu"])
        content = self.tunes[best].tuned()
        for row, scored in zip(content["rows"], [*self.plain.found(), found[best]], strict=True):
            row |= scored
        if self.index:
            content["rows"][-1]["tuned"]["k"] = best
            content["rows"][-1]["bleu_by_k"] = {str(k): own["bleu"] for k, own in found.items()}
            if len(found) > 2 and best in (min(found), max(found)):
                print(f"tune: K={best} lies at the edge of the grid: widen translation.k")
        (folder / "tuned.json").write_text(json.dumps(content, indent=1))

    def chosen(self) -> Tune:
        """The grid's pass at the best K."""
        tuned = self.tuned()["rows"][-1]["tuned"]
        return self.tunes[int(tuned["k"])] if "k" in tuned else next(iter(self.tunes.values()))

    def rows(self) -> list[Row]:
        return self.chosen().rows()


class EvaluatePairs(Evaluate):
    """``rows.json``: loss and BLEU of every row on test."""

    def __init__(self, config: DictConfig, encoded: Encode, tune: TuneByBleu, translate: Translate):
        super().__init__(config, encoded, tune)
        self.by_bleu, self.translate = tune, translate

    def needs(self) -> list[Artefact]:
        return [*super().needs(), self.translate]

    def build(self, folder: Path) -> None:
        self.tune = self.by_bleu.chosen()
        super().build(folder)
        rows = json.loads((folder / "rows.json").read_text())
        found = [row | scored for row, scored in zip(rows, self.translate.found(), strict=True)]
        for row in found:
            row["tuned"] |= {"k": row["k"]} if row["k"] else {}
        (folder / "rows.json").write_text(json.dumps(found, indent=1))


class TranslationPlan(Plan):
    """The same way for parallel text."""

    @cached_property
    def corpus(self) -> PreparePairs:  # type: ignore[override]
        return PreparePairs(self.config, self.config.dataset)

    @cached_property
    def pack(self) -> Pack | None:
        wanted = instantiate(self.config.batching, _convert_="all").needs_neighbours
        return PackSentences(self.config, self.corpus) if wanted else None

    @cached_property
    def fit(self) -> Fit:
        return FitTranslation(self.config, self.corpus, self.pack, lambda: self.logger)

    @cached_property
    def valid(self) -> EncodePairs:
        return EncodePairs(self.config, "evaluate", "valid", self.corpus, self.model)

    @cached_property
    def test(self) -> EncodePairs:
        return EncodePairs(self.config, "evaluate", "test", self.corpus, self.model)

    @cached_property
    def store(self) -> Artefact:
        if self.config.datastore.path:
            return GivenStore(self.config, self.model)
        return EncodePairs(self.config, "datastore", self.config.datastore.split, self.corpus, self.model)

    @cached_property
    def tune(self) -> TuneByBleu:
        ks = plain(self.config.translation.k) if uses_external(self.config) else [self.config.index.k]
        tunes = {k: self.tuned_at(k) for k in ks}
        own = {k: Translate(self.config, self.valid, tune, LAST) for k, tune in tunes.items()}
        return TuneByBleu(self.config, tunes, Translate(self.config, self.valid, tunes[ks[0]], ALL_BUT_LAST), own)

    def tuned_at(self, k: int) -> Tune:
        """Temperatures and share at K entries."""
        config: DictConfig = OmegaConf.merge(self.config, {"index": {"k": k}})  # type: ignore[assignment]
        return Tune(config, self.valid, Index(config, self.store) if uses_external(config) else None)

    @cached_property
    def evaluate(self) -> EvaluatePairs:
        return EvaluatePairs(self.config, self.test, self.tune, Translate(self.config, self.test, self.tune))

    def check_windows(self) -> None:
        """UserError, before the model is trained, where a sentence has more pieces than it allows."""
        positions, corpus = self.config.model.backbone.positions, self.corpus.corpus()
        for split in corpus.statistics["splits"]:
            for side in (corpus, corpus.sources):
                longest = int(side.split(split).lengths.max())
                if longest >= positions:
                    raise UserError(
                        f"split {split} has a sentence of {longest} pieces: raise model.backbone.positions={positions}"
                    )

    def made_by(self, stage: str) -> list[Artefact]:
        if stage == "tune":
            return [*self.tune.needs(), self.tune]
        if stage == "evaluate":
            return [self.test, self.evaluate.translate, self.evaluate]
        return super().made_by(stage)
