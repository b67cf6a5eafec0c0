"""A job whose parts are small files, for tests of engines; its module imports little, since worker processes import it."""

from __future__ import annotations

import os
import signal
import time

from trime.engines.base import Advance, Job, MakePart
from trime.engines.processes import THREADS
from trime.errors import UserError


def open_part_files(job: Job) -> MakePart:
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
        if job.settings == "slow":
            time.sleep(600)
        advance(number)
        advance(1)
        (job.folder / str(number)).write_text(f"{os.getpid()} {os.environ.get(THREADS[0])}")

    return make
