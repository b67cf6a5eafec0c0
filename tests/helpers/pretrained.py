"""Small models in the transformers format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trime.common.pretrained import load_pretrained
from trime.kv.answering import DecoderAnswerer, ReadingConfig
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.eviction.base import EvictionPolicy
from trime.kv.rope import RopeDecoder
from trime.models.pretrained.tokenizer import train_word_level

TEXT = ["def wait ( self , timeout ) : return self . lock", "class Lock : pass", "import threading"]


SIZES = {"max_position_embeddings": 128, "hidden_size": 16, "intermediate_size": 32}
SIZES |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)


def save_model(kind: str, folder: Path, **sizes: Any) -> Path:
    """Save a decoder with random weights and a tokenizer in the transformers format, and return the folder.

    ``sizes`` take the place of those of ``SIZES``.
    """
    import transformers

    torch.manual_seed(0)
    words = len(train_word_level(TEXT, 40, folder))
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=words + 3, bos_token_id=None, eos_token_id=1, pad_token_id=0, **SIZES | sizes
    )
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


def decoder_answerer(folder: Path, policy: EvictionPolicy, size: int, chunk: int, **reading: Any) -> DecoderAnswerer:
    """Return an answerer with a memory for each layer of a saved model, which has no sliding windows."""
    family = RopeDecoder(load_pretrained(str(folder)), "none")
    memories = [Attendre(BoundedMemory(size, policy), 0, None, True) for _ in family.layers]
    return DecoderAnswerer(family, ReadingConfig(memories, chunk, **reading))
