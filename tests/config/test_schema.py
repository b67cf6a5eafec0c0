"""The schema: every setting has help, nothing malformed is accepted, and the message is one line that names the setting."""

from __future__ import annotations

import math
from functools import reduce
from operator import getitem
from typing import Annotated, Any, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from omegaconf import OmegaConf

from tests.conftest import composed
from trime.common.io import plain
from trime.config.check import check_components, parse_as, validate
from trime.config.help import help_text, schema_entries
from trime.config.schema import Settings
from trime.errors import UserError
from trime.stages import preflight

LEAVES = {key: entry.kind for key, entry in schema_entries().items() if not entry.is_section}
TEXT, LIST = "maybe", [[1]]
BEYOND = {Ge: ("ge", -1), Gt: ("gt", 0), Le: ("le", 1), Lt: ("lt", 0)}  # the bound, and what is added to it


def malformed(kind: Any) -> list[Any]:
    """Return values that a type refuses."""
    if get_origin(kind) is Annotated:
        own, *rules = get_args(kind)
        bounds = [(rule, *BEYOND[type(rule)]) for rule in rules if type(rule) in BEYOND]
        beyond = [getattr(rule, name) + step for rule, name, step in bounds]
        return [*malformed(own), *beyond, *([[]] if get_origin(own) is list and rules else [])]
    members = get_args(kind)
    if kind is bool:
        return ["no", "yes", 1, TEXT, LIST, None]
    if kind in (int, float):
        return [TEXT, LIST, math.nan, math.inf, True, None, *([1.5] if kind is int else [])]
    if kind is str or get_origin(kind) is dict:
        return [LIST, 3, None] + [{"a": 1}] * (kind is str)
    if get_origin(kind) is list:
        return [3, TEXT, {"a": 1}, None, *([[value] for value in malformed(members[0])] if members[0] is not Any else [])]
    if type(None) in members:  # what no member allows
        return [value for value in malformed(members[0]) if value is not None] if len(members) == 2 else [[{}]]
    return [-1, LIST, None]  # words, and unions


def test_no_malformed_value_is_accepted() -> None:
    """The message has the whole key, in one line."""
    content, tried = plain(composed()), 0
    parse_as(Settings, content)
    for key, kind in LEAVES.items():
        *sections, name = key.split(".")
        section = reduce(getitem, sections, content)
        before = section[name]
        for section[name] in malformed(kind):
            with pytest.raises(UserError) as refused:
                parse_as(Settings, content)
            assert key in str(refused.value) and "\n" not in str(refused.value), (key, section[name], refused.value)
            tried += 1
        section[name] = before
    assert tried > 500


def test_quantities_are_read_and_whole_numbers_are_numbers() -> None:
    config = composed("evaluate.tokens=30k", "tune.temperature=[1,2]", "datastore.tokens=2e6")
    settings = validate(config)
    assert settings.evaluate.tokens == 30_000 and settings.datastore.tokens == 2 * 10**6
    assert settings.tune.temperature == [1.0, 2.0] and all(isinstance(value, float) for value in settings.tune.temperature)
    assert settings.mixture.tokens == 200_000 and settings.index.metric == "ip"


def test_every_setting_has_help() -> None:
    """In ``--help SECTION`` with its default; the overview has every section and group, on one screen."""
    everything = "\n".join(help_text(topic) for topic in {key.split(".")[0] for key in LEAVES})
    assert all(f"  {key}=" in everything for key in LEAVES)
    overview = help_text()
    assert len(overview.splitlines()) <= 32 and all(key.split(".")[0] in overview for key in LEAVES)
    assert "  lru " in help_text("eviction") and "memorizing" in help_text("model.backbone")
    assert help_text("evaluate.tokens").startswith("  evaluate.tokens=null")
    with pytest.raises(UserError, match="is it evaluate"):
        help_text("evaluat")


WRONG = """
batching.size=many batching.size=0 dataset.modules=few model.backbone.dropout=x model.backbone.layers=-1 neighbours.exclude=all
optimizer.weight=3 optimizer.betas=[2.0,0.9] mixture.model.hidden=0 test_memories.long.across_documents=maybe
schedule._target_=trime.nothing.At small.model.kind=encoder model.backbone._target_=trime.nothing trainer.extra.max_tiem=1
trainer.extra.max_steps=1
"""


@pytest.mark.parametrize("override", WRONG.split())
def test_parts_are_checked_by_what_they_name(override: str) -> None:
    """By signatures and constructors, before anything runs."""
    key, _, value = override.partition("=")
    config = composed()
    OmegaConf.update(config, key, OmegaConf.from_dotlist([f"v={value}"])["v"], force_add=True)
    with pytest.raises(UserError, match=key.split(".")[0]):
        preflight.check(config)


def test_arguments_that_fit_are_accepted() -> None:
    """A whole number is a number, a text may be missing until it is needed, and other objects are not judged."""
    check_components(plain(composed("dataset=folder_words", "mixture.model.hidden=8", "schedule.peak=1")))


def test_imitated_bfloat16_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for fast, precision, warned in ((False, "bf16-mixed", True), (False, "32-true", False), (True, "bf16-mixed", False)):
        caplog.clear()
        monkeypatch.setattr(preflight, "multiplies_in_bfloat16", lambda fast=fast: fast)
        preflight.open_graph(composed("trainer.accelerator=cpu", f"trainer.precision={precision}"))
        assert ("imitates" in caplog.text) == warned
