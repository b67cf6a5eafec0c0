"""init_small: creates a small model with random weights and a dataset's tokenizer, which model=pretrained then trains."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate

from trime.common.identity import Free
from trime.data.byte_pairs import train_pieces
from trime.lab.artefact import Artefact, Lab
from trime.lab.stage import Stage
from trime.models.pretrained.tokenizer import END, PADDING, save_tokenizer
from trime.stages.prepare import PreparedText

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class InitSmall(Artefact):
    """An untrained small model with a tokenizer of ``vocabulary`` byte pairs, in the transformers format."""

    kind, format = "init_small", 2

    model: dict[str, Any]
    vocabulary: int
    seed: int
    text: Free[PreparedText]  # the tokenizer learns from its lines, which need not be prepared
    lab: Free[Lab]

    def identity(self) -> Any:
        return super().identity() | self.text.text_identity()

    def build(self, folder: Path) -> None:
        documents = self.text.dataset.documents("train")
        lines = (line.decode("utf-8", "replace") for document in documents for line in document.lines)
        tokenizer = save_tokenizer(train_pieces(lines, self.vocabulary, special_tokens=[PADDING, END]), folder)
        torch.manual_seed(self.seed)
        small = instantiate(self.model, _convert_="all")
        model = small.build(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
        model.save_pretrained(folder)
        log.info(f"init_small: {sum(part.numel() for part in model.parameters()):,} parameters, {len(tokenizer):,} pieces")


INIT_SMALL = Stage("init_small", lambda graph: [graph.initial_model], of_run=False)
