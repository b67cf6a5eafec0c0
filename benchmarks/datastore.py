"""The datastore: speed and forecast of building it, its compression and what that costs in perplexity, search in shards.

Model, text and keys are those of the benchmark ``external``. ``encode`` is compared with the model reading the same windows
without writing anything. Compression is by 8-bit keys (``datastore.dtype``) and by codes in the index (FAISS factory strings);
bytes include the index; the temperature is the best of a few, because PCA makes similarities smaller. For search in shards,
the same queries go to one index, to its three parts in this process and to three Ray workers with one core each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from benchmarks import external
from benchmarks.external import Contestant
from benchmarks.measure import Claim, Measured, alternately, ratio
from trime.common.metrics import perplexity
from trime.data.module import WindowLoader
from trime.lab.runner import run
from trime.models.network import Reader
from trime.stages.encode import Encode
from trime.stages.graph import Graph
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
OVER_MODEL, OFF = 1.1, 0.2  # maximal time over that of the model alone; maximal relative error of the forecast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    external.add_arguments(parser)
    parser.set_defaults(keys=["200k"], tokens="4k", rounds=3)


def make_config(options: argparse.Namespace, *more: str) -> DictConfig:
    """Return the configuration for the single size of the datastore."""
    return external.make_config(options, options.keys[0], *more)


def measure(options: argparse.Namespace) -> Measured:
    """Measure building, compression and search."""
    if len(options.keys) > 1:
        sys.exit(f"--keys {' '.join(options.keys)}: this benchmark takes a single size of the datastore")
    run(make_config(options, "stages=[prepare,pack,fit]"))
    rows, claims = measure_building(options)
    searched, more = measure_search(options)
    return Measured([*rows, *measure_compression(options), *searched], [*claims, *more])


def measure_building(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Claim]]:
    """Return rows and claims of building the datastore, beside the model alone and the forecast."""
    config = make_config(options)
    store = Graph(config).store_of(config)
    assert isinstance(store, Encode)
    corpus, device = store.corpus.corpus(), store.hardware.device
    network = store.settings.open(store.model.path())[0].to(device)
    windows = store.windows(corpus)
    forecast = store.estimate_cost(Reader(network), corpus, windows)
    sizes: list[int] = []

    @torch.no_grad()
    def read_only() -> None:
        reader, batches = Reader(network), store.batches(windows, network.is_stateful)
        with store.hardware.autocast():
            for batch in WindowLoader(corpus.split(store.split), windows, batches, corpus.vocabulary.special_ids):
                reader.encode(batch.to(device))

    def encode() -> None:
        with tempfile.TemporaryDirectory(dir=options.outputs) as folder:
            (Path(folder) / "begun").touch()  # no forecast this time
            store.build(Path(folder))
            sizes.append(sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")))

    results = alternately({"the model alone": read_only, "encode": encode}, options.rounds, warmup=1)
    tokens, seconds = windows.scored(), results["encode"]["median_seconds"]
    rows = [{"what": name, "tokens/s": round(tokens / result["median_seconds"])} for name, result in results.items()]
    rows[1] |= {
        "seconds": seconds,
        "forecast s": round(forecast[0], 2),
        "bytes": sizes[-1],
        "forecast bytes": round(forecast[1]),
    }
    over = ratio(results["encode"]["rounds"], results["the model alone"]["rounds"])
    return rows, [
        Claim(f"building {tokens:,} entries over the model alone", over, OVER_MODEL),
        Claim("forecast of time, how far off", abs(forecast[0] / seconds - 1), OFF),
        Claim("forecast of disk, how far off", abs(forecast[1] / sizes[-1] - 1), OFF),
    ]


def measure_compression(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row of size and perplexity for each type of keys and code of the index."""
    rows = []
    for dtype, factory in COMPRESSED:
        overrides = (
            "tune.temperature=[0.5,0.7,1,1.5,2,3]",
            f"datastore.dtype={dtype}",
            f"index.factory={factory or 'null'}",
            f"index.nprobe={PROBE}",
        )
        run(make_config(options, "stages=[encode]", *overrides))
        contestant = Contestant(make_config(options, *overrides))
        assert contestant.index
        index = contestant.index.summary()
        contestant()  # warm-up
        start, loss = time.perf_counter(), contestant()
        rows.append(
            {
                "what": f"{dtype}, {factory or 'exact'}",
                "seconds": round(time.perf_counter() - start, 2),
                "bytes": index["bytes"],
                "bytes an entry": round(index["bytes"] / index["entries"], 1),
                "perplexity": round(perplexity(loss), 3),
            }
        )
    return rows


def measure_search(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Claim]]:
    """Return rows and claims of one index, of its parts in this process and of its parts on Ray workers."""
    local, ray = f"{PARTS} parts", f"{PARTS} workers of Ray"
    ways = {
        "one index": ("index.parts=1",),
        local: (f"index.parts={PARTS}",),
        ray: (f"index.parts={PARTS}", "index.engine=ray"),
    }
    cells = (f"index.factory={CELLS}", f"index.nprobe={PROBE}")
    run(make_config(options, "stages=[encode]", *cells))
    contestants = {name: Contestant(make_config(options, *cells, *way)) for name, way in ways.items()}
    queries = sample_queries(next(iter(contestants.values())).encoded.path())
    batch = queries.repeat(-(-4096 // len(queries)), 1)[:4096]
    searches = {name: partial(contestant.search, batch) for name, contestant in contestants.items()}
    results = alternately(searches, options.rounds, warmup=1)
    over = {name: ratio(result["rounds"], results["one index"]["rounds"]) for name, result in results.items()}
    rows = [
        {"what": f"{name}, 4,096 queries", "seconds": result["median_seconds"], "over one index": over[name]}
        for name, result in results.items()
    ]
    claims = [Claim(f"search of {name} over one index", over[name], most) for name, most in ((local, 1.15), (ray, 1.5))]
    return rows, claims
