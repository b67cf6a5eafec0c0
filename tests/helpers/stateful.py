"""Reading a text with a backbone that carries a state from segment to segment."""

from __future__ import annotations

import torch

from trime.models.backbones.stateful import StatefulBackbone


def read(backbone: StatefulBackbone, tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Return f of a text that is read in segments of ``size`` tokens."""
    state, outputs = None, []
    for part in tokens.split(size, dim=1):
        encoding, state = backbone(part, state, None)
        outputs.append(encoding.f)
    return torch.cat(outputs, 1)
