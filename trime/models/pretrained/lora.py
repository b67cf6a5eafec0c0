"""Low-rank updates of a pretrained model's linear layers (LoRA, Hu et al. 2022), by peft; only they are trained."""

from __future__ import annotations

from typing import Any

from trime.errors import UserError, install_command

ALL = "all-linear"


def add_lora(model: Any, rank: int, alpha: int, dropout: float = 0.0) -> Any:
    """Add updates to every linear layer but the output's, in place, freeze all other weights, and return peft's model."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UserError(f"model.lora needs the package peft: {install_command('pretrained')}") from None
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=ALL))
