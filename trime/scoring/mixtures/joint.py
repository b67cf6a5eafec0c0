"""Mixtures without a fit: one softmax over vocabulary and memories (TRIME Eq. 5, 6), and interpolation (Eq. 8, 9).

A model may learn a gate z(c) (footnote 6; the pointer-generator network, See et al. 2017), which sets the memories' share of
the softmax to sigmoid(z), whatever their mass: this is Eq. 5 with the memories' mass scaled to e^z times the vocabulary's.
"""

from __future__ import annotations

import torch

from trime.common.checks import check_broadcast, check_number, check_object
from trime.common.types import Float, LogMass, Tensor

MULTIPLIED = 8  # probabilities of a product: a power of 2
LEAST_MULTIPLIED = 1e-30  # of each of them: the product of eight that are mixed stays above the smallest double


def joint_log_prob(vocabulary: LogMass, masses: list[LogMass]) -> Float[Tensor, "*s n"]:
    """Return log P(target) by one logsumexp over all masses; that of the vocabulary is always finite.

    Raises UserError for shapes that cannot be broadcast.
    """
    for mass in (vocabulary, *masses):
        check_object("masses", mass, LogMass, "[LogMass(target, total)], a list")
    check_broadcast(vocabulary=vocabulary.target, **{f"memory {n}": mass.target for n, mass in enumerate(masses, 1)})
    whole = pool_masses([vocabulary, *apply_gate(vocabulary, masses)])
    return whole.target - whole.total


def memory_share(vocabulary: LogMass, masses: list[LogMass]) -> Float[Tensor, "*s n"]:
    """Return the memories' share of the total mass, in [0, 1]."""
    return 1 - (vocabulary.total - pool_masses([vocabulary, *apply_gate(vocabulary, masses)]).total).exp()


def apply_gate(vocabulary: LogMass, masses: list[LogMass]) -> list[LogMass]:
    """Return the masses that enter the softmax, scaled by the gate if there is one; an empty memory stays empty."""
    if vocabulary.gate is None or not masses:
        return masses
    memory = masses[0] if len(masses) == 1 else pool_masses(masses)  # pooling a single empty memory would have no gradient
    empty = memory.total.isinf()
    total = torch.where(empty, -torch.inf, vocabulary.total + vocabulary.gate)
    return [LogMass(memory.target - torch.where(empty, 0, memory.total) + total, total)]


def pool_masses(masses: list[LogMass]) -> LogMass:
    """Return the mass of several memories, whose shapes can be broadcast, as one memory."""
    columns = zip(*((mass.target, mass.total) for mass in masses), strict=True)
    return LogMass(*(torch.logsumexp(torch.stack(torch.broadcast_tensors(*column)), 0) for column in columns))


def interpolate(
    base: Float[Tensor, "*#s n"], memory: LogMass, share: Float[Tensor, "*#s n"] | Float[Tensor, "*#s 1"] | float
) -> Float[Tensor, "*s n"]:
    """Return log((1 - share) P + share P'), where P' is the memory's own softmax; an empty memory leaves P.

    A share of exactly 0 or 1 leaves one of the two, and gets no gradient.
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
    # Where a share is 0 or 1 its logarithm is infinite, and the gradient would be NaN even if the result were replaced.
    none, all_of_it = empty | (share == 0), share == 1
    inner = torch.where(none | all_of_it, 0.5, share)
    mixed = torch.logaddexp(base + torch.log1p(-inner), torch.where(empty, base, log_probability) + inner.log())
    return torch.where(none, base, torch.where(all_of_it, log_probability, mixed))


def summed_interpolations(
    base: Float[Tensor, "#s a n"], memory: LogMass, shares: tuple[float, ...]
) -> Float[Tensor, "s a t k"]:
    """Return the sums over tokens of ``interpolate`` for every base, every temperature of a memory [s t n] and every share.

    Shares lie between 0 and 1. Probabilities are multiplied, and their products have a logarithm together, which is many
    times faster than a logarithm for each.
    """
    n, sizes = base.shape[-1], max(len(base), len(memory.total))
    base, padding = base.expand(sizes, -1, -1), -n % MULTIPLIED
    probability = torch.nn.functional.pad(base.double().exp(), (0, padding), value=1.0)
    empty = memory.total.isinf()
    own = torch.where(empty, 0, (memory.target - torch.where(empty, 0, memory.total)).double().exp())
    multiplied = MULTIPLIED if bool((probability >= LEAST_MULTIPLIED).all()) else 1
    sums = probability.new_empty((*base.shape[:2], memory.target.shape[1], len(shares)))
    for t in range(memory.target.shape[1]):
        change = torch.where(empty[:, t, None], 0, own[:, t, None] - probability[..., :n])
        change = torch.nn.functional.pad(change, (0, padding))
        for k, share in enumerate(shares):
            mixed = torch.add(probability, change, alpha=share)
            for _ in range(multiplied.bit_length() - 1):
                mixed = mixed[..., : mixed.shape[-1] // 2] * mixed[..., mixed.shape[-1] // 2 :]
            sums[:, :, t, k] = mixed.log_().sum(-1)
    return sums
