"""What the hash of a result contains: all fields of its dataclass that are not ``Free``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
Free = Annotated[T, "free"]  # a field that cannot change a result, such as a device or a place: no hash contains it


def hashed_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not free: declared ``Free[...]``, or by ``free`` in the schema."""
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if not str(field.type).startswith("Free[") and not field.metadata.get("free")  # types are text
    }


def identity_of(value: Any) -> Any:
    """Return what a value contributes to a hash, as plain data.

    An artefact contributes its fingerprint, an object with a method ``identity`` what that returns, and any other dataclass its
    hashed fields. TypeError for an object that does not say what it is.
    """
    if isinstance(fingerprint := getattr(value, "fingerprint", None), str):
        return fingerprint
    if hasattr(value, "identity"):
        return value.identity()
    if dataclasses.is_dataclass(value):
        return {"type": type(value).__name__} | {name: identity_of(part) for name, part in hashed_fields(value).items()}
    if isinstance(value, Mapping):
        return {str(name): identity_of(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [identity_of(part) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a hash cannot contain {type(value).__name__}: declare its field Free, or make it a dataclass")


def fingerprint_of(content: Any) -> str:
    """Return the hash of plain data, in 12 digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
