"""One softmax over the vocabulary and every memory (TRIME Eq. 5 and 6)."""

from __future__ import annotations

import torch

from trime.types import Float, Mass, Tensor


def joint(vocabulary: Mass, found: list[Mass]) -> Float[Tensor, "*s n"]:
    """log P(target): all masses enter one logsumexp, which always holds the vocabulary's finite one."""
    target = torch.logsumexp(stacked([vocabulary.target, *(mass.target for mass in found)]), 0)
    return target - torch.logsumexp(stacked([vocabulary.total, *(mass.total for mass in found)]), 0)


def memory_share(vocabulary: Mass, found: list[Mass]) -> Float[Tensor, "*s n"]:
    """The share of all mass that the memories hold, in [0, 1]."""
    total = torch.logsumexp(stacked([vocabulary.total, *(mass.total for mass in found)]), 0)
    return 1 - (vocabulary.total - total).exp()


def stacked(parts: list[Tensor]) -> Tensor:
    """Tensors of broadcastable shapes on a new first axis."""
    return torch.stack(torch.broadcast_tensors(*parts))
