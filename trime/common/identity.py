"""The content of a result's hash: all fields of its dataclass that are not ``Free``."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from trime.errors import UserError

T = TypeVar("T")
PACKAGE = str(Path(__file__).parents[1])
PLACES = PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
INSTALLED = tuple(f"{place}/" for place in PLACES if place)
FREE = "free"
Free = Annotated[T, FREE]  # a field that cannot change a result, such as a device or a place: no hash contains it
MOVED = {  # where classes are that settings of earlier versions name elsewhere
    "trime.memory.recall.": "trime.kv.recall.",
    "trime.memory.slots.": "trime.kv.",
    "trime.memory.training.in_batch_nearest.": "trime.translation.nearest_in_batch.",  # before the room that it was in
    "trime.memory.training.": "trime.token_memory.train.",
    "trime.memory.inference.": "trime.token_memory.test.",
    "trime.memory.retrieval.": "trime.token_memory.search.",
    "trime.models.layers.": "trime.layers.",
    "trime.data.questions.babilong.": "trime.data.questions.rooms.",
    "trime.data.parallel.": "trime.translation.pairs.",
    "trime.models.backbones.encoder_decoder.": "trime.translation.encoder_decoder.",
}


def hashed_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not free: declared ``Free[...]``, or by ``free`` in the schema."""
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.name not in free_fields(value.__class__) and not field.metadata.get(FREE)
    }


@cache
def free_fields(kind: type) -> frozenset[str]:
    """Return the names of a dataclass's fields whose annotation is ``Free``, by whatever name and at any depth."""
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise UserError(f"the fields of {kind.__name__} cannot be read ({error}): import what their types name") from None
    return frozenset(name for name, hint in hints.items() if is_free(hint))


def is_free(hint: Any) -> bool:
    """Return whether an annotation is, or has in it, one that is ``Free``."""
    return FREE in getattr(hint, "__metadata__", ()) or any(map(is_free, get_args(hint)))


def identity_of(value: Any) -> Any:
    """Return a value's contribution to a hash, as plain data.

    An artefact contributes its fingerprint, an object with a method ``identity`` what that returns, and any other dataclass its
    hashed fields. TypeError for an object that has no identity.
    """
    if isinstance(fingerprint := getattr(value, "fingerprint", None), str):
        return fingerprint
    code = code_of(type(value).__module__)
    if hasattr(value, "identity"):
        return [value.identity(), code] if code else value.identity()
    if dataclasses.is_dataclass(value):
        own = {"type": type(value).__name__} | ({"code": code} if code else {})
        return own | {name: identity_of(part) for name, part in hashed_fields(value).items()}
    if isinstance(value, Mapping):
        return {str(name): identity_of(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [identity_of(part) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a hash cannot contain {type(value).__name__}: declare its field Free, or make it a dataclass")


def fingerprint_of(content: Any) -> str:
    """Return the hash of plain data, in 12 digits; it depends on the code of classes that users name by ``_target_``.

    A class of this package that has moved has its first name, so that earlier artefacts are found again.
    """
    first = with_targets(content, {new: old for old, new in MOVED.items()})
    return hashlib.sha256(json.dumps(with_code(first), sort_keys=True).encode()).hexdigest()[:12]


def with_code(content: Any) -> Any:
    """Return plain data in which settings with a ``_target_`` of the user's own also have a hash of its code."""
    if isinstance(content, list | tuple):
        return [with_code(part) for part in content]
    if not isinstance(content, dict):
        return content
    target = content.get("_target_")
    code = code_of(target) if isinstance(target, str) else None
    return {name: with_code(part) for name, part in content.items()} | ({"code": code} if code else {})


def with_current_targets(content: Any) -> Any:
    """Return plain settings of any version, whose ``_target_`` name classes of this package where they are now."""
    return with_targets(content, MOVED)


def with_targets(content: Any, places: Mapping[str, str]) -> Any:
    """Return plain data in which each ``_target_`` that begins with a key of ``places`` begins with its value instead."""
    if isinstance(content, list | tuple):
        return [with_targets(part, places) for part in content]
    if not isinstance(content, dict):
        return content
    renamed = {name: with_targets(part, places) for name, part in content.items()}
    if isinstance(target := content.get("_target_"), str):
        names = (new + target.removeprefix(old) for old, new in places.items() if target.startswith(old))
        renamed["_target_"] = next(names, target)
    return renamed


def code_of(name: str) -> str | None:
    """Return a hash of the module that ``name`` is in, and of the user's modules that it imports; None if it is installed.

    Code of this package and of installed ones, which their versions tell apart, is not the user's.
    """
    if name.partition(".")[0] in ("trime", "builtins"):
        return None
    module = module_of(name)
    files, waiting = dict[str, str](), [module]
    while waiting:
        module = waiting.pop()
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py") or file in files or file.startswith(INSTALLED):
            continue
        files[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for value in [*vars(module).values()]:
            waiting.append(value if inspect.ismodule(value) else sys.modules.get(getattr(value, "__module__", None) or ""))
    return hashlib.sha256("".join(sorted(files.values())).encode()).hexdigest() if files else None


@cache  # a name that is a class is first tried as a module, and a run asks for the same ones again and again
def module_of(name: str) -> ModuleType | None:
    """Return the module that a dotted name begins with; None where there is none."""
    for end in range(len(parts := name.split(".")), 0, -1):
        with suppress(ImportError, ValueError):
            return importlib.import_module(".".join(parts[:end]))
    return None
