"""The words of a command line, checked before Hydra reads them, whose own messages are about its grammar."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from trime.config.folder import PROGRAM
from trime.config.walk import schema_entries
from trime.errors import UserError

SWEEPS = {"-m", "--multirun"}
SHOWS = {"-c", "--cfg", "-i", "--info"}  # they show one configuration
TAKES_VALUE = {*SHOWS, "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir"}
SHORT = {"-m", "-r", "-c", "-i", "-p", "-cp", "-cn", "-cd", "-sc"}
STAGES_BY_NAME = ("list", "disk", "prune", "ledger", "audit", "export", "generate")


def check_words(words: list[str], choices: Mapping[str, Mapping[str, object]]) -> None:
    """Raise UserError at the first word that Hydra could not read, or would read otherwise than it was meant.

    ``choices`` are the groups of settings, each with its choices by name.
    """
    sweeps = bool(SWEEPS & {*words})
    for flag in (word.partition("=")[0] for word in words):
        if sweeps and flag in SHOWS:
            raise UserError(f"{flag} shows the configuration of one run: leave out -m, and name one choice of each setting")
        if flag.startswith("-") and not flag.startswith("--") and flag not in SHORT:
            raise UserError(f"there is no flag {flag}: settings are written as SETTING=VALUE, without a dash")
    settings = settings_among(words)
    for word, following in zip(settings, [*settings[1:], ""], strict=True):
        check_word(word, following, sweeps, choices)


def settings_among(words: list[str]) -> list[str]:
    """Return the words that are neither flags nor values of flags."""
    before = ["", *words[:-1]]
    return [word for word, flag in zip(words, before, strict=True) if not word.startswith("-") and flag not in TAKES_VALUE]


def check_word(word: str, following: str, sweeps: bool, choices: Mapping[str, Mapping[str, object]]) -> None:
    """Raise UserError at a word without a value, with a value that needs quotes, or with several values of one run."""
    key, equals, value = word.partition("=")
    if not equals and not word.startswith("~"):
        raise UserError(without_value(word, following, choices))
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        if not equals:
            raise  # a deletion, ~KEY, about which Hydra says enough
        raise UserError(unreadable(key, value)) from None
    if override.is_sweep_override() and not sweeps:
        raise UserError(several_values(key, value, override, choices))


def without_value(word: str, following: str, choices: Mapping[str, Mapping[str, object]]) -> str:
    """Return what to say of a word that has no "=": the setting that it is a choice of, or what settings look like."""
    known = {entry.key for entry in schema_entries() if not entry.is_section} | {*choices}
    if word in known:
        value = following if following and "=" not in following else "VALUE"
        return f"{word}: a setting is written {word}={value}"
    if word in STAGES_BY_NAME:
        return f"{word}: a stage is written 'stages=[{word}]'"
    near = next(chosen_in(word, choices), None)
    example = near or "experiment=trime"
    return f"{word}: a setting is written SETTING=VALUE" + (f": is it {near}?" if near else f", as {example}")


def chosen_in(word: str, choices: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """Yield GROUP=CHOICE for the choices of that name, then for those of a similar one; experiments first."""
    ordered = sorted(choices, key=lambda group: group != "experiment")
    yield from (f"{group}={word}" for group in ordered if word in choices[group])
    for group in ordered:
        yield from (f"{group}={name}" for name in get_close_matches(word, choices[group], 1, cutoff=0.8))


def unreadable(key: str, value: str) -> str:
    """Return what to say of a value that Hydra cannot read: the same word with its value in quotes, for the shell too."""
    opened = value[:1] in ("[", "{")
    advice = "close its brackets and quotes, or, if it is text, " if opened else "text with such characters needs quotes: "
    return f"{key}={value} cannot be read: {advice}type {quoted(key, value)}"


def quoted(key: str, value: str) -> str:
    """Return a setting with a text as its value, as a shell and then Hydra read it."""
    text = value.strip("'\"") if value[:1] in ("'", '"') else value
    mark = "'" if '"' in text and "'" not in text else '"'
    trailing = len(text) - len(text.rstrip("\\"))
    escaped = text.replace(mark, f"\\{mark}") + "\\" * trailing
    return shlex.quote(f"{key}={mark}{escaped}{mark}")


def several_values(key: str, value: str, override: Override, choices: Mapping[str, Mapping[str, object]]) -> str:
    """Return what to say of several values without -m: run each, or, where a setting may have them, a list or text."""
    message = f"{key}={value}: several values are a sweep: add -m for a run of each, {' '.join(PROGRAM)} -m {key}={value} …"
    kinds = {entry.key: entry.kind for entry in schema_entries()}
    if override.key_or_group in choices:
        return message
    if get_origin(kinds.get(key)) is list:
        return f"{message}; one list is '{key}=[{value}]'"
    return f"{message}; a list is '{key}=[{value}]', and a text with a comma {quoted(key, value)}"
