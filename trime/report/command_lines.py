"""Command lines of runs, as reports show them."""

from __future__ import annotations

import re
import shlex

PATH_SETTINGS = re.compile(
    r"((?:[\w.]*path|paths\.\w+|report\.keep|questions\.(?:babi|background))=).+"
)  # settings that are paths on a machine


def split_command(command: str | None) -> list[str]:
    """Return the words of a command line, split as a shell does."""
    try:
        return shlex.split(command or "")
    except ValueError:  # an earlier version could drop a quotation mark
        return (command or "").split()


def without_paths(command: str | None) -> str | None:
    """Return a command line in which paths are replaced by …; None for an empty one."""
    words = [PATH_SETTINGS.sub(r"\1…", w) if PATH_SETTINGS.match(w) else shlex.quote(w) for w in split_command(command)]
    return " ".join(words) or None
