"""The artefacts of an experiment as a graph: each is linked to those it is made from (the data flow)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers.logger import DummyLogger
from torch.distributed.elastic.multiprocessing.errors import record

from trime.common.components import build
from trime.common.cpu import prepare_cpu
from trime.common.io import plain
from trime.common.urls import local_copy
from trime.config import schema
from trime.config.check import parse_as
from trime.data.corpus import VocabularySource
from trime.data.duplicates import copies_within, duplicates_of
from trime.data.segments import parse_token_count
from trime.errors import UserError
from trime.lab.artefact import Artefact, Lab
from trime.lab.engines import Engine, Job, Local, MakeShard
from trime.lab.shards import ShardedArtefact, Work
from trime.lab.stage import known_stages
from trime.lab.tracking import build_loggers
from trime.models.network import Network
from trime.report.page import Section
from trime.report.run_result import ScoredRun
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.scoring.rows import MixtureSpecs, rows_of
from trime.stages.answer import Answer
from trime.stages.encode import Encode, Portion, TextWindows
from trime.stages.evaluate import Evaluate, TestResults
from trime.stages.fit import ExternalModel, Fit, LanguageModelTraining
from trime.stages.import_checkpoint import Import
from trime.stages.index import ExternalStore, duplicates_in_store
from trime.stages.memories import Memories, Sources
from trime.stages.model_io import ModelSettings, check_positions
from trime.stages.pack import Pack
from trime.stages.prepare import Prepare, VocabularySettings
from trime.stages.pretrained import is_pretrained, vocabulary_source
from trime.stages.run_analysis import PerToken, RunAnalysis
from trime.stages.scoring import Scoring
from trime.stages.subsets import SubsetMixtures, Subsets
from trime.stages.train_small import InitSmall, TrainSmall
from trime.stages.tune import MixtureSettings, Tune, TunedRows, TuneMixture, given_mixture
from trime.training.hardware import Hardware, launch
from trime.training.trainer import TrainerSettings


class Graph:
    """Data flow: corpus (and neighbours) to model, model and corpora to encodings, encodings to results."""

    importer: type[Import] = Import  # of released checkpoints
    packer: type[Pack] = Pack
    at_test = "similarity"  # the setting by which memories at test compare contexts
    samples_title = "Test text, scored"

    def __init__(self, config: DictConfig):
        self.config = config
        self.corpora: dict[str, Prepare] = {}  # by the settings of their datasets
        self.stores: dict[str, Artefact] = {}  # by the settings of their datastores

    def corpus_of(self, dataset: DictConfig | None) -> Prepare:
        """Return the corpus of a dataset in the main vocabulary, the main corpus for None; the same for the same settings."""
        if not dataset:
            return self.corpus
        key = OmegaConf.to_yaml(dataset, resolve=True)
        if key not in self.corpora:
            self.corpora[key] = self.prepare(dataset, self.fixed_vocabulary or self.corpus.source())
        return self.corpora[key]

    def prepare(self, dataset: DictConfig, source: VocabularySource | None) -> Prepare:
        """Return the corpus of a dataset in its own vocabulary, or in that of a ``source``."""
        return Prepare(plain(dataset), VocabularySettings(**plain(self.config.vocabulary)), self.lab, source)

    @cached_property
    def lab(self) -> Lab:
        """The folders of this experiment's artefacts, and the engine that makes them."""
        outputs, data = (Path(self.config.paths[name]).expanduser() for name in ("outputs", "data"))
        return Lab(outputs, data, self.config.artefacts.verify, self.make_shards)

    @cached_property
    def hardware(self) -> Hardware:
        """The devices of this run, and its precision."""
        return Hardware.of(self.config.trainer)

    @cached_property
    def scoring(self) -> Scoring:
        """Settings of scoring that all rows share."""
        return Scoring(self.config.evaluate.scaled_interpolation, self.config.compatibility.sorted_windows)

    @cached_property
    def model_settings(self) -> ModelSettings:
        """Settings by which the model is built and reads text."""
        return ModelSettings.of(self.config)

    @cached_property
    def corpus(self) -> Prepare:
        """The corpus that is trained on."""
        return self.prepare(self.config.dataset, self.fixed_vocabulary)

    @cached_property
    def fixed_vocabulary(self) -> VocabularySource | None:
        """The vocabulary of an imported or pretrained model, in which all text is read; None if the corpus makes its own."""
        if is_pretrained(self.config):
            return vocabulary_source(self.config)
        if not self.config.checkpoint:
            return None
        vocabulary = self.model.vocabulary  # type: ignore[attr-defined]
        return VocabularySource(vocabulary.fingerprint, lambda: vocabulary) if vocabulary else None

    @cached_property
    def evaluated_corpus(self) -> Prepare:
        """The corpus that is tuned and tested on."""
        return self.corpus_of(self.config.evaluate.get("dataset"))

    @cached_property
    def pack(self) -> Pack | None:
        """The neighbours of training segments, if batches are made from them."""
        needed = build(self.config.batching).needs_neighbours
        if not needed or not self.config.train.updates or self.config.checkpoint:
            return None
        segments, neighbours = self.config.segments, plain(self.config.neighbours)
        return self.packer(self.corpus, segments.length, segments.bounded, self.config.batching.k, neighbours, self.lab)

    @cached_property
    def model(self) -> Artefact:
        """The model that is evaluated: given by ``checkpoint=``, imported, or trained here."""
        if not self.config.checkpoint:
            return self.fit
        is_folder = local_copy(self.config.checkpoint).is_dir()
        return ExternalModel(self.config.checkpoint, self.lab) if is_folder else self.imported

    @cached_property
    def imported(self) -> Import:
        """The released checkpoint that ``checkpoint=`` names, as a model of this package."""
        return self.importer(self.config.checkpoint, plain(self.config.dictionary), self.lab)

    @cached_property
    def fit(self) -> Fit:
        """The model that this experiment trains."""
        train = self.config.train
        return Fit(
            corpus=self.corpus,
            pack=self.pack,
            task=self.training_task(),
            weights=self.model_settings.weights(),
            trainer=TrainerSettings.of(self.config),
            accumulate=train.accumulate,
            keep=train.keep,
            validate_every=train.validate_every,
            memory_size=train.memory_size,
            eviction=plain(train.eviction),
            lengths=self.lengths_in_training(),
            loggers=lambda: self.loggers,
            launch=self.launch_training,
            lab=self.lab,
        )

    def training_task(self) -> LanguageModelTraining:
        """Return the training of this kind of experiment."""
        return LanguageModelTraining.of(self.config)

    def lengths_in_training(self) -> dict[str, int]:
        """Return the lengths that the model must read: segments, and windows unless it reads any length with memories."""
        segments = {"segments.length": self.config.segments.length} if self.config.train.updates else {}
        return segments | ({} if self.model_settings.reads_any_length else self.windows(self.config, False).lengths())

    def windows(self, config: DictConfig, for_datastore: bool) -> TextWindows:
        """Return the cut of a split into the windows that are encoded."""
        return TextWindows.of(config, for_datastore)

    def launch_training(self, folder: Path) -> None:
        """Train in ``folder``, in a process for each device."""
        launch(self.hardware, train_in, type(self), OmegaConf.to_yaml(self.config, resolve=True), folder)

    @cached_property
    def valid(self) -> Encode:
        """The encoded validation split."""
        return self.encode(self.config, "evaluate", "valid", self.evaluated_corpus)

    @cached_property
    def test(self) -> Encode:
        """The encoded test split."""
        return self.encode(self.config, "evaluate", "test", self.evaluated_corpus)

    def encode(self, config: DictConfig, section: str, split: str, corpus: Prepare) -> Encode:
        """Return the encoded portion of a split that a section of a configuration asks for."""
        return Encode(
            portion=Portion.of(config, section, split),
            corpus=corpus,
            model=self.model,
            windowing=self.windows(config, section == "datastore"),
            reading=self.model_settings.reading(),
            hardware=self.hardware,
            settings=self.model_settings,
            batch_tokens=config.evaluate.batch_tokens,
            lab=self.lab,
        )

    def text_of(self, config: DictConfig) -> Prepare:
        """Return the corpus that the section ``datastore`` of a configuration names."""
        return self.corpus_of(config.datastore.get("dataset"))

    def store_of(self, config: DictConfig) -> Artefact:
        """Return the encoded text of the section ``datastore``: made by this run, or the folder of ``datastore.path=DIR``."""
        key = OmegaConf.to_yaml(config.datastore, resolve=True)
        if key not in self.stores:
            made = not config.datastore.path
            self.stores[key] = (
                self.encode(config, "datastore", config.datastore.split, self.text_of(config))
                if made
                else ExternalStore(config.datastore.path, self.model, self.lab)
            )
        return self.stores[key]

    def make_shards(self, artefact: ShardedArtefact, work: Work, folder: Path, bar: Any) -> None:
        """Make the missing shards of an artefact, by the configured engine unless they must follow one another."""
        engine: Engine = Local() if work.in_order else build(self.config.engine)
        # Other processes make a shard from the settings, with this precision whatever devices they have.
        precision = {"trainer": {"precision": self.hardware.precision}}
        settings = OmegaConf.to_yaml(OmegaConf.merge(self.config, precision), resolve=True)
        job = Job(partial(open_job, type(self)), settings, artefact.stage, artefact.name, folder)
        bar.update(work.done())
        engine.run(job, work.make, work.missing(), bar.update)

    @cached_property
    def duplicates(self) -> list[str]:
        """Notes on documents of valid and test that are also in train, in valid, or in the text of the datastore."""
        text, notes = self.evaluated_corpus, list[str]()
        corpus, drops_copies = text.corpus(), text.dataset.copies == "drop"
        stored = [(memory.text, memory.config.datastore.split) for memory in self.memories.stored.values()]
        given = [memory.store for memory in self.memories.datastores if isinstance(memory.store, ExternalStore)]
        for split in ("valid", "test"):
            notes += copies_within(corpus, split)
            for other, other_split in dict.fromkeys([(self.corpus, "train"), (text, "valid"), *stored]):
                is_store = (other, other_split) in stored
                notes += duplicates_of(corpus, split, other.corpus(), other_split, is_store, drops_copies)
            for store in given:
                notes += duplicates_in_store(corpus, split, store)
        return notes

    @property
    def reads_pieces(self) -> bool:
        """Whether tokens are pieces of words."""
        return is_pretrained(self.config)

    def check_settings(self) -> None:
        """Raise UserError at the first setting that this kind of experiment cannot work with."""
        padding, trains = self.config.compatibility.padding, not (self.config.checkpoint or is_pretrained(self.config))
        if padding is not None and trains and not self.config.vocabulary.fairseq:
            raise UserError(
                f"compatibility.padding={padding} (compatibility=published) is <unk> in our vocabularies: "
                "add vocabulary.fairseq=true"
            )

    def check_network(self, network: Network) -> None:
        """Raise UserError if a network, which may be on the device ``meta``, cannot do what this experiment needs."""
        if getattr(network.backbone, "needs_source", False):
            raise UserError("model=translation is for translations: leave it out")

    def check_text(self) -> None:
        """Raise UserError, before a model is trained, if a later stage could not work with this text."""
        stages = {*self.config.stages}
        for split, readers in (("valid", {"encode", "tune"}), ("test", {"evaluate"})):
            if readers & stages:
                self.evaluated_corpus.corpus().split(split)
        if {"encode", "index"} & stages:
            for memory in self.memories.stored.values():
                memory.check_text()
        self.check_windows()

    def check_windows(self) -> None:
        """Raise UserError if a line is longer than the model's positions."""
        if self.config.evaluate.lines and not self.config.checkpoint:
            for split in (self.valid, self.test):
                longest = int(split.windows(self.evaluated_corpus.corpus()).length.max())
                check_positions(self.config.model.backbone.get("positions"), {}, longest=longest)

    @cached_property
    def tune(self) -> TunedRows:
        """The tuned settings of every row, with the fitted mixture if there is one."""
        return self.tune_with(self.memories)

    def tune_with(self, memories: Memories) -> TunedRows:
        """Return the artefact that tunes the rows with these memories, and fits their mixture if there is one to be fitted."""
        mixture, fitted = self.config.mixture, next((row for row in self.table if isinstance(row, FittedMixtureSpec)), None)
        grid = Tune(
            grid_rows=tuple(row for row in self.table if isinstance(row, MixtureSpec)),
            fitted_row=fitted,
            most_masses=parse_token_count(mixture.tokens) if fitted else None,
            encoded=self.valid,
            memories=memories,
            grid=plain(self.config.tune),
            scoring=self.scoring,
            lab=self.lab,
        )
        if not fitted:
            return grid
        settings = MixtureSettings(plain(mixture.model), mixture.folds, self.config.seed)
        return TuneMixture(grid, settings, given_mixture(self.config), self.lab)

    @cached_property
    def table(self) -> MixtureSpecs:
        """The rows of the experiment's table."""
        return rows_of(self.config)

    @cached_property
    def memories(self) -> Memories:
        """The memories that rows use at test."""
        return Memories(self.table, self.sources)

    @cached_property
    def sources(self) -> Sources:
        """The artefacts that this run can make for memories."""
        return Sources(self.config, self.text_of, self.store_of, self.lab)

    @cached_property
    def evaluate(self) -> TestResults:
        """The results on the test split."""
        return self.losses

    @cached_property
    def losses(self) -> Evaluate:
        """The losses of every row on the test split."""
        memory = self.model_settings.memory()
        return Evaluate(self.test, self.tune, self.scoring, memory, plain(self.config.eviction), self.lab)

    def own_samples(self) -> Artefact | None:
        """Return the samples of test that the report shows in place of passages of its text, if there are such."""
        return None

    def own_sections(self, run: ScoredRun) -> list[Section]:
        """Return sections of the report's page that only this kind of experiment has."""
        return []

    @cached_property
    def analysis(self) -> RunAnalysis | None:
        """The analysis of the rows, if evaluate.analysis asks for it."""
        return RunAnalysis(self.test, self.tune, self.scoring, self.lab) if self.config.evaluate.analysis else None

    @cached_property
    def per_token(self) -> PerToken | None:
        """Every scored token of test, if evaluate.per_token asks for it."""
        return PerToken(self.test, self.tune, self.scoring, self.lab) if self.config.evaluate.per_token else None

    @cached_property
    def subsets(self) -> Subsets | None:
        """The value of each memory of the mixture, if this run fits one."""
        selection = self.config.evaluate.subsets
        if not isinstance(self.tune, TuneMixture) or selection == "none" or self.tune.given:
            return None
        return Subsets(self.test, self.tune, SubsetMixtures(self.tune, selection, self.lab), self.scoring, self.lab)

    @cached_property
    def small_model(self) -> TrainSmall | None:
        """The small model that is trained to answer questions; None if model.name names a model."""
        if self.config.model.get("name"):
            return None
        config, names = self.config, ("optimizer", "schedule", "seed")
        questions = OmegaConf.merge(config.questions, config.small.questions, {"count": None})
        return TrainSmall(
            small=parse_as(schema.Small, plain(config.small), "small"),
            **{name: plain(config[name]) for name in names},
            trainer=TrainerSettings.of(config),
            questions=plain(questions),
            lab=self.lab,
        )

    @cached_property
    def initial_model(self) -> InitSmall:
        """A small model with random weights, and a tokenizer of this text."""
        small = self.config.small
        return InitSmall(plain(small.model), small.vocabulary, self.config.seed, self.corpus, self.lab)

    @cached_property
    def answer(self) -> Answer:
        """The answers to questions over long contexts."""
        config = self.config
        return Answer(
            small_model=self.small_model,
            eviction=plain(config.eviction),
            answering=parse_as(schema.Answering, plain(config.answering), "answering"),
            asked=plain(config.questions),
            model_settings=plain(config.model),
            hardware=self.hardware,
            lab=self.lab,
        )

    @cached_property
    def loggers(self) -> list[Any]:
        """The run's experiment loggers; a logger starts its run when it is first written to.

        In a worker process a dummy, for callbacks that need a logger.
        """
        if self.hardware.is_worker:
            return [DummyLogger()] if self.config.logger.lightning else []
        return build_loggers(self.config.logger, self.run_folder)

    @cached_property
    def run_folder(self) -> Path:
        """The folder of a run's results."""
        return self.results_folder(self.evaluate)

    @cached_property
    def answers_folder(self) -> Path:
        """The folder of the results of answering questions."""
        return self.results_folder(self.answer)

    def results_folder(self, results: Artefact) -> Path:
        """Return the folder of results, named by experiment, seed and fingerprint."""
        runs = self.lab.outputs / "runs" / self.config.name
        return runs / f"seed{self.config.seed}-{results.fingerprint[:8]}"

    def folder_of(self, stages: Sequence[str]) -> Path:
        """Return the folder of the results of some stages."""
        return self.answers_folder if {"train_small", "answer"} & {*stages} else self.run_folder

    def artefacts_of(self, stage: str) -> list[Artefact]:
        """Return the artefacts that a stage makes for this experiment, in order; none for stages that read only."""
        return known_stages()[stage].artefacts(self)


def open_job(graph_of: type[Graph], job: Job) -> MakeShard:
    """Return the function that makes the shards of a job's artefact in another process, from nothing but the settings.

    A shard that exists already, because the worker that made it died before it said so, is not made again.
    """
    artefacts = [artefact for artefact in graph_in(graph_of, job.settings).artefacts_of(job.stage) if artefact.name == job.name]
    if not artefacts or not isinstance(artefacts[0], ShardedArtefact):
        raise UserError(f"{job.stage}: a worker understands these settings differently: install the same on all machines")
    work = artefacts[0].work(job.folder)

    def make(number: int, advance: Callable[[int], object]) -> None:
        if work.files[number].exists():
            advance(work.sizes[number])
        else:
            work.make(number, advance)

    return make


@record  # an error of this process is raised in the one that launched it
def train_in(graph_of: type[Graph], settings: str, folder: Path) -> None:
    """Train as one of several processes."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    graph_in(graph_of, settings).fit.train(folder)


def graph_in(graph_of: type[Graph], settings: str) -> Graph:
    """Return the graph of a configuration as YAML, in another process or on another machine."""
    config: DictConfig = OmegaConf.create(settings)  # type: ignore[assignment]
    if Hardware.of(config.trainer).device.type == "cpu":
        prepare_cpu()
    return graph_of(config)
