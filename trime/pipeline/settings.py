"""What the value of every setting may be, those of all runs and those of translation and of reading."""

from __future__ import annotations

import re

from trime.data.analyzers import ANALYZERS
from trime.data.neighbours import EXCLUDE
from trime.evaluation.rows import INTERPOLATED
from trime.memory.similarity import METRICS
from trime.models.pretrained.rope import POSITIONS, STORED
from trime.pipeline.kinds import (
    BOOLEAN,
    NATURAL,
    NUMBER,
    POSITIVE,
    SHARE,
    SOME,
    Kind,
    each,
    grid,
    is_number,
    one_of,
    optional,
    whole,
)

DTYPES = ("float16", "bfloat16", "float32")

NAME = Kind(lambda value: isinstance(value, str) and re.fullmatch(r"[^./\0][^/\0]*", value) is not None, "a name, not a path")

REPORT = {
    "report.name": NAME,
    "frontier.seconds_per_token": optional(POSITIVE),
    "frontier.gb": optional(POSITIVE),
}
KINDS = {
    **REPORT,
    "name": NAME,
    "task": one_of("language_model", "translation"),
    "seed": whole(0),
    "model.backbone.layers": optional(SOME),
    "schedule.peak": optional(NUMBER),
    "dataset.ratio": optional(NUMBER),
    "segments.length": SOME,
    "vocabulary.limit": optional(whole(3)),
    "vocabulary.minimum": NATURAL,
    "similarity": one_of(*METRICS),
    "memory.metric": optional(one_of(*METRICS)),
    "model.gate": optional(BOOLEAN),
    "batching.processes": optional(SOME),
    "batching.multiple": optional(SOME),
    "train.accumulate": SOME,
    "train.plain_share": NATURAL,
    "train.clip_norm": NATURAL,
    "train.checkpoint_every": SOME,
    "train.validate_every": SOME,
    "train.log_every": SOME,
    "train.keep": one_of("best", "last"),
    "train.memory_size": SOME,
    "trainer.devices": optional(SOME, "auto"),
    "trainer.num_nodes": SOME,
    "trainer.strategy": one_of("ddp", "fsdp"),
    "trainer.accelerator": one_of("auto", "cpu", "gpu", "cuda"),
    "trainer.precision": one_of("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"),
    "evaluate.block": SOME,
    "evaluate.batch_tokens": SOME,
    "evaluate.context": whole(0),
    "evaluate.interpolate": one_of(*INTERPOLATED),
    "evaluate.sample": one_of("starts", "documents"),
    "evaluate.papers": BOOLEAN,
    "evaluate.memories": optional(Kind(lambda value: isinstance(value, list), "a list, as [local,long]")),
    "evaluate.subsets": one_of("none", "leave_one_out", "all"),
    "evaluate.dtype": one_of(*DTYPES),
    "datastore.dtype": one_of(*DTYPES, "int8"),
    "neighbours.analyzer": one_of(*ANALYZERS),
    "neighbours.exclude": one_of(*EXCLUDE),
    "index.factory": optional(Kind(lambda value: isinstance(value, str) and value != "", "auto or a factory string")),
    "index.metric": one_of(*METRICS),
    "index.k": SOME,
    "index.probe": SOME,
    "index.recall": SHARE,
    "index.rescore": BOOLEAN,
    "index.device": one_of("cpu", "cuda"),
    "index.parts": SOME,
    "index.cores": SOME,
    "index.engine": one_of("local", "ray"),
    "index.address": Kind(lambda value: value in (None, "auto") or ":" in str(value), "null, auto or HOST:PORT"),
    "replay.sizes": grid(SOME),
    "replay.c": optional(grid(NUMBER)),
    "generate.tokens": SOME,
    "generate.entries": whole(0),
    "generate.temperature": NATURAL,
    "generate.top_p": SHARE,
    "report.samples.passages": whole(0),
    "report.samples.tokens": SOME,
    "report.samples.entries": whole(0),
    "report.samples.before": optional(whole(0)),
}
TRANSLATION = {
    "translation.width": SOME,
    "translation.layers": SOME,
    "translation.heads": SOME,
    "translation.inner": SOME,
    "translation.key": one_of("g", "f"),
    "translation.joined_dictionary": BOOLEAN,
    "translation.beam": SOME,
    "translation.shortest": whole(0),
    "translation.unweighted_external": BOOLEAN,
    "translation.sentences_at_once": SOME,
    "translation.batch_tokens": SOME,
    "translation.k": grid(SOME),
    "translation.best_by": one_of("objective", "bleu"),
    "translation.penalty": NUMBER,
    "translation.smoothing": Kind(lambda value: NATURAL.holds(value) and value < 1, "a number in 0..1, below 1"),
    "translation.longest": Kind(
        lambda value: grid(NATURAL).holds(value) and len(value) == 2 and sum(value) > 0,
        "two numbers a and b: n pieces become at most a n + b",
    ),
    "translation.sentences": optional(SOME),
}
READING = {
    "model.chunk": SOME,
    "model.outputs": SOME,
    "model.query_size": each(optional(whole(0))),
    "model.top_k": each(optional(SOME)),
    "model.dtype": one_of(*DTYPES),
    "model.position": one_of(*POSITIONS),
    "model.stored": one_of(*STORED),
    "model.search": one_of("exact", "buckets"),
    "model.factor": Kind(lambda value: is_number(value) and value >= 1, "a number, at least 1"),
    "model.end": one_of("flush", "drain"),
    "taught.batch": SOME,
    "taught.alone_share": Kind(lambda value: is_number(value) and 0 <= value <= 1, "a number in 0..1"),
    "answering.batch": SOME,
    "answering.longest": SOME,
    "answering.split": one_of("train", "valid", "test"),
    "answering.last": optional(SOME),
}
