"""Every loss case, one process and several: values and gradients in float64 (losses/).

Each runs through LanguageModel with the compatibility setting, so that pads are memories and queries, and
through its own settings where no pad, quirk or process boundary is in play. Not compared, for they follow from
what is: ``ntokens`` (rows times length), ``max_abs_grad_diff_f32_vs_f64``, and sums in float32; ``norm_c`` and
``ctx_nll`` only where something is visible, for elsewhere they hold the published code's stand-in of -10000.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, multiprocessing, nn

from tests.golden.commands import CRITERIA
from tests.golden.published import PAD, adaptive_head, arrays, index, names_in, parametrized
from trime.memory.distributed import gather_contexts
from trime.memory.in_batch import InBatch
from trime.models.network import Network
from trime.tasks.language_model import LanguageModel, Training
from trime.types import Batch, Encoding, positions_of

INDEX = index("losses/index.json")
ALONE = {name: case for name, case in INDEX.items() if "criterion" in case and "ranks" not in case}
SEVERAL = {name: case for name, case in INDEX.items() if "criterion" in case and "ranks" in case}


class Given(nn.Module):
    """A backbone that answers with given representations."""

    def __init__(self, f: torch.Tensor, g: torch.Tensor):
        super().__init__()
        self.f, self.g, self.width = nn.Parameter(f), nn.Parameter(g), f.shape[-1]

    def forward(self, *_: object) -> tuple[Encoding, None]:
        return Encoding(self.f, self.g), None


def task(case: dict, found: dict, published: bool) -> LanguageModel:
    """The case's objective over its representations."""
    head = adaptive_head(INDEX[case["softmax"]], arrays(f"losses/{case['softmax']}.npz"), published)
    backbone = Given(*(torch.as_tensor(found[name]).double() for name in "fg"))
    memory = InBatch(CRITERIA[case["criterion"]](), case["cross_sent_ratio"] or 0.0, own_gradient_only=published)
    return LanguageModel(Network(backbone, head), memory, Training(0, 0, 1, 0, published), torch.optim.SGD, lambda _: 0.0)


def batch_of(found: dict, first: int = 0, document: int = 0) -> Batch:
    """The rows of a case, from row ``first`` of the batch on, as one stream."""
    targets = torch.as_tensor(found["target"])
    rows, length = targets.shape
    segment = torch.arange(first, first + rows)
    scored = targets != PAD
    same = torch.full_like(segment, document)
    return Batch(targets, targets, scored.sum(1), scored, same, segment, segment * length, segment == 0)


def quirky(case: dict, found: dict) -> bool:
    """A target on which the published code drops the in-band term (ignore_index = 1 inside each tail)."""
    cutoffs = INDEX[case["softmax"]]["cutoff"][:-1]
    return any((found["target"] == cutoff + 1).any() for cutoff in cutoffs)


def draw(case: dict) -> float:
    """Dropping local memory is drawn in training alone."""
    return 0.0 if case.get("training", True) else 1.0


def of_plain_phase(found: dict) -> bool:
    """Whether a case is of the phase before the joint loss: it has no fields of tokens and memories."""
    return "visible" not in found


def names_with(array: str) -> list[str]:
    """Return the cases of one process that have an array."""
    return [name for name in ALONE if array in names_in(f"losses/{name}.npz")]


@parametrized("name", list(ALONE))
def test_published_losses_and_gradients(name: str) -> None:
    case, found = ALONE[name], arrays(f"losses/{name}.npz")
    model, plain = task(case, found, True), of_plain_phase(found)
    losses, _ = model.losses(batch_of(found), draw(case), plain)
    losses.sum().backward()
    if not plain:
        same(losses, found["loss_per_token_f64"].ravel(), 1e-9)
        largest = max(abs(found["norm_t"]).max(), losses.max().item())  # a few roundings of the largest logarithm
        in_float32 = torch.as_tensor(found["loss_per_token_f32"]).ravel()
        assert (losses - in_float32).abs().max() < 16 * torch.finfo(torch.float32).eps * largest
    same(losses.sum(), found.get("loss_total_f64", case["loss_total"]), 1e-8)
    same_gradients(model, found)
    assert int(batch_of(found).scored.sum()) == case["sample_size"]


@parametrized("name", names_with("nonpad_loss_total_f64"))
def test_published_losses_without_pad_queries(name: str) -> None:
    case, found = ALONE[name], arrays(f"losses/{name}.npz")
    model, batch = task(case, found, True), batch_of(found)
    losses, _ = model.losses(batch, draw(case), False)
    loss = losses[batch.scored.flatten()].sum()
    loss.backward()
    same(loss, found["nonpad_loss_total_f64"], 1e-8)
    same_gradients(model, {name.removeprefix("nonpad_"): value for name, value in found.items() if "nonpad" in name})


@parametrized("name", list(ALONE))
def test_own_settings_differ_in_the_quirks_alone(name: str) -> None:
    case, found = ALONE[name], arrays(f"losses/{name}.npz")
    losses, share = task(case, found, False).losses(batch_of(found), draw(case), of_plain_phase(found))
    assert len(losses) == len(share) == case["sample_size"] and losses.isfinite().all()
    real = found["target"].ravel() != PAD
    odd = quirky(case, found) or (not of_plain_phase(found) and found["visible"][real][:, ~real].any())
    expected = found.get("nonpad_loss_total_f64", case["loss_total"])
    assert (abs(losses.sum().item() - float(expected)) < 1e-8 * max(1, float(expected))) != odd


@parametrized("name", names_with("visible"))
def test_what_is_visible(name: str) -> None:
    """The masses of both sides, and the visible sets themselves."""
    case, found = ALONE[name], arrays(f"losses/{name}.npz")
    place, memory = positions_of(batch_of(found)), task(case, found, True).memory
    assert memory is not None
    seen = memory.visibility_for(draw(case)).sees(place, place)
    assert torch.equal(seen, torch.as_tensor(found["visible"]).bool())
    assert (found["mem_labels"] == found["target"].ravel()).all()
    query, _, vocabulary = task(case, found, True).evidence(batch_of(found))
    same(vocabulary.total, found["norm_t"], 1e-9)
    mass = memory.evidence(query, query, torch.tensor([query.g.shape[1] ** 0.5], dtype=torch.float64), draw(case))
    anything = torch.as_tensor(found["visible"]).bool().any(1)
    same(mass.total[0][anything], found["norm_c"][anything.numpy()], 1e-9)
    assert mass.total[0][~anything].isinf().all()
    hit = mass.target[0].isfinite().detach()
    same((mass.total - mass.target)[0][hit], found["ctx_nll"][hit.numpy()], 1e-9)
    real = torch.as_tensor(found["target"]).ravel() != PAD
    same((vocabulary.total - vocabulary.target)[real], found["ce_per_token_f64"].ravel()[real.numpy()], 1e-9)
    same((vocabulary.total - vocabulary.target).sum(), found["ce_total_f64"], 1e-9)


def same(actual: torch.Tensor, expected: Any, tolerance: float) -> None:
    """Within a tolerance, and the rounding of what is stored in float32."""
    wanted = torch.as_tensor(expected)
    stored = torch.finfo(torch.float32).eps * wanted.abs().double() if wanted.dtype == torch.float32 else 0
    assert ((actual.detach() - wanted).abs() <= tolerance * wanted.abs().double().clamp(min=1) + stored).all()


def same_gradients(model: LanguageModel, found: dict) -> None:
    """Gradients of f, g and the output weights, as far as they are given."""
    head, backbone = model.network.head, model.network.backbone
    pairs = {"grad_f": backbone.f, "grad_g": backbone.g, "grad_head_emb": head.tables[0], "grad_head_class": head.classes}
    for tail, projection in enumerate(head.projections):
        pairs |= {f"grad_tail{tail}_proj": projection, f"grad_tail{tail}_emb": head.tables[tail + 1]}
    for name, weight in pairs.items():
        if name in found and weight.numel():
            same(torch.zeros_like(weight) if weight.grad is None else weight.grad, found[name], 1e-8)


def rows_before(case: dict, rank: int) -> int:
    return sum(case["segments_per_rank"][:rank])


def one_rank(rank: int, world: int, place: str, names: list[str]) -> None:
    """A process's losses and gradients of every case, published and own, saved for the test to read."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{place}/meet", rank=rank, world_size=world)
    for name in names:
        case, found = SEVERAL[name], arrays(f"losses/{name}.npz")
        own = {key.removeprefix(f"rank{rank}_"): value for key, value in found.items() if key.startswith(f"rank{rank}_")}
        for published in (True, False):
            model = task(case, own, published)
            batch = batch_of(own, rows_before(case, rank), rank // case["num_comb_shards"])
            losses, _ = model.losses(batch, draw(case), False)
            losses.sum().backward()
            gradients = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.network.named_parameters()}
            content = {"losses": losses.detach(), "gradients": gradients}
            if published:
                same_gradients(model, own)
                same(losses, own["loss_per_token_f64"].ravel(), 1e-9)
                same(losses.sum(), own["loss_total_f64"], 1e-8)
                labels = gather_contexts(model.evidence(batch)[1]).token
                assert labels.tolist() == own["mem_labels"].tolist()
            torch.save(content, f"{place}/{name}-{published}-{rank}.pt")
    distributed.destroy_process_group()


@parametrized("world", sorted({case["ranks"] for case in SEVERAL.values()}))
def test_several_processes(world: int, tmp_path: Path) -> None:
    """The published losses in each process; ours, whose gradients are those of one process with the whole batch."""
    names = [name for name, case in SEVERAL.items() if case["ranks"] == world]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    multiprocessing.spawn(one_rank, (world, str(tmp_path), names), nprocs=world)
    for name in names:
        case, found = SEVERAL[name], arrays(f"losses/{name}.npz")
        parts = [torch.load(tmp_path / f"{name}-False-{rank}.pt") for rank in range(world)]
        whole = {key: np.concatenate([found[f"rank{rank}_{key}"] for rank in range(world)]) for key in ("f", "g", "target")}
        streams = np.repeat(np.arange(world) // case["num_comb_shards"], case["segments_per_rank"])
        model, batch = task(case, whole, False), batch_of(whole)._replace(document=torch.as_tensor(streams))
        losses, _ = model.losses(batch, draw(case), False)
        losses.sum().backward()
        same(torch.cat([part["losses"] for part in parts]), losses.detach(), 1e-12)
        for key, weight in model.network.named_parameters():
            gradients = [part["gradients"][key] for part in parts]
            joined = torch.cat(gradients) if key.startswith("backbone") else torch.stack(gradients).sum(0)
            same(joined, torch.zeros_like(weight) if weight.grad is None else weight.grad, 1e-12)


def test_every_entry_is_known() -> None:
    """An entry of a new kind must not pass unseen: each is a case of a known criterion, or the output layer of some."""
    heads = {case["softmax"] for case in INDEX.values() if "criterion" in case}
    assert {*INDEX} == heads | {name for name, case in INDEX.items() if case.get("criterion") in CRITERIA}
