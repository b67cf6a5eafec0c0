"""Eviction policies on streams of scores, step by step (evict_policies.json), and against their counterparts in kvpress."""

from __future__ import annotations

from typing import Any

import torch

from tests.golden.memories import description, evicted, tensors
from tests.golden.policies import policy_of
from tests.golden.published import parametrized
from trime.common.types import AttentionBlock
from trime.kv.bounded import BoundedMemory, take_slots
from trime.kv.eviction.base import EvictionPolicy
from trime.kv.eviction.initial import Constant
from trime.kv.eviction.lfa import LFA
from trime.kv.eviction.lra_last import LRALast
from trime.kv.eviction.score_transform import Softmax
from trime.kv.eviction.sink import Sink
from trime.kv.eviction.snapkv import SnapKV

CASES = [(stream, name) for stream, group in description("evict_policies").items() for name in group["policies"]]
BLOCK = 3  # queries: the policy observes the attention of a step in several blocks


class Stream:
    """Scores and masks of a stream, with a row for each head where every head keeps a set of its own."""

    def __init__(self, arrays: dict[str, torch.Tensor], per_head: bool):
        self.score, heads = arrays["in/S"].double(), arrays["in/S"].shape[1]
        self.key, self.query, self.allowed = arrays["in/key_valid"], arrays["in/query_valid"], arrays["in/qk_mask"]
        if per_head:
            self.score = self.score.flatten(0, 1)[:, None]
            self.key, self.query, self.allowed = (x.repeat_interleave(heads, 0) for x in (self.key, self.query, self.allowed))

    def positions(self, valid: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
        low, high = span.tolist()
        return torch.arange(low, high).expand(len(valid), -1).masked_fill(~valid[:, low:high], -1)

    def block(self, query: torch.Tensor, kept: torch.Tensor) -> AttentionBlock:
        b, h = self.score.shape[:2]
        rows = take_slots(self.score.transpose(1, 2), query.clamp(min=0)).transpose(1, 2)
        score = rows.gather(3, kept.clamp(min=0)[:, None, None].expand(b, h, query.shape[1], -1))
        visible = take_slots(self.allowed, query.clamp(min=0)).gather(
            2, kept.clamp(min=0)[:, None].expand(-1, query.shape[1], -1)
        )
        return AttentionBlock(score.masked_fill(~(visible & (kept >= 0)[:, None])[:, None], -torch.inf), query)


def ascending(position: torch.Tensor, *columns: torch.Tensor) -> list[torch.Tensor]:
    """Return entries in the order of the stream, the empty ones last."""
    order = position.masked_fill(position < 0, 10**9).argsort(1)
    return [position.gather(1, order), *(column.gather(1, order) for column in columns)]


def same_entries(position: torch.Tensor, score: torch.Tensor, expected: torch.Tensor, scores: torch.Tensor) -> None:
    position, score = ascending(position, score)
    width = min(expected.shape[1], position.shape[1])  # either may have more empty slots
    assert (position[:, width:] < 0).all() and (expected[:, width:] < 0).all()
    assert torch.equal(position[:, :width], expected[:, :width])
    filled = position[:, :width] >= 0
    score, scores = score[:, :width][filled], scores[:, :width][filled]
    assert torch.equal(score.isinf(), scores.isinf())
    score, scores = (s.nan_to_num(posinf=0) for s in (score, scores))
    torch.testing.assert_close(score, scores, rtol=1e-11, atol=1e-11)


@parametrized("stream, name", CASES)
def test_policy(stream: str, name: str) -> None:
    parameters, group = description("evict_policies")[stream]["policies"][name], tensors(f"evict_{stream}")
    text, memory = Stream(group, parameters["per_head"]), BoundedMemory(parameters["M"], policy_of(parameters))
    steps = len(group["in/insert_range"])
    expected = {key: per_row(group[f"{name}/{key}"], parameters["per_head"]) for key in KEYS}
    assert group[f"{name}/kept_pos"].shape[-1] == parameters["M"]
    state = memory.empty((torch.empty(len(text.key), 0, 1),))
    for step in range(steps):
        fresh = text.positions(text.key, group["in/insert_range"][step])
        admitted = memory.policy.enter((), state.ranking, fresh).masked_fill(fresh < 0, -torch.inf)
        candidates = torch.cat([state.ranking.position, fresh], 1), torch.cat([state.ranking.score, admitted], 1)
        same_entries(*candidates, expected["cand_pos"][:, step], expected["cand_score"][:, step])
        before = state.ranking.position
        state = memory.update(state, (fresh[..., None].float(),), fresh)
        gone = [[place for place in row if place >= 0] for row in expected["evicted_pos"][:, step].tolist()]
        assert evicted(before, fresh, state.ranking.position) == gone
        filled = state.ranking.position >= 0
        assert torch.equal(state.columns[0][..., 0][filled].long(), state.ranking.position[filled])  # columns move along
        stayed = (state.ranking.position[:, :, None] == before[:, None]) & filled[:, :, None]
        assert (stayed.nonzero()[:, 1] == stayed.nonzero()[:, 2]).all()  # in their slots
        state = state._replace(ranking=attended(memory.policy, text, state.ranking, group["in/attend_range"][step]))
        same_entries(
            state.ranking.position, state.ranking.score, expected["kept_pos"][:, step], expected["kept_score"][:, step]
        )
        assert torch.equal(state.ranking.clock, expected["pmax"][:, step])


KEYS = ("cand_pos", "cand_score", "evicted_pos", "kept_pos", "kept_score", "pmax")


def per_row(array: torch.Tensor, per_head: bool) -> torch.Tensor:
    """Return [row, step, ...]; heads that keep sets of their own become rows."""
    return array.flatten(0, 1) if per_head else array


def attended(policy: EvictionPolicy, text: Stream, ranking: Any, span: torch.Tensor) -> Any:
    """Return the ranking after the attention of the queries in a span."""
    summary = policy.begin(ranking)
    for query in text.positions(text.query, span).split(BLOCK, dim=1):
        summary = policy.observe(summary, text.block(query, ranking.position))
    return policy.finalize(ranking, summary)


PRESSES = description("kvpress_scores")["presses"]


class Prompt:
    """A prompt after its prefill, one row for each key head; the query heads that share it stand side by side."""

    def __init__(self) -> None:
        arrays, sizes = tensors("kvpress_scores"), description("kvpress_scores")
        rows, self.group, self.length = sizes["B"] * sizes["Hkv"], sizes["H"] // sizes["Hkv"], sizes["L"]
        query, key = arrays["q"].view(rows, self.group, self.length, -1), arrays["k"].flatten(0, 1)
        causal = torch.ones(self.length, self.length).tril().bool()
        score = (query @ key[:, None].transpose(-1, -2) / sizes["D"] ** 0.5).masked_fill(~causal, -torch.inf)
        self.position, self.heads = torch.arange(self.length).expand(rows, -1), sizes["Hkv"]
        self.block, self.kept, self.rows = AttentionBlock(score, self.position), sizes["n_kept"], rows

    def scores(self, policy: EvictionPolicy, last: int) -> torch.Tensor:
        """Return the scores of all entries after the attention of the ``last`` queries."""
        memory = BoundedMemory(self.length, policy)
        state = memory.update(memory.empty((self.position[:, :0].double(),)), (self.position.double(),), self.position)
        block = AttentionBlock(self.block.score[:, :, -last:], self.position[:, -last:])
        ranking = policy.finalize(state.ranking, policy.observe(policy.begin(state.ranking), block))
        return ascending(ranking.position, ranking.score)[1]


def press_streaming_llm(prompt: Prompt, parameters: dict[str, Any]) -> torch.Tensor:
    """Return 1 for kept entries and 0 for others; kvpress ranks no further."""
    memory = BoundedMemory(prompt.kept, Sink(parameters["n_sink"]))
    state = memory.update(memory.empty((prompt.position[:, :0].double(),)), (prompt.position.double(),), prompt.position)
    return torch.zeros(prompt.rows, prompt.length).double().scatter(1, state.ranking.position, 1.0)


def press_observed_attention(prompt: Prompt, parameters: dict[str, Any]) -> torch.Tensor:
    """Return the sum of all attention, divided by the number of queries that see the entry."""
    total = prompt.scores(LFA(Constant(), Softmax()), prompt.length)
    return total / prompt.group / (prompt.length - torch.arange(prompt.length))


def press_snapkv(prompt: Prompt, parameters: dict[str, Any]) -> torch.Tensor:
    """Return the attention of the last window, smoothed over neighbours; the window itself is kept."""
    window, kernel = parameters["window_size"], parameters["kernel_size"]
    scores = prompt.scores(SnapKV(Softmax(), window, kernel), prompt.length)[:, :-window] / prompt.group
    return torch.cat([scores, scores.new_full((len(scores), window), float("nan"))], 1)


def press_tova(prompt: Prompt, parameters: dict[str, Any]) -> torch.Tensor:
    """Return the attention of the last query, over all heads; the last token itself is kept."""
    scores = prompt.scores(LRALast(Constant(), Softmax()), 1).view(-1, prompt.heads, prompt.length)
    mean = scores.sum(1, keepdim=True).expand_as(scores).flatten(0, 1) / prompt.group / prompt.heads
    return torch.cat([mean[:, :-1], mean.new_full((len(mean), 1), float("nan"))], 1)


COUNTERPARTS = {  # the other presses (knorm, keydiff) have no queries: they rank by the keys alone
    "streaming_llm": press_streaming_llm,
    "observed_attention": press_observed_attention,
    "snapkv": press_snapkv,
    "tova": press_tova,
}


@parametrized("press", sorted(PRESSES.keys() & COUNTERPARTS.keys()))
def test_press(press: str) -> None:
    prompt, arrays = Prompt(), tensors("kvpress_scores")
    scores = COUNTERPARTS[press](prompt, PRESSES[press])
    expected = arrays[f"{press}/scores"].flatten(0, 1)
    ranked = ~scores.isnan()  # the others are protected: their scores rank above all
    torch.testing.assert_close(scores[ranked], expected[ranked], rtol=1e-6, atol=1e-6)
    best = scores.nan_to_num(nan=torch.inf).topk(prompt.kept, dim=1).indices.sort(1).values
    assert torch.equal(best, arrays[f"{press}/kept"].flatten(0, 1))
