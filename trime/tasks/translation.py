"""The LightningModule for translation: as for language models, with label smoothing where there is no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from trime.tasks.language_model import LanguageModel
from trime.types import Batch, Tensor


class TranslationModule(LanguageModel):
    """Trains translation; ``smoothing`` is the label smoothing of the plain training loss (Eq. 5 has none, as published)."""

    def __init__(self, *arguments: Any, smoothing: float = 0.0):
        super().__init__(*arguments)
        self.smoothing = smoothing

    def losses(self, batch: Batch, draw: float | None, plain: bool) -> tuple[Tensor, Tensor]:
        """Return the loss of each target piece in nats, and the memory's share of the mass."""
        if not (self.training and self.smoothing and (self.memory is None or plain)):
            return super().losses(batch, draw, plain)
        f = self.reader.encode(batch).f[batch.scored]
        logits = F.linear(f, self.network.head.weight).float()  # type: ignore[arg-type]
        losses = F.cross_entropy(logits, batch.targets[batch.scored], reduction="none", label_smoothing=self.smoothing)
        return losses, torch.zeros_like(losses)
