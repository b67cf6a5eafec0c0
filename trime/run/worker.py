"""A worker process of a distributed training: ``python -m trime.run.worker CONFIG FOLDER`` (see pipeline/processes.py)."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from omegaconf import OmegaConf

from trime.engines.processes import exit_with
from trime.errors import UserError
from trime.kernels.cpu import prepare_cpu
from trime.pipeline.processes import device_of
from trime.plan.by_task import build_plan


def main() -> int:
    """Take part in the training and return the exit status.

    Exit when the launching process does, whatever its fate: a collective operation would wait for it forever.
    """
    threading.Thread(target=exit_with, args=(os.getppid(),), daemon=True).start()
    config, folder = OmegaConf.load(sys.argv[1]), Path(sys.argv[2])
    if device_of(config).type == "cpu":  # type: ignore[arg-type]
        prepare_cpu()
    try:
        build_plan(config).fit.train(folder)  # type: ignore[arg-type]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
