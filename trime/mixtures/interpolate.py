"""Linear interpolation with a fixed share for the memory (TRIME Eq. 8 and 9; continuous cache; kNN-LM)."""

from __future__ import annotations

import torch

from trime.types import Float, Mass, Tensor


def interpolate(
    base: Float[Tensor, "*#s n"], memory: Mass, share: Float[Tensor, "*#s n"] | Float[Tensor, "*#s 1"] | float
) -> Float[Tensor, "*s n"]:
    """Return log((1 - share) P + share P'), where P' is the memory's own softmax; an empty memory leaves P."""
    share = torch.as_tensor(share, dtype=base.dtype, device=base.device)
    empty = memory.total.isinf()
    log_probability = memory.target - torch.where(empty, 0, memory.total)
    mixed = torch.logaddexp(base + torch.log1p(-share), log_probability + share.log())
    return torch.where(empty, base, mixed)
