"""The objective in a loop of one's own: several processes have the losses of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing

from trime.memory.training.visibility import External, Local, Long, Others
from trime.training.trime_loss import trime_loss

ROWS = [3, 1]  # of each process
VISIBLE = {"local": Local(), "long": Long(), "external": External(), "others": Others()}


def losses(rows: slice) -> dict[str, torch.Tensor]:
    """Return the loss of every target of some rows."""
    draw, count = torch.Generator().manual_seed(0), sum(ROWS)
    g, logits = torch.randn(count, 5, 8, generator=draw), torch.randn(count, 5, 11, generator=draw)
    targets = torch.randint(0, 11, (count, 5), generator=draw)
    given = g[rows], logits[rows], targets[rows]
    return {name: trime_loss(*given, visibility=visible, reduction="none") for name, visible in VISIBLE.items()}


def run_rank(rank: int, folder: str) -> None:
    """Save what one process computes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=len(ROWS))
    torch.save(losses(slice(sum(ROWS[:rank]), sum(ROWS[: rank + 1]))), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_several_processes_have_the_losses_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(run_rank, (str(tmp_path),), nprocs=len(ROWS))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(ROWS))]
    for name, whole in losses(slice(None)).items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), whole)
