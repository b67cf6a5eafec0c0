"""Fitted mixtures: weights sum to one and do not depend on the target; dev scores are of documents outside the fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import Tiny
from trime.errors import UserError
from trime.lab.runner import run
from trime.scoring.mixtures.adaptive import LEARNED, Adaptive, constant_log_weights
from trime.scoring.mixtures.calibrated import Calibrated
from trime.scoring.mixtures.experts import (
    HISTORY_DEFAULT,
    HISTORY_FLOOR,
    ExpertMasses,
    History,
    Mixture,
    folds,
    log_mixture,
    score_tokens,
)
from trime.stages.graph import Graph

KINDS = [lambda: Adaptive([0.5, 1.0], hidden=8), lambda: Calibrated([0.5, 1.0]), lambda: Adaptive([0.5, 1.0], history=[])]


def random_masses(count: int, documents: int, seed: int = 0) -> ExpertMasses:
    """Return masses of a vocabulary and of a memory of two experts, right where its mass is large and sometimes empty."""
    generator = torch.Generator().manual_seed(seed)
    good = torch.rand(count, generator=generator) < 0.4
    of_memory = torch.where(good, 6.0, 3.0) + torch.randn(2, count, generator=generator) / 4
    total = torch.stack([torch.full((count,), 5.0), *of_memory], 1)
    total[torch.rand(count, generator=generator) < 0.1, 1:] = -torch.inf
    share = torch.stack([torch.full((count,), 0.1), torch.where(good, 0.8, 0.001), torch.where(good, 0.6, 0.01)], 1)
    return ExpertMasses(total + share.log(), total, torch.arange(count) * documents // count)


def fitted(kind: int, masses: ExpertMasses, seed: int = 0) -> tuple[Mixture, torch.Tensor]:
    """Return a fitted mixture and its cross-fitted log-probabilities."""
    mixture = KINDS[kind]()
    mixture.memories = {"memory": 2}
    fold = folds(masses.document, 3, seed)
    return mixture, mixture.fit(masses, fold, [False, False, False], seed)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_fit_helps_on_new_text(kind: int) -> None:
    """It beats the vocabulary alone and uniform weights; the cross-fitted dev loss is near that of new text."""
    mixture, dev = fitted(kind, random_masses(4000, 8))
    other = random_masses(4000, 8, seed=1)
    loss, even = -score_tokens(mixture, other).mean(), torch.where(other.total.isfinite(), 0.0, -torch.inf).log_softmax(1)
    assert loss < -other.log_probability[:, 0].mean() - 0.3
    assert loss < -log_mixture(even, other.log_probability).mean() - (0.0 if kind == 1 else 0.05)
    assert abs(-dev.mean() - loss) < 0.05


def test_constant_weights_are_the_best_ones() -> None:
    """No others make the training tokens more probable: the gradient vanishes, also where experts are missing."""
    masses = random_masses(2000, 5)
    known, log_probability = masses.total.isfinite(), masses.log_probability
    training = torch.stack([torch.arange(2000) < 1200, torch.arange(2000) >= 500])

    def slope(weights: torch.Tensor, tokens: torch.Tensor) -> float:
        weights.requires_grad_()
        shared = weights.expand_as(known).masked_fill(~known, -torch.inf).log_softmax(1)
        log_mixture(shared, log_probability)[tokens].mean().backward()
        assert weights.grad is not None
        return float(weights.grad.abs().max())

    for weights, tokens in zip(constant_log_weights(log_probability, known, training), training, strict=True):
        assert slope(weights, tokens) < 1e-3 < 1e-2 < slope(torch.zeros(3), tokens)


def test_constant_weights_are_finite_where_only_a_token_that_is_held_out_lacks_a_memory() -> None:
    """A memory that is always better leaves the vocabulary no weight but for the first token, of another fold."""
    log_probability = torch.tensor([[-5.0, 0.0]] * 9)
    log_probability[0, 1] = -60.0
    known, training = torch.ones(9, 2, dtype=torch.bool), torch.ones(3, 9, dtype=torch.bool)
    known[0, 1] = training[0, 0] = False
    weights = constant_log_weights(log_probability, known, training).exp()
    assert weights.isfinite().all() and weights[0, 1] > 0.999 and weights[1, 0] == weights[2, 0] > 1e-3


def test_a_memory_that_deserves_a_small_share_gets_it() -> None:
    """One of 21 memories is right where the vocabulary is wrong, at one token in a hundred, which nothing foretells."""
    generator = torch.Generator().manual_seed(0)
    found = torch.rand(3000, generator=generator) < 0.01
    vocabulary, right = torch.where(found, -8.0, -3.0), torch.where(found, -0.1, -8.0)
    useless = -8 - torch.rand(3000, 20, generator=generator)
    log_probability = torch.cat([vocabulary[:, None], right[:, None], useless], 1)
    total = 5 + torch.randn(3000, 22, generator=generator)
    masses = ExpertMasses(total + log_probability, total, torch.arange(3000) // 500)
    mixture = Adaptive([1.0])
    loss = -mixture.fit(masses, folds(masses.document, 6, 0), [False] * 22, 0).mean()
    share = torch.tensor([0.99, 0.01]).log().expand(3000, 2)
    alone, best = -vocabulary.mean(), -log_mixture(share, log_probability[:, :2]).mean()
    assert loss - best < (alone - best) / 2


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_fit_is_deterministic_and_can_be_saved_and_copied(kind: int) -> None:
    """Its weights sum to one over experts with entries, also on new text."""
    masses, other = random_masses(900, 5), random_masses(300, 3, seed=1)
    (one, dev), (two, again) = fitted(kind, masses), fitted(kind, masses)
    assert torch.equal(dev, again)
    three = KINDS[kind]()
    three.memories = {"memory": 2}
    three.load(two.state())
    scores = score_tokens(one, masses)
    for same in (three, one.to(torch.device("cpu"))):
        assert torch.equal(score_tokens(same, masses), scores) and one.describe()
    history = History(one.decays).text_features(other)
    weights = one.log_weights(other.total, history).exp()
    torch.testing.assert_close(weights.sum(1), torch.ones(300))
    assert not weights[other.total.isinf()].any() and bool((weights[:, 0] > 0).all())
    copied = one.to(torch.device("meta"))
    assert {part.device.type for part in copied.parameters.values()} == {"meta"}
    assert copied.log_weights(other.total.to("meta"), history.to("meta")).shape == other.total.shape


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_scores_of_a_fold_do_not_depend_on_its_targets(kind: int) -> None:
    """Changing the targets of a fold leaves the weights that score it the same."""
    masses = random_masses(900, 6)
    fold = folds(masses.document, 3, 0)
    changed = masses.target.clone()
    changed[fold == 0, 1:] -= 3
    mixture, other = KINDS[kind](), KINDS[kind]()
    mixture.memories = other.memories = {"memory": 2}
    if isinstance(mixture, Adaptive) and isinstance(other, Adaptive):
        mixture.decays = other.decays = ()
    mixture.fit(masses, fold, [False] * 3, 0)
    other.fit(masses._replace(target=changed), fold, [False] * 3, 0)
    if isinstance(mixture, Adaptive) and isinstance(other, Adaptive):
        assert all(torch.equal(mixture.parameters[name][0], other.parameters[name][0]) for name in LEARNED)
        assert not torch.equal(mixture.parameters["w2"][1], other.parameters["w2"][1])


def test_history_is_a_decaying_mean() -> None:
    """Whatever the pieces in which a text comes; a new document starts anew."""
    decays, scores = (0.0, 0.8, 1.0), torch.randn(700, 2) * 8
    document = torch.tensor([0] * 400 + [1] * 300)
    masses = ExpertMasses(scores, torch.zeros(700, 2), document)
    whole = History(decays).text_features(masses)
    pieces = History(decays)
    parts = [pieces.features(0, scores[start : start + 7]) for start in range(0, 399, 7)]
    torch.testing.assert_close(torch.cat(parts), whole[:399])
    torch.testing.assert_close(History(decays).features(0, scores[:400]), whole[:400])  # longer than a CHUNK
    expected = []
    for number in range(700):
        begin = 0 if number < 400 else 400
        past = scores[begin:number].clamp(min=HISTORY_FLOOR)
        shares = [torch.tensor([decay ** (number - begin - 1 - i) for i in range(number - begin)]) for decay in decays]
        means = [(share[:, None] * past).sum(0) / share.sum() for share in shares]
        expected.append(torch.cat(means) if number > begin else torch.full((2 * len(decays),), HISTORY_DEFAULT))
    torch.testing.assert_close(whole, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_folds_are_documents_balanced_by_size_or_blocks_of_few_documents() -> None:
    document = torch.repeat_interleave(torch.arange(9), torch.tensor([50, 5, 5, 5, 5, 40, 30, 30, 10]))
    fold = folds(document, 3, 0)
    assert all(len(fold[document == one].unique()) == 1 for one in range(9))
    assert max(fold.bincount()) - min(fold.bincount()) < 20
    few = folds(torch.zeros(100).long(), 4, 0)
    assert max(few.bincount()) - min(few.bincount()) <= 7 and int((few.diff() != 0).sum()) >= 12
    assert not torch.equal(fold, folds(document, 3, 1))


def test_a_mixture_is_reused_if_its_kind_and_history_are_the_same(tiny: Tiny, tmp_path: Path) -> None:
    overrides = "experiment=trime", "evaluate.memories=[local]", "evaluate.subsets=none"
    config = tiny(*overrides)
    run(config)
    path = Graph(config).tune.path()
    again = tiny(*overrides, f"mixture.path={path}", "mixture.model.epochs=1")
    run(again)
    assert not Graph(again).tune.summary()["crossfitted"]  # type: ignore[attr-defined]
    files = [Graph(each).run_folder / "results.json" for each in (config, again)]
    same = [json.loads(file.read_text())["metrics"]["test"][-1]["loss"] for file in files]
    assert same[0] == pytest.approx(same[1], abs=1e-6)
    for other in ("mixture=calibrated", "mixture.model.history=[0.5,0.9]", "mixture.temperatures=[0.3,0.6,1.2,2.4]"):
        with pytest.raises(UserError, match="fit it anew"):
            run(tiny(*overrides, f"mixture.path={path}", other))
    with pytest.raises(UserError, match="is not a mixture"):
        run(tiny(*overrides, "mixture.path=nowhere", "train.updates=9", "stages=[prepare]"))
    copied = shutil.copytree(path, tmp_path / "mixture")
    (copied / "mixture.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="fit it anew"):
        run(tiny(*overrides, f"mixture.path={copied}", "seed=3"))
