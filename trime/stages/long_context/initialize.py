"""initialize: creates a small model with random weights and a dataset's tokenizer, which model=pretrained then trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate

from trime.io import plain
from trime.models.pretrained.tokenizer import train_byte_pairs
from trime.pipeline.artefact import Artefact
from trime.stages.prepare import Prepare


class Initialize(Artefact):
    """An untrained ``taught.model`` with a tokenizer of ``taught.vocabulary`` byte pairs, in the transformers format."""

    kind, stage = "initialize", "initialize"

    def settings(self) -> Any:
        text = Prepare(self.config, self.config.dataset).dataset.fingerprint()
        taught = self.config.taught
        return {"model": plain(taught.model), "vocabulary": taught.vocabulary, "text": text, "seed": self.config.seed}

    def build(self, folder: Path) -> None:
        documents = Prepare(self.config, self.config.dataset).dataset.documents("train")
        lines = (line.decode("utf-8", "replace") for document in documents for line in document.lines)
        tokenizer = train_byte_pairs(lines, self.config.taught.vocabulary, folder)
        torch.manual_seed(self.config.seed)
        small = instantiate(self.config.taught.model, _convert_="all")
        model = small.build(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
        model.save_pretrained(folder)
        print(f"initialize: {sum(part.numel() for part in model.parameters()):,} parameters, {len(tokenizer):,} pieces")
