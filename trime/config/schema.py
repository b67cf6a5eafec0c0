"""Every setting outside what a group's ``_target_`` takes: type, default, help and bounds, from which checks and --help come.

A value may be an interpolation (``${segments.length}``); it is judged when it is resolved, before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trime.choices import ANALYZERS, DTYPES, EXCLUDED, EXTENSIONS, INTERPOLATED, METRICS, STORED_KEYS
from trime.config.fields import Rule, section, setting

STAGES = ["import", "prepare", "pack", "fit", "encode", "datastore", "tune", "evaluate", "report"]  # by default, in order
TAUGHT_MODEL = {
    "_target_": "trime.models.pretrained.small.Small",
    "kind": "decoder",
    "width": 128,
    "layers": 4,
    "heads": 4,
    "longest": 512,
}


Switch = Any  # not bool, to which OmegaConf would convert `no`, 3 and the like


def switch(default: bool, help: str) -> Any:
    """Return the field of a switch: true or false."""
    return setting(default, help, switch=True)


def tokens(default: Any, help: str) -> Any:
    """Return the field of a number of tokens: a number, 100k, 2M, or null for all."""
    return setting(default, f"{help}; null: all", at_least=1, quantity=True, optional=True)


@dataclass
class Paths:
    """Where things lie on this machine."""

    data: str = setting("data", "downloads and prepared text")
    outputs: str = setting("outputs", "artefacts, runs and reports")


@dataclass
class Vocabulary:
    """The vocabulary of the training split."""

    limit: int | None = setting(32000, "symbols at most; null: every symbol", at_least=3, whole=True, optional=True)
    minimum: int = setting(2, "occurrences that a symbol needs", at_least=0, whole=True)
    fairseq: Switch = switch(False, "special symbols and padding as in fairseq's dictionaries")


@dataclass
class Segments:
    """How text is cut for training."""

    length: int = setting(512, "L, tokens of a training segment", at_least=1, whole=True)
    bounded: Switch = switch(True, "segments end at document borders; false: the stream is one document, as published")


@dataclass
class Train:
    """Settings of the optimisation."""

    updates: int = setting(1000, "optimiser steps; 0, for a pretrained model: take it as it is", at_least=0, whole=True)
    accumulate: int = setting(1, "micro-batches per update; in-batch memory is per micro-batch", at_least=1, whole=True)
    plain_share: float = setting(0.05, "share of updates that first train the plain language model (TRIME 5.2)", at_least=0)
    clip_norm: float = setting(0.25, "gradient norm at most; 0: no clipping", at_least=0)
    checkpoint_every: int = setting(100, "updates", at_least=1, whole=True)
    validate_every: int = setting(150, "updates", at_least=1, whole=True)
    validate_tokens: Any = tokens(16384, "tokens of valid per validation")
    keep: str = setting("best", "best: the weights of the lowest validation objective; last", choices=("best", "last"))
    log_every: int = setting(10, "updates", at_least=1, whole=True)
    memory_size: int = setting(
        512, "entries of a memory inside the model; at evaluation model.memory_size", at_least=1, whole=True
    )
    eviction: Any = setting(None, "eviction policy of that memory: eviction@train.eviction=NAME")


@dataclass
class Long:
    """The long-term memory at test; its sizes are tune.memory_size."""

    crossing: Switch = switch(False, "entries of earlier documents too, as published")
    repeats: Switch = switch(False, "contexts of the window count in long and in local memory, as published")


@dataclass
class Evaluate:
    """Scoring valid and test."""

    dataset: Any = setting(None, "other text to evaluate on, in the main vocabulary: dataset@evaluate.dataset=NAME")
    tokens: Any = tokens(None, "tokens scored of valid and of test")
    sample: str = setting(
        "starts",
        "starts: as many tokens from the start of each document; documents: whole documents, fewer of them",
        choices=("starts", "documents"),
    )
    block: int = setting(256, "tokens scored per window", at_least=1, whole=True)
    context: int = setting(256, "earlier tokens of the document before each window", at_least=0, whole=True)
    lines: Switch = switch(False, "a window scores whole lines, as many as fit a block, as published for WikiText")
    bounded: Switch = switch(True, "windows and memory end at document borders; false: as published")
    scaled_interpolation: Switch = switch(True, "sqrt(d) in Eq. 8; false: without, as in the published code")
    interpolate: str = setting(
        "datastore",
        "memories of Eq. 8's P_kNN: the datastore alone, as in the published code, or all of the row",
        choices=INTERPOLATED,
    )
    analysis: Switch = switch(False, "perplexity by word frequency, retrieval accuracy, size of the long memory")
    batch_tokens: int = setting(8192, "tokens encoded at a time", at_least=1, whole=True)
    dtype: str = setting("float32", "of stored encodings", choices=DTYPES)
    rows: list[Any] = setting([{"joint": []}], "rows of the table as the papers have them; the last is the experiment's own")
    papers: Switch = switch(True, "all of these rows; false: the first alone, beside what mixture= mixes")
    memories: list[str] | None = setting(None, "memories that mixture= mixes, as [local,ngram]; null: all that rows name")
    subsets: str = setting(
        "leave_one_out",
        "subsets of a fitted mixture's memories to evaluate, to tell what each is worth",
        choices=("none", "leave_one_out", "all"),
    )


@dataclass
class Datastore:
    """The text of the external memory."""

    dataset: Any = setting(None, "other text for it: dataset@datastore.dataset=NAME")
    path: str | None = setting(None, "a folder encode-… of another run, instead of encoding")
    split: str = setting("train", "of the dataset", choices=("train", "valid", "test"))
    tokens: Any = tokens(None, "entries, as many from the start of each document")
    dtype: str = setting("float16", "of stored keys; int8: half the disk", choices=(*DTYPES, "int8"))


@dataclass
class Index:
    """The search index over the datastore."""

    factory: str | None = setting(
        "auto",
        "auto; null: exact; Cells; a FAISS factory string, underscores for commas, whose numbers may be left out; or the "
        "dotted name of an index builder",
        name=True,
        optional=True,
    )
    metric: str = setting("${similarity}", "similarity of keys", choices=METRICS)
    k: int = setting(1024, "K, nearest entries per query", at_least=1, whole=True)
    recall: float = setting(
        0.95, "of the exact K nearest, where factory is auto; tune measures it on valid", above=0, at_most=1
    )
    probe: int = setting(1, "cells a query visits; with auto as many as the recall needs", at_least=1, whole=True)
    rescore: Switch = switch(False, "similarities to the stored keys instead of the codes'")
    device: str = setting("cpu", "cuda: by faiss-gpu, pip install 'trime[gpu]'", choices=("cpu", "cuda"))
    parts: int = setting(1, "parts of the store, each with an index of its own", at_least=1, whole=True)
    engine: str = setting("local", "ray: each part on a worker, pip install 'trime[cluster]'", choices=("local", "ray"))
    address: str | None = setting(None, "of a Ray cluster: auto or HOST:PORT; null: Ray on this machine")
    cores: int = setting(1, "of each worker", at_least=1, whole=True)


@dataclass
class Mixture:
    """The lab's own row, beneath those of the papers: how all memories are mixed."""

    kind: str = setting("none", "name of the mixture, set by mixture=; all but none, joint and interpolated are fitted")
    path: str | None = setting(None, "a folder mixture-… of another run, instead of fitting")
    model: Any = setting(None, "what is fitted")
    history: list[float] = setting(
        [], "decays of what the weights know of each expert's success at earlier tokens; []: nothing", at_least=0, at_most=1
    )
    online: Switch = switch(False, "go on learning from the tokens that were scored")
    temperatures: list[float] = setting(
        [1.0],
        "of each memory; one expert each where adaptive, one of them is taken where calibrated",
        above=0,
        filled=True,
        rising=True,
    )
    folds: int = setting(
        8, "of valid's documents; the dev figure is of documents that were not fitted to", at_least=3, whole=True
    )
    tokens: Any = tokens("200k", "tokens of valid at most")


@dataclass
class Tune:
    """The grid, scored on valid."""

    temperature: list[float] = setting(
        [0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0], "τ of Eq. 6", filled=True, above=0
    )
    interpolation_temperature: list[float] = setting(
        [0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 2.0, 4.0], "τ' of Eq. 8", filled=True, above=0
    )
    interpolation_share: list[float] = setting(
        [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], "λ of Eq. 8", filled=True, at_least=0, at_most=1
    )
    memory_size: list[int] = setting(
        [512, 1024, 2048, 4096, 8192], "M of the long memory", filled=True, at_least=1, whole=True, rising=True
    )


@dataclass
class Replay:
    """stages=[record,replay]: policies and sizes over a recorded run, of a memory inside a model or of the long one."""

    policies: list[str] = setting(
        ["fifo", "sink", "lru", "lfu", "lra_last", "lra_max", "lra_sum", "lfa", "lfa_gamma"], "eviction="
    )
    sizes: list[int] = setting([128, 512, 2048], "entries", filled=True, at_least=1, whole=True)
    c: list[float] | None = setting(
        None, "every policy whose new entries start at mean - c std, at each c", filled=True, optional=True
    )


@dataclass
class Frontier:
    """table=frontier: the budget that advice is given for."""

    seconds_per_token: float | None = setting(None, "at most; null: any", above=0, optional=True)
    gb: float | None = setting(None, "of memories, at most; null: any", above=0, optional=True)


@dataclass
class Generate:
    """Settings of stages=[generate]."""

    tokens: int = setting(100, "tokens to generate", at_least=1, whole=True)
    temperature: float = setting(0.8, "0: the likeliest token", at_least=0)
    top_p: float = setting(0.95, "sample from the smallest set of tokens of so much probability", above=0, at_most=1)
    entries: int = setting(3, "entries of memories that explain=true names per token", at_least=0, whole=True)


@dataclass
class Taught:
    """stages=[teach]: a small model in the transformers format, on questions over short contexts (initialize: untrained)."""

    model: Any = setting(TAUGHT_MODEL, "its kind and sizes")
    questions: dict[str, Any] = setting({"words": 128, "least": 0}, "settings in place of questions'")
    vocabulary: int = setting(8000, "words (initialize: byte pairs)", at_least=3, whole=True)
    batch: int = setting(16, "questions per update", at_least=1, whole=True)
    alone_share: float = setting(
        0.0, "share of updates, at first, on facts without the text around them", at_least=0, at_most=1
    )
    prompt_share: float = setting(
        0.2, "share of a decoder's loss that its prompts have, beside the answers", at_least=0, at_most=1
    )
    question_first: Switch = switch(True, "the question stands before the context too")
    spread: Switch = switch(False, "leave gaps in a decoder's positions behind sentences, up to model.longest")


@dataclass
class Answering:
    """Settings of stages=[answer]."""

    split: str = setting("test", "of questions", choices=("train", "valid", "test"))
    batch: int = setting(8, "questions read side by side", at_least=1, whole=True)
    longest: int = setting(8, "tokens of an answer at most", at_least=1, whole=True)
    last: int | None = setting(
        None, "read so many last tokens of a prompt alone; null: all", at_least=1, whole=True, optional=True
    )
    question_first: Switch = switch(True, "the question stands before the context too")


@dataclass
class Translation:
    """task=translation, as TRIME's Appendix C, in small."""

    width: int = setting(256, "of the model", at_least=1, whole=True)
    layers: int = setting(3, "of the encoder, and of the decoder", at_least=1, whole=True)
    heads: int = setting(4, "of attention", at_least=1, whole=True)
    inner: int = setting(1024, "width of feed-forward layers", at_least=1, whole=True)
    dropout: float = setting(0.2, "share", at_least=0, below=1)
    key: str = setting(
        "g", "of memories: g, the decoder's last feed-forward input; f, its output, as published", choices=("g", "f")
    )
    updates: int = setting(4000, "optimiser steps", at_least=1, whole=True)
    batch_tokens: int = setting(4096, "pieces per batch (batching.padding: whether padding counts)", at_least=1, whole=True)
    smoothing: float = setting(0.1, "of labels; TRIME's loss has none", at_least=0, below=1)
    joined_dictionary: Switch = switch(
        True, "one vocabulary and embedding for both languages; false: one each, as fairseq's IWSLT'14"
    )
    k: list[int] = setting([1, 2, 4, 8, 16, 32, 64], "K, of which valid's BLEU chooses", filled=True, at_least=1, whole=True)
    beam: int = setting(4, "hypotheses per sentence", at_least=1, whole=True)
    penalty: float = setting(
        0.6, "score = log-probability / length^penalty, the end of the sentence counted in both", at_least=-10, at_most=10
    )
    shortest: int = setting(0, "pieces of a translation at least", at_least=0, whole=True)
    longest: list[float] = setting([1.5, 10], "[a, b]: a source of n pieces has a translation of at most a n + b", at_least=0)
    unweighted_external: Switch = switch(False, "add (1 - share) p + p_external, as the published decoder does")
    best_by: str = setting("objective", "which validation train.keep=best means", choices=("objective", "bleu"))
    sentences: int | None = setting(None, "translated of each split; null: all", at_least=1, whole=True, optional=True)
    sentences_at_once: int = setting(64, "sentences translated side by side", at_least=1, whole=True)


@dataclass
class Domain:
    """experiment=domain/…_b: the external memory from the text that is evaluated on."""

    split: str = setting("train", "of that text", choices=("train", "valid", "test"))
    tokens: Any = tokens(None, "entries")


@dataclass
class Trainer:
    """Arguments of pytorch_lightning.Trainer; those that are not listed are passed on to it (see check_trainer)."""

    accelerator: str = setting("auto", "where models run", choices=("auto", "cpu", "gpu", "cuda"))
    devices: Any = setting("auto", "every GPU, or a number of processes on the CPU", at_least=1, whole=True, words=("auto",))
    strategy: str = setting(
        "ddp", "of several devices; fsdp shards weights, gradients and optimiser state", choices=("ddp", "fsdp")
    )
    num_nodes: int = setting(
        1,
        "machines: the same command on each, MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment",
        at_least=1,
        whole=True,
    )
    precision: str = setting(
        "auto",
        "auto: bf16 where the device has it",
        choices=("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"),
    )
    enable_progress_bar: Switch = switch(True, "show progress bars")


@dataclass
class Samples:
    """Passages of test in page.html, annotated token by token."""

    passages: int = setting(3, "0: none", at_least=0, whole=True)
    before: int | None = setting(
        None, "tokens read before a passage; null: as many as fill the memories", at_least=0, whole=True, optional=True
    )
    tokens: int = setting(40, "tokens of a passage", at_least=1, whole=True)
    entries: int = setting(3, "entries of memories shown per token", at_least=0, whole=True)


@dataclass
class Report:
    """Tables, pictures and pages."""

    runs: Any = setting(None, "patterns of run folders, with stages=[report]: one table of them all")
    against: str = setting("vanilla", "the experiment or eviction policy that others are compared with")
    name: str = setting("comparison", "of the report's folder")
    keep: str | None = setting(None, "a folder to which results.json of the runs are copied")
    published: Any = setting(None, "published figures by column and experiment: [dev, test] or [test]")
    figures: Any = setting(None, "figures of runs and of comparisons: +figures@report.figures.NAME=FILE draws NAME.png")
    samples: Samples = section(Samples, "passages of test in page.html")


@dataclass
class Compatibility:
    """Quirks of the published code, for comparisons to the last digit."""

    padding: int | None = setting(None, "the token whose cells are memories too", at_least=0, whole=True, optional=True)
    dropped_in_band: Switch = switch(False, "the second word of every tail band counts with its class's probability alone")
    own_gradient_only: Switch = switch(False, "memories gathered from other processes are constants")
    string_ids: Switch = switch(False, "BM25 ids are compared as strings with numbers, so that the order is a plain shuffle")
    sorted_windows: Switch = switch(False, "windows without context are read from the shortest to the longest")


@dataclass
class Logger:
    """Where figures are logged while a run goes on."""

    history: Switch = switch(True, "metrics.csv in the run's folder")
    lightning: dict[str, Any] = setting(
        {}, "loggers of Lightning: +logger.lightning.NAME={_target_: CLASS}; no artefact depends on them"
    )
    offline: Switch = switch(True, "W&B without an account; false: online")
    project: str = setting("trime", "W&B's project")


@dataclass
class Settings:
    """The whole configuration: sections, and groups (folders of conf/) whose choices are given by GROUP=NAME."""

    name: str = setting("trime_lab", "of the run; experiments set their own")
    seed: int = setting(0, "of weights, batches and draws", at_least=0, whole=True)
    task: str = setting("language_model", "set by experiments", choices=("language_model", "translation"))
    stages: list[str] = setting(STAGES, "what to run, in this order; what exists is not made again")
    checkpoint: str | None = setting(None, "instead of training: a folder fit-… or import-…, or a released fairseq checkpoint")
    dictionary: Any = setting(None, "dict.txt of a released checkpoint; of translation [dict.de.txt,dict.en.txt]")
    similarity: str = setting(
        "ip", "of contexts, in training and at test: inner product (TRIME), l2 or cosine", choices=METRICS
    )
    prompt_file: str | None = setting(None, "stages=[generate]: the text to continue; null: standard input")
    explain: Switch = switch(False, "tell how each generated token's probability splits between vocabulary and memories")
    expected: list[Any] = setting([], "published figures that this experiment answers for (conf/reproduce)")
    initial_c: dict[str, float] = setting({}, "c of eviction policies whose new entries start at mean - c std")
    trained: str | None = setting(None, "set by train_memory=, for names of runs")
    tested: str | None = setting(None, "set by test_memory=, for names of runs")
    choice: Any = setting(None, "set by ablations, for names of runs")
    choices: Any = setting(None, "set by ablations, for names of runs")

    paths: Paths = section(Paths, "where things lie on this machine")
    vocabulary: Vocabulary = section(Vocabulary, "of the training split")
    segments: Segments = section(Segments, "how text is cut for training")
    train: Train = section(Train, "the optimisation")
    long: Long = section(Long, "the long-term memory at test")
    evaluate: Evaluate = section(Evaluate, "scoring valid and test")
    datastore: Datastore = section(Datastore, "the text of the external memory")
    tune: Tune = section(Tune, "the grid, scored on valid")
    index: Index = section(Index, "the search index over the datastore")
    mixture: Mixture = section(Mixture, "how all memories are mixed, beneath the papers' rows")
    replay: Replay = section(Replay, "eviction policies over a recorded run")
    frontier: Frontier = section(Frontier, "the budget that table=frontier advises for")
    generate: Generate = section(Generate, "stages=[generate]")
    taught: Taught = section(Taught, "stages=[teach]")
    answering: Answering = section(Answering, "stages=[answer]")
    translation: Translation = section(Translation, "task=translation")
    domain: Domain = section(Domain, "experiment=domain/…")
    trainer: Trainer = section(
        Trainer, "arguments of pytorch_lightning.Trainer; any but these is passed on, and is part of what determines the model"
    )
    callbacks: dict[str, Any] = setting(
        {}, "callbacks of Lightning in training: +callbacks.NAME={_target_: CLASS}; part of what determines the model"
    )
    report: Report = section(Report, "tables, pictures and pages")
    compatibility: Compatibility = section(Compatibility, "quirks of the published code")
    logger: Logger = section(Logger, "where figures are logged")

    dataset: Any = setting(None, "the text")
    batching: Any = setting(None, "which segments make a training batch")
    neighbours: Any = setting(None, "BM25 neighbours of segments")
    model: Any = setting(None, "sizes and parts of the network")
    memory: Any = setting(None, "the memory in training")
    memories: Any = setting(None, "memories at test: memories@memories.NAME=FILE")
    optimizer: Any = setting(None, "its learning rate is the schedule's")
    schedule: Any = setting(None, "of the learning rate")
    eviction: Any = setting(None, "policy of a memory inside the model, or of the long memory, at evaluation")
    questions: Any = setting(None, "over long contexts")


COUNT, SIZE, SWITCH = Rule(at_least=1, whole=True), Rule(at_least=0, whole=True), Rule(switch=True)
# Settings of groups whose bounds the signature of their ``_target_`` does not tell; those that a choice lacks are passed over.
PARTS = {
    "model.gate": SWITCH,
    "model.backbone.layers": Rule(at_least=1, whole=True, optional=True),
    "batching.size": Rule(at_least=1, whole=True, optional=True),
    "batching.tokens": COUNT,
    "batching.processes": COUNT,
    "batching.multiple": COUNT,
    "schedule.peak": Rule(at_least=0),
    "dataset.ratio": Rule(at_least=0, optional=True),
    "memory.metric": Rule(choices=METRICS),
    "neighbours.analyzer": Rule(choices=ANALYZERS),
    "neighbours.exclude": Rule(choices=EXCLUDED),
    "mixture.model.history": Rule(at_least=0, at_most=1),
    "mixture.model.hidden": COUNT,
    "mixture.model.epochs": COUNT,
    "mixture.model.patience": COUNT,
    "mixture.model.batch": COUNT,
    "mixture.model.learning_rate": Rule(above=0),
    "mixture.model.online_rate": Rule(above=0),
}
# Of a model of this suite that reads on from window to window, and of a pretrained one.
STATEFUL = {"model.memory_size": SIZE}
PRETRAINED = {
    "model.memory_size": SIZE,
    "model.chunk": COUNT,
    "model.outputs": COUNT,
    "model.query_size": Rule(at_least=0, whole=True, optional=True),
    "model.top_k": Rule(at_least=1, whole=True, optional=True),
    "model.dtype": Rule(choices=DTYPES),
    "model.position": Rule(choices=EXTENSIONS),
    "model.stored": Rule(choices=STORED_KEYS),
    "model.search": Rule(choices=("exact", "buckets")),
    "model.factor": Rule(at_least=1),
    "model.end": Rule(choices=("flush", "drain")),
    "model.causal": Rule(switch=True, optional=True),
    "model.lora.rank": COUNT,
    "model.lora.alpha": COUNT,
    "model.lora.dropout": Rule(at_least=0, below=1),
}
