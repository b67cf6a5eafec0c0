"""One softmax over the vocabulary and every memory (TRIME Eq. 5 and 6), or a learned gate where the model has one.

The gate z(c) (footnote 6; the pointer-generator network, See et al. 2017) sets the memories' share to sigmoid(z), whatever
their mass: this is Eq. 5 with the memories' mass scaled to a total of e^z times the vocabulary's.
"""

from __future__ import annotations

import torch

from trime.checks import check_broadcast, check_object
from trime.types import Float, LogMass, Tensor


def joint_log_prob(vocabulary: LogMass, masses: list[LogMass]) -> Float[Tensor, "*s n"]:
    """Return log P(target) by one logsumexp over all masses, of which the vocabulary's is always finite.

    Raises UserError for shapes that cannot be broadcast.
    """
    for mass in (vocabulary, *masses):
        check_object("masses", mass, LogMass, "[LogMass(target, total)], a list")
    check_broadcast(vocabulary=vocabulary.target, **{f"memory {n}": mass.target for n, mass in enumerate(masses, 1)})
    masses = apply_gate(vocabulary, masses)
    target = torch.logsumexp(stack_broadcast([vocabulary.target, *(mass.target for mass in masses)]), 0)
    return target - torch.logsumexp(stack_broadcast([vocabulary.total, *(mass.total for mass in masses)]), 0)


def memory_share(vocabulary: LogMass, masses: list[LogMass]) -> Float[Tensor, "*s n"]:
    """Return the memories' share of the total mass, in [0, 1]."""
    masses = apply_gate(vocabulary, masses)
    total = torch.logsumexp(stack_broadcast([vocabulary.total, *(mass.total for mass in masses)]), 0)
    return 1 - (vocabulary.total - total).exp()


def apply_gate(vocabulary: LogMass, masses: list[LogMass]) -> list[LogMass]:
    """Return the masses that enter the softmax, scaled by the gate if there is one; an empty memory stays empty."""
    if vocabulary.gate is None or not masses:
        return masses
    memory = masses[0] if len(masses) == 1 else pool_masses(masses)  # the union of a single empty memory would have no gradient
    empty = memory.total.isinf()
    total = torch.where(empty, -torch.inf, vocabulary.total + vocabulary.gate)
    return [LogMass(memory.target - torch.where(empty, 0, memory.total) + total, total)]


def pool_masses(masses: list[LogMass]) -> LogMass:
    """Return the mass of several memories as one memory."""
    return LogMass(
        torch.logsumexp(stack_broadcast([mass.target for mass in masses]), 0),
        torch.logsumexp(stack_broadcast([mass.total for mass in masses]), 0),
    )


def stack_broadcast(parts: list[Tensor]) -> Tensor:
    """Stack tensors of broadcastable shapes along a new first axis."""
    return torch.stack(torch.broadcast_tensors(*parts))
