"""evaluate of a translation experiment: perplexity and BLEU on the test split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trime.common.identity import Free
from trime.common.io import write_json
from trime.lab.artefact import Lab
from trime.stages.evaluate import Evaluate, TestResults
from trime.stages.translation.translate import Translate


@dataclass(frozen=True, eq=False)
class EvaluateTranslations(TestResults):
    """Loss and BLEU of every row on the test split: ``rows.json``."""

    kind, stage = "evaluate_translations", "evaluate"

    losses: Evaluate
    translations: Translate
    lab: Free[Lab]

    def build(self, folder: Path) -> None:
        results = [row | bleu for row, bleu in zip(self.losses.rows(), self.translations.scores(), strict=True)]
        for row in results:
            row["tuned"] |= {"k": row["k"]} if row["k"] else {}
        write_json(folder / "rows.json", results)

    def rows(self) -> list[dict[str, Any]]:
        """Return the results of every row, with the statistics that a paired bootstrap of BLEU needs."""
        return [row | {"bleu_statistics": self.translations.bleu_statistics(n)} for n, row in enumerate(super().rows())]
