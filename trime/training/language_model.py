"""The LightningModule of language models, plain or with in-batch memories (TRIME Eq. 1, 5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig

from trime.common.metrics import perplexity
from trime.common.types import Batch, Contexts, LogMass, Tensor, is_token
from trime.errors import UserError
from trime.models.network import Network, Reader, shard_weights
from trime.scoring.mixtures.joint import joint_log_prob, memory_share
from trime.token_memory.train.distributed import all_gather_varlen, all_reduce_sum, rank_rows, world_size
from trime.token_memory.train.in_batch import InBatch, StaleContexts, local_draw
from trime.training.schedules import check_scheduler_state, with_schedule

SHOWN = 0.05  # weight of the newest update in the loss that the bar shows


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of an update; the first ``plain_updates`` train with the plain loss (TRIME section 5.2)."""

    seed: int = 0
    plain_updates: int = 0
    # The published code's quirk: padded cells are memories of <pad>, and queries that add to the loss, but count as no targets.
    padding_is_memory: bool = False


class LanguageModel(pl.LightningModule):
    """Trains with the summed loss of scored tokens, divided once by the update's targets; ``schedule``: rate by update."""

    def __init__(
        self,
        network: Network,
        memory: InBatch | None,
        training: UpdateSettings,
        optimizer: Callable[..., torch.optim.Optimizer],
        schedule: Callable[[int], float],
    ):
        super().__init__()
        self.network, self.memory, self.update_settings = network, memory, training
        self.optimizer_factory, self.schedule = optimizer, schedule
        self.targets, self.update_targets = 0, 0
        self.valid_sum, self.valid_count = 0.0, 0
        self.shown_loss: Tensor | None = None
        self.start_reading()
        self.paused: tuple[Reader, StaleContexts] | None = None
        self.carried: list[list[Tensor]] = []
        self.carried_contexts: list[list[list[Tensor]]] = []
        self.frozen = {
            f"network.{name}" for name, weight in network.named_parameters(remove_duplicate=False) if not weight.requires_grad
        }
        self.strict_loading = not self.frozen

    def start_reading(self) -> None:
        """Start from rows without a state, and without contexts of earlier batches."""
        self.reader, self.stale = Reader(self.network), StaleContexts(self.memory.stale if self.memory else 0)

    def losses(self, batch: Batch, draw: float | None, plain: bool, progress: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return each scored token's loss in nats, and the memory's share.

        ``draw``: the update's, None in validation; ``progress``: the part of the training that is done.
        """
        query, contexts, vocabulary = self.queries_and_memories(batch)
        if self.memory is None or plain:
            return vocabulary.total - vocabulary.target, torch.zeros_like(vocabulary.total)
        exact = torch.promote_types(query.g.dtype, torch.float32)
        divisor = query.g.new_tensor([math.sqrt(query.g.shape[1])], dtype=exact)
        mass = self.memory.mass(query, self.stale.join_and_store(contexts), divisor, draw, progress)
        memory = LogMass(mass.target[0], mass.total[0])
        return -joint_log_prob(vocabulary, [memory]), memory_share(vocabulary, [memory]).detach()

    def queries_and_memories(self, batch: Batch) -> tuple[Contexts, Contexts, LogMass]:
        """Return the scored contexts, those that are memory, and the vocabulary's mass for the scored ones."""
        if self.update_settings.padding_is_memory and batch.length.any():
            contexts, mass = self.reader.contexts_and_mass(batch._replace(scored=torch.ones_like(batch.scored)))
            free = torch.where(is_token(batch).flatten(), mass.target, mass.total)  # log P of padding is 0
            return contexts, contexts, replace(mass, target=free)
        contexts, mass = self.reader.contexts_and_mass(batch)
        scored, tokens = batch.scored.flatten(), is_token(batch).flatten()
        memories = contexts if tokens.all() else contexts.take(tokens)
        queries = memories if torch.equal(scored, tokens) else contexts.take(scored)  # the same object saves half the work
        return queries, memories, mass

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # A resumed run then equals an uninterrupted one.
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            torch.manual_seed((self.update_settings.seed * 1_000_003 + self.global_step) * 4096 + self.global_rank)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        draw = local_draw(self.update_settings.seed, self.global_step)
        plain = self.global_step < self.update_settings.plain_updates
        losses, share = self.losses(batch, draw, plain, self.global_step / self.trainer.max_steps)
        loss = losses.sum()
        if not torch.isfinite(loss):
            raise UserError(
                f"the loss is {loss.item()} at update {self.global_step}: lower schedule.peak or raise schedule.warmup"
            )
        count = int(batch.scored.sum())
        self.targets += count
        mean = loss.detach() / max(1, count)
        share = share.mean() if count else loss.detach() * 0
        self.log_dict({"train/loss": mean, "train/memory_share": share, "train/lr": self.schedule(self.global_step)})
        self.log("train/perplexity", mean.exp())
        # A moving average: one batch says little, and the bar shows nothing else.
        self.shown_loss = mean if self.shown_loss is None else torch.lerp(self.shown_loss, mean, SHOWN)
        self.log("perplexity", self.shown_loss.exp(), prog_bar=True, logger=False)
        self.log_dict({f"train/{name}": value for name, value in self.network.training_metrics().items()})
        return loss * self.trainer.accumulate_grad_batches  # Lightning divides by it

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Divide gradients by the update's number of targets, then clip; called before every optimiser step."""
        parameters = [parameter for parameter in self.parameters() if parameter.grad is not None]
        # The loss is a sum: only now is it known by how many targets, of all micro-batches and processes, to divide.
        (targets,) = all_reduce_sum(self.targets, device=self.device)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:  # with several processes the gradient is their mean
            torch._foreach_div_(gradients, targets / world_size())
        self.targets, self.update_targets = 0, int(targets)
        if gradient_clip_val and gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        elif gradient_clip_val:
            torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

    def on_validation_epoch_start(self) -> None:
        # The training state is set aside: validation starts from an empty one.
        self.valid_sum, self.valid_count = 0.0, 0
        self.paused = self.reader, self.stale
        self.start_reading()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        losses, _ = self.losses(batch, draw=None, plain=False)
        self.valid_sum += float(losses.double().sum())
        self.valid_count += int(batch.scored.sum())

    def on_validation_epoch_end(self) -> None:
        if self.paused is not None:
            (self.reader, self.stale), self.paused = self.paused, None
        total, count = all_reduce_sum(self.valid_sum, self.valid_count, device=self.device)
        loss = total / max(1, count)
        self.log_dict({"valid/objective": loss, "valid/objective_perplexity": perplexity(loss)})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the state of every process's rows; leave out frozen weights, which come from elsewhere."""
        for name in self.frozen:
            checkpoint["state_dict"].pop(name, None)
        reader, stale = self.paused or (self.reader, self.stale)
        checkpoint["carried"] = [all_gather_varlen(tensor) for tensor in reader.state_tensors()]
        checkpoint["stale"] = stale.saved()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_scheduler_state(checkpoint)
        self.carried, self.carried_contexts = checkpoint.get("carried", []), checkpoint.get("stale", [])

    def on_train_start(self) -> None:
        """Restore the state of the rows, whatever the number of processes that saved it."""
        self.reader.restore(rank_rows(self.carried, self.global_rank, world_size()), self.device)
        self.stale.restore(self.carried_contexts, self.global_rank, world_size(), self.device)

    def configure_model(self) -> None:
        """Shard the weights where the trainer's strategy has a device mesh."""
        if self.device_mesh is not None:
            shard_weights(self.network, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return with_schedule(self.optimizer_factory(self.parameters(), lr=self.schedule(0)), self.schedule)
