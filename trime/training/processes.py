"""Training on several devices: torchrun's launcher starts a process for each, in which the training alone runs.

On several machines the same command runs on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT and one shared disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trime.errors import UserError
from trime.training.hardware import Hardware


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
