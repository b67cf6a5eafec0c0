"""The LightningModule that trains a model in the transformers format to answer questions over contexts.

The loss is that of the answer's tokens; a decoder adds the loss of the prompt's tokens with a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch.nn import functional as F

from trime.common.types import Int, Tensor
from trime.errors import UserError
from trime.training.schedules import check_scheduler_state, with_schedule

PROMPT_SAMPLE = 0.25  # share of the prompts' tokens that is drawn for the loss


class QuestionBatch(NamedTuple):
    """Prompts, and answers with their end symbol, padded on the right with -1."""

    prompt: Int[Tensor, "b l"]
    answer: Int[Tensor, "b t"]
    position: Int[Tensor, "b l"] | None = None  # of the prompts' tokens; None: 0, 1, ...


class AnsweringModule(pl.LightningModule):
    """Trains on question batches, with ``prompt_loss_weight`` on a decoder's prompts; ``schedule``: learning rate by update."""

    def __init__(
        self,
        model: Any,
        optimizer: Callable[..., torch.optim.Optimizer],
        schedule: Callable[[int], float],
        prompt_loss_weight: float,
        seed: int,
    ):
        super().__init__()
        self.model, self.optimizer_factory, self.schedule = model, optimizer, schedule
        self.prompt_loss_weight, self.seed = prompt_loss_weight, seed

    def on_train_batch_start(self, batch: QuestionBatch, batch_idx: int) -> None:
        torch.manual_seed(self.seed * 1_000_003 + self.global_step)  # a resumed run equals an uninterrupted one

    def training_step(self, batch: QuestionBatch, batch_idx: int) -> Tensor:
        is_encoder_decoder = self.model.config.is_encoder_decoder
        loss, accuracy = self.encoder_decoder_loss(batch) if is_encoder_decoder else self.decoder_loss(batch)
        if not torch.isfinite(loss):
            raise UserError(f"the loss is {loss.item()} at update {self.global_step}: lower schedule.peak")
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/answers_right", accuracy, prog_bar=True)
        return loss

    def encoder_decoder_loss(self, batch: QuestionBatch) -> tuple[Tensor, Tensor]:
        """Return the loss, and the share of answers that are predicted correctly under teacher forcing."""
        start = torch.full_like(batch.answer[:, :1], self.model.config.decoder_start_token_id)
        inputs = torch.cat([start, batch.answer[:, :-1].clamp(min=0)], 1)
        mask = (batch.prompt >= 0).long()
        logits = self.model(input_ids=batch.prompt.clamp(min=0), attention_mask=mask, decoder_input_ids=inputs).logits
        return masked_cross_entropy(logits, batch.answer), exact_answers(logits, batch.answer)

    def decoder_loss(self, batch: QuestionBatch) -> tuple[Tensor, Tensor]:
        """Return loss and share of correct answers of a decoder, whose rows are prompt and answer without a gap."""
        lengths, width = (batch.prompt >= 0).sum(1), batch.prompt.shape[1] + batch.answer.shape[1]
        joined = batch.prompt.new_full((len(batch.prompt), width), -1)
        joined[:, : batch.prompt.shape[1]] = batch.prompt
        columns = lengths[:, None] + torch.arange(batch.answer.shape[1], device=lengths.device)
        joined = joined.scatter(1, columns, batch.answer)
        inputs = {"input_ids": joined.clamp(min=0), "attention_mask": (joined >= 0).long()}
        if batch.position is not None:
            inputs["position_ids"] = extend_positions(batch.position, lengths, width)
        hidden, output = self.model.base_model(**inputs).last_hidden_state[:, :-1], self.model.get_output_embeddings()
        logits = output(hidden.gather(1, (columns - 1)[..., None].expand(-1, -1, hidden.shape[-1])))
        loss = masked_cross_entropy(logits, batch.answer)
        if self.prompt_loss_weight:
            # A share of the tokens, drawn anew at every update: the output layer is most of a small model's cost.
            prompts = joined[:, 1:].scatter(1, columns - 1, -1)
            sample = (prompts >= 0) & (torch.rand(prompts.shape, device=prompts.device) < PROMPT_SAMPLE)
            loss = loss + self.prompt_loss_weight * masked_cross_entropy(output(hidden[sample])[None], prompts[sample][None])
        return loss / (1 + self.prompt_loss_weight), exact_answers(logits, batch.answer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_scheduler_state(checkpoint)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return with_schedule(self.optimizer_factory(self.parameters(), lr=self.schedule(0)), self.schedule)


def extend_positions(position: Int[Tensor, "b l"], lengths: Int[Tensor, " b"], width: int) -> Int[Tensor, "b w"]:
    """Return the positions of prompts, continued by one per token over the answers that follow them."""
    last = position.gather(1, lengths[:, None] - 1)
    following = last + torch.arange(width, device=position.device) - (lengths[:, None] - 1)
    return torch.where(following > last, following, F.pad(position, (0, width - position.shape[1])))


def masked_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the targets that are not padding, 0 where all are."""
    total = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=-1, reduction="sum")
    return total / (target >= 0).sum().clamp(min=1)


def exact_answers(logits: Tensor, answer: Tensor) -> Tensor:
    """Return the share of rows whose answer tokens are all the most probable ones."""
    return ((logits.argmax(-1) == answer) | (answer < 0)).all(1).float().mean()
