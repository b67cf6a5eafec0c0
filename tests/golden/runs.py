"""Overrides of a run that repeats a published one."""

from __future__ import annotations

from typing import Any

from tests.golden.checkpoints import checkpoint, corpus_of
from tests.golden.scored import case_settings, flag
from tests.golden.texts import DATA

STAGES = "stages=[import,prepare,encode,tune]"


FAITHFUL = [
    "compatibility=published",
    "evaluate.bounded=false",
    "evaluate.scaled_interpolation=false",
    "long.across_documents=true",
    "long.include_window=true",
]


def overrides(case: dict[str, Any]) -> list[str]:
    """Return the command line of a case."""
    row, _, published = case_settings(case)
    text, sizes = DATA / corpus_of(case["model"]), [int(flag(case, "--mem-size", 0)) or 64]
    return [
        *(FAITHFUL if published else FAITHFUL[1:]),
        f"checkpoint={checkpoint(case['model'])}",
        f"dictionary={text}/dict.txt",
        "dataset=folder_words",
        f"dataset.path={text}/text",
        "dataset.tokenizer._target_=trime.data.tokenizers.Whitespace",
        f"evaluate.block={case['block']}",
        f"evaluate.context={case['context_window']}",
        f"evaluate.lines={str(case['break_mode'] == 'complete').lower()}",
        "evaluate.tokens=null",
        "mixture=none",
        f"evaluate.rows=[{{joint: [{','.join(row.joint)}]}}]",
        f"tune.temperature=[{row.temperature[0]}]",
        f"tune.memory_size={sizes}",
    ]
