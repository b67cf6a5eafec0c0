"""A pretrained model as the language model of an experiment: what names it, and its tokenizer as the vocabulary of all text."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from omegaconf import DictConfig

from trime.data.corpus import content_hash
from trime.data.vocabulary import Vocabulary
from trime.models.pretrained.tokenizer import Pieces
from trime.stages.prepare import Source
from trime.types import UserError


def is_pretrained(config: DictConfig) -> bool:
    """Whether model=pretrained."""
    return "name" in config.model


@cache
def identity(name: str) -> str:
    """What names a model: its weights, where it is a folder."""
    files = sorted(Path(name).expanduser().glob("*.safetensors"))
    return " ".join(map(content_hash, files)) or name


def source_of(config: DictConfig) -> Source:
    """The pieces of a model's own tokenizer, for every text."""
    if config.model.name is None:
        raise UserError("model=pretrained is a language model where one is named: add model.name=DIR_OR_NAME")
    pieces = Pieces(config.model.name)
    vocabulary = Vocabulary(pieces.symbols, [0] * len(pieces.symbols), pieces.start, pieces.unknown)
    return Source(f"{vocabulary.fingerprint} of a pretrained model", lambda: vocabulary, pieces)
