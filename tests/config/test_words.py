"""The words of a command line: what Hydra cannot read, and the names that people type, are one line that says what to type."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.conftest import ROOT, composed
from trime.config.help import groups
from trime.config.walk import schema_entries
from trime.config.wording import NAMES_ELSEWHERE, no_setting
from trime.config.words import check_words, quoted
from trime.errors import UserError

CHOICES = groups(ROOT / "conf")
KEYS = [entry.key for entry in schema_entries()]
REFUSED = [
    ("trime_ext", "trime_ext: a setting is written SETTING=VALUE: is it experiment=trime_ext?"),
    ("trime_ex", "is it experiment=trime_ext?"),
    ("wikitext103", "is it dataset=wikitext103?"),
    ("experiment trime_ext", "experiment: a setting is written experiment=trime_ext"),
    ("nope", "nope: a setting is written SETTING=VALUE, as experiment=trime"),
    ("train.updates", "a setting is written train.updates=VALUE"),
    ("prune", "'stages=[prune]'"),
    ("experiment=vanilla,trime", "add -m for a run of each, python cli.py -m experiment=vanilla,trime …"),
    ("experiment=vanilla seed=0,1", "add -m"),
    ("seed=range(3)", "add -m"),
    ("tune.temperature=1,2", "one list is 'tune.temperature=[1,2]'"),
    ("dataset.path=a,b", "a text with a comma 'dataset.path=\"a,b\"'"),
    ("-m experiment=vanilla,trime --cfg job", "--cfg shows the configuration of one run: leave out -m"),
    ("--multirun seed=0,1 --info", "--info shows"),
    ("experiment=trime -x", "there is no flag -x"),
    ("dataset.path=a=b", "type 'dataset.path=\"a=b\"'"),
    ("stages=[fit", "stages=[fit cannot be read: close its brackets"),
]
ACCEPTED = [
    "experiment=trime seed=0",
    "-m experiment=vanilla,trime seed=range(3)",
    "--cfg job experiment=trime",
    "experiment=trime --cfg=job -p dataset",
    "stages=[fit,report] tune.temperature=[1,2] model.lora={rank:8}",
    "~callbacks +a=1 ++b.c=null dataset@evaluate.dataset=folder",
    "--config-dir somewhere experiment=trime",
    "hydra.mode=MULTIRUN",
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_a_word_that_cannot_be_meant_is_refused_with_what_to_type(words: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        check_words(words.split(), CHOICES)
    assert said in str(raised.value) and "\n" not in str(raised.value) and "mismatched" not in str(raised.value)


@pytest.mark.parametrize("words", ACCEPTED)
def test_other_words_are_left_to_hydra(words: str) -> None:
    check_words(words.split(), CHOICES)


@given(st.text("ab =,:'\"\\$()[]{}#&;ü é/~*?%", min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_a_path_that_cannot_be_read_is_advised_with_its_quotes(path: str) -> None:
    """The advised word, read by a shell and then by Hydra, is accepted and holds the path."""
    try:
        check_words([f"dataset.path={path}"], CHOICES)
        return
    except UserError as error:
        assert str(error).count("\n") == 0
    (word,) = shlex.split(quoted("dataset.path", path))
    check_words([word], CHOICES)
    value = OverridesParser.create().parse_override(word).value()
    assert path[:1] in "'\"" or value == path or "${" in path


def test_the_path_of_the_report_is_shown_as_it_is_typed() -> None:
    with pytest.raises(UserError, match=r"type 'dataset\.path=\"a=b ü\"'"):
        check_words(["experiment=trime", "dataset.path=a=b ü"], CHOICES)


def test_names_of_other_programs_are_those_of_settings() -> None:
    """Every setting of the table exists, and no name in it is a setting itself."""
    config = composed("experiment=trime_ext", "dataset=folder")
    pretrained = composed("experiment=vanilla", "model=pretrained")
    for setting, names in NAMES_ELSEWHERE.items():
        *choices, key = setting.split()
        for group, _, choice in (each.partition("=") for each in choices):
            assert choice in CHOICES[group]
        values = [OmegaConf.select(each, key, default=KEYS) for each in (config, pretrained)]
        assert key in KEYS or any(value is not KEYS for value in values), setting
        for name in names.split():
            assert no_setting(name, [*KEYS, *CHOICES]) == f"there is no setting {name}: is it {setting}?"
            assert name not in KEYS
    listed = "lr learning_rate batch_size epochs steps seq_len context_length k temperature lambda device gpus max_steps"
    every = {name for names in NAMES_ELSEWHERE.values() for name in names.split()}
    assert {*listed.split(), "hidden_size", "layers", "dropout", "warmup"} <= every


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.lr", "schedule.peak"),
        ("optimizer.learning-rate", "schedule.peak"),
        ("train.update", "train.updates"),
        ("evaluate.token", "evaluate.tokens"),
        ("exprimnt", "experiment"),
        ("dataset.path", "dataset=folder dataset.path"),
    ],
)
def test_the_setting_that_is_meant_is_named(key: str, meant: str) -> None:
    assert no_setting(key, [*KEYS, *CHOICES]) == f"there is no setting {key}: is it {meant}?"
