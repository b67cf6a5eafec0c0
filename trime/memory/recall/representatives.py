"""A few keys of a block that stand out (InfLLM, Xiao et al. 2024, whose choice needs later queries; here keys alone choose)."""

from __future__ import annotations

from trime.common.types import Bool, Float, Tensor
from trime.memory.recall.base import BlockKey


class Representatives(BlockKey):
    """The ``count`` keys that differ most from the block's mean, in each head; a query takes the best product with one."""

    def __init__(self, count: int = 4):
        self.count = count

    def of(self, key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "n b r g d"]:
        weight = filled[..., None, None].to(key.dtype)
        mean = (key * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1)
        distance = (key - mean).norm(dim=-1).masked_fill(~filled[..., None], -1)  # [n s b g]
        best = distance.topk(min(self.count, key.shape[1]), 1).indices
        return key.gather(1, best[..., None].expand(-1, -1, -1, -1, key.shape[-1])).transpose(1, 2)

    def scores(self, query: Float[Tensor, "b g q d"], block: Float[Tensor, "b g n r d"]) -> Float[Tensor, "b g q n"]:
        products = query @ block.flatten(2, 3).transpose(-1, -2)  # [b g q n·r]
        return products.unflatten(-1, block.shape[2:4]).amax(-1)
