"""Local attention with the cache of Transformer-XL: each token sees a window of the tokens before it, over segments."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trime.kernels.cpu import attend
from trime.models.layers.relative import RelativeBias, in_window
from trime.types import Bool, Float, Tensor


class Cache(NamedTuple):
    """Keys and values of the last tokens of each row, the newest last; constants."""

    key: Float[Tensor, "b h w d"]
    value: Float[Tensor, "b h w d"]
    filled: Bool[Tensor, "b w"]

    @staticmethod
    def empty(key: Float[Tensor, "b h l d"], window: int) -> Cache:
        """No tokens yet, for keys of that kind."""
        b, h, _, d = key.shape
        none = key.new_zeros(b, h, window, d)
        return Cache(none, none, torch.zeros(b, window, dtype=torch.bool, device=key.device))

    def reset(self, rows: Bool[Tensor, " b"]) -> Cache:
        """Rows without their tokens: zeros."""
        none = rows[:, None, None, None]
        return Cache(self.key.masked_fill(none, 0), self.value.masked_fill(none, 0), self.filled & ~rows[:, None])

    def pushed(self, key: Float[Tensor, "b h l d"], value: Float[Tensor, "b h l d"]) -> Cache:
        """The last tokens after a segment."""
        window = self.key.shape[2]
        pairs = ((self.key, key), (self.value, value))
        kept, held = (torch.cat([old[:, :, new.shape[2] :], new.detach()[:, :, -window:]], 2) for old, new in pairs)
        fresh = self.filled.new_ones(len(key), min(key.shape[2], window))
        return Cache(kept, held, torch.cat([self.filled[:, key.shape[2] :], fresh], 1))


class Window(NamedTuple):
    """What local attention sees: ``length`` tokens, the own one among them or (``itself`` false) not.

    ``empty_take_mass`` is the official code's quirk: empty places of the cache are zero keys, not masked ones.
    """

    length: int = 512
    itself: bool = True
    empty_take_mass: bool = False


def sliding_attention(
    query: Float[Tensor, "b h l d"],
    own: tuple[Float[Tensor, "b h l d"], Float[Tensor, "b h l d"]],
    cache: Cache,
    bias: tuple[RelativeBias, Tensor],
    window: Window,
    dropout: float = 0.0,
) -> Float[Tensor, "b h l d"]:
    """softmax(query keys + bias) values over the cache and the row itself, in blocks of the window's length.

    ``query`` carries its scale; ``bias`` is a module and the scale of its output (per head, or one).
    """
    keys, values = (torch.cat([old, new], 2) for old, new in ((cache.key, own[0]), (cache.value, own[1])))
    filled = torch.cat([cache.filled, cache.filled.new_ones(len(query), query.shape[2])], 1)
    parts = []
    for start in range(0, query.shape[2], window.length):
        reach = slice(start, start + 2 * window.length)
        seen = Seen(keys[:, :, reach], values[:, :, reach], filled[:, reach])
        parts.append(block_attention(query[:, :, start : start + window.length], seen, bias, window, dropout))
    return torch.cat(parts, 2)


class Seen(NamedTuple):
    """What a block of queries may look at: the window before it, and itself."""

    key: Float[Tensor, "b h k d"]
    value: Float[Tensor, "b h k d"]
    filled: Bool[Tensor, "b k"]


def block_attention(
    query: Float[Tensor, "b h q d"], own: Seen, bias: tuple[RelativeBias, Tensor], window: Window, dropout: float
) -> Float[Tensor, "b h q d"]:
    """One block of queries, of the window's length or less."""
    mask, nothing = band(bias, query.shape[2], own.key.shape[2], window)[None], None
    if not window.empty_take_mass and not own.filled.all():
        mask = mask.masked_fill(~own.filled[:, None, None], -torch.inf)
    if not window.itself:  # the first token of a document sees nothing
        nothing = (mask[:, :1] == -torch.inf).all(-1, keepdim=True)
        mask = mask.masked_fill(nothing, 0.0)
    mixed = attend(query, own.key, own.value, mask, dropout, scale=1.0)
    return mixed if nothing is None else mixed.masked_fill(nothing, 0.0)


def band(bias: tuple[RelativeBias, Tensor], queries: int, keys: int, window: Window) -> Float[Tensor, "h q k"]:
    """The scaled bias of every query and key, -inf outside the window: rows are one row of distances, shifted."""
    module, scale = bias
    far = window.length + queries - 1  # query i stands at window.length + i, key j at j
    distance = torch.arange(far, far - queries - keys + 1, -1, device=scale.device)
    row = (module(distance) * scale[:, None]).masked_fill(~in_window(distance, window.length, window.itself), -torch.inf)
    return row.unfold(1, keys, 1).flip(1)
