"""Command lines of runs, for readers."""

from __future__ import annotations

import re
import shlex

PLACES = re.compile(r"((?:[\w.]*path|paths\.\w+|report\.keep)=).+")  # settings that say where things lie on a machine


def words(command: str | None) -> list[str]:
    """Of a command line, as a shell reads it."""
    try:
        return shlex.split(command or "")
    except ValueError:  # kept by an earlier version, a quotation mark short
        return (command or "").split()


def without_places(command: str | None) -> str | None:
    """A command line that says nothing of a machine."""
    return " ".join(PLACES.sub(r"\1…", word) if PLACES.match(word) else shlex.quote(word) for word in words(command)) or None
