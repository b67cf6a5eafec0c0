"""fit: trains the model; a killed training resumes from its last checkpoint, mid-epoch, with the same batches."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytorch_lightning as pl
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from omegaconf import DictConfig
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from torch import distributed

from trime.common.components import build
from trime.common.identity import Free
from trime.common.io import partial_of, plain, write_json
from trime.common.metrics import ResourceUsage, processor_ms
from trime.common.urls import local_copy
from trime.data.corpus import Corpus, content_hash
from trime.data.module import TextDataModule
from trime.data.segments import parse_token_count
from trime.data.vocabulary import Vocabulary
from trime.errors import UserError
from trime.lab.artefact import Artefact, Lab
from trime.lab.manifest import check_manifest
from trime.lab.stage import Stage
from trime.models.network import Network, build_network, save_network
from trime.models.pretrained.tokenizer import load_tokenizer
from trime.stages.model_io import ModelSettings, check_positions, write_description
from trime.stages.pack import Pack
from trime.stages.prepare import Prepare
from trime.training.callbacks import BestWeights, Forecast, History
from trime.training.hardware import Hardware
from trime.training.language_model import LanguageModel, UpdateSettings
from trime.training.trainer import TrainerSettings, quiet, run_training


@dataclass(frozen=True)
class LanguageModelTraining:
    """Training on segments of ``length`` tokens, and the settings of its batches and updates."""

    batching: dict[str, Any]  # conf/batching
    memory: dict[str, Any]  # conf/memory
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    seed: int
    padded: bool  # padded positions are memories, too, as in the published code
    plain_updates: int  # the first ones train the plain language model (TRIME 5.2)
    model: Free[ModelSettings]
    validate_tokens: Free[int | None]  # of a validation; None: all
    length: int
    bounded: bool  # segments end with their document

    @classmethod
    def of(cls, config: DictConfig, **further: Any) -> Self:
        """Return the training that a configuration describes; ``further`` are fields of a subclass."""
        train, names = config.train, ("batching", "memory", "optimizer", "schedule", "seed")
        return cls(
            **{name: plain(config[name]) for name in names},
            padded=config.compatibility.padding is not None,
            plain_updates=math.ceil(train.plain_share * train.updates),
            model=ModelSettings.of(config),
            validate_tokens=parse_token_count(train.validate_tokens),
            length=config.segments.length,
            bounded=config.segments.bounded,
            **further,
        )

    def network(self, corpus: Corpus) -> Network:
        """Return a new network for the corpus's vocabulary."""
        return build_network(self.components(corpus), len(corpus.vocabulary))

    def components(self, corpus: Corpus) -> dict[str, Any]:
        """Return the description of the network."""
        return self.model.components()

    def describe(self, folder: Path, corpus: Corpus, trained: dict[str, Any]) -> None:
        """Write ``model.json``, from which the network is built again."""
        write_description(folder, self.components(corpus), corpus.vocabulary, trained)

    def data(self, corpus: Corpus, neighbours: np.ndarray | None, is_stateful: bool) -> TextDataModule:
        """Return the training batches in planned order, and the batches of a validation.

        ``neighbours`` [segments k] are those of training segments, if the batching needs them; a stateful model reads rows that
        continue from batch to batch.
        """
        batching = build(self.batching)
        if is_stateful and not batching.contiguous_rows:
            raise UserError("this backbone's rows continue from batch to batch: set batching=streams")
        cutting = self.length, self.bounded, self.validate_tokens
        return TextDataModule(None, corpus.folder, batching, *cutting, neighbours)

    def module(self, network: Network) -> LanguageModel:
        """Return the Lightning module that trains the network."""
        return LanguageModel(network, *self.module_arguments())

    def module_arguments(self) -> tuple[Any, UpdateSettings, Any, Any]:
        """Return a Lightning module's arguments beside its network: memory, settings, optimiser and schedule."""
        training = UpdateSettings(self.seed, self.plain_updates, self.padded)
        memory = build(self.memory) if self.memory.get("_target_") else None
        optimizer = build(self.optimizer, _partial_=True)
        return memory, training, optimizer, build(self.schedule)

    def callbacks(self, corpus: Corpus) -> list[pl.Callback]:
        """Return the callbacks that this task adds."""
        return []

    def best_weights(self, folder: Path) -> BestWeights:
        """Return the callback that keeps the weights of the best validation, the one with the lowest objective."""
        return BestWeights(folder)


log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class Fit(Artefact):
    """The trained model: ``model.safetensors``, ``model.json``, ``train.json``, ``metrics.csv``."""

    kind, format = "fit", 3

    corpus: Prepare
    pack: Pack | None
    task: LanguageModelTraining
    weights: dict[str, Any]  # settings on which the weights depend before they are trained
    trainer: TrainerSettings
    accumulate: int  # micro-batches per update
    keep: str  # the weights of the "best" validation, or the "last" ones
    validate_every: Free[int]  # updates
    memory_size: Free[int]  # of a memory inside the model while it is trained
    eviction: Free[dict[str, Any] | None]  # of that memory
    lengths: Free[dict[str, int]]  # of windows that the model must be able to read, by their settings
    loggers: Free[Callable[[], list[Any]]]  # experiment loggers of this process
    launch: Free[Callable[[Path], None]]  # trains in a folder, in a process for each device
    lab: Free[Lab]

    def identity(self) -> Any:
        if not self.trainer.updates:  # a pretrained model, unchanged
            return [need.fingerprint for need in self.needs()], self.weights
        content, model = super().identity(), self.task.model
        if self.keep == "best" or self.trainer.callbacks:  # which may read it
            content["validation"] = [self.validate_every, self.task.validate_tokens]
        if model.memory() and not model.is_pretrained:
            content["memory"] = [self.memory_size, self.eviction]
        if self.hardware.compiles:
            content["compiled"] = True
        if self.task.memory.get("own_gradient_only"):  # with this quirk of the published code, devices change the gradient
            content["devices"] = self.hardware.world_size
        return content

    @property
    def hardware(self) -> Hardware:
        """The devices that train."""
        return self.trainer.hardware

    def build(self, folder: Path) -> None:
        if not (folder / "train.json").exists():  # written last: a killed build may have finished training
            self.train_on_all(folder)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def join_training(self) -> None:
        """Run this machine's share of a multi-node training; write no files."""
        folder = partial_of(self.folder)
        if not self.folder.is_dir() and not (folder / "train.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            self.train_on_all(folder)

    def train_on_all(self, folder: Path) -> None:
        """Train in this process, or with several devices in a process for each."""
        if self.hardware.world_size == 1:
            self.train(folder)
        else:
            self.launch(folder)

    def train(self, folder: Path) -> None:
        """Train, then write the model with its description and a report of the training."""
        corpus = self.corpus.corpus()
        pl.seed_everything(self.task.seed, verbose=False)
        network = self.task.network(corpus)
        check_positions(network.backbone.positions, self.lengths, self.task.model.is_pretrained)
        if not self.hardware.is_worker:
            log.info(f"fit: {network.parameter_count:,} parameters, {self.trainer.updates:,} updates")
        meter, history = ResourceUsage(), History(folder / "metrics.csv", self.trainer.log_every)
        updates = kept_update = 0
        if self.trainer.updates:
            network, updates, kept_update = self.run_updates(network, corpus, folder, history)
        else:  # a pretrained model, unchanged
            network.requires_grad_(False)
        if self.hardware.is_worker:
            return
        save_network(network, folder / "model.safetensors", json.dumps(self.weights))
        self.task.describe(folder, corpus, self.weights)
        if self.task.model.is_pretrained and self.trainer.updates:
            network.backbone.decoder.save(folder / "transformers")
            load_tokenizer(self.task.model.model["name"]).save_pretrained(folder / "transformers")
        history.tick()
        report = {
            "updates": updates,
            "kept_update": kept_update,
            "tokens": history.tokens,
            "seconds": round(history.seconds, 1),
            "tokens_per_second": round(history.tokens / max(history.seconds, 1e-9), 1),
            **processor_ms(history.processor_seconds if self.hardware.world_size == 1 else None, history.tokens),
            "peak_memory_mb": meter.peak_memory_mb,
            "parameters": network.parameter_count,
            "devices": self.hardware.world_size,
        }
        write_json(folder / "train.json", report)

    def run_updates(self, network: Network, corpus: Any, folder: Path, history: History) -> tuple[Network, int, int]:
        """Train, resuming where a killed training stopped; return the network, the updates made and that of its weights."""
        if self.hardware.compiles:
            network.compile_layers()
        neighbours = self.pack.table() if self.pack else None
        module, data = self.task.module(network), self.task.data(corpus, neighbours, network.is_stateful)
        best = self.task.best_weights(folder / "checkpoints") if self.keep == "best" else None
        with quiet():
            forecast = Forecast(self.stage, folder, module.update_settings.plain_updates)
            callbacks = [history, forecast, *self.task.callbacks(corpus), *([best] if best else [])]
            trainer = self.lightning_trainer(folder, callbacks)
            try:
                run_training(self.stage, trainer, module, data, folder)
                network = network if module.device_mesh is None else self.gather_weights(trainer, corpus)
                if trainer.global_step < trainer.max_steps:
                    log.warning(f"{self.stage}: stopped after {trainer.global_step:,} of {trainer.max_steps:,} updates")
                network, kept_update = self.select_weights(network, best, trainer.global_step)
                return network, trainer.global_step, kept_update
            except Exception as error:
                if not self.hardware.compiles or trainer.global_step or isinstance(error, UserError):
                    raise
                reason = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
                raise UserError(f"training with trainer.compile=true failed at its start ({reason}): leave it out") from error
            finally:  # otherwise the next run of a sweep would wait for processes that have ended
                if distributed.is_initialized():
                    distributed.destroy_process_group()

    def select_weights(self, network: Network, best: BestWeights | None, last: int) -> tuple[Network, int]:
        """Return the network with the weights of the best validation (or the last ones), and the update they are from."""
        if best is None or not best.update:  # no validation had a finite objective
            return network, last
        if not self.hardware.is_worker:
            network.load_state_dict(best.weights(), strict=False)  # frozen weights are not among them
        return network, best.update

    def gather_weights(self, trainer: pl.Trainer, corpus: Any) -> Network:
        """Return the whole network, in the first process, put together from the shards of all processes."""
        weights = trainer.strategy.lightning_module_state_dict()
        network = self.task.network(corpus)
        if not self.hardware.is_worker:
            network.load_state_dict({name.removeprefix("network."): weight for name, weight in weights.items()})
        return network

    def lightning_trainer(self, folder: Path, callbacks: list[pl.Callback]) -> pl.Trainer:
        """Return Lightning's trainer for the configured devices."""
        hardware, world = self.hardware, self.hardware.world_size
        options: dict[str, Any] = {"devices": hardware.device_count, "num_nodes": hardware.num_nodes}
        if world > 1 and hardware.strategy == "fsdp":
            options["strategy"] = ModelParallelStrategy(world, 1, save_distributed_checkpoint=False)
        elif world > 1:  # a tail of the softmax may have no target in a process's rows
            options["strategy"] = DDPStrategy(find_unused_parameters=True)
        options |= {
            # Processes are started by this lab, also in a job of SLURM.
            "plugins": [LightningEnvironment() if world == 1 else TorchElasticEnvironment()],
            "accumulate_grad_batches": self.accumulate,
            "val_check_interval": min(self.validate_every, self.trainer.updates) * self.accumulate,
            "check_val_every_n_epoch": None,  # validations are counted in updates, over all epochs
            "logger": self.loggers() or False,
        }
        return self.trainer.build(self.stage, folder, callbacks, options)


@dataclass(frozen=True, eq=False, repr=False)
class ExternalModel(Artefact):
    """A model that was trained or imported before, in the folder that ``checkpoint=DIR`` names."""

    kind = "fit"

    checkpoint: Free[str]
    lab: Free[Lab]

    def identity(self) -> Any:
        return content_hash(self.path() / "model.safetensors")

    @property
    def folder(self) -> Path:
        """The folder that ``checkpoint=`` names."""
        return local_copy(self.checkpoint)

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary of an imported model; None for a trained one, which has that of its corpus."""
        file = self.folder / "vocabulary.json"
        return Vocabulary.load(file) if file.is_file() else None

    def path(self) -> Path:
        """Return the folder; UserError if it holds no model."""
        if not (self.folder / "model.safetensors").is_file():
            raise UserError(f"checkpoint={self.folder} holds no model: name a folder that stage fit made")
        remedy = "name a fit-… or import-… folder of a run in checkpoint="
        check_manifest(self.folder, "(fit|import)-.*", remedy, self.lab.verify)
        return self.folder

    def build(self, folder: Path) -> None:
        raise AssertionError("a given model is never built")


FIT = Stage("fit", lambda graph: [None if graph.config.checkpoint else graph.model], check=lambda graph: graph.check_text())
