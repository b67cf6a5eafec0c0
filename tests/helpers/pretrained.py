"""Small models in the transformers format."""

from __future__ import annotations

from pathlib import Path

import torch

from trime.models.pretrained.tokenizer import train_word_level

TEXT = ["def wait ( self , timeout ) : return self . lock", "class Lock : pass", "import threading"]


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def save_model(kind: str, folder: Path) -> Path:
    """Save a decoder with random weights and a tokenizer in the transformers format, and return the folder."""
    import transformers

    torch.manual_seed(0)
    words = len(train_word_level(TEXT, 40, folder))
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=words + 3, max_position_embeddings=128, bos_token_id=None, eos_token_id=1, pad_token_id=0, **SIZES
    )
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder
