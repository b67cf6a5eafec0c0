"""The end of a search, as by sweep=optuna: its best job is evaluated on test and reported."""

from __future__ import annotations

import math
import shlex

from trime.common.metrics import perplexity
from trime.config.compose import command_of
from trime.config.folder import PROGRAM
from trime.lab.job_results import JobResult
from trime.lab.runner import run


def report_best(results: list[JobResult]) -> None:
    """Print the job with the lowest loss on dev, then run it again with all stages; it finds what it made before."""
    best = min(results, key=lambda result: math.inf if result.loss is None else result.loss)
    if best.loss is None:
        print("search: no job has a result on dev: name the stages up to tune")
        return
    overrides = [word for word in best.overrides if not word.startswith("sweep=")]
    shown = f"loss {best.loss:.4f}, perplexity {perplexity(best.loss):.2f}"
    print(f"\nsearch: the best of {len(results)} jobs on dev ({shown}): {shlex.join([*PROGRAM, *overrides])}")
    with command_of(*overrides, "search=false") as config:
        run(config)
