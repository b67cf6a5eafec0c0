"""The command line from a released checkpoint and its text to the loss that the published program printed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.golden.checkpoints import checkpoint, corpus_of
from tests.golden.published import parametrized
from tests.golden.scored import CASES, case_settings, flag
from tests.golden.texts import DATA
from trime.plan.language_model import Plan
from trime.run.runner import run

STAGES = "stages=[import,prepare,encode,tune]"
FAITHFUL = [
    "compatibility=published",
    "evaluate.bounded=false",
    "evaluate.scaled_interpolation=false",
    "long.crossing=true",
    "long.repeats=true",
]


def overrides(case: dict[str, Any]) -> list[str]:
    """Return the command line of a case."""
    row, _, published = case_settings(case)
    text, sizes = DATA / corpus_of(case["model"]), [int(flag(case, "--mem-size", 0)) or 64]
    return [
        *(FAITHFUL if published else FAITHFUL[1:]),
        f"checkpoint={checkpoint(case['model'])}",
        f"dictionary={text}/dict.txt",
        "dataset=folder",
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


RUN = [name for name, case in CASES.items() if case["datastore"] is None and "li" not in case["flags"]]


@parametrized("name", RUN)
def test_printed_loss(name: str, tiny: Callable[..., DictConfig]) -> None:
    case = CASES[name]
    config = tiny(*overrides(case), STAGES)
    run(config)
    plan = Plan(config)
    if case["split"] == "test":
        plan.test.make()
        plan.evaluate.make()
        (result,) = plan.evaluate.rows()
    else:
        (result,) = plan.tune.tuned()["rows"]
    assert result["tokens"] == case["tokens_scored"]
    assert result["loss"] / math.log(2) == pytest.approx(case["loss_base2"], abs=1e-4)


@parametrized("name", RUN[:1])
def test_results_say_what_was_imported(name: str, tiny: Callable[..., DictConfig], tmp_path: Path) -> None:
    case = CASES[name]
    config = tiny(*overrides(case), "stages=[import,prepare,encode,tune,evaluate,report]")
    run(config)
    results = (Plan(config).run_folder / "results.json").read_text()
    assert '"imported"' in results and "checkpoint_last.pt" in results and '"updates"' in results
    # The imported folder itself serves as a checkpoint.
    options = [word for word in overrides(case) if not word.startswith(("checkpoint=", "dictionary="))]
    again = tiny(*options, f"checkpoint={Plan(config).model.folder}", "dictionary=null", STAGES)
    run(again)
    assert Plan(again).tune.tuned()["rows"][0]["loss"] == Plan(config).tune.tuned()["rows"][0]["loss"]
