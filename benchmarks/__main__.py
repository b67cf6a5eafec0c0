"""Measure one of this project's claims beside what it is compared with: ``python -m benchmarks NAME --json FILE``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.measure import RESULTS, publish
from trime.common.cpu import prepare_cpu

NAMES = (
    "first_run",
    *("objective", "step", "packing", "external", "datastore", "startup", "memorizing", "attendre", "fit", "mixture"),
    *("retained", "cache", "sizing", "pays", "decoder_memory", "completion", "newer_name", "ngrams", "counts", "recall"),
    *("reading", "storing", "duel", "own_words", "default_weights", "drafting", "generating"),
)
ENVIRONMENT = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "NUMBA_NUM_THREADS")  # variables that change times


def main() -> int:
    """Run the benchmark named on the command line; return the exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES, help="the benchmark; NAME --help lists its options")
    name = parser.parse_args(sys.argv[1:2]).name
    module = import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(f"python -m benchmarks {name}", description=module.__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", help="where the results are written")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    module.add_arguments(parser)
    options = parser.parse_args(sys.argv[2:])
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: this machine has no CUDA device")
    if options.device == "cpu":
        prepare_cpu()
    else:
        torch.set_float32_matmul_precision("high")  # as in trainings in bfloat16, the default there
    measured = module.measure(options)
    settings = [f"{variable}={os.environ[variable]}" for variable in ENVIRONMENT if variable in os.environ]
    publish(name, shlex.join([*settings, "python", "-m", "benchmarks", *sys.argv[1:]]), measured, options.json)
    if hasattr(module, "draw"):
        print(f"written: {module.draw(measured.rows, options.json.with_suffix('.png'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
