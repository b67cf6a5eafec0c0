"""A few keys of a block that stand out (InfLLM, Xiao et al. 2024, whose choice needs later queries; here keys alone choose)."""

from __future__ import annotations

from trime.common.checks import check_number
from trime.common.types import Bool, Float, Tensor
from trime.memory.recall.base import BlockKey, mean_of


class Representatives(BlockKey):
    """The ``count`` keys that differ most from the block's mean, in each head; a query takes the best product with one."""

    def __init__(self, count: int = 4):
        check_number("count", count, at_least=1, whole=True)
        self.count = count

    def of(self, key: Float[Tensor, "n s b g d"], filled: Bool[Tensor, "n s b"]) -> Float[Tensor, "b r g n d"]:
        distance = (key - mean_of(key, filled)[:, None]).norm(dim=-1).masked_fill(~filled[..., None], -1)  # [n s b g]
        best = distance.topk(min(self.count, key.shape[1]), 1).indices
        return key.gather(1, best[..., None].expand(-1, -1, -1, -1, key.shape[-1])).permute(2, 1, 3, 0, 4)

    def scores(self, query: Float[Tensor, "b g q d"], block: Float[Tensor, "b r g n d"]) -> Float[Tensor, "b g q n"]:
        return (query[:, None] @ block.transpose(-1, -2)).amax(1)
