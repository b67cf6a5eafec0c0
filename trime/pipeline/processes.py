"""Training on several devices: one process per device, the first of which is the command itself.

On several machines the same command runs on each, with Lightning's variables (NODE_RANK, MASTER_ADDR, MASTER_PORT) and one
shared disk. The other processes run ``python -m trime.run.worker``: they run their part of the training and write no files.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import distributed

from trime.errors import UserError

DEVICE = ("trainer.accelerator", "trainer.precision")  # the settings that decide where and how precisely models compute
RANK, NODE = "LOCAL_RANK", "NODE_RANK"  # Lightning's variables: the number of this process on its machine, and of the machine


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


def local_rank() -> int:
    """Return the number of this process on its machine, from 0."""
    return int(os.environ.get(RANK, 0))


def is_worker(config: DictConfig) -> bool:
    """Return True unless this process is global rank 0."""
    return node_rank(config) > 0 or local_rank() > 0


@contextmanager
def launch_workers(config: DictConfig, folder: Path) -> Iterator[None]:
    """Start the other processes of a training in ``folder``, and stop them when the training ends.

    UserError if the machines lose each other.
    """
    if world_size(config) == 1 or local_rank() > 0:
        yield
        return
    saved = dict(os.environ)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if config.trainer.num_nodes == 1 else {}
    os.environ |= {NODE: str(node_rank(config)), RANK: "0"} | address
    scratch = tempfile.TemporaryDirectory()
    workers = start_workers(config, folder, Path(scratch.name) / "config.yaml")
    ending = threading.Event()
    threading.Thread(target=watch, args=(workers, ending), daemon=True).start()
    finished = False
    try:
        yield
        finished = True
    except RuntimeError as error:
        if config.trainer.num_nodes == 1 or not (isinstance(error, distributed.DistError) or "gloo" in str(error).lower()):
            raise
        place, reason = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", (str(error).splitlines() or [""])[0]
        raise UserError(
            f"the machines lost their connection, or never connected, at {place} ({reason}): run it on all of them again"
        ) from None
    finally:
        ending.set()
        for worker in workers:
            stop(worker, 30 if finished else 1)
        scratch.cleanup()
        os.environ.clear()
        os.environ.update(saved)


def start_workers(config: DictConfig, folder: Path, file: Path) -> list[subprocess.Popen[bytes]]:
    """Start a process for each further device of this machine, which reads the configuration from ``file``."""
    OmegaConf.save(config, file, resolve=True)
    command = [sys.executable, "-m", "trime.run.worker", str(file), str(folder)]
    python_path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ranks = range(1, device_count(config))
    return [subprocess.Popen(command, env=os.environ | {RANK: str(rank), "PYTHONPATH": python_path}) for rank in ranks]


def watch(workers: list[subprocess.Popen[bytes]], ending: threading.Event) -> None:
    """End this process once a worker has died: a collective operation would wait for the worker forever."""
    while not ending.wait(3.0):  # the first process may be about to report the same error itself
        if any(worker.poll() not in (None, 0) for worker in workers):
            print("error: a process of the training died (see above); the same command resumes it", file=sys.stderr)
            for worker in workers:
                worker.kill()
            os._exit(1)


def stop(worker: subprocess.Popen[bytes], patience: float) -> None:
    """Wait ``patience`` seconds for a process to end, then kill it."""
    try:
        worker.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        worker.kill()


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
