"""evaluate: scores the test split once with the tuned settings, each row in its own pass to measure speed and memory.

The pass is made in parts, each of them a file until the artefact is finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trime.common.identity import Free
from trime.common.io import write_json, write_tensors
from trime.common.metrics import ResourceUsage, Usage, processor_ms
from trime.lab.artefact import Artefact, Lab
from trime.lab.engines import Advance
from trime.lab.parts import ArtefactInParts, Parts, columns_of, grouped, read_part
from trime.lab.stage import Stage
from trime.memory.inference.base import Memory
from trime.scoring.loss_sums import LossSums, TokenMeans, dev_frequency, summarize_row
from trime.scoring.mixture_spec import FittedMixtureSpec, MixtureSpec
from trime.scoring.scorer import Scorer
from trime.stages.encode import Encode
from trime.stages.scoring import Scoring, build_scorer, text_parts, windows_of
from trime.stages.tune import TunedRows


class TestResults(Artefact):
    """The results of every row on the test split: ``rows.json``."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the results of every row."""
        return self.read("rows.json")


@dataclass(frozen=True, eq=False, repr=False)
class Evaluate(TestResults, ArtefactInParts):
    """Loss and perplexity of every row on the test split: ``rows.json``."""

    kind, format = "evaluate", 7

    encoded: Encode
    tune: TunedRows
    scoring: Scoring
    model_memory: dict[str, Any]  # size and policy of the memory inside the model, if it has one: the table names them
    eviction: Free[dict[str, Any]]  # the policy that the table names; memories of ``tune`` have theirs
    lab: Free[Lab]

    def open_parts(self, folder: Path) -> EvaluateParts:
        return EvaluateParts(self, folder)

    def build(self, folder: Path) -> None:
        parts = self.open_parts(folder)
        self.make_parts(parts, f"evaluate {self.encoded.split}")
        results = [self.row_result(row, files) for row, files in zip(parts.rows, parts.files_by_row(), strict=True)]
        write_json(folder / "rows.json", results)

    def row_result(self, row: MixtureSpec | FittedMixtureSpec, files: list[Path]) -> dict[str, Any]:
        """Return the results of one row over the whole split, from the files of its parts."""
        corpus, information = self.encoded.corpus.corpus(), self.encoded.summary()
        sums, shares, usage, search = LossSums(), TokenMeans(len(corpus.vocabulary)), Usage(), {}
        usage.add(information)
        for tensors, note in map(read_part, files):
            sums.put_tensors(columns_of(tensors, "losses"))
            if row.memories:
                shares.add(tensors["token"], tensors["share"])
            usage.add(note)
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


class EvaluateParts(Parts):
    """Parts of the test split for one row after the other: summed losses, and the share of P(target) from memories by token."""

    def __init__(self, evaluate: Evaluate, folder: Path):
        self.evaluate, self.folder = evaluate, folder
        self.rows, memories = evaluate.tune.rows(), evaluate.tune.memories
        carried = [max(row.state_scope, memories.state_scope(row.memories)) for row in self.rows]
        cuts = {each: text_parts(evaluate.encoded, each) for each in {*carried}}
        self.parts = [(row, part) for row, each in enumerate(carried) for part in cuts[each]]
        self.sizes = [part.tokens for _, part in self.parts]
        self.opened: tuple[int, Scorer] | None = None

    def file(self, number: int) -> Path:
        row, part = self.parts[number]
        return self.folder / f"part-{row}-{part.name}.safetensors"

    def files_by_row(self) -> list[list[Path]]:
        """Return the files of each row's parts, in order."""
        files = [*zip(self.parts, self.files(), strict=True)]
        return [[file for (owner, _), file in files if owner == row] for row in range(len(self.rows))]

    def scorer(self, row: int) -> Scorer:
        """Return the scorer of a row, which is kept until that of another row is asked for."""
        if self.opened is None or self.opened[0] != row:
            evaluate, self.opened = self.evaluate, None  # the memories of another row may be large
            memories = evaluate.tune.for_row(row).memories
            self.opened = row, build_scorer(evaluate.scoring, [self.rows[row]], memories, evaluate.encoded)
        return self.opened[1]

    def make(self, number: int, advance: Advance) -> None:
        index, part = self.parts[number]
        row, scorer = self.rows[index], self.scorer(index)  # before the clock starts: it may open an index
        meter, sums, score_window, tokens, shares = ResourceUsage(), LossSums(), row.window_scorer(), [], []
        for window, (masses,) in scorer.query(windows_of(self.evaluate.encoded, part)):
            score = score_window(window, masses)
            sums.add(window, score)
            if row.memories:
                of_vocabulary = score_window.vocabulary_log_prob(window, masses)
                tokens.append(window.query.token)
                shares.append(1 - (of_vocabulary - score)[0, 0].double().exp())
            advance(len(window.vocabulary.total))
        tensors = grouped("losses", sums.tensors())
        if row.memories:
            tensors |= {"token": torch.cat(tokens).cpu(), "share": torch.cat(shares).cpu()}
        write_tensors(self.file(number), tensors, meter.note() | {"search": describe_search(scorer.memories)})


def describe_search(memories: Mapping[str, Memory]) -> dict[str, Any]:
    """Return how datastores are searched, and for how many entries: one value where all agree, else one for each in words."""
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
    """Return the results on test, and what analyses them."""
    subsets = graph.subsets.build_order() if graph.subsets else []
    return [*graph.evaluate.build_order(), *subsets, graph.analysis, graph.per_token]


EVALUATE = Stage("evaluate", results_on_test, has_log=True)
