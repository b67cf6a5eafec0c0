"""The schema: every setting has help, its default keeps its rule, and nothing malformed is accepted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any, get_origin

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.conftest import ROOT, composed
from trime.config.check import check_sections, check_settings, fits
from trime.config.fields import Rule
from trime.config.help import help_text
from trime.config.schema import PARTS, PRETRAINED, Settings
from trime.config.walk import schema_entries
from trime.errors import UserError
from trime.io import plain

LEAVES = {entry.key: (entry.kind, entry.rule) for entry in schema_entries() if not entry.is_section}
TEXT, LIST, SECTION = "maybe", [[1]], {"a": 1}


def malformed() -> Iterator[tuple[str, Any]]:
    """Every setting of the schema with values that it must not have."""
    for key, (kind, rule) in LEAVES.items():
        for value in malformed_values(kind, rule):
            yield key, value


def malformed_values(kind: Any, rule: Rule | None) -> list[Any]:
    """Values that a setting of a type under a rule refuses."""
    assert rule
    if get_origin(kind) is list:
        return [3, TEXT, SECTION, *([[]] if rule.filled else []), *([[TEXT]] if rule.bounded else [])]
    if rule.switch:
        return ["no", "off", "yes", "on", 3, TEXT, LIST]
    if rule.choices:
        return [TEXT, -1, LIST, *([] if rule.optional else [None])]
    if rule.bounded:
        beyond = [rule.at_least - 1] if rule.at_least is not None else [rule.above] if rule.above is not None else []
        beyond += [rule.at_most + 1] if rule.at_most is not None else [rule.below] if rule.below is not None else []
        return [TEXT, LIST, math.nan, math.inf, *beyond, *([1.5] if rule.whole and not rule.quantity else [])]
    return [LIST, SECTION] if kind is str else []


def test_there_are_many_malformed_values() -> None:
    assert len([*malformed()]) >= 300


@pytest.mark.parametrize("section", sorted({key.split(".")[0] for key in LEAVES}))
def test_no_malformed_value_is_accepted(section: str) -> None:
    """Each is refused when it is set, or by the check before anything runs, and the message names the setting."""
    settings = OmegaConf.structured(Settings)
    defaults = OmegaConf.to_container(settings)
    for key, value in malformed():
        if key.split(".")[0] != section:
            continue
        with pytest.raises((OmegaConfBaseException, UserError)) as refused:
            OmegaConf.update(settings, key, value, merge=False)
            check_sections(plain(settings))
        OmegaConf.update(settings, key, reduce(getitem, key.split("."), defaults), merge=False)
        check_sections(plain(settings))
        named = getattr(refused.value, "full_key", None) or str(refused.value)
        assert key.split(".")[-1] in named, (key, value, refused.value)


def test_defaults_keep_their_rules() -> None:
    check_sections(plain(OmegaConf.structured(Settings)))


def test_every_setting_has_help() -> None:
    """In ``--help SECTION`` with its default; every group's choices are listed there too."""
    everything = "\n".join(help_text(ROOT / "conf", topic) for topic in {key.split(".")[0] for key in LEAVES})
    assert all(f"  {key}=" in everything for key in LEAVES)
    assert "  lru " in help_text(ROOT / "conf", "eviction")


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("model.backbone", "model.backbone: its settings are those of the choice\nbackbone=NAME, one of:\n  memorizing"),
        ("evaluate.tokens", "evaluate.tokens="),
    ],
)
def test_help_of_what_is_no_section(topic: str, said: str) -> None:
    """One line for a setting, and the group for a part that is chosen."""
    assert said in help_text(ROOT / "conf", topic)


@pytest.mark.parametrize(
    ("topic", "said"), [("nonsense", "group nonsense: python cli.py --help lists"), ("evaluat", "is it evaluate")]
)
def test_help_of_nothing(topic: str, said: str) -> None:
    """An error with the nearest names."""
    with pytest.raises(UserError, match=said):
        help_text(ROOT / "conf", topic)


def test_rules_of_groups_are_of_settings_that_exist() -> None:
    commands = (
        "",
        "experiment=trime_ext dataset=folder questions=passkey engine=processes",
        "experiment=trime_mt engine=ray",
    )
    known = [plain(composed(*command.split())) for command in commands]
    known += [plain(composed("model=pretrained", "+model.lora={rank: 1, alpha: 1, dropout: 0.0}", "model.name=x"))]
    for key in PARTS | PRETRAINED:
        assert any(OmegaConf.select(OmegaConf.create(config), key, default=Rule) is not Rule for config in known), key


@pytest.mark.parametrize(
    "override",
    [
        "batching.size=many",
        "dataset.modules=few",
        "model.backbone.dropout=x",
        "neighbours.exclude=all",
        "optimizer.weight=3",
        "mixture.model.hidden=0",
        "memories.long.across_documents=maybe",
        "eviction._target_=trime.nothing.At",
    ],
)
def test_parts_are_checked_by_what_they_name(override: str) -> None:
    key, _, value = override.partition("=")
    settings = plain(composed())
    OmegaConf.update(config := OmegaConf.create(settings), key, OmegaConf.create({"v": value})["v"], force_add=True)
    with pytest.raises(UserError, match=key.split(".")[0]):
        check_settings(plain(config))


def test_every_experiment_passes() -> None:
    for name in ("vanilla", "trime_ext", "trime_mt", "attendre_decoder", "memorizing", "srupp", "reproduce/table2/trime_ext"):
        check_settings(plain(composed(f"experiment={name}")))


def test_values_fit_types_as_plain_data_can_tell() -> None:
    assert fits(3, float) and fits(None, int | None) and fits([1], list[int]) and not fits("3", int)
    assert (
        not fits(True, int) and not fits(1, bool) and fits({"_target_": "x"}, get_object("trime.eviction.base.EvictionPolicy"))
    )
