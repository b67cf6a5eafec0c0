"""Training on several devices: torchrun's launcher starts a process for each, in which the training alone runs.

On several machines the same command runs on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT and one shared disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trime.errors import UserError

DEVICE = ("trainer.accelerator", "trainer.precision")  # the settings that decide where and how precisely models compute
NODE = "NODE_RANK"  # the variable with the number of this machine


def device_of(config: DictConfig) -> torch.device:
    """Return the device that models run on, by trainer.accelerator."""
    return torch.device("cuda" if torch.cuda.is_available() and config.trainer.accelerator != "cpu" else "cpu")


def device_count(config: DictConfig) -> int:
    """Return how many devices of this machine train: trainer.devices, or all of them."""
    if config.trainer.devices != "auto":
        return int(config.trainer.devices)
    return max(1, torch.cuda.device_count()) if config.trainer.accelerator != "cpu" else 1


def world_size(config: DictConfig) -> int:
    """Return how many devices train on all machines together."""
    return int(config.trainer.num_nodes) * device_count(config)


def node_rank(config: DictConfig) -> int:
    """Return the number of this machine, from 0; UserError if the environment does not define it."""
    nodes = int(config.trainer.num_nodes)
    if nodes == 1:
        return 0
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", NODE) if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"trainer.num_nodes={nodes} needs {' and '.join(missing)} in the environment of the same command on every machine: "
            "the first machine's address, a free port of it, and the number of this machine, from 0"
        )
    number = os.environ[NODE]
    if not number.isdigit() or int(number) >= nodes:
        raise UserError(f"{NODE}={number} of trainer.num_nodes={nodes} machines: it counts them from 0 to {nodes - 1}")
    return int(number)


def is_launched() -> bool:
    """Return True in a process that ``launch`` has started."""
    return torch.distributed.is_torchelastic_launched()


def is_worker(config: DictConfig) -> bool:
    """Return True unless this process writes the files: it is the first, or on the first machine."""
    return int(os.environ["RANK"]) > 0 if is_launched() else node_rank(config) > 0


def launch(config: DictConfig, train: Callable[..., None], *arguments: object) -> None:
    """Run ``train(*arguments)`` in a process for each device, and wait until all have ended.

    ``train`` is a function of a module that torch's ``record`` decorates. If one process fails, the others are stopped, and its
    UserError is raised; KeyboardInterrupt if a signal stops them.
    """
    nodes, rank = int(config.trainer.num_nodes), node_rank(config)
    settings = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=device_count(config),
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
