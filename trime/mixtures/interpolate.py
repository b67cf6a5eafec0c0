"""Linear interpolation with a fixed share for the memory (TRIME Eq. 8 and 9; continuous cache; kNN-LM)."""

from __future__ import annotations

import torch

from trime.checks import check_broadcast, check_number, check_object
from trime.types import Float, LogMass, Tensor


def interpolate(
    base: Float[Tensor, "*#s n"], memory: LogMass, share: Float[Tensor, "*#s n"] | Float[Tensor, "*#s 1"] | float
) -> Float[Tensor, "*s n"]:
    """Return log((1 - share) P + share P'), where P' is the memory's own softmax; an empty memory leaves P.

    Raises UserError for a share outside of [0, 1], or for shapes that cannot be broadcast.
    """
    check_object("memory", memory, LogMass, "LogMass(target, total)")
    if not isinstance(share, Tensor):
        check_number("share", share, at_least=0, at_most=1)
    share = torch.as_tensor(share, dtype=base.dtype, device=base.device)
    for extreme in (share.min(), share.max()) if share.numel() else ():
        check_number("share", float(extreme), at_least=0, at_most=1)
    check_broadcast(base=base, target=memory.target, total=memory.total, share=share)
    empty = memory.total.isinf()
    log_probability = memory.target - torch.where(empty, 0, memory.total)
    mixed = torch.logaddexp(base + torch.log1p(-share), log_probability + share.log())
    return torch.where(empty, base, mixed)
