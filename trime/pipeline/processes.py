"""Training on several devices: one process each, the first of which is the command itself.

On several machines the same command runs on each, as Lightning has it (NODE_RANK, MASTER_ADDR, MASTER_PORT; one disk for all).
The others run ``python -m trime.run.worker``: they take part in the training and write nothing.
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

from trime.data.module import Share
from trime.types import UserError

RANK, NODE = "LOCAL_RANK", "NODE_RANK"  # Lightning's names for which process of a machine this is, and which machine


def device_of(config: DictConfig) -> torch.device:
    """Where models run: as the trainer's accelerator says."""
    return torch.device("cuda" if torch.cuda.is_available() and config.trainer.accelerator != "cpu" else "cpu")


def device_count(config: DictConfig) -> int:
    """How many devices train: those that trainer.devices asks for, or all there are."""
    if config.trainer.devices != "auto":
        return int(config.trainer.devices)
    return max(1, torch.cuda.device_count()) if config.trainer.accelerator != "cpu" else 1


def world_size(config: DictConfig) -> int:
    """How many devices train on all machines together."""
    return int(config.trainer.num_nodes) * device_count(config)


def node(config: DictConfig) -> int:
    """Which of several machines this is; UserError where the environment does not say it."""
    nodes = int(config.trainer.num_nodes)
    if nodes == 1:
        return 0
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", NODE) if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"trainer.num_nodes={nodes} wants {' and '.join(missing)} in the environment of the same command on every machine: "
            "the first one's address, a free port of it, and which machine this is, from 0"
        )
    told = os.environ[NODE]
    if not told.isdigit() or int(told) >= nodes:
        raise UserError(f"{NODE}={told} of trainer.num_nodes={nodes} machines: it counts them from 0 to {nodes - 1}")
    return int(told)


def local_rank() -> int:
    """Which of this machine's processes this is."""
    return int(os.environ.get(RANK, 0))


def share_of(config: DictConfig) -> Share:
    """This process's place among all."""
    return Share(node(config) * device_count(config) + local_rank(), world_size(config))


def is_worker(config: DictConfig) -> bool:
    """This process is not the first of all."""
    return node(config) > 0 or local_rank() > 0


@contextmanager
def launch_workers(config: DictConfig, folder: Path) -> Iterator[None]:
    """Starts the other processes of a training in ``folder``, and ends them with it."""
    if world_size(config) == 1 or local_rank() > 0:
        yield
        return
    saved = dict(os.environ)
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if config.trainer.num_nodes == 1 else {}
    os.environ |= {NODE: str(node(config)), RANK: "0"} | alone
    aside = tempfile.TemporaryDirectory()
    file = Path(aside.name) / "config.yaml"
    OmegaConf.save(config, file, resolve=True)
    command = [sys.executable, "-m", "trime.run.worker", str(file), str(folder)]
    place = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ranks = range(1, device_count(config))
    others = [subprocess.Popen(command, env=os.environ | {RANK: str(rank), "PYTHONPATH": place}) for rank in ranks]
    ending = threading.Event()
    threading.Thread(target=watch, args=(others, ending), daemon=True).start()
    whole = False
    try:
        yield
        whole = True
    except RuntimeError as error:
        if config.trainer.num_nodes == 1 or not (isinstance(error, distributed.DistError) or "gloo" in str(error).lower()):
            raise
        where, told = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", (str(error).splitlines() or [""])[0]
        raise UserError(
            f"the machines of the training lost one another or never met at {where} ({told}); the same command on all resumes"
        ) from None
    finally:
        ending.set()
        for other in others:
            stop(other, 30 if whole else 1)
        aside.cleanup()
        os.environ.clear()
        os.environ.update(saved)


def watch(others: list[subprocess.Popen[bytes]], ending: threading.Event) -> None:
    """Ends this process where another one died: a collective operation would wait for it for ever."""
    while not ending.wait(3.0):  # the first process may be about to say the same of its own
        if any(other.poll() not in (None, 0) for other in others):
            print("error: a process of the training died (see above); the same command resumes it", file=sys.stderr)
            for other in others:
                other.kill()
            os._exit(1)


def stop(other: subprocess.Popen[bytes], patience: float) -> None:
    """Waits so many seconds for a process that is done, or ends it."""
    try:
        other.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        other.kill()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
