"""Training on several devices: one process each, the first of which is the command itself.

The others run ``python -m trime.follow``: they take part in the training and write nothing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from trime.data.module import Share

RANK = "LOCAL_RANK"  # Lightning's name for which process this is


def device_of(config: DictConfig) -> torch.device:
    """Where models run: as the trainer's accelerator says."""
    return torch.device("cuda" if torch.cuda.is_available() and config.trainer.accelerator != "cpu" else "cpu")


def devices_of(config: DictConfig) -> int:
    """How many devices train: those that trainer.devices asks for, or all there are."""
    if config.trainer.devices != "auto":
        return int(config.trainer.devices)
    return max(1, torch.cuda.device_count()) if config.trainer.accelerator != "cpu" else 1


def share_of(config: DictConfig) -> Share:
    """This process's place among them."""
    return Share(int(os.environ.get(RANK, 0)), devices_of(config))


def follows() -> bool:
    """This process is not the first."""
    return int(os.environ.get(RANK, 0)) > 0


@contextmanager
def together(config: DictConfig, folder: Path) -> Iterator[None]:
    """Starts the other processes of a training in ``folder``, and ends them with it."""
    world = devices_of(config)
    if world == 1 or follows():
        yield
        return
    saved = dict(os.environ)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", RANK: "0"}
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    command = [sys.executable, "-m", "trime.follow", str(folder)]
    place = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    others = [subprocess.Popen(command, env=os.environ | {RANK: str(rank), "PYTHONPATH": place}) for rank in range(1, world)]
    ending = threading.Event()
    threading.Thread(target=watch, args=(others, ending), daemon=True).start()
    whole = False
    try:
        yield
        whole = True
    finally:
        ending.set()
        for other in others:
            stop(other, 30 if whole else 1)
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
