"""evaluate: scores the test split once with the tuned settings; rows of the same memories share a pass, and each has its time.

The pass is made in shards, each of them a file until the artefact is finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from trime.common.identity import Free
from trime.common.io import write_json, write_tensors
from trime.common.metrics import ResourceUsage, Usage, processor_ms
from trime.lab.artefact import Artefact, Lab
from trime.lab.engines import Advance
from trime.lab.shards import ShardedArtefact, Work, prefixed, read_shard, unprefixed
from trime.lab.stage import Stage
from trime.scoring.loss_sums import LossSums, TokenMeans, dev_frequency, summarize_row
from trime.scoring.meters import RowScores
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.scoring.scorer import Scorer
from trime.stages.encode import Encode
from trime.stages.scoring import Scoring, Span, build_scorer, span_file, spans_of, windows_of
from trime.stages.tune import TunedRows
from trime.token_memory.test.base import Memory


class TestResults(Artefact):
    """The results of every row on the test split: ``rows.json``."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the results of every row."""
        return self.read("rows.json")


@dataclass(frozen=True, eq=False, repr=False)
class Evaluate(TestResults, ShardedArtefact):
    """Loss and perplexity of every row on the test split: ``rows.json``."""

    kind, format = "evaluate", 8

    encoded: Encode
    tune: TunedRows
    scoring: Scoring
    model_memory: dict[str, Any]  # size and policy of the memory inside the model, if it has one: the table names them
    eviction: Free[dict[str, Any]]  # the policy that the table names; memories of ``tune`` have theirs
    lab: Free[Lab]

    def shards(self) -> list[tuple[list[int], Span]]:
        """Return spans of the split for one group of rows after the other, by their numbers.

        Rows of the same memories are a group, which asks each memory once, whatever sizes were chosen for it.
        """
        groups: dict[Any, list[int]] = {}
        rows, memories = self.tune.rows(), self.tune.memories
        for number, row in enumerate(rows):
            groups.setdefault((frozenset(row.memories), id(self.tune.for_row(number))), []).append(number)
        spans = cache(partial(spans_of, self.encoded))
        scopes = [
            max(memories.state_scope(rows[group[0]].memories), *(rows[row].state_scope for row in group))
            for group in groups.values()
        ]
        return [(group, span) for group, scope in zip(groups.values(), scopes, strict=True) for span in spans(scope)]

    def work(self, folder: Path, shards: list[tuple[list[int], Span]] | None = None) -> Work:
        """Return the work on each shard: summed losses, and the memories' share of P(target)."""
        shards, rows = shards or self.shards(), self.tune.rows()
        files = [span_file(folder, span, f"{'-'.join(map(str, group))}-") for group, span in shards]
        opened: dict[int, Scorer] = {}  # of one group, for the memories of another may be large

        def make(number: int, advance: Advance) -> None:
            group, span = shards[number]
            if group[0] not in opened:
                opened.clear()
                own = [rows[row] for row in group]
                opened[group[0]] = build_scorer(self.scoring, own, self.tune.for_row(group[0]).memories, self.encoded)
            write_tensors(files[number], *self.score(span, opened[group[0]], [rows[row] for row in group], advance))

        return Work(files, [span.tokens for _, span in shards], make)

    def score(
        self, span: Span, scorer: Scorer, group: Sequence[MixtureSpec | FittedMixtureSpec], advance: Advance
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Score a span by the rows of a group; return the tensors of its file, by a row's place in the group, and a note."""
        rows, tokens, meter = [RowScores(row) for row in group], [], ResourceUsage()  # the clock starts when the index is open
        for window, masses in scorer.query(windows_of(self.encoded, span)):
            tokens.append(window.query.token)
            for row, row_masses in zip(rows, masses, strict=True):
                row.add(window, row_masses)
            advance(len(window.vocabulary.total))
        note, tensors, notes = meter.note(), {"token": torch.cat(tokens).cpu()}, []
        for place, row in enumerate(rows):
            tensors |= prefixed(str(place), row.tensors())
            # The time of a row does not include that of scoring the rest of the group.
            others = [other for other in rows if other is not row]
            spent = {name: sum(getattr(other, name) for other in others) for name in ("seconds", "processor_seconds")}
            notes.append(note | {name: note[name] - seconds for name, seconds in spent.items()})
        return tensors, {"rows": notes, "search": describe_search(scorer.memories)}

    def build(self, folder: Path) -> None:
        shards, rows = self.shards(), self.tune.rows()
        work = self.work(folder, shards)
        self.make_shards(work, folder, f"evaluate {self.encoded.split}")
        results = []
        for number, row in enumerate(rows):
            own = [(group.index(number), file) for (group, _), file in zip(shards, work.files, strict=True) if number in group]
            results.append(self.row_result(row, own[0][0], [file for _, file in own]))
        write_json(folder / "rows.json", results)

    def row_result(self, row: MixtureSpec | FittedMixtureSpec, place: int, files: list[Path]) -> dict[str, Any]:
        """Return the results of one row over the whole split, from the files of its group, in which it has a place."""
        corpus, information = self.encoded.corpus.corpus(), self.encoded.summary()
        sums, shares, usage, search = LossSums(), TokenMeans(len(corpus.vocabulary)), Usage(), {}
        usage.add(information)
        for tensors, note in map(read_shard, files):
            own = unprefixed(tensors, str(place))
            sums.put_tensors(unprefixed(own, "losses"))
            if row.memories:
                shares.add(tensors["token"], own["share"])
            usage.add(note["rows"][place])
            search = note["search"]
        result = summarize_row(row, sums)
        if row.memories:  # the share of P(target) that comes from memories
            result["memory_share"] = shares.buckets(dev_frequency(corpus))
        at_test, inside = result["tuned"].get("memory_size"), self.model_memory.get("size")
        size = at_test or inside  # of the row's memory that is tuned, or else of the memory inside the model
        return result | {
            **search,
            "memory_size": size,
            "eviction": policy_name(self.eviction) if size else None,
            **({"model_memory_size": inside} if at_test and inside else {}),
            "tokens_per_second": round(result["tokens"] / max(usage.seconds, 1e-9), 1),
            **processor_ms(usage.processor_seconds, result["tokens"]),
            "peak_memory_mb": usage.peak_memory_mb,
        }


def describe_search(memories: Mapping[str, Memory]) -> dict[str, Any]:
    """Describe the search of datastores and its K: one value where all agree, else the values in words."""
    searched = [memory.nearest for memory in memories.values() if memory.nearest]
    kinds, ks = [[*dict.fromkeys(values)] for values in ([nearest.kind for nearest in searched], [n.k for n in searched])]
    return {"search": " and ".join(map(str, kinds)) or None, "k": ks[0] if len(ks) == 1 else " and ".join(map(str, ks)) or None}


def policy_name(policy: dict[str, Any]) -> str:
    """Return a policy's name and main settings: ``lra_sum c=2``, ``lfa c=1 gamma=0.05``, ``lru top_k=32``."""
    settings = {"c": (policy.get("initial") or {}).get("c"), "gamma": policy.get("gamma")}
    settings |= {"sinks": policy.get("sinks") or None, "top_k": policy.get("top_k")}
    words = [f"{key}={value:g}" for key, value in settings.items() if value is not None]
    return " ".join([str(policy["_target_"]).split(".")[-2], *words])


def results_on_test(graph: Any) -> list[Artefact | None]:
    """Return the results on test, and their analyses."""
    subsets = graph.subsets.build_order() if graph.subsets else []
    return [*graph.evaluate.build_order(), *subsets, graph.analysis, graph.per_token]


EVALUATE = Stage("evaluate", results_on_test, has_log=True)
