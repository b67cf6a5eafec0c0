"""Check a composed configuration: by the types of the schema, and components by the signatures of their classes."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from typing_extensions import is_typeddict

from trime.config.fields import describe_type
from trime.config.schema import Settings
from trime.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from pydantic import TypeAdapter

FOR_HYDRA = ("_target_", "_partial_", "_convert_", "_recursive_")


def validate(config: DictConfig) -> Settings:
    """Return a configuration as checked settings; UserError at the first value that its type does not allow."""
    from omegaconf import OmegaConf  # imported late, as pydantic below: --help needs none of it
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:  # a choice refers to a setting that another choice lacks
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}: choose parts that go together") from None
    return parse_as(Settings, content)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of a type, which takes a fifth of a second to build for all settings."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def parse_as(kind: Any, content: Any, place: str = "") -> Any:
    """Return plain data as a value of a type; UserError that names the setting, below ``place``, and its type."""
    from pydantic import ValidationError

    try:
        return adapter(kind).validate_json(json.dumps(content))  # JSON, for there a strict dataclass may be a mapping
    except ValidationError as error:
        first = error.errors()[0]
    names, value = [*filter(None, [place])], content
    for name in map(str, first["loc"]):  # it goes on to items of lists, and names the members of unions
        if hints := fields_of(kind):
            if name not in hints:
                raise UserError(no_setting(".".join([*names, name]), hints))
            kind = hints[name]
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        else:
            break
        names, value = [*names, name], value.get(name) if isinstance(value, dict) else value
    raise UserError(f"{'.'.join(names)}={format_value(value)}: it must be {describe_type(kind)}")


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the types of a section's settings; none if the type is no section."""
    members = [kind, *typing.get_args(kind)]
    found = [member for member in members if is_dataclass(member) or is_typeddict(member)]
    return typing.get_type_hints(found[0], include_extras=True) if found else {}


def no_setting(key: str, known: typing.Iterable[str]) -> str:
    """Return the message for a key that does not exist, with the name beside it that is most similar."""
    *sections, name = key.split(".")
    near = difflib.get_close_matches(name, known, 1)
    return f"there is no setting {key}" + (f": is it {'.'.join([*sections, near[0]])}?" if near else "")


def format_value(value: Any) -> str:
    """Return a value as the command line has it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"[{','.join(map(format_value, value))}]" if isinstance(value, list) else str(value)


def check_components(settings: dict[str, Any]) -> None:
    """Raise UserError where a ``_target_`` cannot be imported, or an argument is unknown to it or of another type."""
    from hydra.utils import get_object

    for key, component in components_of(settings):
        try:
            target = get_object(component["_target_"])
        except Exception as error:  # Hydra raises several kinds, and imports may fail
            reason = " ".join(str(error).split())
            raise UserError(f"{key}._target_={component['_target_']} cannot be imported: {reason}") from error
        parameters = inspect.signature(target).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        hints = hints_of(target)
        for name in component.keys() - parameters.keys() - {*FOR_HYDRA}:
            if not takes_any:
                message = no_setting(f"{key}.{name}", parameters)
                raise UserError(message if message.endswith("?") else f"{message}: choose from {', '.join(parameters)}")
        for name, value in component.items():
            if name in hints and not (isinstance(value, dict) and "_target_" in value):  # those are checked by themselves
                check_argument(f"{key}.{name}", value, hints[name])


def check_argument(key: str, value: Any, hint: Any) -> None:
    """Raise UserError where a value is of another type than an argument; types that plain data cannot have are not checked."""
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value}: it must be a finite number")
    try:
        TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        if value is not None or str not in (*typing.get_args(hint), hint):  # a text that is needed is asked for when it is used
            raise UserError(f"{key}={format_value(value)}: it must be {describe_type(hint)}") from None
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation):
        if isinstance(value, dict):  # an object of a class that pydantic does not know
            names = ", ".join(f"{key}.{name}" for name in value) or key
            raise UserError(f"{names}: {key} names no class: add _target_: package.module.CLASS") from None
        return
    if isinstance(value, int) and value < 0:
        raise UserError(f"{key}={value}: it must be at least 0")


def components_of(settings: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every section with a ``_target_``, at any depth, with its key."""
    if isinstance(settings, dict):
        if settings.get("_target_"):
            yield place, settings
        for name, value in settings.items():
            yield from components_of(value, f"{place}.{name}" if place else str(name))


def hints_of(target: Any) -> dict[str, Any]:
    """Return the types of a callable's arguments; none if they cannot be resolved."""
    is_tuple = inspect.isclass(target) and issubclass(target, tuple)  # a NamedTuple's fields are its arguments
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) and not is_tuple else target)
    except (NameError, TypeError):
        return {}
