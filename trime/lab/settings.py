"""Parts of a configuration: what an artefact, or a part of it, is given, and what its hash covers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from trime.common.io import plain

Keys = tuple[str, ...]  # dotted keys of settings, or names of whole sections
ABSENT = object()


class Configured:
    """Part of a run that sees only the settings that its class names.

    Those of ``depends_on`` determine what it makes and are hashed; those of ``unhashed`` do not (devices, intervals of
    logging), or enter the hash by ``settings()`` in another form; ``paths`` and ``artefacts`` are given to all. Names are
    dotted keys or whole sections; where one list names a part of a section in the other list, the part counts. Any other
    setting cannot be read, so that the hash cannot miss one. Only ``Samples`` reads more, through its plan: what the artefacts
    that it needs have hashed already.
    """

    depends_on: ClassVar[Keys] = ()
    unhashed: ClassVar[Keys] = ()

    def __init__(self, config: DictConfig):
        self.config = select_settings(config, ("paths", "artefacts", *self.depends_on, *self.unhashed))

    def settings(self) -> Any:
        """Return everything that determines what it makes: settings, hashes of files, devices."""
        inside = [key for key in self.unhashed if any(key.startswith(f"{section}.") for section in self.depends_on)]
        return without(plain_settings(self.config, self.depends_on), inside)


def select_settings(config: DictConfig, keys: Iterable[str]) -> DictConfig:
    """Return a configuration with these dotted keys only; reading another key of it is an error."""
    part = OmegaConf.create(plain_settings(config, keys))
    OmegaConf.set_struct(part, True)
    return part


def plain_settings(config: DictConfig, keys: Iterable[str]) -> dict[str, Any]:
    """Return these dotted keys of a configuration as plain data, references resolved.

    Keys that the configuration does not have are left out: not every model has a memory size.
    """
    content: dict[str, Any] = {}
    for key in sorted({*keys}):  # a section before its parts
        value = OmegaConf.select(config, key, default=ABSENT)
        if value is not ABSENT:
            *sections, name = key.split(".")
            place = content
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = plain(value)
    return content


def without(content: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Remove these dotted keys from plain settings, and return them."""
    for key in keys:
        *sections, name = key.split(".")
        place: Any = content
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(name, None)
    return content
