"""One softmax over the vocabulary and every memory (TRIME Eq. 5 and 6); or, where the model has one, a learned gate.

The gate z(c) (footnote 6; the pointer-generator network, See et al. 2017) sets the memories' share to sigmoid(z), whatever
their mass: that is Eq. 5 with their mass scaled so that their total is e^z times the vocabulary's.
"""

from __future__ import annotations

import torch

from trime.types import Float, Mass, Tensor


def joint(vocabulary: Mass, masses: list[Mass]) -> Float[Tensor, "*s n"]:
    """log P(target): all masses enter one logsumexp, which always holds the vocabulary's finite one."""
    masses = apply_gate(vocabulary, masses)
    target = torch.logsumexp(stack_broadcast([vocabulary.target, *(mass.target for mass in masses)]), 0)
    return target - torch.logsumexp(stack_broadcast([vocabulary.total, *(mass.total for mass in masses)]), 0)


def memory_share(vocabulary: Mass, masses: list[Mass]) -> Float[Tensor, "*s n"]:
    """The share of all mass that the memories hold, in [0, 1]."""
    masses = apply_gate(vocabulary, masses)
    total = torch.logsumexp(stack_broadcast([vocabulary.total, *(mass.total for mass in masses)]), 0)
    return 1 - (vocabulary.total - total).exp()


def apply_gate(vocabulary: Mass, masses: list[Mass]) -> list[Mass]:
    """The memories as they enter the softmax; an empty one stays empty."""
    if vocabulary.gate is None or not masses:
        return masses
    memory = masses[0] if len(masses) == 1 else union(masses)  # a union of one has no gradient where it is empty
    empty = memory.total.isinf()
    total = torch.where(empty, -torch.inf, vocabulary.total + vocabulary.gate)
    return [Mass(memory.target - torch.where(empty, 0, memory.total) + total, total)]


def union(masses: list[Mass]) -> Mass:
    """Several memories as one."""
    return Mass(
        torch.logsumexp(stack_broadcast([mass.target for mass in masses]), 0),
        torch.logsumexp(stack_broadcast([mass.total for mass in masses]), 0),
    )


def stack_broadcast(parts: list[Tensor]) -> Tensor:
    """Tensors of broadcastable shapes on a new first axis."""
    return torch.stack(torch.broadcast_tensors(*parts))
