"""Check a composed configuration against the schema and against the signatures of what ``_target_`` names."""

from __future__ import annotations

import difflib
import inspect
import math
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin

from hydra.utils import get_object

from trime.config.fields import Rule
from trime.config.registry import model_settings
from trime.config.schema import PARTS, PRETRAINED, SMALL_QUESTIONS, STATEFUL, Trainer
from trime.config.walk import schema_entries
from trime.config.wording import TYPES, alternatives, no_setting, wanted, written
from trime.errors import UserError

LIGHTNING = "pytorch_lightning.Trainer"
# Arguments of Lightning's trainer that the lab gives it, and the setting that decides each.
DECIDED_BY = {
    "max_steps": "train.updates",
    "max_epochs": "train.updates",
    "min_epochs": "train.updates",
    "fast_dev_run": "train.updates",
    "accumulate_grad_batches": "train.accumulate",
    "gradient_clip_val": "train.clip_norm",
    "val_check_interval": "train.validate_every",
    "check_val_every_n_epoch": "train.validate_every",
    "log_every_n_steps": "train.log_every",
    "enable_checkpointing": "train.checkpoint_every",
    "callbacks": "callbacks.NAME",
    "logger": "logger.lightning.NAME",
    "default_root_dir": "paths.outputs",
    "plugins": "trainer.strategy",
}


def check_settings(settings: dict[str, Any]) -> None:
    """Raise UserError at the first setting that is not what the schema, or the signature of a ``_target_``, says.

    ``settings`` is the whole configuration as plain, resolved data.
    """
    check_known(settings)
    check_sections(settings)
    inside = PRETRAINED if "name" in settings["model"] else STATEFUL
    for key, rule in (PARTS | inside).items():
        if (value := value_at(settings, key)) is not MISSING:
            check_rule(key, value, rule)
    check_trainer(settings["trainer"])
    for key in ("callbacks", "logger.lightning"):
        check_named_parts(key, value_at(settings, key))
    for key, part in parts_of(settings):
        check_arguments(key, part)


def check_known(settings: dict[str, Any]) -> None:
    """Raise UserError at a setting that the schema does not have, as ``+`` and ``++`` on the command line can add."""
    entries = {entry.key: entry for entry in schema_entries()}
    for section in ("", *(key for key, entry in entries.items() if entry.is_section and key != "trainer")):
        place = value_at(settings, section) if section else settings
        for name in place:
            key = f"{section}.{name}" if section else str(name)
            if key not in entries:
                raise UserError(no_setting(key, entries))
    own = {"model": model_settings(), "small.questions": {*settings["questions"], *SMALL_QUESTIONS}}
    for section, names in own.items():
        if unknown := [name for name in value_at(settings, section) if name not in names]:
            raise UserError(no_setting(f"{section}.{unknown[0]}", [f"{section}.{name}" for name in names]))


def check_sections(settings: dict[str, Any], *names: str) -> None:
    """Raise UserError at the first setting of the named sections, by default of all, that breaks its rule."""
    for entry in schema_entries():
        if entry.rule and (not names or entry.key.split(".")[0] in names):
            check_rule(entry.key, value_at(settings, entry.key), entry.rule)


def added_arguments(trainer: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of ``trainer`` that are not in the schema: further arguments of Lightning's trainer."""
    listed = {entry.name for entry in fields(Trainer)}
    return {name: value for name, value in trainer.items() if name not in listed}


def check_trainer(trainer: dict[str, Any]) -> None:
    """Raise UserError at an argument that Lightning's trainer lacks, or that another setting decides."""
    added = added_arguments(trainer)
    if not added:  # nor is Lightning imported
        return
    possible = inspect.signature(target_of("trainer", LIGHTNING)).parameters
    for name in added:
        if name in DECIDED_BY:
            raise UserError(f"trainer.{name}: this argument of Lightning's trainer is set by {DECIDED_BY[name]}: set that")
        if name not in possible:
            near = difflib.get_close_matches(name, possible.keys() - DECIDED_BY.keys(), 1)
            advice = f": is it {near[0]}?" if near else ""
            raise UserError(f"trainer.{name}: {LIGHTNING} has no such argument{advice}")
    check_arguments("trainer", {"_target_": LIGHTNING} | added)


def check_named_parts(key: str, parts: dict[str, Any]) -> None:
    """Raise UserError where an entry has no ``_target_``; null is none."""
    for name, part in parts.items():
        if part is not None and not (isinstance(part, dict) and part.get("_target_")):
            raise UserError(f"{key}.{name}={written(part)}: it must name a class, as {{_target_: package.module.CLASS}}")


def check_rule(key: str, value: Any, rule: Rule) -> None:
    """Raise UserError where a value breaks a rule."""
    if broken := rule.broken_by(value):
        raise UserError(f"{key}={written(value)}: it must be {broken}")


def value_at(settings: dict[str, Any], key: str) -> Any:
    """Return the value of a dotted key; MISSING where there is none, or no section that could have it."""
    value: Any = settings
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return MISSING
        value = value[name]
    return value


def parts_of(settings: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what has a ``_target_``, at any depth, with its key."""
    if isinstance(settings, dict):
        if settings.get("_target_"):
            yield place, settings
        for name, value in settings.items():
            yield from parts_of(value, f"{place}.{name}" if place else str(name))


def check_arguments(key: str, part: dict[str, Any]) -> None:
    """Raise UserError where an argument is unknown to what ``_target_`` names, or of another type than it says."""
    target = target_of(key, part["_target_"])
    parameters = inspect.signature(target).parameters
    hints = hints_of(target)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in part.items():
        if name in ("_target_", "_partial_", "_convert_", "_recursive_"):
            continue
        if name not in parameters and not takes_any:
            raise UserError(
                f"{key}.{name}: {part['_target_'].rpartition('.')[2]} has no such setting; it has {known(parameters)}"
            )
        if name in hints and not fits(value, hints[name]):
            raise UserError(f"{key}.{name}={written(value)}: it must be {wanted(hints[name])}")
        if name in hints and isinstance(value, int) and value < 0 and int in alternatives(hints[name]):
            raise UserError(f"{key}.{name}={value}: it must be at least 0")


def target_of(key: str, target: Any) -> Any:
    """Return the class or function that ``_target_`` names; UserError where there is none."""
    try:
        return get_object(target)
    except Exception as error:  # Hydra raises several kinds, and imports may fail
        raise UserError(f"{key}._target_={target} cannot be imported: {' '.join(str(error).split())}") from error


def hints_of(target: Any) -> dict[str, Any]:
    """Return the types of a callable's arguments, without those that cannot be resolved."""
    is_tuple = inspect.isclass(target) and issubclass(target, tuple)  # a NamedTuple's fields are its arguments
    function = target.__init__ if inspect.isclass(target) and not is_tuple else target
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}


def known(parameters: typing.Mapping[str, inspect.Parameter]) -> str:
    """Return the names of parameters, for a message."""
    return ", ".join(parameters) or "none"


def fits(value: Any, hint: Any) -> bool:
    """Return True if a value is of a type, as far as plain data can tell; an int is a float, other objects are not judged.

    A text may be null: what needs one says so itself, and not every experiment builds all that its configuration describes.
    """
    kinds = alternatives(hint)
    if value is None and str in kinds:
        return True
    if all(is_plain(kind) for kind in kinds):
        return any(fits_one(value, kind) for kind in kinds)
    if any(kind in (bool, int, float) for kind in kinds):
        return not isinstance(value, str) or str in kinds
    return not all(map(is_object, kinds)) or value is None or (isinstance(value, dict) and "_target_" in value)


def is_object(kind: Any) -> bool:
    """Return True for a class or a protocol of this package, whose objects a part with a ``_target_`` describes."""
    return inspect.isclass(kind) and kind.__module__.startswith("trime.")


def is_plain(kind: Any) -> bool:
    """Return True for a type that plain data can be judged by."""
    return kind in TYPES or get_origin(kind) in (list, tuple, dict, Literal) or kind in (list, tuple, dict)


def fits_one(value: Any, kind: Any) -> bool:
    """Return True if a value is of one plain type."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        return value in get_args(kind)
    if origin in (list, tuple):
        items = [kind for kind in get_args(kind) if kind is not ...]
        return isinstance(value, list) and (len(items) != 1 or all(fits(item, items[0]) for item in value))
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, origin)
