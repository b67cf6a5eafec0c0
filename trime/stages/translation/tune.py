"""tune of a translation experiment: K by BLEU on valid (TRIME Appendix C)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.evaluation.fitted_rows import FittedRow
from trime.evaluation.rows import Row
from trime.pipeline.artefact import Artefact
from trime.stages.translation.translate import Translate
from trime.stages.tune import Tune


class TuneByBleu(Tune):
    """``tuned.json``: every row with a memory at the K whose translations of valid have the highest BLEU.

    ``plain`` has the translations of the rows without memory, which come first; ``own`` those of the others at each K, where
    each has its own best temperatures, or its own fitted mixture.
    """

    kind, stage, format = "tune_bleu", "tune", 2

    def __init__(self, config: DictConfig, tunes: dict[int, Tune], plain: Translate, own: dict[int, Translate]):
        first = next(iter(tunes.values()))
        super().__init__(config, first.encoded, first.memories)
        self.tunes, self.plain, self.own = tunes, plain, own

    def needs(self) -> list[Artefact]:
        return [*self.tunes.values(), self.plain, *self.own.values()]

    def parts(self) -> list[Artefact]:
        return [*(part for tune in self.tunes.values() for part in (*tune.parts(), tune)), self.plain, *self.own.values()]

    def settings(self) -> Any:
        return list(self.tunes)

    def build(self, folder: Path) -> None:
        rows, first = self.plain.results(), next(iter(self.tunes.values()))
        content = first.tuned() | {"k": [None for _ in rows]}
        content["rows"] = [row | scored for row, scored in zip(content["rows"], rows, strict=False)]
        for number in range(len(next(iter(self.own.values())).results())):
            found = {k: own.results()[number] for k, own in self.own.items()}
            best = max(found, key=lambda k: found[k]["bleu"])
            row = self.tunes[best].tuned()["rows"][len(rows) + number] | found[best]
            row["tuned"]["k"] = best
            content["rows"].append(row | {"bleu_by_k": {str(k): own["bleu"] for k, own in found.items()}})
            content |= {"recall": self.tunes[best].tuned()["recall"]}
            content["k"].append(best)
            if len(found) > 2 and best in (min(found), max(found)):
                print(f"tune: {row['memories']}: K={best} lies at the edge of the grid: widen translation.k")
        (folder / "tuned.json").write_text(json.dumps(content, indent=1))

    def of(self, row: int) -> Tune:
        """Return the pass at the row's best K."""
        k = self.tuned()["k"][row]
        return next(iter(self.tunes.values())) if k is None else self.tunes[k]

    def rows(self) -> Sequence[Row | FittedRow]:
        return [self.of(number).rows()[number] for number in range(len(self.tuned()["rows"]))]
