"""tune of a translation experiment: chooses K by BLEU on valid (TRIME Appendix C)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trime.common.identity import Free
from trime.common.io import write_json
from trime.lab.artefact import Lab
from trime.scoring.fitted_mixture_spec import FittedMixtureSpec
from trime.scoring.mixture_spec import MixtureSpec
from trime.stages.encode import Encode
from trime.stages.memories import Memories
from trime.stages.translation.translate import Translate
from trime.stages.tune import TunedRows

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TuneByBleu(TunedRows):
    """Tunes K: every row with memory gets the K whose translations of valid have the highest BLEU (``tuned.json``).

    ``without_memory`` holds the translations of the rows without memory, which come first; ``with_memory`` those of the
    other rows at each K, each with its own best temperatures or its own fitted mixture.
    """

    kind, stage, format = "tune_bleu", "tune", 4

    tunes: dict[int, TunedRows]
    without_memory: Translate
    with_memory: dict[int, Translate]
    lab: Free[Lab]

    @property
    def encoded(self) -> Encode:  # type: ignore[override]
        return next(iter(self.tunes.values())).encoded

    @property
    def memories(self) -> Memories:  # type: ignore[override]
        return next(iter(self.tunes.values())).memories

    def build(self, folder: Path) -> None:
        rows, first = self.without_memory.scores(), next(iter(self.tunes.values()))
        content = first.tuned() | {"k": [None for _ in rows]}
        content["rows"] = [row | scored for row, scored in zip(content["rows"], rows, strict=False)]
        for number in range(len(next(iter(self.with_memory.values())).scores())):
            by_k = {k: translations.scores()[number] for k, translations in self.with_memory.items()}
            best = max(by_k, key=lambda k: by_k[k]["bleu"])
            row = self.tunes[best].tuned()["rows"][len(rows) + number] | by_k[best]
            row["tuned"]["k"] = best
            content["rows"].append(row | {"bleu_by_k": {str(k): result["bleu"] for k, result in by_k.items()}})
            content |= {"recall": self.tunes[best].tuned()["recall"]}
            content["k"].append(best)
            # With two values or one, every choice is at the edge.
            if len(by_k) > 2 and best in (min(by_k), max(by_k)):
                log.warning(f"tune: {row['memories']}: K={best} is at the edge of the grid: widen translation.k")
        write_json(folder / "tuned.json", content)

    def tuned(self) -> dict[str, Any]:
        return self.read("tuned.json")

    def for_row(self, row: int) -> TunedRows:
        """Return the pass at the row's best K."""
        k = self.tuned()["k"][row]
        return next(iter(self.tunes.values())) if k is None else self.tunes[k]

    def rows(self) -> Sequence[MixtureSpec | FittedMixtureSpec]:
        return [self.for_row(number).rows()[number] for number in range(len(self.tuned()["rows"]))]
