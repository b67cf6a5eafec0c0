"""The devices of a run, the precision in which models compute on them, and their processes in a training.

On several machines the same command runs on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT and one shared disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trime.common import cpu
from trime.common.identity import Free
from trime.errors import UserError

NODE = "NODE_RANK"  # the variable with the number of this machine


@dataclass(frozen=True)
class Hardware:
    """The section ``trainer``: where models run. Of its fields ``precision``, Lightning's name of it, changes results, and
    ``compiles`` their last digits, or what dropout draws."""

    precision: str
    accelerator: Free[str] = "auto"
    devices: Free[int | str] = "auto"  # of a machine
    num_nodes: Free[int] = 1  # machines
    strategy: Free[str] = "ddp"
    progress_bar: Free[bool] = True
    compiles: Free[bool] = False  # the layers of the model that is trained

    @classmethod
    def of(cls, trainer: Any) -> Hardware:
        """Return the hardware of a section ``trainer``; the precision "auto" is bf16 if the device supports it."""
        precision = str(trainer.precision)
        if precision == "auto":
            on_cuda = torch.cuda.is_available() and trainer.accelerator != "cpu"
            fast = torch.cuda.is_bf16_supported() if on_cuda else cpu.multiplies_in_bfloat16()
            precision = "bf16-mixed" if fast else "32-true"
        places = trainer.accelerator, trainer.devices, int(trainer.num_nodes), trainer.strategy
        return cls(precision, *places, trainer.enable_progress_bar, trainer.compile)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() and self.accelerator != "cpu" else "cpu")

    def autocast(self) -> torch.autocast:
        """Return the context in which a trained model computes: bfloat16 if that is the precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision.startswith("bf16"))

    @property
    def device_count(self) -> int:
        """The number of devices on this machine that train."""
        if self.devices != "auto":
            return int(self.devices)
        return max(1, torch.cuda.device_count()) if self.accelerator != "cpu" else 1

    @property
    def world_size(self) -> int:
        """The number of devices that train, on all machines."""
        return self.num_nodes * self.device_count

    @property
    def node_rank(self) -> int:
        """The number of this machine, from 0; UserError if the environment does not define it."""
        if self.num_nodes == 1:
            return 0
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", NODE) if not os.environ.get(name)]
        if missing:
            raise UserError(
                f"trainer.num_nodes={self.num_nodes} needs {' and '.join(missing)} in the environment of the same command on "
                "every machine: the first machine's address, a free port of it, and the number of this machine, from 0"
            )
        number = os.environ[NODE]
        if not number.isdigit() or int(number) >= self.num_nodes:
            last = self.num_nodes - 1
            raise UserError(f"{NODE}={number} of trainer.num_nodes={self.num_nodes} machines: it counts them from 0 to {last}")
        return int(number)

    @property
    def is_worker(self) -> bool:
        """Whether another process writes the files: the first one, or that of the first machine."""
        launched = torch.distributed.is_torchelastic_launched()
        return int(os.environ["RANK"]) > 0 if launched else self.node_rank > 0


@contextmanager
def training_products(device: torch.device, precision: str) -> Iterator[None]:
    """Let a CUDA device multiply float32 matrices as TF32 (10 bits) in a training in bfloat16 (7 bits) or half precision."""
    before = torch.get_float32_matmul_precision()
    # Such a training computes in float32 from products that were rounded to fewer bits than TF32 has.
    if device.type == "cuda" and precision.startswith(("bf16", "16")) and before == "highest":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def launch(hardware: Hardware, train: Callable[..., None], *arguments: object) -> None:
    """Run ``train(*arguments)`` in a process for each device, and wait until all have ended.

    ``train`` is a function of a module that torch's ``record`` decorates. If one process fails, the others are stopped, and its
    UserError is raised; KeyboardInterrupt if a signal stops them.
    """
    nodes, rank = hardware.num_nodes, hardware.node_rank
    settings = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=hardware.device_count,
        run_id="trime",
        max_restarts=0,
        start_method="spawn",
        rdzv_backend="static" if nodes > 1 else "c10d",
        rdzv_endpoint=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if nodes > 1 else "localhost:0",
        rdzv_configs={"rank": rank} if nodes > 1 else {},
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it logs a page where one line will do
    try:
        elastic_launch(settings, train)(*arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        kind, _, message = str(failure.message).partition(": ")
        if kind == UserError.__name__:
            raise UserError(message) from None
        if failure.exitcode < 0:
            raise UserError(f"a process of the training died ({failure.signal_name()}): the same command resumes it") from None
        if nodes > 1 and kind in ("DistBackendError", "DistNetworkError", "DistStoreError", "RuntimeError"):
            raise UserError(
                f"the machines lost their connection ({message.splitlines()[0]}): run it on all of them again"
            ) from error
        raise
    except SignalException:
        raise KeyboardInterrupt from None
