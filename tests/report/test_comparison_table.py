"""Laws of comparisons: seeds form one group, differences are paired, intervals have their nominal coverage."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import trime
from tests.helpers.results import group_of, grouped, made, scored
from trime.report.bootstrap import difference
from trime.report.comparison import compare_picture, compare_runs, compare_table, order_table
from trime.report.groups import group_labels, rank_groups
from trime.report.run_result import without_paths
from trime.report.tables import EDGE, run_table, text_notes
from trime.scoring.loss_sums import FEW_DOCUMENTS, MAX_PARTS, PART_TOKENS, LossSums
from trime.stages.tune import at_grid_edge


def test_kept_commands_name_no_places_and_set_runs_apart() -> None:
    kept = without_paths("python cli.py 'dataset.path=~/my novels' 'evaluate.rows=[{joint: [local]}]' index.k=4 seed=0")
    assert kept == "python cli.py dataset.path=… 'evaluate.rows=[{joint: [local]}]' index.k=4 seed=0"
    commands = (kept, kept.replace("k=4", "k=8"), "python cli.py 'index.k=2 a broken one")
    runs = [group_of([made("a", 0, [4.0]) | {"command": command}]) for command in commands]
    assert group_labels(runs[:2]) == ["a index.k=4", "a index.k=8"] and group_labels(runs[:1]) == ["a"]
    assert group_labels(runs)[2] == "a 'index.k=2" and without_paths(None) is None


def test_translations_are_ranked_by_bleu() -> None:
    runs = []
    for name, loss, bleu in (("a", 1.0, 30.0), ("b", 2.0, 35.0)):
        run = made(name, 0, [loss, loss]) | {"dataset": {"name": "pairs", "fingerprint": "g"}}
        run["metrics"] = {split: [run["metrics"][split][-1] | {"bleu": bleu}] for split in ("valid", "test")}
        runs.append(run)
    groups = grouped(runs)
    kind, order = rank_groups(groups)
    values = [group.values("test", kind) for group in order]
    assert kind == "BLEU" and [group.name for group in order] == ["b", "a"] and values == [[35.0], [30.0]]
    _, (line,) = order_table(groups, {"paper": {"a": [1.0], "b": [2.0]}})
    assert line[-1] == "no interval", "BLEU whose parts were not kept is not judged by perplexity"


def test_seeds_are_one_group_and_other_settings_are_not() -> None:
    runs = [made("m", s, [4.0], p, z) for s in (0, 1, 2) for p in ("fifo", "lru c=1", "lru c=2") for z in (8, 16)]
    groups = grouped([*runs, made("vanilla", 1, [5.0])])
    assert sorted(group.seeds for group in groups) == ["3 seeds: 0, 1, 2"] * 6 + ["seed 1"]
    twice = [made("m", 0, [4.0]), made("m", 0, [4.0]) | {"config_hash": "other"}]
    assert len(grouped(twice)) == 2


def test_other_texts_and_settings_part_seeds() -> None:
    """A seed is averaged with others of the same settings and texts alone, whatever version of the code hashed them."""

    def of(seed: int, hash: str, *overrides: str, **texts: Any) -> dict[str, Any]:
        words = " ".join(("python cli.py experiment=m", f"seed={seed}", *overrides))
        return made("m", seed, [4.0]) | {"config_hash": hash, "command": words} | texts

    index = {"entries": 10, "index": "exact", "recall": 1.0, "split": "train"}
    stores = [{"datastore": index | {"dataset": name, "text": name * 8}} for name in ("a", "b")]
    read = {"evaluation_dataset": made("m", 0, [4.0])["dataset"]}
    trained = [{"dataset": {"name": "c", "fingerprint": text}} | read for text in "de"]
    groups = grouped([of(0, "1"), of(1, "1", "threads=2"), of(2, "2"), of(3, "3", "schedule.peak=1")])
    assert [group.seeds for group in groups] == ["3 seeds: 0, 1, 2", "seed 3"]
    assert group_labels(groups) == ["m", "m schedule.peak=1"]
    for texts in (stores, trained):
        groups = grouped([of(0, "1", **text) for text in texts])
        labels = group_labels(groups)
        assert len(groups) == 2 and len({*labels}) == 2 and all(label.startswith("m (") for label in labels)


def test_the_same_seed_run_again_is_no_second_seed() -> None:
    """As when a run is repeated by other code: its losses differ a little, which says nothing of seeds."""
    again = made("m", 0, [4.1]) | {"commit": "abcdef012345"}
    groups = grouped([made("m", 0, [4.0]) | {"commit": "123456789abc"}, again])
    assert [group.seeds for group in groups] == ["seed 0", "seed 0"]
    assert group_labels(groups) == ["m (made at 1234567)", "m (made at abcdef0)"]


def test_a_shift_of_every_document_is_sure_and_noise_is_not() -> None:
    random = np.random.default_rng(0)
    base = random.normal(4, 1, 12).tolist()
    one = group_of([made("a", 0, base)])
    more = difference(group_of([made("b", 0, [x + 0.1 for x in base])]), one)
    assert more.significant and more.low > 0
    assert more.value == pytest.approx(math.exp(sum(base) / 12 + 0.1) - math.exp(sum(base) / 12))
    noise = random.permutation([0.5, -0.5, 0.4, -0.4, 0.3, -0.3] * 2)
    less = difference(group_of([made("c", 0, (np.array(base) + noise).tolist())]), one)
    assert not less.significant and "no difference shown" in str(less)


@pytest.mark.slow
def test_the_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    random, covered = np.random.default_rng(1), 0
    for _ in range(100):
        base = random.normal(3, 0.5, (1, 40))
        other = base + 0.05 + random.normal(0, 0.1, (1, 40))
        found = difference(group_of([made("b", 0, other[0].tolist())]), group_of([made("a", 0, base[0].tolist())]))
        centre = math.exp(base.mean() + 0.05) - math.exp(base.mean())
        covered += found.low <= centre <= found.high
    assert 88 <= covered <= 99


def test_seeds_that_disagree_widen_the_interval() -> None:
    losses = [4.0, 4.1, 3.9, 4.2] * 3
    base = [made("a", seed, losses) for seed in range(3)]
    same = [made("b", seed, [x + 0.1 for x in losses]) for seed in range(3)]
    apart = [made("b", seed, [x + 0.1 + d for x in losses]) for seed, d in enumerate((-0.3, 0.0, 0.3))]
    sure, unsure = (difference(group_of(runs), group_of(base)) for runs in (same, apart))
    assert sure.significant and not unsure.significant and sure.value == pytest.approx(unsure.value, rel=0.1)


def test_one_document_and_one_seed_have_no_interval() -> None:
    one, other = (group_of([made(name, 0, [loss])]) for name, loss in (("a", 4.0), ("b", 5.0)))
    found = difference(one, other)
    assert found.value < 0 and math.isnan(found.low) and not found.significant and "no interval" in str(found)


@pytest.mark.parametrize(("documents", "verdict"), [(9, "no verdict"), (10, "")])
def test_few_units_get_no_verdict(documents: int, verdict: str) -> None:
    """The difference and its interval are shown, but not that one is better."""
    one, other = (group_of([made(name, 0, [loss] * documents)]) for name, loss in (("a", 4.0), ("b", 5.0)))
    found = difference(one, other)
    assert found.high < 0 and str(found) == f"{found.value:+.2f} {found.interval} {verdict}".strip()
    assert found.significant == found.has_verdict == (not verdict)
    seeds = [[made(name, seed, [loss] * documents) for seed in range(3)] for name, loss in (("a", 4.0), ("b", 5.0))]
    assert difference(*map(group_of, seeds)).has_verdict == (not verdict), "the text of several seeds is the same text"


def test_the_papers_order_is_compared_pair_by_pair() -> None:
    """Signs agree, disagree, or no difference is shown; rows without published results are left out."""
    losses = {"a": [5.0, 5.0, 5.0, 5.0], "b": [4.0, 4.1, 4.0, 4.1], "c": [4.1, 4.0, 4.0, 4.1], "d": [1.0, 1.0, 1.0, 1.0]}
    groups = grouped([made(name, 0, of_four * 3) for name, of_four in losses.items()])
    published = {"paper": {"a": [0.0, 50.0], "b": [0.0, 60.0], "c": [0.0, 40.0]}, "empty": {"z": [1.0, 1.0]}}
    twice = grouped([made("d", 0, own) for own in ([2.0], [3.0])])
    _, lines = order_table([*groups, *twice], published | {"d": {"d": [1.0, 1.0]}})
    assert {(one, other): order for _, one, other, _, _, order in lines} == {
        ("b", "a"): "disagrees",
        ("a", "c"): "agrees",
        ("b", "c"): "no difference shown",
    }
    header, table = compare_table(groups, "a", published)
    assert header[-1] == "paper*" and {line[0]: line[-1] for line in table}["b"] == "0.00 / 60.00"


@pytest.mark.parametrize("documents", [1, 3, FEW_DOCUMENTS])
@pytest.mark.parametrize("length", [1, 40, 900])
def test_what_is_drawn_holds_every_token_once(documents: int, length: int) -> None:
    """The units are documents in order, or parts of them if there are few."""
    sums, step, losses = LossSums(), PART_TOKENS // 4, torch.arange(documents * length).double()
    given = torch.zeros(step, 2), torch.zeros(step, 1), torch.zeros(step).long()
    for document in range(documents):
        for number in range(length):
            score = torch.full((1, 2, step), -float(losses[document * length + number])) / torch.tensor([1.0, step])[:, None]
            sums.add(trime.window_of(*given, document, number * step), score)
    unit, units = sums.bootstrap_units(0, 1)
    assert sums.tokens == documents * length * step == sum(count for _, count in units)
    assert sum(loss for loss, _ in units) == pytest.approx(float(losses.sum())) == float(sums.total[0, 1])
    if documents == FEW_DOCUMENTS:
        assert unit == "documents" and len(units) == FEW_DOCUMENTS
    else:
        assert unit.startswith("parts of") and documents <= len(units) <= MAX_PARTS + documents
        assert length != 900 or len(units) > MAX_PARTS / 3


def test_a_row_tuned_to_the_edge_of_a_grid_says_so() -> None:
    """It says so in all tables; a memory size or a grid of one value is not an edge."""
    grid = {"temperature": [0.5, 1.0, 2.0], "interpolation_temperature": [1.0, 2.0, 4.0]}
    grid |= {"interpolation_share": [0.3], "memory_size": [1, 2, 3]}
    tuned = {"temperature": 2.0, "cache_temperature": 4.0, "interpolation_temperature": 2.0, "lambda": 0.3, "memory_size": 3}
    assert at_grid_edge(tuned, grid) == ["temperature", "cache_temperature"]
    edge, inside = made("edge", 0, [1.0, 2.0]), made("inside", 0, [1.5, 2.5])
    edge["metrics"]["valid"] = [edge["metrics"]["valid"][0] | {"at_grid_edge": ["temperature"], "tuned": {"temperature": 2.0}}]
    edge["metrics"]["test"] = [edge["metrics"]["test"][0] | {"tuned": {"temperature": 2.0}}]
    (line,) = run_table(scored(edge))[1]
    assert line[-1] == f"τ 2{EDGE}" and not any(EDGE in cell for cell in run_table(scored(inside))[1][0])
    groups = grouped([edge, inside])
    header, lines = compare_table(groups, "inside", {})
    assert {line[0]: line[header.index(f"tuned to an edge {EDGE}")] for line in lines} == {"edge": "τ", "inside": ""}
    assert not any(EDGE in name for name in compare_table(grouped([inside]), "inside", {})[0])
    assert order_table(groups, {"paper": {"edge": [1.0], "inside": [2.0]}})[1][0][1:3] == ["inside", f"edge {EDGE}"]


def test_results_that_are_no_numbers_are_named_and_rank_last(tmp_path: Path) -> None:
    """Results of earlier versions may hold NaN, by which nothing can be sorted."""
    runs = [made("a", 0, [4.0] * 12), made("broken", 0, [math.nan] * 12), made("b", 0, [3.0] * 12)]
    groups = grouped(runs)
    _, lines = compare_table(groups, "a", {})
    assert [line[0] for line in lines] == ["b", "a", "broken"] and lines[2][1:3] == ["not finite"] * 2
    assert "nan" not in f"{lines}{run_table(scored(runs[1]))}"
    (note,) = [note for note in text_notes(scored(runs[1])) if "NaN" in note]
    assert note.startswith("Results of vocabulary are not finite")
    assert compare_picture([groups], tmp_path / "picture.png").is_file()


def test_warnings_of_every_run_are_told() -> None:
    """Those that are not of all runs, with the names of theirs."""
    runs = [scored(made("a", 0, [4.0])), scored(made("b", 0, [5.0]) | {"duplicates": ["half of it is in train"]})]
    notes = compare_runs(runs, OmegaConf.create({"against": "a", "published": {}, "show_published": "never"})).text_notes
    assert "b: half of it is in train" in notes and text_notes(runs[0])[0] in notes
