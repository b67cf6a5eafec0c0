"""The paper's equations and the design's equivalences, in float64, against loops written from the text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.conftest import composed
from tests.helpers.laws import ROWS, VISIBILITIES, WORDS, contexts, direct_mass, eq5
from trime.common.types import Contexts, LogMass
from trime.data.batching.policies import generator, greedy_chain
from trime.scoring.mixtures.joint import interpolate, joint_log_prob, memory_share, pool_masses
from trime.scoring.rows import parse_row
from trime.token_memory.search.search import ExactSearch
from trime.token_memory.similarity import similarity
from trime.token_memory.test.evicting import FifoTokenMemory
from trime.token_memory.train.in_batch import Drawn, InBatch, local_draw
from trime.token_memory.train.objective.blockwise import blockwise_mass
from trime.token_memory.train.visibility import Everything, External, Local, Long, Others, SameDocument


def plain_mass(logits: Tensor, token: Tensor) -> LogMass:
    return LogMass(logits.gather(1, token[:, None]).squeeze(1), logits.logsumexp(1))


@pytest.mark.parametrize("visibility", VISIBILITIES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("block", [4, 512])
@pytest.mark.parametrize("tau", [1.0, 1.3])
def test_eq_5_and_6(visibility: object, block: int, tau: float) -> None:
    batch = contexts(1, ROWS)
    logits = torch.randn(len(batch.token), WORDS, dtype=torch.float64)
    divisor = math.sqrt(6) * tau
    expected = eq5(logits, batch, batch, visibility, divisor)
    for word in range(WORDS):  # each word as the target, so that all of the distribution is compared
        query = batch._replace(token=torch.full_like(batch.token, word))
        found = blockwise_mass(query, batch, visibility, torch.tensor([divisor], dtype=torch.float64), block)
        result = joint_log_prob(plain_mass(logits, query.token), [LogMass(found.target[0], found.total[0])])
        assert (result.exp() - expected[:, word]).abs().max() < 1e-12


def test_several_memories_share_one_softmax() -> None:
    """Eq. 7: the union of memories is the memory that holds the entries of all."""
    first, second = contexts(2, ROWS[:2]), contexts(3, ROWS[2:])
    query = contexts(4, [(5, 0, 9)])
    divisor = torch.tensor([1.7, 0.4], dtype=torch.float64)
    parts = [blockwise_mass(query, memory, Everything(), divisor) for memory in (first, second)]
    whole = blockwise_mass(query, Contexts.concat([first, second]), Everything(), divisor)
    assert torch.allclose(pool_masses(parts).target, whole.target)
    assert torch.allclose(pool_masses(parts).total, whole.total)
    logits = torch.randn(9, WORDS, dtype=torch.float64)
    vocabulary = plain_mass(logits, query.token)
    assert torch.allclose(joint_log_prob(vocabulary, parts), joint_log_prob(vocabulary, [whole]))


def test_eq_8_and_9() -> None:
    memory, query = contexts(5, ROWS), contexts(6, [(9, 0, 4)])
    base = torch.randn(4, WORDS, dtype=torch.float64).log_softmax(1)
    tau, share = 0.8, 0.3
    for word in range(WORDS):
        asked = query._replace(token=torch.full_like(query.token, word))
        found = blockwise_mass(asked, memory, Everything(), torch.tensor([tau * math.sqrt(6)], dtype=torch.float64))
        mixed = interpolate(base[:, word], LogMass(found.target[0], found.total[0]), share)
        for i in range(4):
            weights = [math.exp(float(query.g[i] @ key) / (tau * math.sqrt(6))) for key in memory.g]
            inside = sum(w for w, token in zip(weights, memory.token.tolist(), strict=True) if token == word)
            expected = (1 - share) * math.exp(base[i, word]) + share * inside / sum(weights)
            assert abs(mixed[i].exp().item() - expected) < 1e-12


def test_eq_8_interpolates_over_the_datastore_or_over_every_memory() -> None:
    """P_kNN of the released code and of the paper, against Eq. 8 and 9 written out."""
    rng = torch.Generator().manual_seed(3)
    similarity = {name: torch.randn(6, generator=rng).double() for name in ("local", "long", "external")}
    token = {name: torch.randint(4, (6,), generator=rng) for name in similarity}
    logits, target, tau, own, share = torch.randn(4, generator=rng).double(), 2, 1.3, 0.7, 0.25

    def masses(name: str) -> LogMass:
        scores = torch.stack([similarity[name] / tau, similarity[name] / own])
        hit = scores.masked_fill(token[name] != target, -math.inf)
        return LogMass(hit.logsumexp(1)[None, :, None], scores.logsumexp(1)[None, :, None])

    grid = [f"tune.temperature=[{tau}]", f"tune.interpolation_temperature=[{own}]", f"tune.interpolation_share=[{share}]"]
    config = composed("experiment=trime_ext", *grid, "tune.memory_size=[6]")
    for names in (["external"], [*similarity]):
        row = parse_row({"joint": [*similarity], "interpolate": [names]}, config)
        score = row.score(LogMass(logits[target, None], logits.logsumexp(0)[None]), {name: masses(name) for name in similarity})
        every = sum(float((similarity[name] / own).exp().sum()) for name in names)
        hits = sum(float((similarity[name] / own).exp()[token[name] == target].sum()) for name in names)
        whole = float(logits.exp().sum()) + sum(float((s / tau).exp().sum()) for s in similarity.values())
        part = float(logits[target].exp()) + sum(
            float((s / tau).exp()[token[n] == target].sum()) for n, s in similarity.items()
        )
        assert float(score) == pytest.approx(math.log((1 - share) * part / whole + share * hits / every), abs=1e-12)


@pytest.mark.parametrize("interpolated", [[["external"]], [["local", "external"]], [["local"], ["external"]]])
@pytest.mark.parametrize("least", [-5.0, -200.0])
def test_summed_losses_of_a_grid_are_those_of_its_tokens(interpolated: list[list[str]], least: float) -> None:
    """Products of probabilities, some of them tiny, and empty memories, which leave the base."""
    rng, n = torch.Generator().manual_seed(2), 13
    config = composed("experiment=trime_ext", "tune.interpolation_share=[0.1,0.9]", "tune.temperature=[1.0,2.0]")
    row = replace(parse_row({"joint": ["local"], "interpolate": interpolated}, config), sizes=(1, 2, 3))
    times = len(row.divisors(1.0, 1.0))

    def masses(empty: bool) -> LogMass:
        total = torch.randn(3, times, n, generator=rng).double()
        target = total + least * torch.rand(3, times, n, generator=rng).double()
        target[..., 4] = -math.inf
        total[..., 5:7] = target[..., 5:7] = -math.inf if empty else -1.0
        return LogMass(target, total)

    found = {"local": masses(False), "external": masses(True)}
    vocabulary = LogMass(least * torch.rand(n, generator=rng).double(), torch.ones(n).double())
    expected = -row.score(vocabulary, found).double().sum(-1)
    assert torch.allclose(row.losses(vocabulary, found), expected, rtol=1e-12, atol=1e-9)
    if not any("local" in names for names in interpolated):  # a base that has no sizes
        alone = replace(row, joint=())
        found = {name: LogMass(mass.target[:, 2:], mass.total[:, 2:]) for name, mass in found.items()}
        expected = -alone.score(vocabulary, found).double().sum(-1)
        assert torch.allclose(alone.losses(vocabulary, found), expected, rtol=1e-12, atol=1e-9)


def test_every_mixture_sums_to_one_with_empty_memories_too() -> None:
    batch = contexts(7, ROWS)
    logits = torch.randn(len(batch.token), WORDS, dtype=torch.float64)
    divisor = torch.tensor([2.0], dtype=torch.float64)
    joined, mixed = torch.zeros(len(batch.token)).double(), torch.zeros(len(batch.token)).double()
    for word in range(WORDS):
        query = batch._replace(token=torch.full_like(batch.token, word))
        found = blockwise_mass(query, batch, Local(), divisor)
        memory, vocabulary = LogMass(found.target[0], found.total[0]), plain_mass(logits, query.token)
        joined += joint_log_prob(vocabulary, [memory]).exp()
        mixed += interpolate(vocabulary.target - vocabulary.total, memory, 0.4).exp()
    assert torch.allclose(joined, torch.ones_like(joined), atol=1e-13)
    assert torch.allclose(mixed, torch.ones_like(mixed), atol=1e-13)
    assert found.total[0].isinf().any(), "the first context of a segment sees nothing: the law covers that"


def test_interpolation_with_an_empty_memory_or_no_share_is_the_base() -> None:
    base = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    nothing = LogMass(torch.full((3,), -math.inf).double(), torch.full((3,), -math.inf).double())
    assert torch.equal(interpolate(base, nothing, 0.5), base)
    some = LogMass(torch.tensor([-math.inf, -1.0, 0.0]).double(), torch.zeros(3).double())
    assert torch.allclose(interpolate(base, some, 1e-12), base, atol=1e-10)


@pytest.mark.parametrize("visibility", VISIBILITIES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("block", [3, 64])
def test_blockwise_is_direct_with_gradients(visibility: object, block: int) -> None:
    query, memory = contexts(8, ROWS), contexts(9, [(0, 2, 9), (1, 0, 4), (3, 0, 8)])
    divisor = torch.tensor([0.7, 2.0], dtype=torch.float64)
    weights = torch.randn(2, 2, len(query.token), dtype=torch.float64)

    def loss(mass: LogMass) -> Tensor:
        parts = [
            torch.where(part.isinf(), 0, part) * weight for part, weight in zip((mass.target, mass.total), weights, strict=True)
        ]
        return torch.stack(parts).sum()

    gradients = []
    for direct in (False, True):
        q, m = (part.g.clone().requires_grad_() for part in (query, memory))
        asked, held = query._replace(g=q), memory._replace(g=m)
        mass = (
            direct_mass(asked, held, visibility, divisor) if direct else blockwise_mass(asked, held, visibility, divisor, block)
        )
        loss(mass).backward()
        gradients.append((mass, q.grad, m.grad))
    (one, *ours), (other, *theirs) = gradients
    assert torch.allclose(one.target, other.target) and torch.allclose(one.total, other.total)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
    assert all(part.isfinite().all() for part in ours)


@pytest.mark.parametrize("overlap", [0, 3])
def test_reading_segments_with_recent_is_one_batch_with_long(overlap: int) -> None:
    whole = contexts(10, [(0, 0, 20), (1, 0, 12)])
    divisor = torch.tensor([1.0, 3.0], dtype=torch.float64)
    expected = blockwise_mass(whole, whole, Long(), divisor)
    recent, found = FifoTokenMemory([1000]), []
    for document, length in ((0, 20), (1, 12)):
        own = whole.take(whole.positions.document == document)
        for start in range(0, length, 4):
            low = max(0, start - overlap)
            window = own.take(slice(low, start + 4))  # one segment, as the rows here are documents
            query = window.take(slice(start - low, None))
            local = blockwise_mass(query, window, Local(), divisor)
            memory = recent.mass(query, divisor, overlap=start - low)
            found.append(pool_masses([LogMass(local.target[None], local.total[None]), memory]))
            recent.write(query, keep_extra=4 + overlap)
    assert torch.allclose(torch.cat([part.target[0] for part in found], 1), expected.target)
    assert torch.allclose(torch.cat([part.total[0] for part in found], 1), expected.total)


def test_nested_sizes_are_memories_of_each_size() -> None:
    written, query = contexts(11, [(0, 0, 30)]), contexts(12, [(0, 30, 5)])
    divisor = torch.tensor([1.0], dtype=torch.float64)
    nested = FifoTokenMemory([4, 9, 50])
    for start in range(0, 30, 6):
        nested.write(written.take(slice(start, start + 6)))
    together = nested.mass(query, divisor)
    for position, size in enumerate((4, 9, 50)):
        alone = blockwise_mass(query, written.take(slice(max(0, 30 - size), 30)), SameDocument(), divisor)
        assert torch.allclose(together.total[position], alone.total)
        assert torch.allclose(together.target[position], alone.target)


def test_memory_share_is_the_probability_that_memory_gives() -> None:
    vocabulary, memory = LogMass(torch.tensor([0.0]), torch.tensor([1.0])), LogMass(torch.tensor([0.5]), torch.tensor([2.0]))
    assert math.isclose(float(memory_share(vocabulary, [memory])), math.e**2 / (math.e + math.e**2), rel_tol=1e-6)


def test_dropping_local_memory_is_a_pure_function_of_seed_and_update() -> None:
    draws = [local_draw(3, update) for update in range(2000)]
    assert draws == [local_draw(3, update) for update in range(2000)]
    assert draws != [local_draw(4, update) for update in range(2000)]
    assert abs(sum(draw < 0.9 for draw in draws) / 2000 - 0.9) < 0.03
    batch = contexts(13, ROWS)
    divisor, memory = torch.tensor([1.0]), InBatch(External(), 0.9)
    kept, dropped = (memory.mass(batch, batch, divisor, draw).total for draw in (0.95, 0.1))
    assert torch.equal(kept, blockwise_mass(batch, batch, External(), divisor).total)
    assert torch.equal(dropped, blockwise_mass(batch, batch, Others(), divisor).total)


def test_what_an_update_sees_is_drawn_by_shares_that_move() -> None:
    memory = Drawn({"local": 0.5, "long": 0.25}, {"long": 0.1, "others": 0.9})
    draws = torch.arange(0.0005, 1, 0.001).tolist()

    def shares(progress: float) -> dict[str, float]:
        kinds = [type(memory.visibility_for(draw, progress)).__name__ for draw in draws]
        return {kind: round(kinds.count(kind) / len(draws), 3) for kind in sorted({*kinds})}

    assert shares(0.0) == {"Local": 0.5, "Long": 0.25, "Nothing": 0.25}
    assert shares(0.5) == {"Local": 0.25, "Long": 0.175, "Nothing": 0.125, "Others": 0.45}
    assert shares(1.0) == {"Long": 0.1, "Others": 0.9}
    assert isinstance(memory.visibility_for(None), External), "validation sees all"
    batch = contexts(13, ROWS)
    nothing = memory.mass(batch, batch, torch.tensor([1.0]), 0.9, 0.0)
    assert bool(nothing.total.isneginf().all() and nothing.target.isneginf().all())
    for wrong in ({"near": 0.1}, {"local": 0.7, "long": 0.4}, {"local": -0.1}):
        with pytest.raises(ValueError, match=r"memory.shares"):
            Drawn(wrong)


def test_algorithm_1() -> None:
    torch.manual_seed(0)
    neighbours = torch.stack([torch.randperm(40)[:6] for _ in range(40)]).numpy()
    neighbours[3:20:4, 2:] = -1
    order = greedy_chain(neighbours.tolist(), generator(5, 2).permutation(len(neighbours)).tolist())
    # From the text: l, c, S; SimSeg gives the list; a random sample of S where no neighbour is left in S.
    starts = iter(generator(5, 2).permutation(40).tolist())
    unused, expected, current = set(range(40)), [], None
    while unused:
        if current is None:
            current = next(start for start in starts if start in unused)
        expected.append(current)
        unused.remove(current)
        current = next((int(other) for other in neighbours[current] if int(other) in unused), None)
    assert order == expected and sorted(order) == list(range(40))


METRIC = {
    "ip": lambda q, k: float(q @ k),
    "l2": lambda q, k: -float((q - k).square().sum()),
    "cosine": lambda q, k: len(q) * float(q @ k) / float(q.norm() * k.norm()),
}


@pytest.mark.parametrize("metric", list(METRIC))
def test_similarities(metric: str) -> None:
    """Pair by pair as they are defined; the same in a memory's mass, with gradients, and to nearest neighbours."""
    query, memory = contexts(11, ROWS[:2]), contexts(12, ROWS[2:])
    expected = torch.tensor([[METRIC[metric](q, k) for k in memory.g] for q in query.g], dtype=torch.float64)
    assert torch.allclose(similarity(query.g, memory.g, metric), expected)
    divisor = torch.tensor([1.5], dtype=torch.float64)
    found = blockwise_mass(query, memory, Everything(), divisor, 4, metric)
    assert torch.allclose(found.total[0], (expected / 1.5).logsumexp(1))
    search = ExactSearch(lambda: iter([memory.g]), metric)
    score, index = search.nearest(query.g, 3)
    assert torch.allclose(score.double(), expected.topk(3).values, atol=1e-4) and torch.equal(index, expected.topk(3).indices)
    g = query.g.clone().requires_grad_()

    def total(g: Tensor) -> Tensor:
        own = query._replace(g=g)
        return blockwise_mass(own, own, External(), divisor, 4, metric).total

    assert torch.autograd.gradcheck(total, g)


def test_a_gate_sets_the_memories_share() -> None:
    """P = (1 - s) P_vocabulary + s P_memories, s = sigmoid(gate); where the memories are empty, the vocabulary's alone."""
    torch.manual_seed(0)
    vocabulary = plain_mass(torch.randn(9, WORDS, dtype=torch.float64), torch.randint(WORDS, (9,)))
    target = torch.randn(2, 9, dtype=torch.float64)
    found = [LogMass(own, own + torch.rand(9)) for own in target]
    found[0].target[2] = found[0].total[2] = found[1].target[2] = found[1].total[2] = -math.inf
    found[0].target[3] = -math.inf  # there are memories, none of them of the target
    gate = torch.randn(9, dtype=torch.float64, requires_grad=True)
    gated, share = replace(vocabulary, gate=gate), gate.sigmoid() * (torch.arange(9) != 2)
    inside = (pool_masses(found).target - pool_masses(found).total).exp().nan_to_num(0)
    expected = (1 - share) * (vocabulary.target - vocabulary.total).exp() + share * inside
    result = joint_log_prob(gated, found)
    assert torch.allclose(result.exp(), expected) and torch.allclose(memory_share(gated, found), share)
    result.sum().backward()
    assert gate.grad is not None and gate.grad.isfinite().all() and gate.grad[2] == 0
    assert torch.allclose(joint_log_prob(gated, []), joint_log_prob(vocabulary, []))
    alone = LogMass(found[0].target.clone().requires_grad_(), found[0].total.clone().requires_grad_())
    joint_log_prob(gated, [alone]).sum().backward()
    assert all(own.grad is not None and own.grad.isfinite().all() for own in (alone.target, alone.total))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_sure_share_has_finite_gradients(share: float) -> None:
    """The second memory is empty, the third lacks the word."""
    base, total = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), torch.tensor([0.0, -math.inf, 0.0])
    target, gate = torch.tensor([-4.0, -math.inf, -5.0]), torch.tensor([share], requires_grad=True)
    mixed = interpolate(base, LogMass(target, total), gate)
    mixed.sum().backward()
    assert mixed.tolist() == ([-1, -2, -3] if share == 0 else [-4, -2, -5])
    assert base.grad is not None and base.grad.tolist() == ([1, 1, 1] if share == 0 else [0, 1, 0])
    assert gate.grad is not None and float(gate.grad) == 0
