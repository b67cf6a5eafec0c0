"""TRIME's objective for a training loop of one's own (Eq. 5)."""

from __future__ import annotations

import math

import torch

from trime.common.checks import (
    check_choice,
    check_device,
    check_floats,
    check_in_vocabulary,
    check_number,
    check_object,
    check_whole_numbers,
)
from trime.common.types import Contexts, Float, Int, LogMass, Tensor, TokenPosition
from trime.errors import UserError
from trime.scoring.mixtures.joint import joint_log_prob
from trime.token_memory.train.distributed import first_row
from trime.token_memory.train.in_batch import InBatch
from trime.token_memory.train.visibility import Local, Long, Visibility

REDUCTIONS = ("mean", "sum", "none")
IGNORED = -100  # targets that are neither scored nor memory, as in PyTorch's cross_entropy


def trime_loss(
    g: Float[Tensor, "b l d"],
    logits: Float[Tensor, "b l v"],
    targets: Int[Tensor, "b l"],
    *,
    visibility: Visibility | None = None,
    document: Int[Tensor, " b"] | None = None,
    start: Int[Tensor, " b"] | None = None,
    temperature: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """Return the loss in nats of each target, given the vocabulary's logits and the other contexts of the batch (Eq. 5).

    Each row of the batch is a segment. g is the representation of contexts, in the paper the input of the last feed-forward
    block; its inner products are divided by sqrt(d) and ``temperature``. ``visibility`` decides which contexts are memory:
    ``Local()`` by default, ``Long()``, ``External()``, or ``Others()``, which is ``External`` with the local memory dropped.
    ``Long`` needs the ``document`` of each row, and the position ``start`` of its first token there (rows are documents of
    their own by default). Targets of -100 are not scored and are no memory. With several processes the memory is that of all
    of them. ``reduction``: mean, sum or none (a tensor of the scored targets, row by row). Raises UserError where shapes
    disagree, targets are outside of the vocabulary, or a loss is NaN.
    """
    check_floats("g", g, 3)
    check_floats("logits", logits, 3)
    check_whole_numbers("targets", targets, 2)
    if not g.shape[:2] == logits.shape[:2] == targets.shape:
        shapes = f"g {[*g.shape]}, logits {[*logits.shape]}, targets {[*targets.shape]}"
        raise UserError(f"{shapes}: the first two axes, rows and length, must be the same")
    by_row = {name: column for name, column in (("document", document), ("start", start)) if column is not None}
    for name, column in by_row.items():
        check_whole_numbers(name, column, 1)
        if len(column) != len(targets):
            raise UserError(f"{name} has {len(column)} numbers for {len(targets)} rows: there must be one for each")
    check_device(g=g, logits=logits, targets=targets, **by_row)
    check_in_vocabulary("targets", targets[targets != IGNORED], logits.shape[2])
    check_number("temperature", temperature, above=0)
    check_choice("reduction", reduction, REDUCTIONS)
    if visibility is not None:
        check_object("visibility", visibility, Visibility, "Local()")
    if isinstance(visibility, Long) and start is None and document is not None and len(document.unique()) < len(document):
        raise UserError("Long() needs start where rows are segments of one document: the position of each row's first token")
    targets = targets.long()
    rows, length = targets.shape
    row = first_row(rows, g.device) + torch.arange(rows, device=g.device)
    document, start = row if document is None else document, torch.zeros_like(row) if start is None else start
    position = (start[:, None] + torch.arange(length, device=g.device)).flatten()
    positions = TokenPosition(document.repeat_interleave(length), row.repeat_interleave(length), position)
    scored = (targets != IGNORED).flatten()
    if reduction == "mean" and not scored.any():
        raise UserError(f"every target is {IGNORED}: a batch without targets has no mean loss")
    contexts = Contexts(g.flatten(0, 1), targets.flatten(), positions).take(scored)
    scores = logits.flatten(0, 1)[scored].float()
    vocabulary = LogMass(scores.gather(1, contexts.token[:, None]).squeeze(1), scores.logsumexp(1))
    divisor = contexts.g.new_tensor([math.sqrt(g.shape[-1])], dtype=torch.promote_types(g.dtype, torch.float32))
    memory = InBatch(visibility or Local(), temperature=temperature).mass(contexts, contexts, divisor)
    losses = -joint_log_prob(vocabulary, [LogMass(memory.target[0], memory.total[0])])
    # The kernels pass over entries of NaN, whose loss would look sound.
    if losses.isnan().any() or not contexts.g.isfinite().all():
        raise UserError("the loss is NaN: g or logits hold NaN or infinity, or g is so large that inner products overflow")
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()
