"""The datastore: built at the model's speed, as foretold, compressed at a cost in perplexity, and searched in parts by Ray.

Model, text and keys are those of the benchmark ``external``. ``encode`` is compared with the model reading the same windows
and writing nothing. Compression is by 8-bit keys (``datastore.dtype``) and by codes in the index (FAISS's factory strings);
bytes are those of the store and its index together; the temperature is the best of a few, for PCA makes similarities smaller.
Parts: the same queries are asked of one index, of its three parts in this process and of three workers of Ray, one core each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from benchmarks import external
from benchmarks.external import Contest
from benchmarks.measure import Claim, Measured, alternately, ratio
from trime.data.module import sequential_batches
from trime.metrics import perplexity
from trime.models.network import Reader
from trime.pipeline.model_io import open_network
from trime.pipeline.processes import device_of
from trime.plan.language_model import Plan
from trime.run.runner import run
from trime.stages.encode import Encode
from trime.stages.tune import sample_queries

COMPRESSED = [
    ("float16", None),
    ("int8", None),
    ("float16", "IVF1024_SQ8"),
    ("float16", "IVF1024_PQ32"),
    ("float16", "PCA64_IVF1024_SQ8"),
    ("int8", "PCA64_IVF1024_SQ8"),
]
CELLS, PROBE, PARTS = "Cells512", 32, 3
OVER_MODEL, OFF = 1.1, 0.2  # seconds over the model's own; how far from the forecast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    external.add_arguments(parser)
    parser.set_defaults(keys=["200k"], tokens="4k", rounds=3)


def configured(options: argparse.Namespace, *more: str) -> DictConfig:
    """The experiment over the one size of store."""
    return external.configured(options, options.keys[0], *more)


def measure(options: argparse.Namespace) -> Measured:
    """Building, compressing, searching."""
    if len(options.keys) > 1:
        sys.exit(f"--keys {' '.join(options.keys)}: one size of store, please")
    run(configured(options, "stages=[prepare,pack,fit]"))
    rows, claims = building(options)
    return Measured([*rows, *compressing(options), *searching(options)], claims)


def building(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Claim]]:
    """The store as it is made, beside the model alone and beside the forecast."""
    store = Plan(configured(options)).store
    assert isinstance(store, Encode)
    corpus, device = store.corpus.corpus(), device_of(store.config)
    network = open_network(store.model.path(), store.config)[0].to(device)
    windows = store.windows(corpus)
    foretold = store.estimate_cost(Reader(network), corpus, windows, device)
    sizes: list[int] = []

    @torch.no_grad()
    def alone() -> None:
        reader, plan = Reader(network), sequential_batches(windows, store.windows_per_batch(windows))
        with torch.autocast(device.type, torch.bfloat16, enabled=store.uses_bfloat16(device)):
            for batch in store.loader(corpus, windows, plan):
                reader.encode(batch.to(device))

    def built() -> None:
        with tempfile.TemporaryDirectory(dir=options.outputs) as folder:
            (Path(folder) / "begun").touch()  # not to be foretold again
            store.build(Path(folder))
            sizes.append(sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")))

    found = alternately({"the model alone": alone, "encode": built}, options.rounds, warmup=1)
    tokens, seconds = windows.scored(), found["encode"]["median_seconds"]
    rows = [{"what": name, "tokens/s": round(tokens / own["median_seconds"])} for name, own in found.items()]
    rows[1] |= {
        "seconds": seconds,
        "foretold s": round(foretold[0], 2),
        "bytes": sizes[-1],
        "foretold bytes": round(foretold[1]),
    }
    over = ratio(found["encode"]["rounds"], found["the model alone"]["rounds"])
    return rows, [
        Claim(f"building {tokens:,} entries over the model alone", over, OVER_MODEL),
        Claim("forecast of time, how far off", abs(foretold[0] / seconds - 1), OFF),
        Claim("forecast of disk, how far off", abs(foretold[1] / sizes[-1] - 1), OFF),
    ]


def compressing(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Bytes an entry and the perplexity, by the type of keys and the codes of the index."""
    rows = []
    for dtype, factory in COMPRESSED:
        given = (
            "tune.temperature=[0.5,0.7,1,1.5,2,3]",
            f"datastore.dtype={dtype}",
            f"index.factory={factory or 'null'}",
            f"index.probe={PROBE}",
        )
        run(configured(options, "stages=[encode]", *given))
        contest = Contest(configured(options, *given))
        assert contest.index
        built = contest.index.statistics()
        contest()
        begun, loss = time.perf_counter(), contest()
        rows.append(
            {
                "what": f"{dtype}, {factory or 'exact'}",
                "seconds": round(time.perf_counter() - begun, 2),
                "bytes": built["bytes"],
                "bytes an entry": round(built["bytes"] / built["entries"], 1),
                "perplexity": round(perplexity(loss), 3),
            }
        )
    return rows


def searching(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One index, its parts here, its parts on workers."""
    ways = {
        "one index": ("index.parts=1",),
        f"{PARTS} parts": (f"index.parts={PARTS}",),
        f"{PARTS} workers of Ray": (f"index.parts={PARTS}", "index.engine=ray"),
    }
    cells = (f"index.factory={CELLS}", f"index.probe={PROBE}")
    contests = {name: Contest(configured(options, *cells, *way)) for name, way in ways.items()}
    queries = sample_queries(next(iter(contests.values())).encoded.path())
    asked = queries.repeat(-(-4096 // len(queries)), 1)[:4096]
    searches = {name: (lambda contest=contest: contest.found(asked)) for name, contest in contests.items()}
    found = alternately(searches, options.rounds, warmup=1)
    one = found["one index"]["rounds"]
    return [
        {"what": f"{name}, 4,096 queries", "seconds": own["median_seconds"], "over one index": ratio(own["rounds"], one)}
        for name, own in found.items()
    ]
