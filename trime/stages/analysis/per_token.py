"""Every scored token of test with its probability and what each memory contributed (evaluate.per_token=true)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trime.common.identity import Free
from trime.common.io import to_json
from trime.lab.artefact import Artefact, Lab
from trime.scoring.scorer import ScoredWindow
from trime.stages.encode import Encode
from trime.stages.scoring import Scoring, build_scorer, with_progress
from trime.stages.tune import TunedRows

FILE = "tokens.jsonl"
DIGITS = 6  # decimals of probabilities and weights


@dataclass(frozen=True, eq=False)
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
        symbols, names = corpus.vocabulary.symbols, corpus.names(self.test.split) if self.test.windowing.bounded else None
        with open(folder / FILE, "w", encoding="utf-8") as file:
            for scored in scorer.score_row(with_progress(self.test, "write tokens of")):
                for line in token_lines(scored):
                    token, document = symbols[line["token"]], names[line["document"]] if names else None
                    file.write(
                        to_json(line | {"token": token, "document": document}, file.name, None, ensure_ascii=False) + "\n"
                    )


def token_lines(scored: ScoredWindow) -> Iterator[dict[str, Any]]:
    """Yield the content of each scored token's line, with the numbers of token and document."""
    log_probability, query = scored.log_probability.tolist(), scored.window.query
    parts, weights = columns(scored.parts()), columns(scored.weights())
    places = zip(query.positions.document.tolist(), query.positions.position.tolist(), query.token.tolist(), strict=True)
    for number, (document, position, token) in enumerate(places):
        yield {
            "document": document,
            "position": position,
            "token": token,
            "log_probability": round(log_probability[number], DIGITS),
            "parts": {name: values[number] for name, values in parts.items()},
            "weights": {name: values[number] for name, values in weights.items()},
        }


def columns(values: dict[str, Any]) -> dict[str, list[float]]:
    """Return tensors by name as lists of rounded numbers."""
    return {name: [round(value, DIGITS) for value in column.tolist()] for name, column in values.items()}
