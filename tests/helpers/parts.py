"""Jobs for tests of engines: parts are small files or small shards. It imports little, since worker processes import it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from trime.common.choices import THREADS
from trime.errors import UserError
from trime.lab.engines import Advance, Job, MakeShard

SHARD = 512  # tokens of a shard


def open_part_files(job: Job) -> MakeShard:
    """Return what writes a file for each part: its process, and its number of threads."""
    (job.folder / f"opened-{os.getpid()}").touch()

    def make(number: int, advance: Advance) -> None:
        if job.settings == "mistake" and number == 3:
            raise UserError("part 3 is a mistake")
        death = job.folder / "death"
        if job.settings == "death" and number == 3 and not death.exists():
            death.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if job.settings == "always" and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if job.settings == "a second each":
            time.sleep(1)
        advance(number)
        advance(1)
        (job.folder / str(number)).write_text(f"{os.getpid()} {os.environ.get(THREADS[0])}")

    return make


def cut_small() -> None:
    """Cut what is encoded, packed and scored into small parts, in this process."""
    from trime.stages import encode, pack, scoring

    encode.SHARD = SHARD
    pack.QUERIES = 100
    scoring.SPAN = 200


def open_small_parts(graph_of: type[Any], job: Job) -> MakeShard:
    """Return what makes the parts of an artefact, which are small."""
    from trime.stages.graph import open_job

    cut_small()
    return open_job(graph_of, job)
