"""evaluate of a translation experiment: perplexity and BLEU on the test split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trime.pipeline.artefact import Artefact
from trime.stages.encode import Encode
from trime.stages.evaluate import Evaluate
from trime.stages.translation.translate import Translate
from trime.stages.translation.tune import TuneByBleu


class EvaluatePairs(Evaluate):
    """Loss and BLEU of every row on the test split: ``rows.json``."""

    def __init__(self, config: DictConfig, encoded: Encode, tune: TuneByBleu, translate: Translate):
        super().__init__(config, encoded, tune)
        self.translate = translate

    def needs(self) -> list[Artefact]:
        return [*super().needs(), self.translate]

    def build(self, folder: Path) -> None:
        super().build(folder)
        rows = json.loads((folder / "rows.json").read_text())
        results = [row | bleu for row, bleu in zip(rows, self.translate.results(), strict=True)]
        for row in results:
            row["tuned"] |= {"k": row["k"]} if row["k"] else {}
        (folder / "rows.json").write_text(json.dumps(results, indent=1))

    def rows(self) -> list[dict[str, Any]]:
        """Return the results of every row, with the statistics that a paired bootstrap of BLEU needs."""
        return [row | {"bleu_statistics": self.translate.statistics(n)} for n, row in enumerate(super().rows())]
