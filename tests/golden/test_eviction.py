"""Eviction policies on streams of scores, step by step (evict_policies.json), and those that kvpress has too (6)."""

from __future__ import annotations

from typing import Any

import torch

from tests.golden.memories import description, tensors
from tests.golden.policies import policy_of
from tests.golden.published import parametrized
from trime.eviction.base import EvictionPolicy
from trime.eviction.initial import Constant
from trime.eviction.lfa import LFA
from trime.eviction.lra_last import LRALast
from trime.eviction.lra_sum import LRASum
from trime.eviction.reading import Softmax
from trime.eviction.sink import Sink
from trime.memory.bounded import BoundedMemory, taken
from trime.types import AttentionBlock

CASES = [(stream, name) for stream, group in description("evict_policies").items() for name in group["policies"]]
BLOCK = 3  # queries: the policy sees a step's attention in several blocks


class Stream:
    """Scores and masks, with a row for each head where every head keeps a set of its own."""

    def __init__(self, found: dict[str, torch.Tensor], per_head: bool):
        self.score, heads = found["in/S"].double(), found["in/S"].shape[1]
        self.key, self.query, self.allowed = found["in/key_valid"], found["in/query_valid"], found["in/qk_mask"]
        if per_head:
            self.score = self.score.flatten(0, 1)[:, None]
            self.key, self.query, self.allowed = (x.repeat_interleave(heads, 0) for x in (self.key, self.query, self.allowed))

    def positions(self, valid: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
        low, high = span.tolist()
        return torch.arange(low, high).expand(len(valid), -1).masked_fill(~valid[:, low:high], -1)

    def block(self, query: torch.Tensor, kept: torch.Tensor) -> AttentionBlock:
        b, h = self.score.shape[:2]
        rows = taken(self.score.transpose(1, 2), query.clamp(min=0)).transpose(1, 2)
        score = rows.gather(3, kept.clamp(min=0)[:, None, None].expand(b, h, query.shape[1], -1))
        seen = taken(self.allowed, query.clamp(min=0)).gather(2, kept.clamp(min=0)[:, None].expand(-1, query.shape[1], -1))
        return AttentionBlock(score.masked_fill(~(seen & (kept >= 0)[:, None])[:, None], -torch.inf), query)


def ascending(position: torch.Tensor, *columns: torch.Tensor) -> list[torch.Tensor]:
    """Entries in the order of the stream, the empty ones last."""
    order = position.masked_fill(position < 0, 10**9).argsort(1)
    return [position.gather(1, order), *(column.gather(1, order) for column in columns)]


def same_entries(position: torch.Tensor, score: torch.Tensor, expected: torch.Tensor, scores: torch.Tensor) -> None:
    position, score = ascending(position, score)
    width = min(expected.shape[1], position.shape[1])  # either may have more empty places
    assert (position[:, width:] < 0).all() and (expected[:, width:] < 0).all()
    assert torch.equal(position[:, :width], expected[:, :width])
    filled = position[:, :width] >= 0
    score, scores = score[:, :width][filled], scores[:, :width][filled]
    assert torch.equal(score.isinf(), scores.isinf())
    found, wanted = (s.nan_to_num(posinf=0) for s in (score, scores))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@parametrized("stream, name", CASES)
def test_policy(stream: str, name: str) -> None:
    given, group = description("evict_policies")[stream]["policies"][name], tensors(f"evict_{stream}")
    text, memory = Stream(group, given["per_head"]), BoundedMemory(given["M"], policy_of(given))
    steps = len(group["in/insert_range"])
    wanted = {key: per_row(group[f"{name}/{key}"], given["per_head"]) for key in KEYS}
    assert group[f"{name}/kept_pos"].shape[-1] == given["M"]
    held = memory.empty((torch.empty(len(text.key), 0, 1),))
    for step in range(steps):
        fresh = text.positions(text.key, group["in/insert_range"][step])
        admitted = memory.policy.admit(held.ranking, fresh).masked_fill(fresh < 0, -torch.inf)
        candidates = torch.cat([held.ranking.position, fresh], 1), torch.cat([held.ranking.score, admitted], 1)
        same_entries(*candidates, wanted["cand_pos"][:, step], wanted["cand_score"][:, step])
        before = held.ranking.position
        held, evicted = memory.insert(held, (fresh[..., None].float(),), fresh)
        gone = wanted["evicted_pos"][:, step][:, : evicted.position.shape[1]]
        assert torch.equal(evicted.position, gone) and (wanted["evicted_pos"][:, step][:, gone.shape[1] :] < 0).all()
        filled = held.ranking.position >= 0
        assert torch.equal(held.columns[0][..., 0][filled].long(), held.ranking.position[filled])  # columns went along
        stayed = (held.ranking.position[:, :, None] == before[:, None]) & filled[:, :, None]
        assert (stayed.nonzero()[:, 1] == stayed.nonzero()[:, 2]).all()  # in their slots
        held = held._replace(ranking=attended(memory.policy, text, held.ranking, group["in/attend_range"][step]))
        same_entries(held.ranking.position, held.ranking.score, wanted["kept_pos"][:, step], wanted["kept_score"][:, step])
        assert torch.equal(held.ranking.clock, wanted["pmax"][:, step])


KEYS = ("cand_pos", "cand_score", "evicted_pos", "kept_pos", "kept_score", "pmax")


def per_row(found: torch.Tensor, per_head: bool) -> torch.Tensor:
    """[row, step, ...]: heads that keep sets of their own are rows."""
    return found.flatten(0, 1) if per_head else found


def attended(policy: EvictionPolicy, text: Stream, ranking: Any, span: torch.Tensor) -> Any:
    summary = policy.begin(ranking)
    for query in text.positions(text.query, span).split(BLOCK, dim=1):
        summary = policy.observe(summary, text.block(query, ranking.position))
    return policy.finalize(ranking, summary)


PRESSES = description("kvpress_scores")["presses"]


class Prompt:
    """A prompt after its prefill, one row for each head of keys, the heads of queries that share it side by side."""

    def __init__(self) -> None:
        found, given = tensors("kvpress_scores"), description("kvpress_scores")
        rows, self.group, self.length = given["B"] * given["Hkv"], given["H"] // given["Hkv"], given["L"]
        query, key = found["q"].view(rows, self.group, self.length, -1), found["k"].flatten(0, 1)
        causal = torch.ones(self.length, self.length).tril().bool()
        score = (query @ key[:, None].transpose(-1, -2) / given["D"] ** 0.5).masked_fill(~causal, -torch.inf)
        self.position, self.heads = torch.arange(self.length).expand(rows, -1), given["Hkv"]
        self.block, self.kept, self.rows = AttentionBlock(score, self.position), given["n_kept"], rows

    def scores(self, policy: EvictionPolicy, last: int) -> torch.Tensor:
        """What a policy makes of the ``last`` queries."""
        memory = BoundedMemory(self.length, policy)
        held, _ = memory.insert(memory.empty((self.position[:, :0].double(),)), (self.position.double(),), self.position)
        block = AttentionBlock(self.block.score[:, :, -last:], self.position[:, -last:])
        settled = policy.finalize(held.ranking, policy.observe(policy.begin(held.ranking), block))
        return ascending(settled.position, settled.score)[1]


def press_streaming_llm(prompt: Prompt, given: dict[str, Any]) -> torch.Tensor:
    """The kept set itself, by the memory; kvpress ranks no further."""
    memory = BoundedMemory(prompt.kept, Sink(given["n_sink"]))
    held, _ = memory.insert(memory.empty((prompt.position[:, :0].double(),)), (prompt.position.double(),), prompt.position)
    return torch.zeros(prompt.rows, prompt.length).double().scatter(1, held.ranking.position, 1.0)


def press_observed_attention(prompt: Prompt, given: dict[str, Any]) -> torch.Tensor:
    """The sum of all attention, by the number of queries that could give any."""
    total = prompt.scores(LFA(Constant(), Softmax()), prompt.length)
    return total / prompt.group / (prompt.length - torch.arange(prompt.length))


def press_snapkv(prompt: Prompt, given: dict[str, Any]) -> torch.Tensor:
    """The last window's attention, smoothed over neighbours; the window itself stays."""
    window, kernel = given["window_size"], given["kernel_size"]
    mean = prompt.scores(LRASum(Constant(), Softmax()), window)[:, :-window] / prompt.group / window
    smooth = torch.nn.functional.avg_pool1d(mean, kernel, 1, kernel // 2)
    return torch.cat([smooth, smooth.new_full((len(smooth), window), float("nan"))], 1)


def press_tova(prompt: Prompt, given: dict[str, Any]) -> torch.Tensor:
    """The last query's attention, over all heads; the last token itself stays."""
    own = prompt.scores(LRALast(Constant(), Softmax()), 1).view(-1, prompt.heads, prompt.length)
    mean = own.sum(1, keepdim=True).expand_as(own).flatten(0, 1) / prompt.group / prompt.heads
    return torch.cat([mean[:, :-1], mean.new_full((len(mean), 1), float("nan"))], 1)


COUNTERPARTS = {  # the other presses (knorm, keydiff) ask no query: they rank by the keys alone
    "streaming_llm": press_streaming_llm,
    "observed_attention": press_observed_attention,
    "snapkv": press_snapkv,
    "tova": press_tova,
}


@parametrized("press", sorted(PRESSES.keys() & COUNTERPARTS.keys()))
def test_press(press: str) -> None:
    prompt, found = Prompt(), tensors("kvpress_scores")
    scores = COUNTERPARTS[press](prompt, PRESSES[press])
    expected = found[f"{press}/scores"].flatten(0, 1)
    ranked = ~scores.isnan()  # the others are protected: their score is above all
    torch.testing.assert_close(scores[ranked], expected[ranked], rtol=1e-6, atol=1e-6)
    best = scores.nan_to_num(nan=torch.inf).topk(prompt.kept, dim=1).indices.sort(1).values
    assert torch.equal(best, found[f"{press}/kept"].flatten(0, 1))
