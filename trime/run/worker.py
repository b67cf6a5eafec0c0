"""One of the other processes of a training: ``python -m trime.run.worker CONFIG FOLDER`` (see stages/processes.py)."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from omegaconf import OmegaConf

from trime.kernels.cpu import prepare_cpu
from trime.pipeline.processes import device_of
from trime.plan.by_task import plan_of
from trime.types import UserError


def main() -> int:
    """Takes part in the training; ends with the first process, however that ends."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    config, folder = OmegaConf.load(sys.argv[1]), Path(sys.argv[2])
    if device_of(config).type == "cpu":  # type: ignore[arg-type]
        prepare_cpu()
    try:
        plan_of(config).fit.train(folder)  # type: ignore[arg-type]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def end_with(parent: int) -> None:
    """A killed first process leaves this one in a collective operation, where nobody would end it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
