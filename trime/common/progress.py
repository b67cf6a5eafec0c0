"""Progress bars of long work: redrawn in place on a terminal, a line now and then where output goes to a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

ON_TERMINAL, IN_FILE = 1, 30  # least seconds between two states


class Progress(tqdm):  # type: ignore[misc]
    """A bar of ``total`` units; in a file each state is a line of its own, and work below 30 seconds writes none."""

    def __init__(self, iterable: Any = None, **settings: Any):
        wait = ON_TERMINAL if sys.stderr.isatty() else IN_FILE
        super().__init__(iterable, mininterval=wait, delay=0 if wait == ON_TERMINAL else wait, **settings)

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        """Change the text before the bar; in a file it is written with the next state."""
        super().set_description(desc, refresh and sys.stderr.isatty())

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """Return the function that shows a state."""
        if sys.stderr.isatty():
            return tqdm.status_printer(file)
        return lambda state: print(state, file=sys.stderr, flush=True) if state else None
