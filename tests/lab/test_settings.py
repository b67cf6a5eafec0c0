"""What each artefact is given of the configuration, and which settings its hash covers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, get_args, get_origin

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.conftest import composed
from trime.common.identity import MOVED, Free, code_of, fingerprint_of, free_fields, identity_of, with_current_targets
from trime.common.io import plain
from trime.config.compose import compose_config
from trime.config.help import schema_entries
from trime.config.registry import EVERY_GROUP, registered_targets
from trime.errors import UserError
from trime.lab.artefact import Artefact
from trime.lab.provenance import config_hash
from trime.stages.preflight import build_graph
from trime.stages.tune import TuneMixture
from trime.translation.graph import TranslationGraph

NOTHING: frozenset[str] = frozenset()


def by_setting(settings_of: dict[str, str]) -> dict[str, frozenset[str]]:
    """Return, for each setting, the artefacts that change with it; in a table of settings by the artefacts."""
    return {name: frozenset(artefacts.split()) for artefacts, names in settings_of.items() for name in names.split()}


# Which artefacts of `experiment=trime_ext` change with a setting, apart from those made from them. A name stands for a setting,
# or for all of a section that no longer name stands for. Without effect: where texts are kept, how often is logged, memories
# that no row uses, and a memory inside the model, which this one does not have.
LANGUAGE_MODEL = by_setting(
    {
        "": "dataset.cache train.checkpoint_every train.log_every train.memory_size train.eviction"
        " test_memories.ngram test_memories.ngram_document",
        "corpus": "dataset vocabulary",
        "pack": "neighbours",
        "fit": "batching memory model optimizer schedule train trainer.compile"
        " compatibility.own_gradient_only compatibility.padding compatibility.string_ids",
        "pack fit": "segments batching.k",
        "fit mixture": "seed",
        "fit index grid": "similarity",
        "valid test": "evaluate.lines evaluate.tokens evaluate.sample evaluate.dtype",
        "valid test store": "evaluate.block evaluate.context evaluate.bounded",
        "valid test store fit": "compatibility.dropped_in_band trainer.precision",
        "valid test store grid evaluate subsets": "compatibility.sorted_windows",
        "store": "datastore.split datastore.tokens datastore.dtype",
        "index": "index.factory index.metric index.recall index.parts",
        "index grid": "index.k",
        "grid": "eviction long test_memories tune evaluate.rows evaluate.all_rows index.nprobe index.rescore mixture.tokens",
        "grid mixture": "mixture.temperatures",
        "mixture": "mixture",
        "grid evaluate subsets": "evaluate.scaled_interpolation",
        "subset_mixtures subsets": "evaluate.subsets",
    }
)
# Of experiment=memorizing, whose model has a memory.
MEMORIZING = by_setting(
    {"": "train.checkpoint_every train.log_every", "fit": "train model", "valid test evaluate": "model.memory_size eviction"}
)
SEARCHED = ("beam", "length_penalty", "min_length", "max_length", "sentences", "unweighted_external")
# Of experiment=knn_mt.
TRANSLATION = by_setting(
    {
        "": "translation.batch_size",
        "fit": "translation",
        "fit valid test store": "translation.key",
        "corpus fit": "translation.joined_dictionary",
        "translate": " ".join(f"translation.{name}" for name in SEARCHED),
        "store": "datastore",
    }
)
OTHERS = {
    "optimizer._target_": "torch.optim.SGD",
    "trainer.precision": "64-true",
    "index.factory": None,
    "eviction._target_": "trime.kv.eviction.lru.LRU",
}
ELSEWHERE = ("small", "answering", "questions", "translation", "train.memory_size", "train.eviction", "test_memories")
# With others of these it is another experiment.
KEPT = ("task._target_", "task._partial_", "stages", "mixture.kind", "train.updates", "checkpoint")
EXPERIMENTS: list[tuple[Sequence[str], Sequence[str] | None, dict[str, frozenset[str]]]] = [
    (("experiment=trime_ext", "dataset=stdlib_tiny"), None, LANGUAGE_MODEL),
    (("experiment=memorizing", "dataset=stdlib_tiny"), ("train", "model", "eviction"), MEMORIZING),
    (("experiment=knn_mt", "translation.k=[4]"), ("translation", "datastore"), TRANSLATION),
]


def artefacts_of(config: DictConfig) -> dict[str, Artefact]:
    """Return the artefacts of an experiment by their names in the graph."""
    graph = build_graph(config)
    made = {name: getattr(graph, name) for name in ("corpus", "pack", "fit", "valid", "test", "evaluate")}
    made |= {name: getattr(memory, name) for memory in graph.memories.datastores for name in ("store", "index")}
    if isinstance(graph, TranslationGraph):
        mixture = next(iter(graph.tune.tunes.values()))
        made |= {"translate": graph.evaluate.translations, "bleu": graph.tune, "evaluate": graph.evaluate.losses}
    else:
        mixture, made["subsets"] = graph.tune, graph.subsets
        made["subset_mixtures"] = graph.subsets and graph.subsets.mixtures
    made |= {"grid": mixture.grid, "mixture": mixture} if isinstance(mixture, TuneMixture) else {"grid": mixture}
    return {name: artefact for name, artefact in made.items() if artefact is not None}


def leaves(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a configuration, each list as one value; references to other keys are left out."""
    for name, value in node.items():
        key = f"{place}.{name}" if place else str(name)
        if isinstance(value, dict):
            yield from leaves(value, key)
        elif not (isinstance(value, str) and "${" in value) and name != "_target_":
            yield key, value


def other_value(value: Any, kind: Any) -> Any:
    """Return another value that a setting may have; the same value if none can be thought of."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        choices = [choice for part in (kind, *get_args(kind)) if get_origin(part) is Literal for choice in get_args(part)]
        return next((choice for choice in choices if choice != value), value)
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.25
    return value[:-1] if isinstance(value, list) and len(value) > 1 else value


def changed(config: DictConfig, changes: dict[str, Any]) -> DictConfig:
    """Return a configuration with other values for some keys, all references resolved."""
    copied = config.copy()
    for key, value in changes.items():
        OmegaConf.update(copied, key, value, force_add=True)
    return OmegaConf.create(plain(copied))


def settings_of(config: DictConfig) -> dict[str, str]:
    """Return what each artefact hashes of its own."""
    return {name: hashed(artefact) for name, artefact in artefacts_of(config).items()}


def hashed(artefact: Artefact) -> str:
    """Return what the hash of an artefact contains beside the artefacts that it is made from."""
    content = repr(artefact.identity())
    for need in artefact.needs():
        content = content.replace(need.fingerprint, need.kind)
    return content


def elsewhere(change: dict[str, Any]) -> bool:
    """Return True if all these settings are of other experiments, or of parts that this one does not use."""
    return all(any(f"{key}.".startswith(f"{other}.") for other in ELSEWHERE) for key in change)


def by_section(changes: dict[str, Any], expected: dict[str, frozenset[str]]) -> Iterator[dict[str, Any]]:
    """Yield changes one at a time, but those of a section that nothing is expected to depend on all at once."""
    for section, keys in groupby(changes, lambda key: key.split(".")[0]):
        group = {key: changes[key] for key in keys}
        if any(name.split(".")[0] == section for name in expected):
            yield from ({key: value} for key, value in group.items())
        else:
            yield group


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overrides, sections, expected", EXPERIMENTS)
def test_a_setting_moves_the_hashes_of_what_depends_on_it_and_no_others(
    overrides: Sequence[str], sections: Sequence[str] | None, expected: dict[str, frozenset[str]], every: int
) -> None:
    """Each setting of the sections (None: of all) is changed by itself; in the fast test, every sixth."""
    config = compose_config(*overrides)
    kinds = {key: entry.kind for key, entry in schema_entries().items()}
    values = {key: v for key, v in leaves(OmegaConf.to_container(config)) if not sections or key.split(".")[0] in sections}
    others = {key: other_value(value, kinds.get(key)) for key, value in values.items()} | OTHERS
    changes = {key: other for key, other in others.items() if key in values and key not in KEPT and other != values[key]}
    assert len(changes) > 0.6 * len(values)
    before, wrong, same = settings_of(changed(config, {})), {}, config_hash(changed(config, {}))
    for change in [*by_section(changes, expected)][::every]:
        after = settings_of(changed(config, change))
        names = [name for name in expected if name in change or any(key.startswith(f"{name}.") for key in change)]
        named = expected[max(names, key=len)] if names else NOTHING
        moved = {name for name in before if before[name] != after.get(name)}
        if moved != named:
            wrong[", ".join(change)] = f"changed {sorted(moved)}, expected {sorted(named)}"
        if not moved and not elsewhere(change) and config_hash(changed(config, change)) != same:
            wrong[", ".join(change)] = "changed config_hash, but no artefact"
    assert not wrong, "\n".join(f"{keys}: {text}" for keys, text in wrong.items())


Place = Free[str]


@dataclass(frozen=True)
class Placed:
    size: int
    place: Place
    perhaps: Place | None = None


def test_a_hash_contains_what_says_by_its_fields_what_it_is() -> None:
    """A field that is not Free is plain data, a dataclass or an artefact; any other object is refused."""

    @dataclass(frozen=True)
    class Part:
        size: int
        place: Free[str]

    same = [identity_of({"a": Part(1, place), "b": (2.5, None)}) for place in ("here", "there")]
    part = {"type": "Part", "code": code_of(__name__), "size": 1}  # a class outside the package says also how it is written
    assert same[0] == same[1] == {"a": part, "b": [2.5, None]}
    with pytest.raises(TypeError, match="object"):
        identity_of([object()])
    assert free_fields(Placed) == {"place", "perhaps"}, "by another name, and among other types"
    broken = dataclass(type("Broken", (), {"__annotations__": {"place": "NoSuchName"}}))
    with pytest.raises(UserError, match="import what their types name"):
        free_fields(broken)


@pytest.mark.parametrize("setting", ["datastore.dtype=int8", "index.recall=0.5", "train.updates=7", "dataset.modules=41"])
def test_a_result_changes_with_what_it_is_made_from(setting: str) -> None:
    """At any distance: results on test with the model, the datastore and the index that memories search."""
    graphs = [build_graph(compose_config("experiment=trime_ext", "size=tiny", *more)) for more in ((), (setting,))]
    assert len({graph.evaluate.fingerprint for graph in graphs}) == len({graph.tune.fingerprint for graph in graphs}) == 2


def test_settings_of_earlier_versions_name_classes_where_they_are_now() -> None:
    """All that conf/ names and that has moved is found by its first name too, and has the hash that it had by that name."""
    moved = [target for target in registered_targets(EVERY_GROUP) if target.startswith(tuple(MOVED.values()))]
    assert len(moved) > 25
    for target in moved:
        new = max((place for place in MOVED.values() if target.startswith(place)), key=len)
        (old,) = (first for first, place in MOVED.items() if place == new)
        earlier = [{"_target_": old + target.removeprefix(new), "size": 3}]
        assert with_current_targets(earlier) == [{"_target_": target, "size": 3}]
        assert fingerprint_of(earlier) == fingerprint_of(with_current_targets(earlier))


def test_what_the_hash_depends_on() -> None:
    given = [config_hash(composed("experiment=cache", f"checkpoint={place}/fit-{name}")) for place in "ab" for name in "cd"]
    assert given[0] == given[2] != given[1] == given[3], "a model of one's own is known by its folder's name, wherever it lies"
    table = "experiment=reproduce/table2/"
    knn, given = (composed(f"{table}knn_lm", *words) for words in ((), ("datastore.path=/a/small/one",)))
    assert config_hash(knn) != config_hash(given)
    base = config_hash(composed(f"{table}trime"))
    same = "seed=3 paths.outputs=elsewhere dataset.path=/somewhere logger=none trainer.devices=4 train.log_every=7"
    other = "checkpoint=/my/own/model.pt trainer.precision=bf16-true evaluate.tokens=1k size=tiny train.updates=3"
    other += " long.across_documents=false compatibility=published"
    assert {config_hash(composed(f"{table}trime", word)) for word in same.split()} == {base}
    assert base not in {config_hash(composed(f"{table}trime", word)) for word in other.split()}
