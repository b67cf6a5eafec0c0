"""Every setting but the arguments of a group's ``_target_``: type, default, help and bounds. Checks and --help come from here.

A value may be an interpolation (``${segments.length}``); it is checked once it is resolved, before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trime.choices import (
    ANALYZERS,
    ASKED,
    CACHED_KEYS,
    COUNTED,
    DTYPES,
    EXCLUDED,
    EXTENSIONS,
    INTERPOLATED,
    METRICS,
    ORDERS,
    TOP_K_SEARCHES,
)
from trime.config.fields import Rule, section, setting

STAGES = ["import", "prepare", "pack", "fit", "encode", "datastore", "tune", "evaluate", "report"]  # by default, in order
SMALL_MODEL = {
    "_target_": "trime.models.pretrained.small.Small",
    "kind": "decoder",
    "width": 128,
    "layers": 4,
    "heads": 4,
    "max_positions": 512,
}
SMALL_QUESTIONS = {"words": 128, "min_words": 0}

Switch = Any  # not bool, because OmegaConf would convert `no`, 3 and the like to it


def switch(default: bool, help: str) -> Any:
    """Return the field of a switch: true or false."""
    return setting(default, help, switch=True)


def tokens(default: Any, help: str) -> Any:
    """Return the field of a number of tokens: a number, 100k, 2M, or null for all."""
    return setting(default, f"{help}; null: all", at_least=1, quantity=True, optional=True)


@dataclass
class Paths:
    """Where things lie on this machine."""

    data: str = setting("data", "downloads and prepared text go here: a folder, or a URL as s3://BUCKET/DIR")
    outputs: str = setting("outputs", "artefacts, runs and reports go here: a folder, or a URL, copied to TRIME_CACHE")


@dataclass
class Artefacts:
    """Outputs of stages, which later runs find again."""

    verify: Switch = switch(True, "compare each file's checksum when an artefact is first used; false: only its size")


@dataclass
class Storage:
    """What the stages list, disk and prune say and do about the runs in paths.outputs."""

    match: str = setting("*", "list, prune: the runs of these names, as a pattern; other runs are kept")
    sort: str = setting("date", "order of the list", choices=("date", "name", "score", "size"))
    keep: str = setting("all", "prune: keep all runs, or those whose command had a name=", choices=("all", "named"))
    run: str | None = setting(None, "prune: only the runs of this name, or one as NAME/FOLDER, and what no other run needs")
    delete: Switch = switch(False, "prune: delete; false: only say what would be deleted")
    data: Switch = switch(False, "prune: also what lies in paths.data, which other outputs may use")


@dataclass
class Export:
    """stages=[export]: a finished run's model, memories and mixture in one folder, which trime.load opens anywhere."""

    path: str | None = setting(None, "the folder to write")
    hub: str | None = setting(None, "also upload it to this repository of the Hugging Face Hub, as USER/NAME")
    private: Switch = switch(True, "a repository that is made is private")


@dataclass
class Vocabulary:
    """The vocabulary of the training split."""

    max_size: int | None = setting(32000, "most symbols; null: every symbol", at_least=3, whole=True, optional=True)
    min_count: int = setting(2, "occurrences that a symbol needs to be in the vocabulary", at_least=0, whole=True)
    fairseq: Switch = switch(False, "special symbols and padding as in fairseq's dictionaries")


@dataclass
class Segments:
    """How text is cut for training."""

    length: int = setting(512, "L, tokens of a training segment", at_least=1, whole=True)
    bounded: Switch = switch(True, "segments end at document borders; false: the stream is one document, as published")


@dataclass
class Train:
    """Settings of the optimisation."""

    updates: int = setting(1000, "optimiser steps; 0 takes a pretrained model as it is", at_least=0, whole=True)
    accumulate: int = setting(1, "micro-batches per update; in-batch memory is per micro-batch", at_least=1, whole=True)
    plain_share: float = setting(0.05, "share of updates that first train the plain language model (TRIME 5.2)", at_least=0)
    clip_norm: float = setting(0.25, "largest gradient norm; 0: no clipping", at_least=0)
    checkpoint_every: int = setting(100, "updates between checkpoints", at_least=1, whole=True)
    validate_every: int = setting(150, "updates between validations", at_least=1, whole=True)
    validate_tokens: Any = tokens(16384, "validation tokens per validation")
    keep: str = setting(
        "best",
        "best: the weights with the lowest validation objective; last: those of the last update",
        choices=("best", "last"),
    )
    log_every: int = setting(10, "updates between logged values", at_least=1, whole=True)
    memory_size: int = setting(
        512,
        "entries of a memory inside the model during training; model.memory_size sets it at evaluation",
        at_least=1,
        whole=True,
    )
    eviction: Any = setting(None, "eviction policy of that memory, by eviction@train.eviction=NAME")


@dataclass
class Long:
    """The long-term memory at test; tune.memory_size sets its sizes."""

    across_documents: Switch = switch(False, "true: entries of earlier documents stay, as published")
    include_window: Switch = switch(False, "true: contexts of the window are also in the long memory, as published")


@dataclass
class Evaluate:
    """Scoring valid and test."""

    dataset: Any = setting(None, "another text to evaluate on, with the main vocabulary: dataset@evaluate.dataset=NAME")
    tokens: Any = tokens(None, "tokens scored in each of valid and test")
    sample: str = setting(
        "documents",
        "if tokens is set: whole documents, of longer ones the middle; or starts: as many from the start of each document",
        choices=("documents", "starts"),
    )
    block: int = setting(256, "tokens scored per window", at_least=1, whole=True)
    context: int = setting(256, "earlier tokens of the document before each window", at_least=0, whole=True)
    lines: Switch = switch(False, "true: a window scores as many whole lines as fit into a block, as published for WikiText")
    bounded: Switch = switch(True, "windows and memory end at document borders; false: one stream of text, as published")
    scaled_interpolation: Switch = switch(True, "divide by sqrt(d) in Eq. 8; false: do not, as in the published code")
    interpolate: str = setting(
        "datastore",
        "memories in P_kNN of Eq. 8: datastore only, as in the published code, or all memories of the row",
        choices=INTERPOLATED,
    )
    per_token: Switch = switch(False, "write tokens.jsonl: every scored token of test, its log-probability, parts and weights")
    analysis: Switch = switch(
        False, "also measure perplexity by word frequency, retrieval accuracy and loss by size of the long memory"
    )
    batch_tokens: int | None = setting(
        None, "tokens per batch of encoding; null: 8,192, on a CUDA device 98,304", at_least=1, whole=True, optional=True
    )
    dtype: str = setting("float32", "number format of stored encodings", choices=DTYPES)
    rows: list[Any] = setting(
        [{"joint": []}], "rows of the results, as in the papers; below them stands what mixture= mixes, if anything"
    )
    all_rows: Switch = switch(True, "evaluate all of these rows; false: only the first, beside what mixture= mixes")
    memories: list[str] | None = setting(None, "memories that mixture= mixes, as [local,ngram]; null: all memories in the rows")
    subsets: str = setting(
        "leave_one_out",
        "subsets of a fitted mixture's memories to evaluate, to show what each memory contributes",
        choices=("none", "leave_one_out", "all"),
    )


@dataclass
class Datastore:
    """The text of the external memory."""

    dataset: Any = setting(None, "another text for it: dataset@datastore.dataset=NAME")
    path: str | None = setting(None, "take the folder encode-… of another run instead of encoding")
    split: str = setting("train", "split of the dataset", choices=("train", "valid", "test"))
    tokens: Any = tokens(None, "entries, the same number from the start of each document")
    block: int | None = setting(
        None, "tokens of a window of its text; null: evaluate.block, as published", at_least=1, whole=True, optional=True
    )
    context: int | None = setting(
        None,
        "tokens that are read before each window of its text; null: evaluate.context, as published; fewer make encoding faster",
        at_least=0,
        whole=True,
        optional=True,
    )
    dtype: str = setting(
        "float16", "number format of stored keys; int8 halves the disk space of float16", choices=(*DTYPES, "int8")
    )


@dataclass
class Index:
    """The search index over the datastore."""

    factory: str | None = setting(
        "auto",
        "auto; null for exact search; Cells; a FAISS factory string, with underscores for commas and numbers optional; or "
        "the dotted name of an index builder",
        name=True,
        optional=True,
    )
    metric: str = setting("${similarity}", "similarity of keys", choices=METRICS)
    k: int = setting(1024, "K, nearest entries per query", at_least=1, whole=True)
    recall: float = setting(
        0.95, "share of the exact K nearest entries to find, for factory auto; tune measures it on valid", above=0, at_most=1
    )
    nprobe: int = setting(1, "cells searched per query; with auto, as many as the recall needs", at_least=1, whole=True)
    rescore: Switch = switch(False, "compute similarities from the stored keys instead of their codes")
    device: str = setting("cpu", "where FAISS searches; cuda needs faiss-gpu, extra gpu", choices=("cpu", "cuda"))
    parts: int = setting(
        1, "parts of a search: some cells of one index, or an index of some entries each", at_least=1, whole=True
    )
    engine: str = setting("local", "local, or ray: each part on a worker (extra cluster)", choices=("local", "ray"))
    address: str | None = setting(None, "address of a Ray cluster, auto or HOST:PORT; null: Ray on this machine")
    replicas: int = setting(1, "workers of engine ray that hold the same part and are asked in turns", at_least=1, whole=True)
    cores: int = setting(1, "cores per worker", at_least=1, whole=True)


@dataclass
class Mixture:
    """TRIME Lab's own row, below those of the papers: how all memories are mixed."""

    kind: str = setting("none", "set by mixture=; all mixtures but none, joint and interpolated are fitted")
    path: str | None = setting(None, "take the folder mixture-… of another run instead of fitting")
    model: Any = setting(None, "the fitted mixture and its settings")
    temperatures: list[float] = setting(
        [1.0],
        "temperatures of each memory: one expert each (adaptive), or the best of them (calibrated)",
        above=0,
        filled=True,
        rising=True,
    )
    folds: int = setting(
        8,
        "folds of valid's documents; the dev result is measured on documents that were left out of the fit",
        at_least=3,
        whole=True,
    )
    tokens: Any = tokens("200k", "most validation tokens to fit to")


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
        [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], "λ of Eq. 8", filled=True, above=0, below=1
    )
    memory_size: list[int] = setting(
        [512, 1024, 2048, 4096, 8192], "M of the long memory", filled=True, at_least=1, whole=True, rising=True
    )


@dataclass
class Replay:
    """stages=[record,replay]: policies and sizes tried on a recorded run, for a memory inside a model or the long memory."""

    policies: list[str] = setting(
        ["fifo", "sink", "lru", "lfu", "lra_last", "lra_max", "lra_sum", "lfa", "lfa_gamma"], "eviction policies"
    )
    sizes: list[int] = setting([128, 512, 2048], "memory sizes, in entries", filled=True, at_least=1, whole=True)
    c: list[float] | None = setting(
        None,
        "values of c to try for policies whose new entries start at mean - c std; null: the policy's own",
        filled=True,
        optional=True,
    )


@dataclass
class Frontier:
    """table=frontier: the budget for which it recommends a configuration."""

    seconds_per_token: float | None = setting(None, "most seconds per token; null: any", above=0, optional=True)
    gb: float | None = setting(None, "most GB of memories; null: any", above=0, optional=True)


@dataclass
class Generate:
    """Settings of stages=[generate]."""

    max_new_tokens: int = setting(100, "most tokens to generate", at_least=1, whole=True)
    temperature: float = setting(0.8, "of sampling; 0: always the most likely token", at_least=0)
    top_p: float = setting(0.95, "sample from the smallest set of tokens with this probability", above=0, at_most=1)
    entries: int = setting(3, "entries of memories that explain=true lists per token", at_least=0, whole=True)


@dataclass
class Small:
    """A small model in the transformers format, which stages=[train_small] trains on questions over short contexts."""

    model: Any = setting(SMALL_MODEL, "kind and sizes of the model")
    questions: dict[str, Any] = setting(SMALL_QUESTIONS, "settings of questions that differ in training")
    vocabulary: int = setting(8000, "words; with stages=[init_small] byte pairs", at_least=3, whole=True)
    updates: int = setting(3000, "updates of its training in experiment=attendre_train_small", at_least=0, whole=True)
    batch: int = setting(16, "questions per update", at_least=1, whole=True)
    facts_only_share: float = setting(
        0.0, "share of updates, at the start, on facts without the text around them", at_least=0, at_most=1
    )
    prompt_loss_weight: float = setting(
        0.2, "weight of the prompts in a decoder's loss; the answers have the rest", at_least=0, at_most=1
    )
    order: str = setting("first", "where the question stands: before the context, after it, or both", choices=ORDERS)
    spread: Switch = switch(False, "spread a decoder's positions, up to model.max_positions, by gaps between sentences")


@dataclass
class Answering:
    """Settings of stages=[answer]."""

    split: str = setting("test", "split of the questions", choices=("train", "valid", "test"))
    batch_size: int = setting(8, "texts that are read, and questions that are answered, at a time", at_least=1, whole=True)
    max_new_tokens: int = setting(8, "most tokens of an answer", at_least=1, whole=True)
    max_prompt_tokens: int | None = setting(
        None, "read only this many last tokens of a prompt; null: all", at_least=1, whole=True, optional=True
    )
    counts: str = setting(
        "exact_match",
        "which answers count in pictures and in the list of runs: exact matches, or those that contain an accepted answer",
        choices=COUNTED,
    )
    order: str = setting(
        "first",
        "where the question stands: before the context, after it (a context is then read once for all its questions, unless "
        "they guide it), or both",
        choices=ORDERS,
    )
    chat_template: Switch | None = setting(
        None, "put prompts into the model's chat template; null: if its tokenizer has one", switch=True, optional=True
    )
    examples: int = setting(
        0, "solved questions of train before each prompt, with their facts alone as context", at_least=0, whole=True
    )


@dataclass
class Translation:
    """task=translation, as in TRIME's Appendix C, with a smaller model."""

    width: int = setting(256, "width of the model", at_least=1, whole=True)
    layers: int = setting(3, "layers of the encoder, and as many of the decoder", at_least=1, whole=True)
    heads: int = setting(4, "attention heads", at_least=1, whole=True)
    inner: int = setting(1024, "width of feed-forward layers", at_least=1, whole=True)
    dropout: float = setting(0.2, "dropout probability", at_least=0, below=1)
    key: str = setting(
        "g", "key of the memories: g, the decoder's last feed-forward input; f, its output, as published", choices=("g", "f")
    )
    updates: int = setting(4000, "optimiser steps", at_least=1, whole=True)
    batch_tokens: int = setting(4096, "pieces per batch; batching.padding says whether padding counts", at_least=1, whole=True)
    smoothing: float = setting(0.1, "label smoothing; TRIME's loss has none", at_least=0, below=1)
    joined_dictionary: Switch = switch(
        True, "one vocabulary and embedding for both languages; false: one each, as in fairseq's IWSLT'14"
    )
    k: list[int] = setting([1, 2, 4, 8, 16, 32, 64], "values of K; valid's BLEU chooses", filled=True, at_least=1, whole=True)
    beam: int = setting(4, "hypotheses per sentence", at_least=1, whole=True)
    length_penalty: float = setting(
        0.6, "score = log-probability / length^penalty, both including the end of the sentence", at_least=-10, at_most=10
    )
    min_length: int = setting(0, "fewest pieces of a translation", at_least=0, whole=True)
    max_length: list[float] = setting(
        [1.5, 10], "[a, b]: a translation of n source pieces has at most a n + b pieces", at_least=0
    )
    unweighted_external: Switch = switch(False, "add (1 - share) p + p_external, as the published decoder does")
    best_by: str = setting(
        "objective", "what train.keep=best compares: the validation objective or BLEU", choices=("objective", "bleu")
    )
    sentences: int | None = setting(None, "sentences to translate per split; null: all", at_least=1, whole=True, optional=True)
    batch_size: int = setting(64, "sentences per batch of translation", at_least=1, whole=True)


@dataclass
class Domain:
    """experiment=domain/…_b: an external memory of the text that is evaluated."""

    split: str = setting("train", "split of that text", choices=("train", "valid", "test"))
    tokens: Any = tokens(None, "entries")


@dataclass
class Trainer:
    """Arguments of pytorch_lightning.Trainer; others are passed on to it (see check_trainer)."""

    accelerator: str = setting("auto", "where models run", choices=("auto", "cpu", "gpu", "cuda"))
    devices: Any = setting(
        "auto", "auto: every GPU, or one process on the CPU; or a number of them", at_least=1, whole=True, words=("auto",)
    )
    strategy: str = setting(
        "ddp", "with several devices; fsdp shards weights, gradients and optimiser state", choices=("ddp", "fsdp")
    )
    num_nodes: int = setting(
        1,
        "number of machines; run the same command on each, with MASTER_ADDR, MASTER_PORT and NODE_RANK set",
        at_least=1,
        whole=True,
    )
    precision: str = setting(
        "auto",
        "auto: bf16-mixed where the device supports it, else 32-true",
        choices=("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"),
    )
    enable_progress_bar: Switch = switch(True, "show progress bars")


@dataclass
class Samples:
    """Passages of test that page.html shows token by token."""

    passages: int = setting(3, "number of passages; 0: none", at_least=0, whole=True)
    before: int | None = setting(
        None, "tokens read before a passage; null: enough to fill the memories", at_least=0, whole=True, optional=True
    )
    tokens: int = setting(40, "tokens per passage", at_least=1, whole=True)
    minutes: float | None = setting(
        5.0, "draw no further passage that would end later; null: all of them", above=0, optional=True
    )
    entries: int = setting(3, "entries of memories shown per token", at_least=0, whole=True)


@dataclass
class Report:
    """Tables, pictures and pages."""

    runs: Any = setting(None, "with stages=[report], patterns of run folders to compare in one table")
    against: str = setting("vanilla", "the experiment or eviction policy that others are compared with")
    baseline: str | None = setting(None, "also train this experiment, at the same budget, and compare the run with it")
    name: str = setting("comparison", "name of the report's folder")
    keep: str | None = setting(None, "copy results.json of all runs into this folder")
    published: Any = setting(None, "published results beside those of the run: [dev, test] or [test] by column and experiment")
    show_published: str = setting(
        "auto", "published results and their order; auto: not beside your own text", choices=("auto", "always", "never")
    )
    figures: Any = setting(None, "pictures of runs and of comparisons; +figures@report.figures.NAME=FILE draws NAME.png")
    samples: Samples = section(Samples, "passages of test in page.html")


@dataclass
class Compatibility:
    """Quirks of the published code, for comparisons to the last digit."""

    padding: int | None = setting(
        None, "id of the padding token; padded positions are memories too", at_least=0, whole=True, optional=True
    )
    dropped_in_band: Switch = switch(False, "the second word of each tail band has only its band's probability")
    own_gradient_only: Switch = switch(False, "no gradient into memories gathered from other processes")
    string_ids: Switch = switch(
        False, "BM25 ids are compared as strings with numbers, so batches end up in a plain random order"
    )
    sorted_windows: Switch = switch(False, "windows without context are read from shortest to longest")


@dataclass
class Logger:
    """Loggers of a run's metrics: metrics.csv, W&B and further ones of Lightning."""

    history: Switch = switch(True, "write metrics.csv in the run's folder")
    lightning: dict[str, Any] = setting(
        {}, "Lightning loggers, +logger.lightning.NAME={_target_: CLASS}; no artefact depends on them"
    )
    offline: Switch = switch(True, "use W&B offline, without an account; false: online")
    project: str = setting("trime", "W&B's project")


@dataclass
class Settings:
    """The whole configuration: sections, and groups (folders of conf/) whose choices are given by GROUP=NAME."""

    name: str = setting("trime_lab", "name of the run; experiments set it")
    seed: int = setting(0, "seed of weights, batches and random draws", at_least=0, whole=True)
    threads: int | None = setting(
        None, "threads of computations on the CPU; null: all cores", at_least=1, whole=True, optional=True
    )
    task: str = setting("language_model", "set by experiments", choices=("language_model", "translation"))
    stages: list[str] = setting(STAGES, "stages to run, in this order; existing artefacts are reused")
    checkpoint: str | None = setting(
        None, "use instead of training: a folder fit-… or import-…, or a released fairseq checkpoint"
    )
    dictionary: Any = setting(None, "dict.txt of a released checkpoint; for translation [dict.de.txt,dict.en.txt]")
    similarity: str = setting(
        "ip", "of contexts, in training and at test: ip (inner product, as in TRIME), l2 or cosine", choices=METRICS
    )
    prompt_file: str | None = setting(None, "stages=[generate]: the text to continue; null: standard input")
    explain: Switch = switch(False, "show how each generated token's probability splits between vocabulary and memories")
    search: Switch = switch(False, "set by sweep=optuna: jobs end with their result on dev, and the best one is reported")
    expected: list[Any] = setting([], "published results that this experiment reproduces (conf/reproduce)")
    initial_c: dict[str, float] = setting({}, "c of eviction policies whose new entries start at mean - c std")
    trained: str | None = setting(None, "set by trained_with=, for names of runs")
    tested: str | None = setting(None, "set by tested_with=, for names of runs")
    choice: Any = setting(None, "set by ablations: the values that choice selects from, by name")
    choices: Any = setting(None, "set by ablations: the values that choice selects from, by name")

    paths: Paths = section(Paths, "where things lie on this machine")
    artefacts: Artefacts = section(Artefacts, "outputs of stages, which later runs find again")
    export: Export = section(Export, "a run's model and memories in one folder")
    storage: Storage = section(Storage, "the stages list, disk and prune")
    vocabulary: Vocabulary = section(Vocabulary, "the vocabulary, of the training split")
    segments: Segments = section(Segments, "how text is cut for training")
    train: Train = section(Train, "the optimisation")
    long: Long = section(Long, "the long-term memory at test")
    evaluate: Evaluate = section(Evaluate, "scoring valid and test")
    datastore: Datastore = section(Datastore, "the text of the external memory")
    tune: Tune = section(Tune, "the grid, scored on valid")
    index: Index = section(Index, "the search index over the datastore")
    mixture: Mixture = section(Mixture, "how all memories are mixed, in a row below the papers'")
    replay: Replay = section(Replay, "eviction policies tried on a recorded run")
    frontier: Frontier = section(Frontier, "the budget for table=frontier")
    generate: Generate = section(Generate, "stages=[generate]")
    small: Small = section(Small, "stages=[train_small] and [init_small]")
    answering: Answering = section(Answering, "stages=[answer]")
    translation: Translation = section(Translation, "task=translation")
    domain: Domain = section(Domain, "experiment=domain/…")
    trainer: Trainer = section(
        Trainer, "arguments of pytorch_lightning.Trainer; others are passed on, and change the hash of the model"
    )
    callbacks: dict[str, Any] = setting(
        {}, "Lightning callbacks, +callbacks.NAME={_target_: CLASS}; they change the hash of the model"
    )
    report: Report = section(Report, "tables, pictures and pages")
    compatibility: Compatibility = section(Compatibility, "quirks of the published code")
    logger: Logger = section(Logger, "loggers of a run's metrics")

    dataset: Any = setting(None, "the text to train and evaluate on")
    batching: Any = setting(None, "which segments make a training batch")
    neighbours: Any = setting(None, "BM25 neighbours of segments")
    model: Any = setting(None, "sizes and parts of the network")
    memory: Any = setting(None, "the memory in training")
    memories: Any = setting(None, "memories at test: memories@memories.NAME=FILE")
    optimizer: Any = setting(None, "the optimizer; schedule= sets its learning rate")
    schedule: Any = setting(None, "the learning-rate schedule")
    eviction: Any = setting(None, "eviction policy of the memory inside the model, or of the long memory, at evaluation")
    questions: Any = setting(None, "questions over long contexts")
    engine: Any = setting(None, "what makes the parts of an artefact that do not depend on one another")


COUNT, SIZE, SWITCH = Rule(at_least=1, whole=True), Rule(at_least=0, whole=True), Rule(switch=True)
SHARE = Rule(at_least=0, below=1)
# Bounds of settings that the signature of their ``_target_`` does not give; settings that a choice lacks are skipped.
PARTS = {
    "model.gate": SWITCH,
    "model.backbone.layers": Rule(at_least=1, whole=True, optional=True),
    "model.backbone.inner": COUNT,
    "model.backbone.positions": COUNT,
    "model.backbone.dropout": SHARE,
    "model.backbone.inner_dropout": SHARE,
    "model.softmax_dropout": SHARE,
    "model.head.dropout": SHARE,
    "model.cutoffs": replace(COUNT, many=True, optional=True),
    "model.embedding.cutoffs": replace(COUNT, many=True, optional=True),
    "batching.size": Rule(at_least=1, whole=True, optional=True),
    "batching.tokens": COUNT,
    "batching.processes": COUNT,
    "batching.multiple": COUNT,
    "schedule.peak": Rule(at_least=0),
    "engine.cores": COUNT,
    "engine.devices": SIZE,
    "optimizer.betas": Rule(at_least=0, below=1, filled=True, many=True),
    "dataset.ratio": Rule(at_least=0, optional=True),
    "memory.metric": Rule(choices=METRICS),
    "neighbours.analyzer": Rule(choices=ANALYZERS),
    "neighbours.exclude": Rule(choices=EXCLUDED),
    "mixture.model.history": Rule(at_least=0, at_most=1, many=True),
    "replay.policies": Rule(name=True, filled=True, many=True),
    "questions.ask": Rule(choices=ASKED),
    "small.model.kind": Rule(choices=("decoder", "encdec")),
    "small.questions.min_words": Rule(at_least=0, whole=True, optional=True),
    "small.questions.words": COUNT,
    "mixture.model.hidden": COUNT,
    "mixture.model.epochs": COUNT,
    "mixture.model.patience": COUNT,
    "mixture.model.batch": COUNT,
    "mixture.model.learning_rate": Rule(above=0),
    "mixture.model.online_rate": Rule(above=0),
}
TOP_K = Rule(at_least=1, whole=True, optional=True, filled=True, many=True)
# The same for our own models, some of which carry a state from window to window, and for pretrained models.
STATEFUL = {"model.memory_size": SIZE, "model.factor": COUNT, "model.embedding.factor": COUNT}
PRETRAINED = {
    "model.memory_size": replace(SIZE, many=True),
    "model.chunk": COUNT,
    "model.outputs": COUNT,
    "model.query_size": Rule(at_least=0, whole=True, optional=True, filled=True, many=True),
    "model.top_k": TOP_K,
    "model.backbone.top_k": TOP_K,
    "model.dtype": Rule(choices=DTYPES),
    "model.position": Rule(choices=EXTENSIONS),
    "model.cached_keys": Rule(choices=CACHED_KEYS),
    "model.search": Rule(choices=TOP_K_SEARCHES),
    "model.factor": Rule(at_least=1),
    "model.end": Rule(choices=("flush", "drain")),
    "model.prefill": Rule(choices=("chunked", "guided", "whole")),
    "model.per_head": Rule(switch=True),
    "model.causal": Rule(switch=True, optional=True),
    "model.lora.rank": COUNT,
    "model.lora.alpha": COUNT,
    "model.lora.dropout": Rule(at_least=0, below=1),
}
