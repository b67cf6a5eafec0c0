"""init_small: creates a small model with random weights and a dataset's tokenizer, which model=pretrained then trains."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from trime.data.byte_pairs import train_pieces
from trime.lab.artefact import ConfiguredArtefact
from trime.lab.stage import Stage
from trime.models.pretrained.tokenizer import END, PADDING, save_tokenizer
from trime.stages.prepare import PreparedText

log = logging.getLogger(__name__)


class InitSmall(ConfiguredArtefact):
    """An untrained ``small.model`` with a tokenizer of ``small.vocabulary`` byte pairs, in the transformers format."""

    kind, depends_on = "init_small", ("small.model", "small.vocabulary", "seed")

    def __init__(self, config: DictConfig, text: PreparedText):
        super().__init__(config)
        self.text = text

    def settings(self) -> Any:
        return super().settings() | self.text.text_identity()

    def build(self, folder: Path) -> None:
        documents = self.text.dataset.documents("train")
        lines = (line.decode("utf-8", "replace") for document in documents for line in document.lines)
        tokenizer = save_tokenizer(train_pieces(lines, self.config.small.vocabulary, special_tokens=[PADDING, END]), folder)
        torch.manual_seed(self.config.seed)
        small = instantiate(self.config.small.model, _convert_="all")
        model = small.build(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
        model.save_pretrained(folder)
        log.info(f"init_small: {sum(part.numel() for part in model.parameters()):,} parameters, {len(tokenizer):,} pieces")


INIT_SMALL = Stage("init_small", lambda graph: [InitSmall(graph.config, graph.corpus)], of_run=False)
