"""SRU++: the recurrence and its kernels, the layer from the papers' equations, and the previous segment as TRIME's memory."""

from __future__ import annotations

import math

import pytest
import torch

from tests.conftest import DEVICE, composed
from tests.helpers.laws import eq5
from tests.models.backbones.test_stateful import WORDS, read, text
from trime.common.types import Batch, TokenPosition, contexts_of
from trime.kv.bounded import BoundedMemory
from trime.kv.eviction.fifo import FIFO
from trime.layers.embeddings import PlainInput
from trime.layers.heads import Softmax
from trime.models.backbones.srupp import by_steps, recurrence, srupp
from trime.models.backbones.stateful import StatefulBackbone
from trime.models.network import Network, build_network
from trime.token_memory.train.in_batch import InBatch
from trime.token_memory.train.visibility import Previous
from trime.training.language_model import LanguageModel, UpdateSettings


def model(size: int = 64, heads: int = 1) -> StatefulBackbone:
    """Return two layers in float64 whose attention has a weight."""
    torch.manual_seed(0)
    backbone = srupp(PlainInput(WORDS, 16), 2, heads, 8, 64, BoundedMemory(size, FIFO())).double()
    for layer in backbone.layers:
        layer.alpha.data.fill_(0.7)
        torch.nn.init.normal_(layer.bias)
    return backbone.eval()


def random_inputs(b: int, steps: int, d: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return random u, x, weight, bias, mask and start."""
    torch.manual_seed(b)
    shapes = [(b, steps, 3 * d), (b, steps, d), (2, d), (2, d), (b, d), (b, d)]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    inputs[4] = (torch.rand(b, d) < 0.8) / 0.8
    return [part.to(dtype).requires_grad_(number < 4) for number, part in enumerate(inputs)]


def test_recurrence_is_srus_equations() -> None:
    """Compare lane by lane (Lei et al. 2018; the highway with one dropout mask for all steps)."""
    u, x, weight, bias, mask, start = random_inputs(2, 5, 3, torch.float64)
    h, c = by_steps(u, x, weight, bias, mask, start)

    def sigmoid(z: torch.Tensor) -> float:
        return 1 / (1 + math.exp(-z.item()))

    for row in range(2):
        for lane in range(3):
            cell = float(start[row, lane])
            for step in range(5):
                u0, u1, u2 = (u[row, step, part * 3 + lane] for part in range(3))
                f, r = (sigmoid(part + weight[k, lane] * cell + bias[k, lane]) for k, part in enumerate((u1, u2)))
                cell = f * cell + (1 - f) * float(u0)
                x_t = float(x[row, step, lane])
                assert float(c[row, step, lane]) == pytest.approx(cell)
                r *= float(mask[row, lane])
                assert float(h[row, step, lane]) == pytest.approx(r * cell + x_t * (1 - r))


@pytest.mark.parametrize("b, steps, d", [(1, 1, 1), (3, 40, 7), (2, 17, 128), (2, 9, 300)])
def test_the_compiled_kernels_are_the_steps(b: int, steps: int, d: int) -> None:
    """Values and gradients are those of autograd through the steps, in float64."""
    inputs, exact = random_inputs(b, steps, d), random_inputs(b, steps, d, torch.float64)
    inputs = [part.detach().to(DEVICE).requires_grad_(part.requires_grad) for part in inputs]
    torch.manual_seed(7)
    cotangent = torch.randn(b, steps, d)
    actual = list(recurrence(*inputs))
    actual += torch.autograd.grad((actual[0] * cotangent.to(DEVICE)).sum(), inputs[:4])
    expected = list(by_steps(*exact))
    expected += torch.autograd.grad((expected[0] * cotangent).sum(), exact[:4])
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.cpu().double(), reference, rtol=2e-5, atol=2e-5 * float(reference.abs().max()))


def test_numbers_that_are_none_stay_none() -> None:
    """The compiled sigmoid hides no NaN, so that a diverging model is noticed."""
    u, *more = random_inputs(1, 4, 5)
    u.data[0, 1, 2] = math.nan
    h, c = recurrence(u, *more)
    assert c[0, 1:, 2].isnan().all() and h[0, 1:, 2].isnan().all() and c[0, 0].isfinite().all()


def test_segments_are_one_text() -> None:
    """However the text is split, state and cache make up for it; also in float32 by the kernels."""
    tokens, backbone = text(3, 48), model()
    expected = read(backbone, tokens, 48)
    for size in (4, 13, 16):
        torch.testing.assert_close(read(backbone, tokens, size), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(read(backbone.float(), tokens, 13).double(), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(read(model(size=4), tokens, 4), expected)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_layer_is_the_papers_equations(heads: int) -> None:
    """u = W3 norm(q + alpha A), A over the cache and what came before in the segment (section 3)."""
    layer = model(heads=heads).layers[0]
    torch.manual_seed(3)
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    state = layer(x[:, :5], layer.initial_state(1), torch.arange(5)[None])[2]
    h, g, _ = layer(x[:, 5:], state, torch.arange(5, 9)[None])
    q = layer.norm(x[0]) @ layer.q_proj.weight.T
    k, v = (q @ layer.kv_proj.weight.T).chunk(2, 1)
    attended, head_width = torch.zeros_like(q), 8 // heads
    for i in range(9):
        for part in (slice(n * head_width, (n + 1) * head_width) for n in range(heads)):
            weight = (k[: i + 1, part] @ q[i, part] / math.sqrt(head_width)).softmax(0)
            attended[i, part] = weight @ v[: i + 1, part]
    projected = layer.inner_norm(q + 0.7 * attended)
    torch.testing.assert_close(g[0], projected[5:], rtol=0, atol=1e-12)
    u = projected @ layer.out_proj.weight.T
    ones, zeros = torch.ones(1, 16, dtype=torch.float64), torch.zeros(1, 16, dtype=torch.float64)
    expected = by_steps(u[None], x, layer.weight, layer.bias, ones, zeros)[0]
    torch.testing.assert_close(h, expected[:, 5:], rtol=0, atol=1e-12)


def test_the_published_size() -> None:
    """42M parameters (TRIME Table 4)."""
    for length in (512, 2048):
        config = composed(f"experiment=reproduce/table4/srupp_{length}")
        assert config.segments.length == config.train.memory_size == length
        with torch.device("meta"):
            count = build_network(config.model, 205).parameter_count
        assert 41.5e6 < count < 42.5e6
        long = composed(f"experiment=reproduce/table4/srupp_{length}_trime_long")
        assert max(long.tune.memory_size) == {512: 6144, 2048: 12288}[length]


def segment_of(number: int, length: int = 6) -> Batch:
    """Return the next segment of two rows, each of which is a document."""
    torch.manual_seed(number)
    rows = torch.tensor([0, 1])
    tokens, full = torch.randint(WORDS, (2, 2, length)), torch.full((2,), length)
    scored = torch.ones(2, length, dtype=torch.bool)
    return Batch(*tokens, full, scored, rows, rows * 100 + number, full * number, torch.full((2,), number == 0))


def test_the_previous_segment_is_memory_without_gradient() -> None:
    """Eq. 5 over the segment and the one before, whose representations are constants (TRIME Appendix E)."""
    backbone = model()
    network = Network(backbone, Softmax(backbone.embedding)).double()
    module = LanguageModel(network, InBatch(Previous(), stale=1), UpdateSettings(), torch.optim.SGD, lambda update: 1.0)
    seen = []
    for number in range(3):
        batch = segment_of(number)
        state = module.reader.state
        losses, _ = module.losses(batch, 1.0, False)
        encoding, _ = backbone(batch.tokens, state, batch.fresh)
        contexts = contexts_of(batch, encoding.g)
        seen.append(contexts)
        memory = contexts if number == 0 else contexts.concat(seen[-2:])
        logits = encoding.f.flatten(0, 1) @ network.head.weight.T
        expected = eq5(logits, contexts, memory, Previous(), math.sqrt(8)).gather(1, contexts.token[:, None]).log()[:, 0]
        torch.testing.assert_close(losses, -expected, rtol=0, atol=1e-10)
    stored = module.stale.batches[0]
    assert not stored.g.requires_grad and isinstance(stored.positions, TokenPosition) and len(module.stale.batches) == 1


def test_validation_leaves_the_carried_contexts_alone() -> None:
    backbone = model()
    network = Network(backbone, Softmax(backbone.embedding)).double()
    module = LanguageModel(network, InBatch(Previous(), stale=1), UpdateSettings(), torch.optim.SGD, lambda update: 1.0)
    module.losses(segment_of(0), 1.0, False)
    before = module.stale.batches[0].g
    module.on_validation_epoch_start()
    module.losses(segment_of(5), 1.0, False)
    module.log_dict = lambda *_: None  # type: ignore[method-assign]
    module.valid_count = 1
    module.on_validation_epoch_end()
    assert module.stale.batches[0].g is before
