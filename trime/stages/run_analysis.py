"""Analyses of a run that score it once more, with evaluate.analysis=true and with evaluate.per_token=true.

The first is by frequency buckets, retrieval accuracy and long memory sizes: TRIME Table 14 (buckets by frequency on dev), Table
13 (is the target among those of the top K?), Figure 3. The second writes every scored token of test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trime.common.identity import Free
from trime.common.io import to_json, write_json
from trime.common.metrics import perplexity
from trime.lab.artefact import Artefact, Lab
from trime.report.report_run import TOKENS
from trime.scoring.loss_sums import BUCKETS, TokenMeans, dev_frequency
from trime.scoring.meters import TOP, Hits
from trime.scoring.mixture_spec import MixtureSpec
from trime.scoring.rows import sizes_of
from trime.stages.encode import Encode
from trime.stages.scoring import Scoring, build_scorer, with_progress
from trime.stages.tune import TunedRows
from trime.token_memory.search.search import CachedSearch

DIGITS = 6  # decimals of probabilities and weights of tokens


@dataclass(frozen=True, eq=False, repr=False)
class RunAnalysis(Artefact):
    """Loss by token frequency, retrieval accuracy, and loss by size of the long memory: ``analysis.json``."""

    kind, stage, format = "analysis", "evaluate", 3
    summary_file = "analysis.json"

    test: Encode
    tune: TunedRows
    scoring: Scoring
    lab: Free[Lab]

    def identity(self) -> Any:
        return super().identity() | {"buckets": BUCKETS, "top": TOP}

    def build(self, folder: Path) -> None:
        content = {"valid": self.analyse(self.tune.encoded), "test": self.analyse(self.test)}
        write_json(folder / "analysis.json", content, ensure_ascii=False)

    def analyse(self, encoded: Encode) -> dict[str, Any]:
        """Return the analysis of one split."""
        # All sizes of the last row of the papers are scored in the same pass; the other settings stay as tuned.
        rows = list(self.tune.rows())
        sized = max(number for number, row in enumerate(rows) if isinstance(row, MixtureSpec))  # the last of the papers' rows
        tuned_size = [0] * len(rows)  # the index of a row's tuned memory size among its sizes
        if has_sizes := any(rows[sized].sizes):
            sizes = sizes_of(self.tune.memories.sources.config, rows[sized].memories)
            tuned_size[sized], rows[sized] = sizes.index(rows[sized].sizes[0]), replace(rows[sized], sizes=sizes)
        scorer = build_scorer(self.scoring, rows, self.tune.memories, encoded)
        hits = {name: Hits(memory.nearest) for name, memory in scorer.memories.items() if memory.nearest}
        for each in hits.values():  # scoring and counting search for the same entries
            each.nearest.search = CachedSearch(each.nearest.search)
        corpus = encoded.corpus.corpus()
        tables = [TokenMeans(len(corpus.vocabulary)) for _ in rows]
        losses = torch.zeros(len(rows[sized].sizes), dtype=torch.float64)
        for window, scores in scorer.score_rows(with_progress(encoded, "analyse")):
            for table, score, number in zip(tables, scores, tuned_size, strict=True):
                table.add(window.query.token, -score[number, 0])
            losses += -scores[sized][:, 0].double().sum(-1).cpu()
            for each in hits.values():
                each.add(window.query)
        # TRIME counts frequencies on dev.
        counts = dev_frequency(corpus)
        by_size = dict(zip(map(str, rows[sized].sizes), (losses / tables[-1].tokens).tolist(), strict=True))
        return {
            "buckets": {
                row.label: [
                    {"bucket": name, "tokens": tokens, "loss": loss, "perplexity": None if loss is None else perplexity(loss)}
                    for name, tokens, loss in (cell.values() for cell in table.buckets(counts))
                ]
                for row, table in zip(rows, tables, strict=True)
            },
            "retrieval": next((each.accuracy() for each in hits.values()), {}),  # of the first memory that is searched
            "retrieval_by_memory": {name: each.accuracy() for name, each in hits.items()},
            "by_memory_size": by_size if has_sizes else {},  # the other settings as tuned
        }


@dataclass(frozen=True, eq=False, repr=False)
class PerToken(Artefact):
    """A line of JSON for each scored token of test under the experiment's own row: ``tokens.jsonl``.

    Its keys: ``document``, ``position`` in it, ``token``, ``log_probability`` in nats, ``parts`` of the probability that come
    from the vocabulary and from each memory, and the ``weights`` of a fitted mixture.
    """

    kind, stage = "per_token", "evaluate"

    test: Encode
    tune: TunedRows
    scoring: Scoring
    lab: Free[Lab]

    def build(self, folder: Path) -> None:
        scorer = build_scorer(self.scoring, [self.tune.rows()[-1]], self.tune.memories, self.test)
        corpus = self.test.corpus.corpus()
        symbols, split = corpus.vocabulary.symbols, self.test.split
        names = corpus.names(split) if self.test.windowing.bounded else None  # else windows cross documents
        with open(folder / TOKENS, "w", encoding="utf-8") as file:
            for scored in scorer.score_row(with_progress(self.test, "write tokens of")):
                parts, weights = (
                    {name: [round(value, DIGITS) for value in column.tolist()] for name, column in columns.items()}
                    for columns in (scored.contributions(), scored.weights())
                )
                query, log_probability = scored.window.query, scored.log_probability.tolist()
                places = query.positions.document.tolist(), query.positions.position.tolist(), query.token.tolist()
                for number, (document, position, token) in enumerate(zip(*places, strict=True)):
                    line = {
                        "document": names[document] if names else None,
                        "position": position,
                        "token": symbols[token],
                        "log_probability": round(log_probability[number], DIGITS),
                        "parts": {name: values[number] for name, values in parts.items()},
                        "weights": {name: values[number] for name, values in weights.items()},
                    }
                    file.write(to_json(line, file.name, None, ensure_ascii=False) + "\n")
