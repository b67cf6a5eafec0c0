"""Artefacts of stage evaluate: a mixture refitted on subsets of its memories, to measure the cost and the gain of each memory.

The model is not needed: the masses on valid are stored already, and one pass over test scores every subset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from trime.common.identity import Free
from trime.common.io import write_json, write_tensors
from trime.common.metrics import device_seconds
from trime.common.progress import Progress
from trime.common.types import Tensor
from trime.lab.artefact import Artefact, Lab
from trime.lab.engines import Advance
from trime.lab.shards import ShardedArtefact, Work, prefixed, read_shard, unprefixed
from trime.scoring.loss_sums import LossSums, dev_frequency, sum_by_document, summarize_row
from trime.scoring.meters import Bins, MeteredMemory, WeightSums, select_memories, token_weights
from trime.scoring.mixture_spec import FittedMixtureSpec, FittedScorer, MixtureSpec
from trime.scoring.scorer import Scorer
from trime.stages.encode import Encode
from trime.stages.evaluate import describe_search
from trime.stages.scoring import Scoring, Span, add_sums, build_scorer, span_file, spans_of, sums_as_tensors, windows_of
from trime.stages.tune import TuneMixture
from trime.token_memory.test.base import Memory

BINS = 10  # number of bins of tokens by the similarity of the best entry


@dataclass(frozen=True, eq=False, repr=False)
class SubsetMixtures(Artefact):
    """A mixture for each subset of a mixture's memories, with its cross-fitted loss on valid; the last has all memories."""

    kind, stage, format = "subset_mixtures", "evaluate", 2
    summary_file = "subset_mixtures.json"

    tune: TuneMixture
    selection: str  # which subsets: leave_one_out or all
    lab: Free[Lab]

    def build(self, folder: Path) -> None:
        masses, description = self.tune.grid.expert_masses()
        fitted, states = [], dict[str, torch.Tensor]()
        chosen = subsets(self.tune.row().memory_order, self.selection)
        for number, names in enumerate(Progress(chosen, unit="subset", desc="fit subsets")):
            # The mixture of all memories is fitted already, and without memories there is nothing to fit.
            if names == self.tune.row().memory_order:
                loss = self.tune.summary()["row"]["loss"]
            elif not names:
                loss = -float(masses.log_probability[:, 0].double().mean())
            else:
                mixture, score = self.tune.mixture.fit(*select_memories(masses, description, names))
                states |= prefixed(str(number), mixture.state())
                loss = summarize_row(self.row_of(names), sum_by_document(masses.document, -score))["loss"]
            fitted.append({"memories": names, "valid_loss": loss})
        write_tensors(folder / "subset_mixtures.safetensors", states)
        write_json(folder / "subset_mixtures.json", fitted)

    def row_of(self, names: Sequence[str]) -> FittedMixtureSpec:
        """Return the row of a subset of memories, before its mixture is fitted."""
        full_row = self.tune.row()
        sizes = full_row.sizes if self.tune.memories.has_sizes(names) else MixtureSpec.sizes
        return replace(full_row, memory_order=tuple(names), sizes=sizes)

    def rows(self) -> list[MixtureSpec | FittedMixtureSpec]:
        """Return the row of each subset with its fitted mixture, that of all memories last."""
        # As in build: nothing was stored of no memories, nor of all of them.
        states, rows = load_file(self.path() / "subset_mixtures.safetensors"), list[MixtureSpec | FittedMixtureSpec]()
        *proper, _ = [subset["memories"] for subset in self.summary()]
        for number, names in enumerate(proper):
            if not names:
                rows.append(MixtureSpec((), ()))
                continue
            experts = self.tune.summary()["experts"]
            mixture = self.tune.mixture.build({name: size for name, size in experts.items() if name in names})
            mixture.load(unprefixed(states, str(number)))
            rows.append(replace(self.row_of(names), fitted=mixture))
        return [*rows, self.tune.rows()[-1]]


@dataclass(frozen=True, eq=False, repr=False)
class Subsets(ShardedArtefact):
    """Losses of subsets of a mixture's memories: ``subsets.json``; the last subset has all memories."""

    kind, stage, format = "subsets", "evaluate", 4
    summary_file = "subsets.json"

    encoded: Encode
    tune: TuneMixture
    mixtures: SubsetMixtures
    scoring: Scoring
    lab: Free[Lab]

    def work(self, folder: Path, opened: OpenedSubsets | None = None) -> Work:
        """Return the work on spans of the test split: summed losses of every subset, and the weights of the full mixture."""
        scored = opened or OpenedSubsets(self)
        full_row, memories = scored.rows[-1], self.tune.memories
        spans = spans_of(self.encoded, max(full_row.state_scope, memories.state_scope(full_row.memories)))
        files = [span_file(folder, span) for span in spans]

        def make(number: int, advance: Advance) -> None:
            write_tensors(files[number], *scored.score(spans[number], advance))

        return Work(files, [span.tokens for span in spans], make)

    def build(self, folder: Path) -> None:
        opened, corpus = OpenedSubsets(self), self.encoded.corpus.corpus()
        work = self.work(folder, opened)
        self.make_shards(work, folder, f"subsets {self.encoded.split}")
        sums, weights = [LossSums() for _ in opened.rows], WeightSums(opened.bins, len(corpus.vocabulary))
        notes = []
        for tensors, note in map(read_shard, work.files):
            notes.append(note)
            add_sums(sums, tensors)
            weights.add(tensors["token"], tensors["share"], tensors["bin"])
        tokens, results = sums[-1].tokens, []
        for number, (row, fitted) in enumerate(zip(opened.rows, self.mixtures.summary(), strict=True)):
            summary = summarize_row(row, sums[number])
            results.append(
                {
                    "memories": list(row.memory_order) if isinstance(row, FittedMixtureSpec) else [],
                    "valid_loss": fitted["valid_loss"],
                    **{key: summary[key] for key in ("loss", "tokens", "documents", "bootstrap_unit")},
                    "seconds_per_token": sum(note["seconds"][number] for note in notes) / tokens,
                }
            )
        dtypes = dict.fromkeys(memory.nearest.store.keys.dtype for memory in opened.memories.values() if memory.nearest)
        content = {
            "mixture": self.tune.row().kind,
            "selection": self.mixtures.selection,
            "external_search": describe_search(opened.memories) | {"keys": " and ".join(dtypes)} if dtypes else None,
            "encode_seconds_per_token": self.encoded.summary()["seconds"] / tokens,
            "costs": {
                name: {
                    "bytes": max(note["costs"][name]["bytes"] for note in notes),
                    "seconds_per_token": sum(note["costs"][name]["seconds"] for note in notes) / tokens,
                }
                for name in opened.memories
            },
            "weights": weights.summary(dev_frequency(corpus)),
            "subsets": results,
        }
        write_json(folder / "subsets.json", content)


class OpenedSubsets:
    """The rows of all subsets; the memories that they score with are opened when they are asked for."""

    def __init__(self, subsets: Subsets):
        self.subsets, self.rows = subsets, subsets.mixtures.rows()

    @cached_property
    def scorer(self) -> Scorer:
        """The scorer of all subsets at once, with the memories opened for test."""
        return build_scorer(self.subsets.scoring, self.rows, self.subsets.tune.memories, self.subsets.encoded)

    @cached_property
    def memories(self) -> dict[str, Memory]:
        """The opened memories by name, in the order of the mixture's experts."""
        memories = self.scorer.memories
        return {name: memories[name] for name in self.subsets.tune.row().memory_order}

    @cached_property
    def bins(self) -> dict[str, Bins]:
        """The bins by which the weights of each memory are shown; bins of similarities hold equally many tokens of valid."""
        masses, description = self.subsets.tune.grid.expert_masses()
        bins, first = {}, 1  # after the vocabulary's column
        for name, size in description["experts"].items():
            columns, first = slice(first, first + size), first + size
            if names := self.memories[name].expert_names:
                bins[name] = Bins("context", columns, names, torch.zeros(0))
                continue
            # The similarity itself was not stored: the log-mass of the sharpest softmax, the first, is closest to it.
            best = masses.total[:, columns.start]
            known = best[best.isfinite()].numpy()
            edges = np.quantile(known, np.arange(1, BINS) / BINS) if len(known) else np.zeros(BINS - 1)
            names = [f"{100 * number // BINS}–{100 * (number + 1) // BINS} %" for number in range(BINS)]
            bins[name] = Bins("similarity", columns, names, torch.as_tensor(edges))
        return bins

    def score(self, span: Span, advance: Advance) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Score a span; return summed losses of every subset, of each token the weights of the full mixture, and a note."""
        meters = {name: MeteredMemory(memory) for name, memory in self.memories.items()}
        scorer, sums, seconds = self.scorer, [LossSums() for _ in self.rows], [0.0 for _ in self.rows]
        # A meter for each shard, because shards may be made by other processes or by an earlier run.
        scorer.memories = {**meters}  # type: ignore[dict-item]
        scorers, tokens, shares, bins = [row.window_scorer() for row in self.rows], [], [], []
        full_scorer = scorers[-1]
        assert isinstance(full_scorer, FittedScorer)
        for window, masses in scorer.query(windows_of(self.subsets.encoded, span)):
            for row, (score_window, row_masses) in enumerate(zip(scorers, masses, strict=True)):
                started = device_seconds()
                score = score_window(window, row_masses)
                seconds[row] += device_seconds() - started
                sums[row].add(window, score)
            # The full mixture is scored last: its masses and weights are those of this window.
            share, token_bins = token_weights(self.bins, full_scorer.expert_masses.total, full_scorer.log_weights)
            tokens.append(window.query.token)
            shares.append(share)
            bins.append(token_bins)
            advance(len(window.vocabulary.total))
        tensors = {"token": torch.cat(tokens).cpu(), "share": torch.cat(shares).cpu(), "bin": torch.cat(bins).cpu()}
        tensors |= sums_as_tensors(sums)
        costs = {name: {"bytes": meter.peak_bytes, "seconds": meter.seconds} for name, meter in meters.items()}
        return tensors, {"seconds": seconds, "costs": costs}


def subsets(names: tuple[str, ...], which: str) -> list[tuple[str, ...]]:
    """Return the subsets that ``which`` asks for (all, leave_one_out), in the order of memories, the full set last."""
    sizes: Sequence[int] = range(len(names)) if which == "all" else [len(names) - 1]
    return [*(subset for size in sizes for subset in combinations(names, size)), names]
