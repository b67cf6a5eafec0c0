"""Properties of rotary positions: scores depend only on distances, and what stretching preserves."""

from __future__ import annotations

import math

import pytest
import torch

from trime.layers.rotary import Rotary, RotaryScore, interpolate_positions, ntk_aware, yarn

ROTARY = Rotary.of(8, 100.0)
ROTATIONS = [ROTARY, Rotary.of(4, 100.0), Rotary.of(8, 100.0, True)]
ROTATIONS += [interpolate_positions(ROTARY, 4), ntk_aware(ROTARY, 4), yarn(ROTARY, 4, 32)]


def random_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys with their positions."""
    query, key = torch.randn(2, 5, 4, 8).double(), torch.randn(2, 7, 2, 8).double()
    return query, torch.randint(30, 60, (2, 5)), key, torch.randint(0, 60, (2, 7))


@pytest.mark.parametrize("form", ROTATIONS)
def test_scores_depend_on_distances_alone(form: Rotary) -> None:
    query, at, key, of = random_inputs()
    score = RotaryScore(form)
    torch.testing.assert_close(score(query, at, key, of), score(query, at + 1000, key, of + 1000), rtol=0, atol=1e-10)


def test_heads_of_queries_share_keys_in_order() -> None:
    query, at, key, of = random_inputs()
    both = RotaryScore(ROTARY)(query, at, key, of)
    for head in range(4):
        alone = RotaryScore(ROTARY)(query[:, :, head : head + 1], at, key[:, :, head // 2 : head // 2 + 1], of)
        torch.testing.assert_close(both[:, head : head + 1], alone, rtol=0, atol=1e-12)


def test_interpolation_is_closer_positions() -> None:
    query, at, key, of = random_inputs()
    stretched = RotaryScore(interpolate_positions(ROTARY, 4))(query, 4 * at, key, 4 * of)
    torch.testing.assert_close(stretched, RotaryScore(ROTARY)(query, at, key, of), rtol=0, atol=1e-12)


def test_ntk_keeps_the_highest_frequency_and_stretches_the_lowest() -> None:
    ratio = ntk_aware(ROTARY, 4).frequency / ROTARY.frequency
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(1 / 4) and (ratio.diff() < 0).all()
    base = 100.0 * 4 ** (8 / 6)  # the same, written with a larger base
    torch.testing.assert_close(ntk_aware(ROTARY, 4).frequency, Rotary.of(8, base).frequency)


def test_yarn_keeps_what_turns_often_and_interpolates_what_hardly_turns() -> None:
    form = Rotary(torch.tensor([2 * math.pi, 2 * math.pi / 2, 2 * math.pi / 1000], dtype=torch.float64))  # 64, 32, 0.064 turns
    stretched = yarn(form, 8, 64)
    torch.testing.assert_close(stretched.frequency / form.frequency, torch.tensor([1.0, 1.0, 1 / 8], dtype=torch.float64))
    assert stretched.scale == pytest.approx(0.1 * math.log(8) + 1) and yarn(form, 1, 64).scale == 1


def test_lm_infinite_is_rotary_within_its_length_and_level_beyond() -> None:
    query, at, key, of = random_inputs()
    score = RotaryScore(ROTARY, 20)(query, at, key, of)
    near = ((at[:, :, None] - of[:, None]).abs() <= 20)[:, None].expand_as(score)
    assert near.any() and not near.all()
    torch.testing.assert_close(score[near], RotaryScore(ROTARY)(query, at, key, of)[near], rtol=0, atol=1e-12)
    far = (at.amin() - of > 20)[:, None, None].expand_as(score)
    shifted = RotaryScore(ROTARY, 20)(query, at + 500, key, of)
    torch.testing.assert_close(shifted[far], score[far], rtol=0, atol=1e-12)


@pytest.mark.parametrize("longest", [None, 20])
@pytest.mark.parametrize("future", ["signed", "zero_max"])
@pytest.mark.parametrize("form", ROTATIONS)
def test_keys_may_be_stored_after_rotation(form: Rotary, future: str, longest: int | None) -> None:
    """Also where a model scales what is rotated: a key whose distance is capped stands at 0, as any other."""
    query, at, key, of = random_inputs()
    before, after = (RotaryScore(form, longest, future, kept) for kept in (False, True))
    of[:, :3] += 60  # some after their query, by more than the cap
    assert torch.equal(before.stored(key, of), torch.cat([key, after.stored(key, of)], -1))
    expected = before(query, at, key, of)
    assert torch.equal(before(query, at, before.stored(key, of), of), expected)
    torch.testing.assert_close(after(query, at, after.stored(key, of), of), expected, rtol=0, atol=1e-12)
    if longest is not None:
        far = at[0, 0] - of[0] > longest
        direct = before(query[:1, :1], torch.full((1, 1), longest), key[:1], torch.zeros_like(of[:1]))[0, :, 0]
        torch.testing.assert_close(expected[0, :, 0, far], direct[:, far], rtol=0, atol=1e-12)
