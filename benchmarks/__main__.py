"""``python -m benchmarks NAME --json FILE``: one claim of this project, measured beside what it is compared with."""

from __future__ import annotations

import argparse
import shlex
import sys
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.measure import RESULTS, publish
from trime.kernels.cpu import prepare_cpu

NAMES = ("objective", "step", "packing", "external", "datastore", "startup", "memorizing", "attendre", "fit", "mixture")


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES, help="what is measured; NAME --help tells its sizes")
    named = parser.parse_args(sys.argv[1:2])
    module = import_module(f"benchmarks.{named.name}")
    own = argparse.ArgumentParser(f"python -m benchmarks {named.name}", description=module.__doc__)
    own.add_argument("--json", type=Path, default=RESULTS / f"{named.name}.json", help="where the figures go")
    own.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    module.add_arguments(own)
    options = own.parse_args(sys.argv[2:])
    if options.device != "cpu" and not torch.cuda.is_available():
        own.error(f"--device {options.device}: there is no CUDA device here")
    if options.device == "cpu":
        prepare_cpu()
    publish(named.name, shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]), module.measure(options), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
