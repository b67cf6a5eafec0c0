"""Targets and settings in the yaml files of conf/: a stored model may be made only of these classes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from trime.config.folder import CONF

GROUPS = ("backbone", "eviction", "head", "model")  # the groups that describe a model
EVERY_GROUP = ("",)  # the folder conf/ itself
TARGET = re.compile(r"_target_:\s*([\w.]+)")


@cache
def registered_targets(groups: tuple[str, ...] = GROUPS) -> frozenset[str]:
    """Return every ``_target_`` in the yaml files of some groups, by default those that describe a model."""
    files = [file for group in groups for file in (CONF / group).rglob("*.yaml")]
    return frozenset(target for file in files for target in TARGET.findall(file.read_text(encoding="utf-8")))


def unregistered(stored: Any, own: Any, registered: frozenset[str] | None = None) -> str | None:
    """Return the first thing in a stored description that could run other code than the registered; None if it is safe.

    ``own`` is the description in the present settings: classes that the user names there may be used. References to settings
    (``${…}``) count as unsafe, since resolving them runs resolvers. ``registered``: by default the targets of models.
    """
    allowed = (registered or registered_targets()) | {target for target in targets(own) if isinstance(target, str)}
    for target in targets(stored):
        if not isinstance(target, str) or target not in allowed:
            return f"_target_: {target}"
    return next((text for text in strings(stored) if "${" in text), None)


def targets(content: Any) -> Iterator[Any]:
    """Yield the values of all keys ``_target_``, at any depth."""
    if isinstance(content, dict):
        if "_target_" in content:
            yield content["_target_"]
        for value in content.values():
            yield from targets(value)
    elif isinstance(content, list):
        for value in content:
            yield from targets(value)


def strings(content: Any) -> Iterator[str]:
    """Yield all text, keys included, at any depth."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from (*strings(key), *strings(value))
    elif isinstance(content, list):
        for value in content:
            yield from strings(value)
