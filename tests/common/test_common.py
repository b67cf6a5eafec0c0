"""Files, kernels and settings of the processor that every room uses."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from tests.helpers.results import made, scored
from trime.common import progress
from trime.common.cpu import MAX_ERROR, matmul_error, select_matmul
from trime.common.identity import code_of, with_code
from trime.common.io import checksum_of, new_array, to_json, write_json
from trime.common.numba_kernels import LANES, STEP, lane_sum
from trime.common.progress import Progress
from trime.errors import UserError
from trime.layers.attention import MATH_MAX_KEYS, fused_attention
from trime.report.results import read_run, write_results
from trime.report.run_result import ScoredRun
from trime.scoring.loss_sums import LossSums


def python(code: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, and return what it wrote."""
    command = [sys.executable, "-c", code]
    settings = {"env": os.environ | environment, "cwd": folder, "timeout": 300}
    return subprocess.run(command, check=True, capture_output=True, text=True, **settings)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_named_and_not_written(value: float, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    with pytest.raises(UserError, match=rf"rows.json: 1.tuned.loss is {value}"):
        write_json(file, [{"loss": 1.0}, {"tuned": {"loss": value}}])
    with pytest.raises(UserError, match=rf"results.json: tuned.k is {value}"):
        write_results(tmp_path / "results.json", scored(made("trime", 0, [1.0]) | {"tuned": {"k": value}}))
    with pytest.raises(UserError, match="loss"):
        to_json({"loss": value}, file, indent=None)
    assert not [*tmp_path.iterdir()]


def test_results_of_older_versions_may_hold_nan(tmp_path: Path) -> None:
    content = made("old", 0, [math.nan])
    (tmp_path / "results.json").write_text(json.dumps(content | {"checksum": checksum_of(content)}))
    read = read_run(tmp_path / "results.json")
    assert isinstance(read, ScoredRun) and math.isnan(read.row.loss)


def test_a_loss_that_is_nan_is_refused_where_it_is_summed() -> None:
    """argmin would take it for the best one."""
    sums = LossSums()
    sums.put((3, 0), torch.ones(1, 2), 5)
    with pytest.raises(UserError, match=r"document 3, from token 1,024 on"):
        sums.put((3, 1), torch.tensor([[1.0, math.nan]]), 5)
    assert sums.tokens == 5


def test_products_stay_float32() -> None:
    select_matmul()
    for shape in ((700, 300, 500), (5, 2000, 7), (129, 31, 1)):
        assert matmul_error(*shape) < MAX_ERROR


def test_a_library_that_rounds_is_not_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor whose oneDNN multiplies in bfloat16."""
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr("trime.common.cpu.matmul_error", lambda *shape: 3e-3)
    select_matmul()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("length", [3, MATH_MAX_KEYS, MATH_MAX_KEYS + 1])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_the_same_in_both_forms(length: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In values and gradients, causal or under a mask; products stay float32, on any processor."""
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, length, 8).requires_grad_()
    mask = torch.rand(2, 1, length, length) < 0.7 if masked else None
    mask = None if mask is None else mask | torch.eye(length, dtype=torch.bool)
    results = []
    for precision in ("highest", "medium"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        output = fused_attention(query, key, value, mask, causal=mask is None)
        results.append((output, *torch.autograd.grad(output.square().sum(), (query, key, value))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


CODE = """
import hashlib, torch
from trime.token_memory.train.objective.blockwise import blockwise_mass
from trime.token_memory.train.objective.blockwise_cpu import entry_masses
from trime.token_memory.train.visibility import External, Long
from trime.common.types import Contexts, TokenPosition

torch.manual_seed(0)
rows, length = 9, 150
segment = torch.arange(rows).repeat_interleave(length)
place = TokenPosition(segment // 3, segment, torch.arange(length).repeat(rows) + segment % 3 * length)
g = torch.randn(rows * length, 24, requires_grad=True)
contexts = Contexts(g, torch.randint(40, (rows * length,)), place)
digest = hashlib.sha256()
for visibility in (Long(), External()):
    mass = blockwise_mass(contexts, contexts, visibility, torch.tensor([5.0]))
    gradient, = torch.autograd.grad((mass.total - mass.target).masked_fill(mass.target.isinf(), 0).sum(), g)
    for part in (mass.target, mass.total, gradient):
        digest.update(part.detach().numpy().tobytes())
scores, tokens = torch.randn(70, 333) * 4, torch.randint(9, (70, 333))
mass = entry_masses(scores, tokens, torch.randint(9, (70,)), torch.tensor([0.5, 1.0, 2.0, 3.0]))
digest.update(mass.target.numpy().tobytes() + mass.total.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_compiled_and_cached_kernels_agree_to_the_last_bit(tmp_path: Path) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    one, other = (python(CODE, **environment).stdout for _ in range(2))
    assert len(one) > 60 and one == other


@pytest.mark.parametrize("count", [0, 1, 7, LANES, LANES + 1, STEP - 1, STEP, 3 * STEP + LANES + 5])
def test_a_lane_sum_is_the_sum(count: int) -> None:
    x = np.random.default_rng(count).random(count).astype(np.float32)
    assert lane_sum(x, np.full(LANES, np.nan, np.float32)) == pytest.approx(x.astype(np.float64).sum(), rel=1e-6)


def test_each_state_in_a_file_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "IN_FILE", 0)
    with Progress(total=3, desc="long") as bar:
        for _ in range(3):
            bar.update()
    lines = [line for line in capsys.readouterr().err.split("\n") if line]
    assert lines and all(line.startswith("long") for line in lines) and "3/3" in lines[-1]
    assert not any("\r" in line for line in lines)


THREADS = """
import json, numba, torch, trime

torch.set_num_threads(1)
g, logits = torch.randn(8, 64, 32), torch.randn(8, 64, 50)
targets = torch.randint(50, (8, 64))
loss = lambda: float(trime.trime_loss(g, logits, targets, visibility=trime.Local()))
one = loss()
before = torch.get_num_threads()
numba.set_num_threads(1)
torch.set_num_threads(before)
torch.set_num_threads(2)
two = loss()
print(json.dumps([before, torch.get_num_threads(), numba.get_num_threads(), one, two]))
"""


def test_a_kernel_changes_no_number_of_threads() -> None:
    """PyTorch's and numba's stay; on one thread none is started; on several the result is the same."""
    said = python(THREADS, NUMBA_NUM_THREADS="2", OMP_NUM_THREADS="2").stdout
    before, after, of_numba, one, two = json.loads(said.splitlines()[-1])
    assert (before, after, of_numba) == (1, 2, 1) and one == pytest.approx(two, rel=1e-6)


def test_a_process_forked_from_one_thread_runs_kernels() -> None:
    """As workers of a DataLoader do: numba's threads would end such a process."""
    code = """
import os, torch, trime
torch.set_num_threads(1)
inputs = torch.ones(2, 8, 4), torch.zeros(2, 8, 9), torch.zeros(2, 8).long()
loss = lambda: float(trime.trime_loss(*inputs, visibility=trime.Local()))
loss()
child = os.fork()
if not child:
    loss()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    python(code)


def test_compiled_code_need_not_be_kept() -> None:
    """Where no folder can be written, kernels are compiled again, which one sentence says."""
    code = """
import numba.core.caching as caching
caching.CompileResultCacheImpl._locator_classes = []
from trime.common.numba_kernels import lane_sum
import numpy as np
print(lane_sum(np.ones(10, np.float32), np.empty(32, np.float32)))
"""
    done = python(code)
    assert done.stdout.split()[-1] == "10.0" and "NUMBA_CACHE_DIR" in done.stderr


def test_a_script_beside_the_clone_finds_the_package(tmp_path: Path) -> None:
    """A folder of the package's name, as the clone has, hides nothing."""
    (tmp_path / "trime").mkdir()
    assert python("import trime; print(trime.__version__)", tmp_path).stdout.strip()


def test_a_full_disk_is_told_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    array = new_array(tmp_path / "array.npy", np.dtype(np.float32), (3, 4))
    array[:] = 7
    array.flush()
    assert (np.load(tmp_path / "array.npy") == 7).all()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        new_array(tmp_path / "other.npy", np.dtype(np.float32), (3, 4))


def test_code_of_ones_own_is_part_of_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of its module and of what this imports beside it; not that of the package, nor of installed ones."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helps_mine.py").write_text("x = 1")
    (tmp_path / "is_mine.py").write_text("import torch\nimport helps_mine\nclass Mine: pass")
    settings = {"parts": [{"_target_": "is_mine.Mine", "size": 3}]}
    first = code_of("is_mine.Mine")
    assert first and with_code(settings) == {"parts": [{"_target_": "is_mine.Mine", "size": 3, "code": first}]}
    (tmp_path / "helps_mine.py").write_text("x = 2")
    assert code_of("is_mine.Mine") not in (first, None)
    for installed in ("trime.data.tokenizers.Words", "torch.optim.AdamW", "json.JSONDecoder", "no_such_module.Mine"):
        assert code_of(installed) is None
