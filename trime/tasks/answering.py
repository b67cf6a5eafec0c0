"""The LightningModule that teaches a model in the transformers format to answer questions over contexts.

A decoder learns the answer, and with a share of the loss the prompt, token by token; an encoder-decoder the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from trime.types import Int, Tensor, UserError

SAMPLED = 0.25


class Asked(NamedTuple):
    """Prompts and answers with their end, padded on the right with -1."""

    prompt: Int[Tensor, "b l"]
    answer: Int[Tensor, "b t"]
    position: Int[Tensor, "b l"] | None = None  # of prompts' tokens; None: 0, 1, ...


class Answering(pl.LightningModule):
    """``schedule``: learning rate by update; ``prompt_share``: what a decoder's prompts count beside its answers.

    Of the prompts' tokens ``SAMPLED`` are drawn anew in every update: the output layer is most of a small model's work.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Callable[..., torch.optim.Optimizer],
        schedule: Callable[[int], float],
        prompt_share: float,
        seed: int,
    ):
        super().__init__()
        self.model, self.optimizer_factory, self.schedule = model, optimizer, schedule
        self.prompt_share, self.seed = prompt_share, seed

    def on_train_batch_start(self, batch: Asked, batch_idx: int) -> None:
        """Seeds the update and sets its learning rate, so that a resumed run is the same run."""
        torch.manual_seed(self.seed * 1_000_003 + self.global_step)
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = self.schedule(self.global_step)

    def training_step(self, batch: Asked, batch_idx: int) -> Tensor:
        loss, right = self.of_encdec(batch) if self.model.config.is_encoder_decoder else self.of_decoder(batch)
        if not torch.isfinite(loss):
            raise UserError(f"the loss is {loss.item()} at update {self.global_step}: lower schedule.peak")
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/answers_right", right, prog_bar=True)
        return loss

    def of_encdec(self, batch: Asked) -> tuple[Tensor, Tensor]:
        """Loss, and the share of answers that are right with their past given."""
        start = torch.full_like(batch.answer[:, :1], self.model.config.decoder_start_token_id)
        given = torch.cat([start, batch.answer[:, :-1].clamp(min=0)], 1)
        there = (batch.prompt >= 0).long()
        logits = self.model(input_ids=batch.prompt.clamp(min=0), attention_mask=there, decoder_input_ids=given).logits
        return crossed(logits, batch.answer), right(logits, batch.answer)

    def of_decoder(self, batch: Asked) -> tuple[Tensor, Tensor]:
        """The same; rows are prompt and answer without a gap."""
        lengths, width = (batch.prompt >= 0).sum(1), batch.prompt.shape[1] + batch.answer.shape[1]
        joined = batch.prompt.new_full((len(batch.prompt), width), -1)
        joined[:, : batch.prompt.shape[1]] = batch.prompt
        places = lengths[:, None] + torch.arange(batch.answer.shape[1], device=lengths.device)
        joined = joined.scatter(1, places, batch.answer)
        given = {"input_ids": joined.clamp(min=0), "attention_mask": (joined >= 0).long()}
        if batch.position is not None:
            given["position_ids"] = placed(batch.position, lengths, width)
        hidden, output = self.model.base_model(**given).last_hidden_state[:, :-1], self.model.get_output_embeddings()
        told = output(hidden.gather(1, (places - 1)[..., None].expand(-1, -1, hidden.shape[-1])))
        loss = crossed(told, batch.answer)
        if self.prompt_share:
            prompts = joined[:, 1:].scatter(1, places - 1, -1)
            drawn = (prompts >= 0) & (torch.rand(prompts.shape, device=prompts.device) < SAMPLED)
            loss = loss + self.prompt_share * crossed(output(hidden[drawn])[None], prompts[drawn][None])
        return loss / (1 + self.prompt_share), right(told, batch.answer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_factory(self.parameters(), lr=self.schedule(0))


def placed(position: Int[Tensor, "b l"], lengths: Int[Tensor, " b"], width: int) -> Int[Tensor, "b w"]:
    """Positions of prompts and of the answers that follow them, one after the other."""
    last = position.gather(1, lengths[:, None] - 1)
    behind = last + torch.arange(width, device=position.device) - (lengths[:, None] - 1)
    return torch.where(behind > last, behind, F.pad(position, (0, width - position.shape[1])))


def crossed(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of the targets that are there, 0 where there are none."""
    total = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=-1, reduction="sum")
    return total / (target >= 0).sum().clamp(min=1)


def right(logits: Tensor, answer: Tensor) -> Tensor:
    """The share of rows all of whose tokens are the likeliest."""
    return ((logits.argmax(-1) == answer) | (answer < 0)).all(1).float().mean()
