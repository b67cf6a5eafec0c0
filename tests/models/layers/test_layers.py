"""Models and heads: sizes as published, normalised, causal, block by block."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import composed
from trime.models.backbones.transformer import Transformer
from trime.models.layers import heads
from trime.models.layers.embeddings import AdaptiveInput, PlainInput, band_edges
from trime.models.layers.heads import AdaptiveSoftmax, Softmax
from trime.models.network import build_network

# Parameter counts of the authors' classes of the released sizes.
PUBLISHED = {"wt103_247m": (267_744, 246_933_504), "wt103_150m": (267_744, 149_020_220), "enwik8_38m": (208, 38_198_272)}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    vocabulary, count = PUBLISHED[name]
    with torch.device("meta"):
        assert build_network(composed(f"model={name}").model, vocabulary).parameter_count == count


def test_7m_has_7m_parameters_beside_wikitexts_rare_words() -> None:
    """Table 9 counts 7M: with the tables of a 270K vocabulary at factor 4."""
    with torch.device("meta"):
        assert 6.5e6 < build_network(composed("model=7m").model, 267_744).parameter_count < 7.6e6


@pytest.mark.parametrize("cutoffs", [[], [5], [5, 12]])
@pytest.mark.parametrize("tied", [True, False])
def test_adaptive_softmax_is_a_distribution_and_its_mass_agrees(cutoffs: list[int], tied: bool) -> None:
    torch.manual_seed(0)
    head = AdaptiveSoftmax(AdaptiveInput(20, 8, cutoffs, 2), tied).double()
    f, target = torch.randn(20, 8, dtype=torch.float64), torch.arange(20)
    log_probs = head.log_probs(f)
    assert torch.allclose(log_probs.exp().sum(1), torch.ones(20, dtype=torch.float64))
    mass = head.mass(f, target)
    assert torch.allclose(mass.target - mass.total, log_probs.diagonal())


def test_plain_softmax_mass() -> None:
    head = Softmax(PlainInput(20, 8))
    f, target = torch.randn(5, 8), torch.tensor([0, 3, 19, 7, 7])
    mass = head.mass(f, target)
    assert torch.allclose(mass.target - mass.total, head.log_probs(f).gather(1, target[:, None]).squeeze(1), atol=1e-6)


@pytest.mark.parametrize(
    "make", [lambda: AdaptiveSoftmax(AdaptiveInput(30, 8, [6, 20], 2)), lambda: Softmax(PlainInput(30, 8))]
)
def test_blocks_change_neither_values_nor_gradients(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    head = make().double()  # type: ignore[operator]
    f, target = torch.randn(50, 8, dtype=torch.float64), torch.randint(30, (50,))
    results = []
    for cells in (2**23, 64):
        monkeypatch.setattr(heads, "LOGITS_PER_BLOCK", cells)
        own = f.clone().requires_grad_()
        head.zero_grad()
        mass = head.mass(own, target)
        (mass.target * 1.5 - mass.total).sum().backward()
        results.append([mass.target, mass.total, own.grad, *(p.grad.clone() for p in head.parameters() if p.grad is not None)])
    assert all(torch.allclose(a, b) for a, b in zip(*results, strict=True))


def test_no_later_token_moves_an_earlier_encoding() -> None:
    torch.manual_seed(2)
    model = Transformer(PlainInput(20, 16), layers=2, heads=2, inner=32, positions=12).double().eval()
    tokens = torch.randint(20, (3, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 20
    one, other = model(tokens)[0], model(changed)[0]
    assert torch.equal(one.f[:, :7], other.f[:, :7]) and torch.equal(one.g[:, :7], other.g[:, :7])
    assert not torch.equal(one.f[:, 7:], other.f[:, 7:])


def test_a_row_is_encoded_on_its_own() -> None:
    model = Transformer(AdaptiveInput(20, 16, [5]), layers=1, heads=2, inner=32, positions=12).double().eval()
    tokens = torch.randint(20, (3, 9))
    assert torch.allclose(model(tokens)[0].f[1], model(tokens[1:2])[0].f[0])


def test_impossible_models_say_how_to_mend_them() -> None:
    with pytest.raises(ValueError, match="heads"):
        Transformer(PlainInput(20, 10), layers=1, heads=3, inner=8, positions=4)
    with pytest.raises(ValueError, match="positions=4"):
        Transformer(PlainInput(20, 8), layers=1, heads=2, inner=8, positions=4)(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="cutoffs"):
        band_edges([10, 5], 20)
    with pytest.raises(ValueError, match="bands"):
        AdaptiveInput(100, 8, [5, 20, 50], 4)
