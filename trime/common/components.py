"""Instantiate the components that a configuration describes by ``_target_``."""

from __future__ import annotations

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from trime.errors import UserError


def build(component: Any, key: str = "", **options: Any) -> Any:
    """Return the object that settings describe, lists and dictionaries in it as plain data; UserError if it cannot be built.

    ``key`` is the setting that the message names, unless the constructor named it. ``options`` replace arguments.
    """
    try:
        return instantiate(component, _convert_="all", **options)
    except InstantiationException as error:
        message = str(error.__cause__ or error).splitlines()[0]
        raise UserError(message if not key or key.split(".")[0] in message else f"{key}: {message}") from None
