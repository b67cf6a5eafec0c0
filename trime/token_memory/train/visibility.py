"""Visibility of memory entries to queries, as pure functions of their positions (TRIME Fig. 2, Eq. 2-4).

Each visibility also says which tiles contain no visible pair, so that they are skipped, and in which tiles all pairs are
visible, so that they need no mask.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from trime.common.types import Bool, Int, Tensor, TokenPosition


class Extent(NamedTuple):
    """The smallest and largest document, segment and position in a tile."""

    document: tuple[int, int]
    segment: tuple[int, int]
    position: tuple[int, int]


@runtime_checkable
class Visibility(Protocol):
    """A rule for the entries that queries see; ``rules_out`` and ``shows_all`` may be false of any tile that needs a mask."""

    def sees(self, query: TokenPosition, memory: TokenPosition) -> Bool[Tensor, "n m"]:
        """Return the mask of entries that each query sees."""

    def rules_out(self, query: Extent, memory: Extent) -> bool:
        """Return true if surely no pair of a tile is visible."""

    def shows_all(self, query: Extent, memory: Extent) -> bool:
        """Return true if surely all pairs of a tile are visible."""


def disjoint(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return true if two ranges have no value in common."""
    return one[1] < other[0] or other[1] < one[0]


def same_value(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return true if two ranges are the same single value."""
    return one == other and one[0] == one[1]


def same(one: Int[Tensor, " n"], other: Int[Tensor, " m"]) -> Bool[Tensor, "n m"]:
    return one[:, None] == other[None, :]


def earlier(query: TokenPosition, memory: TokenPosition) -> Bool[Tensor, "n m"]:
    return memory.position[None, :] < query.position[:, None]


class Local:
    """Preceding contexts of the same segment (Eq. 2)."""

    def sees(self, query: TokenPosition, memory: TokenPosition) -> Bool[Tensor, "n m"]:
        return same(query.segment, memory.segment) & earlier(query, memory)

    def rules_out(self, query: Extent, memory: Extent) -> bool:
        return disjoint(query.segment, memory.segment) or query.position[1] <= memory.position[0]

    def shows_all(self, query: Extent, memory: Extent) -> bool:
        return same_value(query.segment, memory.segment) and memory.position[1] < query.position[0]


class Long:
    """Preceding contexts of the same document, in any segment (Eq. 3 with Eq. 2)."""

    def sees(self, query: TokenPosition, memory: TokenPosition) -> Bool[Tensor, "n m"]:
        return same(query.document, memory.document) & earlier(query, memory)

    def rules_out(self, query: Extent, memory: Extent) -> bool:
        return disjoint(query.document, memory.document) or query.position[1] <= memory.position[0]

    def shows_all(self, query: Extent, memory: Extent) -> bool:
        return same_value(query.document, memory.document) and memory.position[1] < query.position[0]


class Previous:
    """Preceding contexts of the same document, in the same segment and in the one before it (TRIME Appendix E)."""

    def sees(self, query: TokenPosition, memory: TokenPosition) -> Bool[Tensor, "n m"]:
        near = query.segment[:, None] - memory.segment[None, :] <= 1
        return same(query.document, memory.document) & earlier(query, memory) & near

    def rules_out(self, query: Extent, memory: Extent) -> bool:
        far = query.segment[0] - memory.segment[1] > 1
        return far or disjoint(query.document, memory.document) or query.position[1] <= memory.position[0]

    def shows_all(self, query: Extent, memory: Extent) -> bool:
        near = query.segment[1] - memory.segment[0] <= 1
        return near and same_value(query.document, memory.document) and memory.position[1] < query.position[0]


class Others:
    """All contexts of other segments, earlier or later: section 4.3 with the local memory dropped."""

    def sees(self, query: TokenPosition, memory: TokenPosition) -> Bool[Tensor, "n m"]:
        return ~same(query.segment, memory.segment)

    def rules_out(self, query: Extent, memory: Extent) -> bool:
        return same_value(query.segment, memory.segment)

    def shows_all(self, query: Extent, memory: Extent) -> bool:
        return disjoint(query.segment, memory.segment)


class External:
    """All contexts of other segments, and the preceding ones of the same segment (section 4.3)."""

    def sees(self, query: TokenPosition, memory: TokenPosition) -> Bool[Tensor, "n m"]:
        return ~same(query.segment, memory.segment) | earlier(query, memory)

    def rules_out(self, query: Extent, memory: Extent) -> bool:
        return same_value(query.segment, memory.segment) and query.position[1] <= memory.position[0]

    def shows_all(self, query: Extent, memory: Extent) -> bool:
        return disjoint(query.segment, memory.segment) or memory.position[1] < query.position[0]


class Everything:
    """Every entry, as in a memory that holds only earlier windows."""

    def sees(self, query: TokenPosition, memory: TokenPosition) -> Bool[Tensor, "n m"]:
        return query.segment.new_ones(1, 1).bool().expand(len(query.segment), len(memory.segment))

    def rules_out(self, query: Extent, memory: Extent) -> bool:
        return False

    def shows_all(self, query: Extent, memory: Extent) -> bool:
        return True


class Nothing:
    """No entry."""

    def sees(self, query: TokenPosition, memory: TokenPosition) -> Bool[Tensor, "n m"]:
        return query.segment.new_zeros(1, 1).bool().expand(len(query.segment), len(memory.segment))

    def rules_out(self, query: Extent, memory: Extent) -> bool:
        return True

    def shows_all(self, query: Extent, memory: Extent) -> bool:
        return False


class SameDocument:
    """Every entry of the query's document, as in a memory of earlier windows that does not cross documents."""

    def sees(self, query: TokenPosition, memory: TokenPosition) -> Bool[Tensor, "n m"]:
        return same(query.document, memory.document)

    def rules_out(self, query: Extent, memory: Extent) -> bool:
        return disjoint(query.document, memory.document)

    def shows_all(self, query: Extent, memory: Extent) -> bool:
        return same_value(query.document, memory.document)
