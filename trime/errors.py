"""Errors that are meant for users."""

from __future__ import annotations

import re
from importlib import metadata


class UserError(Exception):
    """A mistake that the user can mend: printed as one line, exit status 1, no traceback."""


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an optional extra of this project."""
    try:
        requirements = metadata.requires("trime") or []
    except metadata.PackageNotFoundError:
        requirements = []
    wanted = [part.partition(";")[0].strip() for part in requirements if re.search(rf"extra == ['\"]{extra}['\"]", part)]
    return f"pip install {' '.join(map(repr, wanted))}" if wanted else f"pip install -e '.[{extra}]' in the project's folder"
