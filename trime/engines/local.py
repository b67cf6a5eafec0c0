"""Parts are made one after the other in this process."""

from __future__ import annotations

from trime.engines.base import Advance, Engine, Job, MakePart


class Local(Engine):
    """This process makes every part, with all threads of ``threads=``."""

    def run(self, job: Job, make: MakePart, numbers: list[int], advance: Advance) -> None:
        for number in numbers:
            make(number, advance)
