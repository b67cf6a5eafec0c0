"""One of the other processes of a training on several devices: ``python -m trime.follow FOLDER`` (see stages/processes.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import OmegaConf

from trime.stages.plan import Plan


def main() -> None:
    folder = Path(sys.argv[1])
    config = OmegaConf.load(folder / "config.yaml")
    Plan(config).fit.train(folder)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
