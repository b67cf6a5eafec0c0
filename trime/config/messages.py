"""What to say of an override that Hydra refuses: the setting, and what it must be."""

from __future__ import annotations

import re
from typing import Any

from trime.config.folder import CONF
from trime.config.help import groups
from trime.config.walk import schema_entries
from trime.config.wording import no_choice, no_setting, wanted


def message_of(error: BaseException) -> str:
    """Return one line for an error of Hydra or OmegaConf about a setting; its own words where it is about another thing."""
    override = re.search(r"override ([^=\s]+=.*)", str(error))
    cause = error.__cause__ or error
    key = str(getattr(cause, "full_key", None) or "")
    schema = {entry.key: entry for entry in schema_entries()}
    if missing := re.search(
        r"Could not find '([\w/]+)/([^'/]+)'\s+Available options in '[\w/]+':\s+(.*?)(?:Config search|$)", str(error), re.S
    ):
        return no_choice(missing[1], missing[2], missing[3].split())
    if unknown := re.search(r"Could not override '([\w.@]+)'|Key '(\w+)' (?:is not|not) in", str(error)):
        return unknown_setting(unknown[1] or key, schema, str(error), names_beside(key, cause))
    if override and key in schema:
        return f"{override[1].strip()}: it must be {wanted(schema[key].kind, schema[key].rule)}"
    return " ".join(str(error).split())


def names_beside(key: str, cause: BaseException) -> list[str]:
    """Return the settings that stand in the section where ``key`` was looked for, as in a model's backbone."""
    section = getattr(cause, "parent_node", None)
    return [f"{key.rpartition('.')[0]}.{name}" for name in (section or {})] if "." in key else []


def unknown_setting(key: str, schema: dict[str, Any], said: str, others: list[str]) -> str:
    """Return what to say of a setting that there is not, with the nearest setting or group that there is."""
    if key in schema or not key:  # a group that is named in the wrong way: Hydra says how
        return " ".join(said.split())
    return no_setting(key, [*schema, *groups(CONF), *others])
