"""Values and gradients of every loss case in float64, in one process and in several (losses/).

Each case runs through LanguageModel with the compatibility setting, where pads are memories and queries, and with our
own settings where no pad, quirk or process boundary matters. Not compared, because they follow from other values:
``ntokens`` (rows times length), ``max_abs_grad_diff_f32_vs_f64``, and sums in float32. ``norm_c`` and ``ctx_nll`` are
compared only where a memory is visible; elsewhere they hold the published code's placeholder of -10000.
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
from trime.common.types import Batch, Encoding, positions_of
from trime.models.network import Network
from trime.token_memory.train.distributed import gather_contexts
from trime.token_memory.train.in_batch import InBatch
from trime.training.language_model import LanguageModel, UpdateSettings

INDEX = index("losses/index.json")
SINGLE_PROCESS = {name: case for name, case in INDEX.items() if "criterion" in case and "ranks" not in case}
MULTI_PROCESS = {name: case for name, case in INDEX.items() if "criterion" in case and "ranks" in case}


class FixedBackbone(nn.Module):
    """A backbone that returns fixed representations."""

    def __init__(self, f: torch.Tensor, g: torch.Tensor):
        super().__init__()
        self.f, self.g, self.width = nn.Parameter(f), nn.Parameter(g), f.shape[-1]

    def forward(self, *_: object) -> tuple[Encoding, None]:
        return Encoding(self.f, self.g), None


def task(case: dict, vectors: dict, published: bool) -> LanguageModel:
    """Return the case's objective over its representations."""
    head = adaptive_head(INDEX[case["softmax"]], arrays(f"losses/{case['softmax']}.npz"), published)
    backbone = FixedBackbone(*(torch.as_tensor(vectors[name]).double() for name in "fg"))
    memory = InBatch(CRITERIA[case["criterion"]](), case["cross_sent_ratio"] or 0.0, own_gradient_only=published)
    return LanguageModel(
        Network(backbone, head), memory, UpdateSettings(padding_is_memory=published), torch.optim.SGD, lambda _: 0.0
    )


def batch_of(vectors: dict, first: int = 0, document: int = 0) -> Batch:
    """Return the rows of a case as one stream; ``first`` is their first row in the whole batch."""
    targets = torch.as_tensor(vectors["target"])
    rows, length = targets.shape
    segment = torch.arange(first, first + rows)
    scored = targets != PAD
    documents = torch.full_like(segment, document)
    return Batch(targets, targets, scored.sum(1), scored, documents, segment, segment * length, segment == 0)


def drops_in_band_term(case: dict, vectors: dict) -> bool:
    """Return True if the published code drops the in-band term of some target (ignore_index = 1 inside each tail)."""
    cutoffs = INDEX[case["softmax"]]["cutoff"][:-1]
    return any((vectors["target"] == cutoff + 1).any() for cutoff in cutoffs)


def local_draw(case: dict) -> float | None:
    """Return the random draw that decides whether local memory is dropped, which happens only in training."""
    return 0.0 if case.get("training", True) else None


def is_warmup(vectors: dict) -> bool:
    """Return True if a case is of the phase before the joint loss: it has no arrays of tokens and memories."""
    return "visible" not in vectors


def names_with(array: str) -> list[str]:
    """Return the single-process cases that have an array."""
    return [name for name in SINGLE_PROCESS if array in names_in(f"losses/{name}.npz")]


@parametrized("name", list(SINGLE_PROCESS))
def test_published_losses_and_gradients(name: str) -> None:
    case, vectors = SINGLE_PROCESS[name], arrays(f"losses/{name}.npz")
    model, plain = task(case, vectors, True), is_warmup(vectors)
    losses, _ = model.losses(batch_of(vectors), local_draw(case), plain)
    losses.sum().backward()
    if not plain:
        assert_close(losses, vectors["loss_per_token_f64"].ravel(), 1e-9)
        largest = max(abs(vectors["norm_t"]).max(), losses.max().item())  # a few roundings of the largest logarithm
        in_float32 = torch.as_tensor(vectors["loss_per_token_f32"]).ravel()
        assert (losses - in_float32).abs().max() < 16 * torch.finfo(torch.float32).eps * largest
    assert_close(losses.sum(), vectors.get("loss_total_f64", case["loss_total"]), 1e-8)
    same_gradients(model, vectors)
    assert int(batch_of(vectors).scored.sum()) == case["sample_size"]


@parametrized("name", names_with("nonpad_loss_total_f64"))
def test_published_losses_without_pad_queries(name: str) -> None:
    case, vectors = SINGLE_PROCESS[name], arrays(f"losses/{name}.npz")
    model, batch = task(case, vectors, True), batch_of(vectors)
    losses, _ = model.losses(batch, local_draw(case), False)
    loss = losses[batch.scored.flatten()].sum()
    loss.backward()
    assert_close(loss, vectors["nonpad_loss_total_f64"], 1e-8)
    same_gradients(model, {name.removeprefix("nonpad_"): value for name, value in vectors.items() if "nonpad" in name})


@parametrized("name", list(SINGLE_PROCESS))
def test_own_settings_differ_in_the_quirks_alone(name: str) -> None:
    case, vectors = SINGLE_PROCESS[name], arrays(f"losses/{name}.npz")
    losses, share = task(case, vectors, False).losses(batch_of(vectors), local_draw(case), is_warmup(vectors))
    assert len(losses) == len(share) == case["sample_size"] and losses.isfinite().all()
    is_target = vectors["target"].ravel() != PAD
    differs = drops_in_band_term(case, vectors) or (
        not is_warmup(vectors) and vectors["visible"][is_target][:, ~is_target].any()
    )
    expected = vectors.get("nonpad_loss_total_f64", case["loss_total"])
    assert (abs(losses.sum().item() - float(expected)) < 1e-8 * max(1, float(expected))) != differs


@parametrized("name", names_with("visible"))
def test_what_is_visible(name: str) -> None:
    """Compare the masses of vocabulary and memory, and the visible entries."""
    case, vectors = SINGLE_PROCESS[name], arrays(f"losses/{name}.npz")
    position, memory = positions_of(batch_of(vectors)), task(case, vectors, True).memory
    assert memory is not None
    visible = memory.visibility_for(local_draw(case)).sees(position, position)
    assert torch.equal(visible, torch.as_tensor(vectors["visible"]).bool())
    assert (vectors["mem_labels"] == vectors["target"].ravel()).all()
    query, _, vocabulary = task(case, vectors, True).queries_and_memories(batch_of(vectors))
    assert_close(vocabulary.total, vectors["norm_t"], 1e-9)
    mass = memory.mass(query, query, torch.tensor([query.g.shape[1] ** 0.5], dtype=torch.float64), local_draw(case))
    has_memory = torch.as_tensor(vectors["visible"]).bool().any(1)
    assert_close(mass.total[0][has_memory], vectors["norm_c"][has_memory.numpy()], 1e-9)
    assert mass.total[0][~has_memory].isinf().all()
    hit = mass.target[0].isfinite().detach()
    assert_close((mass.total - mass.target)[0][hit], vectors["ctx_nll"][hit.numpy()], 1e-9)
    is_target = torch.as_tensor(vectors["target"]).ravel() != PAD
    assert_close(
        (vocabulary.total - vocabulary.target)[is_target], vectors["ce_per_token_f64"].ravel()[is_target.numpy()], 1e-9
    )
    assert_close((vocabulary.total - vocabulary.target).sum(), vectors["ce_total_f64"], 1e-9)


def assert_close(actual: torch.Tensor, expected: Any, tolerance: float) -> None:
    """Compare within a tolerance, and within rounding where the expected values are float32."""
    reference = torch.as_tensor(expected)
    stored = torch.finfo(torch.float32).eps * reference.abs().double() if reference.dtype == torch.float32 else 0
    assert ((actual.detach() - reference).abs() <= tolerance * reference.abs().double().clamp(min=1) + stored).all()


def same_gradients(model: LanguageModel, vectors: dict) -> None:
    """Compare the gradients of f, g and the output weights that the case has."""
    head, backbone = model.network.head, model.network.backbone
    pairs = {"grad_f": backbone.f, "grad_g": backbone.g, "grad_head_emb": head.tables[0], "grad_head_class": head.classes}
    for tail, projection in enumerate(head.projections):
        pairs |= {f"grad_tail{tail}_proj": projection, f"grad_tail{tail}_emb": head.tables[tail + 1]}
    for name, weight in pairs.items():
        if name in vectors and weight.numel():
            assert_close(torch.zeros_like(weight) if weight.grad is None else weight.grad, vectors[name], 1e-8)


def rows_before(case: dict, rank: int) -> int:
    return sum(case["segments_per_rank"][:rank])


def run_rank(rank: int, world: int, folder: str, names: list[str]) -> None:
    """Save a process's losses and gradients of every case, with the published and our own settings."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    for name in names:
        case, vectors = MULTI_PROCESS[name], arrays(f"losses/{name}.npz")
        rank_vectors = {
            key.removeprefix(f"rank{rank}_"): value for key, value in vectors.items() if key.startswith(f"rank{rank}_")
        }
        for published in (True, False):
            model = task(case, rank_vectors, published)
            batch = batch_of(rank_vectors, rows_before(case, rank), rank // case["num_comb_shards"])
            losses, _ = model.losses(batch, local_draw(case), False)
            losses.sum().backward()
            gradients = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.network.named_parameters()}
            content = {"losses": losses.detach(), "gradients": gradients}
            if published:
                same_gradients(model, rank_vectors)
                assert_close(losses, rank_vectors["loss_per_token_f64"].ravel(), 1e-9)
                assert_close(losses.sum(), rank_vectors["loss_total_f64"], 1e-8)
                labels = gather_contexts(model.queries_and_memories(batch)[1]).token
                assert labels.tolist() == rank_vectors["mem_labels"].tolist()
            torch.save(content, f"{folder}/{name}-{published}-{rank}.pt")
    distributed.destroy_process_group()


@parametrized("world", sorted({case["ranks"] for case in MULTI_PROCESS.values()}))
def test_several_processes(world: int, tmp_path: Path) -> None:
    """Losses in each process are the published ones; our gradients are those of one process with the whole batch."""
    names = [name for name, case in MULTI_PROCESS.items() if case["ranks"] == world]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    multiprocessing.spawn(run_rank, (world, str(tmp_path), names), nprocs=world)
    for name in names:
        case, vectors = MULTI_PROCESS[name], arrays(f"losses/{name}.npz")
        parts = [torch.load(tmp_path / f"{name}-False-{rank}.pt") for rank in range(world)]
        joined_vectors = {
            key: np.concatenate([vectors[f"rank{rank}_{key}"] for rank in range(world)]) for key in ("f", "g", "target")
        }
        streams = np.repeat(np.arange(world) // case["num_comb_shards"], case["segments_per_rank"])
        model, batch = task(case, joined_vectors, False), batch_of(joined_vectors)._replace(document=torch.as_tensor(streams))
        losses, _ = model.losses(batch, local_draw(case), False)
        losses.sum().backward()
        assert_close(torch.cat([part["losses"] for part in parts]), losses.detach(), 1e-12)
        for key, weight in model.network.named_parameters():
            gradients = [part["gradients"][key] for part in parts]
            joined = torch.cat(gradients) if key.startswith("backbone") else torch.stack(gradients).sum(0)
            assert_close(joined, torch.zeros_like(weight) if weight.grad is None else weight.grad, 1e-12)


def test_every_entry_is_known() -> None:
    """Each entry is a case of a known criterion or the output layer of one; an empty index is an error."""
    assert SINGLE_PROCESS
    heads = {case["softmax"] for case in INDEX.values() if "criterion" in case}
    assert {*INDEX} == heads | {name for name, case in INDEX.items() if case.get("criterion") in CRITERIA}
