"""The kernels agree with the definition: every visibility, both directions of a tile, scores far apart."""

from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers import laws
from tests.helpers.laws import VISIBILITIES, direct_mass
from trime.common.types import Contexts, LogMass, Tensor, TokenPosition
from trime.token_memory.train.objective import blockwise
from trime.token_memory.train.objective.blockwise import blockwise_mass
from trime.token_memory.train.visibility import Everything, Extent, External, Visibility


def contexts(scale: float = 1.0) -> Contexts:
    """Return contexts of consecutive segments, in float32."""
    given = laws.contexts(1, [(0, 0, 40), (0, 40, 40), (0, 80, 23), (1, 0, 40), (1, 40, 7), (2, 0, 1)], 8)
    return given._replace(g=scale * given.g.float())


def results(query: Contexts, memory: Contexts, visibility: Any, divisor: Tensor, block: int) -> list[list[Tensor]]:
    """Return masses and the gradients of a weighted sum of them: by blocks in float32, directly in float64."""
    torch.manual_seed(2)
    weights, pairs = torch.randn(2, len(divisor), len(query.token)), []
    for dtype in (torch.float32, torch.float64):
        g = query.g.to(dtype, copy=True).requires_grad_()
        queries = query._replace(g=g)
        entries = queries if memory is query else memory._replace(g=memory.g.to(dtype, copy=True).requires_grad_())
        if dtype == torch.float32:
            mass = blockwise_mass(queries, entries, visibility, divisor, block)
        else:
            mass = direct_mass(queries, entries, visibility, divisor.double())
        parts = [torch.where(part.isinf(), 0, part) for part in (mass.target, mass.total)]
        (torch.stack(parts) * weights).sum().backward()
        pairs.append([mass.target, mass.total, g.grad, entries.g.grad])
    return pairs


def assert_close(pairs: list[list[Tensor]], tolerance: float = 1e-5) -> None:
    """Check that both results agree, relative to the largest value."""
    for ours, exact in zip(*pairs, strict=True):
        assert torch.equal(ours.isinf(), exact.isinf())
        finite = ~exact.isinf()
        if finite.any():  # where nothing is visible, no mass is finite
            assert (ours[finite] - exact[finite]).abs().max() <= tolerance * exact[finite].abs().max()


class Calls(NamedTuple):
    """For each tile, whether the kernels computed it."""

    device: str
    done: list[bool]

    def recorded(self, function: Any) -> Any:
        """Return a function whose results are recorded."""

        def wrapper(*arguments: Any) -> Any:
            result = function(*arguments)
            self.done.append(result is not None and result is not False)
            return result

        return wrapper


@pytest.fixture(params=["cpu", "cuda"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Record the calls of the CPU's kernels, and of CUDA's in Triton's interpreter."""
    record = Calls(request.param, [])
    if request.param == "cuda":
        pytest.importorskip("triton", reason="pip install triton (it comes with torch for CUDA)")
    module = importlib.import_module(f"trime.token_memory.train.objective.blockwise_{request.param}")
    monkeypatch.setattr(blockwise, "kernels_for", lambda product: module if product.dtype == torch.float32 else None)
    for name in ("add_masses", "score_gradients"):
        monkeypatch.setattr(module, name, record.recorded(getattr(module, name)))
    return record


@pytest.mark.parametrize("visibility", VISIBILITIES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("block", [16, 1024])
@pytest.mark.parametrize("symmetric", [True, False])
def test_masses_and_gradients(visibility: Visibility, block: int, symmetric: bool, calls: Calls) -> None:
    query = contexts()
    memory = query if symmetric else query.take(torch.randperm(len(query.token))[:90])
    assert_close(results(query, memory, visibility, torch.tensor([1.3]), block))
    assert all(calls.done)


def test_in_any_order_of_contexts(calls: Calls) -> None:
    """Columns may come after their rows: a tile in which only the columns see something is transposed."""
    query = contexts()
    query = query.take(torch.arange(len(query.token)).flip(0))
    for visibility in VISIBILITIES:
        assert_close(results(query, query, visibility, torch.tensor([1.3]), 16))


def test_several_temperatures(calls: Calls) -> None:
    """Kernels compute masses, one temperature after the other; the definition computes gradients of several."""
    query = contexts()
    assert_close(results(query, query, External(), torch.tensor([0.5, 1.0, 4.0]), 64))
    assert any(calls.done) and not all(calls.done)


@pytest.mark.parametrize("symmetric", [True, False])
def test_scores_far_apart(symmetric: bool, calls: Calls) -> None:
    """With a thousand nats between scores, the definition computes what would underflow; float32 has seven digits."""
    query = contexts(scale=12.0)
    memory = query if symmetric else query.take(slice(30, None))
    assert_close(results(query, memory, External(), torch.tensor([1.0]), 64), 1e3 * 2**-22)
    assert all(calls.done) == (calls.device == "cuda"), "on CUDA each row has its own maximum"


def test_a_target_far_below_the_rest(calls: Calls) -> None:
    """The only memory of a query's target scores 90 nats less than the others."""
    g = torch.zeros(4, 2)
    g[0, 0] = g[2, 0] = g[3, 0] = 9.5
    g[1, 0] = -0.0001
    memory = Contexts(g, torch.tensor([3, 5, 4, 4]), TokenPosition(*torch.zeros(3, 4).long()))
    query = Contexts(g[:1], torch.tensor([5]), TokenPosition(*torch.zeros(3, 1).long()))
    assert_close(results(query, memory, Everything(), torch.tensor([1.0]), 64))


def test_what_is_not_a_number_stays_so(calls: Calls) -> None:
    query = contexts()
    query.g[7, 3] = math.nan
    mass = blockwise_mass(query, query, External(), torch.tensor([1.0]))
    assert mass.total.isnan().any()


def test_nothing_to_ask_or_to_see() -> None:
    query, nothing = contexts(), contexts().take(slice(0, 0))
    divisor = torch.tensor([1.0])
    mass: LogMass = blockwise_mass(query, nothing, External(), divisor)
    assert mass.total.isinf().all() and blockwise_mass(nothing, query, External(), divisor).total.shape == (1, 0)


@pytest.mark.parametrize("visibility", VISIBILITIES, ids=lambda v: type(v).__name__)
def test_all_is_shown_only_where_every_pair_is_seen(visibility: Visibility) -> None:
    """And no pair is visible where a tile is ruled out."""
    place, shown = contexts().positions, False
    parts = [slice(low, low + size) for size in (1, 5, 40) for low in range(0, len(place.segment), 7)]
    extents = [Extent(*((int(c[part].min()), int(c[part].max())) for c in place)) for part in parts]
    for row, query in zip(parts, extents, strict=True):
        for column, memory in zip(parts, extents, strict=True):
            visible = visibility.sees(place.take(row), place.take(column))
            if visibility.shows_all(query, memory):
                shown = True
                assert visible.all()
            if visibility.rules_out(query, memory):
                assert not visible.any()
    assert shown == visibility.sees(place, place).any()
