"""Every setting: type, bounds, default and help. Checks and --help come from here; files of conf/ give the arguments of parts.

A field that is ``free`` cannot change a result. A value may be an interpolation (``${segments.length}``): it is checked once it
is resolved, before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import TypedDict

from trime.common.choices import CachedKeys, Counted, Dtype, Extension, Metric, Order, TopKSearch
from trime.config.fields import (
    FILLED,
    RISING,
    STRICT,
    Address,
    Count,
    Dropout,
    Folder,
    Name,
    NotNegative,
    Part,
    Positive,
    Section,
    Share,
    Size,
    Tokens,
    free,
    section,
    setting,
)

STAGES = ["import", "prepare", "pack", "fit", "encode", "index", "tune", "evaluate", "report"]  # by default, in order
LANGUAGE_MODEL = {"_target_": "trime.stages.graph.Graph", "_partial_": True}
SMALL_MODEL = {
    "_target_": "trime.models.pretrained.small.Small",
    "kind": "decoder",
    "width": 128,
    "layers": 4,
    "heads": 4,
    "max_positions": 512,
}
SMALL_QUESTIONS = {"words": 128, "min_words": 0}
Splits = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class Paths(Section):
    """Folders on this machine."""

    data: Folder = setting("data", "downloads and prepared text go here")
    outputs: Folder = setting("outputs", "artefacts, runs and reports go here")


@dataclass(frozen=True)
class Artefacts(Section):
    """Outputs of stages, which later runs find again."""

    verify: bool = setting(True, "compare each file's checksum when an artefact is first used; false: only its size")


@dataclass(frozen=True)
class Storage(Section):
    """Settings of the stages list, disk and prune, which are about the runs in paths.outputs."""

    match: str = setting("*", "list, prune: the runs of these names, as a pattern; other runs are kept")
    sort: Literal["date", "name", "score", "size"] = setting("date", "order of the list")
    keep: Literal["all", "named"] = setting("all", "prune: keep all runs, or those whose command had a name=")
    run: str | None = setting(None, "prune: only the runs of this name, or one as NAME/FOLDER, and what no other run needs")
    delete: bool = setting(False, "prune: delete; false: only say what would be deleted")
    data: bool = setting(False, "prune: also what lies in paths.data, which other outputs may use")


@dataclass(frozen=True)
class Export(Section):
    """stages=[export]: a finished run's model, memories and mixture in one folder, which trime.load opens anywhere."""

    path: str | None = setting(None, "the folder to write")
    hub: str | None = setting(None, "also upload it to this repository of the Hugging Face Hub, as USER/NAME")
    private: bool = setting(True, "a repository that is made is private")


@dataclass(frozen=True)
class Vocabulary(Section):
    """The vocabulary of the training split."""

    max_size: Annotated[int, Ge(3)] | None = setting(32000, "most symbols; null: every symbol")
    min_count: Size = setting(2, "occurrences that a symbol needs to be in the vocabulary")
    fairseq: bool = setting(False, "special symbols and padding as in fairseq's dictionaries")


@dataclass(frozen=True)
class Segments(Section):
    """Segments of text for training."""

    length: Count = setting(512, "L, tokens of a training segment")
    bounded: bool = setting(True, "segments end at document borders; false: the stream is one document, as published")


@dataclass(frozen=True)
class Train(Section):
    """Settings of the optimisation."""

    updates: Size = setting(1000, "optimiser steps; 0 takes a pretrained model as it is")
    accumulate: Count = setting(1, "micro-batches per update; in-batch memory is per micro-batch")
    plain_share: NotNegative = setting(0.05, "share of updates that first train the plain language model (TRIME 5.2)")
    clip_norm: NotNegative = setting(0.25, "largest gradient norm; 0: no clipping")
    checkpoint_every: Count = free(100, "updates between checkpoints")
    validate_every: Count = setting(150, "updates between validations")  # they decide which weights train.keep=best takes
    validate_tokens: Tokens | None = setting(16384, "validation tokens per validation; null: all")
    keep: Literal["best", "last"] = setting(
        "best", "best: the weights with the lowest validation objective; last: those of the last update"
    )
    log_every: Count = free(10, "updates between logged values")
    memory_size: Count = setting(
        512, "entries of a memory inside the model during training; model.memory_size sets it at evaluation"
    )
    eviction: Part = setting(None, "eviction policy of that memory, by eviction@train.eviction=NAME")


@dataclass(frozen=True)
class Long(Section):
    """The long-term memory at test; tune.memory_size sets its sizes."""

    across_documents: bool = setting(False, "true: entries of earlier documents stay, as published")
    include_window: bool = setting(False, "true: contexts of the window are also in the long memory, as published")


@dataclass(frozen=True)
class Evaluate(Section):
    """Scoring valid and test."""

    dataset: Part | None = setting(None, "another text to evaluate on, with the main vocabulary: dataset@evaluate.dataset=NAME")
    tokens: Tokens | None = setting(None, "tokens scored in each of valid and test; null: all")
    sample: Literal["documents", "starts"] = setting(
        "documents",
        "if tokens is set: whole documents, of longer ones the middle; or starts: as many from the start of each document",
    )
    block: Count = setting(256, "tokens scored per window")
    context: Size = setting(256, "earlier tokens of the document before each window")
    lines: bool = setting(False, "true: a window scores as many whole lines as fit into a block, as published for WikiText")
    bounded: bool = setting(True, "windows and memory end at document borders; false: one stream of text, as published")
    scaled_interpolation: bool = setting(True, "divide by sqrt(d) in Eq. 8; false: do not, as in the published code")
    per_token: bool = free(False, "write tokens.jsonl: every scored token of test, its log-probability, parts and weights")
    analysis: bool = free(
        False, "also measure perplexity by word frequency, retrieval accuracy and loss by size of the long memory"
    )
    batch_tokens: Count | None = free(None, "tokens per batch of encoding; null: 8,192, on a CUDA device 98,304")
    dtype: Dtype = setting("float32", "number format of stored encodings")
    rows: list[Any] = setting(
        [{"joint": []}], "rows of the results, as in the papers; below them stands what mixture= mixes, if anything"
    )
    all_rows: bool = setting(True, "evaluate all of these rows; false: only the first, beside what mixture= mixes")
    memories: list[str] | None = setting(None, "memories that mixture= mixes, as [local,ngram]; null: all memories in the rows")
    subsets: Literal["none", "leave_one_out", "all"] = setting(
        "leave_one_out", "subsets of a fitted mixture's memories to evaluate, to show what each memory contributes"
    )


@dataclass(frozen=True)
class Datastore(Section):
    """The text of the external memory."""

    dataset: Part | None = setting(None, "another text for it: dataset@datastore.dataset=NAME")
    path: str | None = setting(None, "take the folder encode-… of another run instead of encoding")
    split: Splits = setting("train", "split of the dataset")
    tokens: Tokens | None = setting(None, "entries, the same number from the start of each document; null: all")
    block: Count | None = setting(None, "tokens of a window of its text; null: evaluate.block, as published")
    context: Size | None = setting(
        None,
        "tokens that are read before each window of its text; null: evaluate.context, as published; fewer make encoding faster",
    )
    dtype: Dtype | Literal["int8"] = setting("float16", "number format of stored keys; int8 halves the disk space of float16")


@dataclass(frozen=True)
class Index(Section):
    """The search index over the datastore."""

    factory: str | None = setting(
        "auto",
        "auto; null for exact search; Cells; a FAISS factory string, with underscores for commas and numbers optional; or "
        "the dotted name of an index builder",
    )
    metric: Metric = setting("${similarity}", "similarity of keys")
    k: Count = setting(1024, "K, nearest entries per query")
    recall: Annotated[float, Gt(0), Le(1)] = setting(
        0.95, "share of the exact K nearest entries to find, for factory auto; tune measures it on valid"
    )
    nprobe: Count = setting(1, "cells searched per query; with auto, as many as the recall needs")
    rescore: bool = setting(False, "compute similarities from the stored keys instead of their codes")
    device: Literal["cpu", "cuda"] = free("cpu", "where FAISS searches; cuda needs faiss-gpu, extra gpu")
    parts: Count = setting(1, "parts of a search: some cells of one index, or an index of some entries each")
    engine: Literal["local", "ray"] = free("local", "local, or ray: each part on a worker (extra cluster)")
    address: Address | None = free(None, "address of a Ray cluster, auto or HOST:PORT; null: Ray on this machine")
    replicas: Count = free(1, "workers of engine ray that hold the same part and are asked in turns")
    cores: Count = free(1, "cores per worker")


@dataclass(frozen=True)
class Mixture(Section):
    """TRIME Lab's own row, below those of the papers: how all memories are mixed."""

    kind: str = setting("none", "set by mixture=; all mixtures but none, joint and interpolated are fitted")
    path: str | None = setting(None, "take the folder mixture-… of another run instead of fitting")
    model: Part | None = setting(None, "the fitted mixture and its settings")
    temperatures: Annotated[list[Positive], FILLED, RISING] = setting(
        [1.0], "temperatures of each memory: one expert each (adaptive), or the best of them (calibrated)"
    )
    folds: Annotated[int, Ge(3)] = setting(
        8, "folds of valid's documents; the dev result is measured on documents that were left out of the fit"
    )
    tokens: Tokens | None = setting("200k", "most validation tokens to fit to; null: all")


@dataclass(frozen=True)
class Tune(Section):
    """The grid, scored on valid."""

    temperature: Annotated[list[Positive], FILLED] = setting(
        [0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0], "τ of Eq. 6"
    )
    interpolation_temperature: Annotated[list[Positive], FILLED] = setting(
        [0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 2.0, 4.0], "τ' of Eq. 8"
    )
    interpolation_share: Annotated[list[Annotated[float, Gt(0), Lt(1)]], FILLED] = setting(
        [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], "λ of Eq. 8"
    )
    memory_size: Annotated[list[Count], FILLED, RISING] = setting([512, 1024, 2048, 4096, 8192], "M of the long memory")


@dataclass(frozen=True)
class Generate(Section):
    """Settings of stages=[generate]."""

    max_new_tokens: Count = setting(100, "most tokens to generate")
    temperature: NotNegative = setting(0.8, "of sampling; 0: always the most likely token")
    top_p: Annotated[float, Gt(0), Le(1)] = setting(0.95, "sample from the smallest set of tokens with this probability")
    entries: Size = setting(3, "entries of memories that explain=true lists per token")


@dataclass(frozen=True)
class Serve(Section):
    """Settings of stages=[serve]."""

    host: str = setting("127.0.0.1", "that is listened at; others than this machine's need a token in TRIME_TOKEN")
    port: Size = setting(8000, "of the endpoint and its page; 0: one that is free")


class SmallQuestions(TypedDict, total=False):
    """Settings of the questions that a small model learns from; others of conf/questions may be added."""

    words: Count
    min_words: Size | None


SmallQuestions.__pydantic_config__ = {"extra": "allow"}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Small(Section):
    """A small model in the transformers format, which stages=[train_small] trains on questions over short contexts."""

    model: Part = setting(SMALL_MODEL, "kind and sizes of the model")
    questions: SmallQuestions = setting(SMALL_QUESTIONS, "settings of questions that differ in training")
    vocabulary: Annotated[int, Ge(3)] = setting(8000, "words; with stages=[init_small] byte pairs")
    updates: Size = setting(3000, "updates of its training in experiment=attendre_train_small")
    batch: Count = setting(16, "questions per update")
    facts_only_share: Share = setting(0.0, "share of updates, at the start, on facts without the text around them")
    prompt_loss_weight: Share = setting(0.2, "weight of the prompts in a decoder's loss; the answers have the rest")
    order: Order = setting("first", "where the question stands: before the context, after it, or both")
    spread: bool = setting(False, "spread a decoder's positions, up to model.max_positions, by gaps between sentences")


@dataclass(frozen=True)
class Answering(Section):
    """Settings of stages=[answer]."""

    split: Splits = setting("test", "split of the questions")
    batch_size: Count = free(8, "texts that are read, and questions that are answered, at a time")
    max_new_tokens: Count = setting(8, "most tokens of an answer")
    max_prompt_tokens: Count | None = setting(None, "read only this many last tokens of a prompt; null: all")
    counts: Counted = free(
        "exact_match",
        "which answers count in pictures and in the list of runs: exact matches, or those that contain an accepted answer",
    )
    order: Order = setting(
        "first",
        "where the question stands: before the context, after it (a context is then read once for all its questions, unless "
        "they guide it), or both",
    )
    chat_template: bool | None = setting(None, "put prompts into the model's chat template; null: if its tokenizer has one")
    examples: Size = setting(0, "solved questions of train before each prompt, with their facts alone as context")


@dataclass(frozen=True)
class Translation(Section):
    """task=translation, as in TRIME's Appendix C, with a smaller model."""

    width: Count = setting(256, "width of the model")
    layers: Count = setting(3, "layers of the encoder, and as many of the decoder")
    heads: Count = setting(4, "attention heads")
    inner: Count = setting(1024, "width of feed-forward layers")
    dropout: Dropout = setting(0.2, "dropout probability")
    key: Literal["g", "f"] = setting(
        "g", "key of the memories: g, the decoder's last feed-forward input; f, its output, as published"
    )
    updates: Count = setting(4000, "optimiser steps")
    batch_tokens: Count = setting(4096, "pieces per batch; batching.padding says whether padding counts")
    smoothing: Dropout = setting(0.1, "label smoothing; TRIME's loss has none")
    joined_dictionary: bool = setting(
        True, "one vocabulary and embedding for both languages; false: one each, as in fairseq's IWSLT'14"
    )
    k: Annotated[list[Count], FILLED] = setting([1, 2, 4, 8, 16, 32, 64], "values of K; valid's BLEU chooses")
    beam: Count = setting(4, "hypotheses per sentence")
    length_penalty: Annotated[float, Ge(-10), Le(10)] = setting(
        0.6, "score = log-probability / length^penalty, both including the end of the sentence"
    )
    min_length: Size = setting(0, "fewest pieces of a translation")
    max_length: list[NotNegative] = setting([1.5, 10.0], "[a, b]: a translation of n source pieces has at most a n + b pieces")
    unweighted_external: bool = setting(False, "add (1 - share) p + p_external, as the published decoder does")
    best_by: Literal["objective", "bleu"] = setting(
        "objective", "what train.keep=best compares: the validation objective or BLEU"
    )
    sentences: Count | None = setting(None, "sentences to translate per split; null: all")
    batch_size: Count = free(
        64, "sentences per batch of translation; in bfloat16 another number may change a word here and there"
    )


@dataclass(frozen=True)
class Trainer(Section):
    """Arguments of pytorch_lightning.Trainer."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = free("auto", "where models run")
    devices: Count | Literal["auto"] = free("auto", "auto: every GPU, or one process on the CPU; or a number of them")
    strategy: Literal["ddp", "fsdp"] = free("ddp", "with several devices; fsdp shards weights, gradients and optimiser state")
    num_nodes: Count = free(
        1, "number of machines; run the same command on each, with MASTER_ADDR, MASTER_PORT and NODE_RANK set"
    )
    precision: Literal["auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"] = setting(
        "auto", "auto: bf16-mixed where the device supports it, else 32-true"
    )
    compile: bool = setting(False, "compile layers by torch.compile in stage fit: for small models on a GPU")
    enable_progress_bar: bool = free(True, "show progress bars")
    extra: dict[str, Any] = setting({}, "further arguments, as +trainer.extra.max_time=00:01:00:00")


@dataclass(frozen=True)
class Samples(Section):
    """Passages of test that page.html shows token by token."""

    passages: Size = setting(3, "number of passages; 0: none")
    before: Size | None = setting(None, "tokens read before a passage; null: enough to fill the memories")
    tokens: Count = setting(40, "tokens per passage")
    minutes: Positive | None = setting(5.0, "draw no further passage that would end later; null: all of them")
    entries: Size = setting(3, "entries of memories shown per token")


@dataclass(frozen=True)
class Report(Section):
    """Tables, pictures and pages."""

    runs: str | list[str] | None = setting(None, "with stages=[report], patterns of run folders to compare in one table")
    against: str = setting("vanilla", "the experiment or eviction policy that others are compared with")
    name: Name = setting("comparison", "name of the report's folder")
    keep: str | None = setting(None, "copy results.json of all runs into this folder")
    published: dict[str, Any] = setting(
        {}, "published results beside those of the run: [dev, test] or [test] by column and experiment"
    )
    show_published: Literal["auto", "always", "never"] = setting(
        "auto", "published results and their order; auto: not beside your own text"
    )
    figures: dict[str, Any] = setting(
        {}, "pictures of runs and of comparisons; +report.figures.NAME={_target_: CLASS} draws NAME.png"
    )
    samples: Samples = section(Samples)


@dataclass(frozen=True)
class Compatibility(Section):
    """Quirks of the published code, for comparisons to the last digit."""

    padding: Size | None = setting(None, "id of the padding token; padded positions are memories too")
    dropped_in_band: bool = setting(False, "the second word of each tail band has only its band's probability")
    own_gradient_only: bool = setting(False, "no gradient into memories gathered from other processes")
    string_ids: bool = setting(
        False, "BM25 ids are compared as strings with numbers, so batches end up in a plain random order"
    )
    sorted_windows: bool = setting(False, "windows without context are read from shortest to longest")


@dataclass(frozen=True)
class Logger(Section):
    """Loggers of a run's metrics: metrics.csv, W&B and further ones of Lightning."""

    history: bool = setting(True, "write metrics.csv in the run's folder")
    lightning: dict[str, Any] = setting({}, "Lightning loggers, +logger.lightning.NAME={_target_: CLASS}")
    offline: bool = setting(True, "use W&B offline, without an account; false: online")
    project: str = setting("trime", "W&B's project")


class Lora(TypedDict):
    """Low-rank updates of a pretrained model's layers, which are trained in place of its weights."""

    rank: Count
    alpha: Count
    dropout: NotRequired[Dropout]

    __pydantic_config__ = STRICT  # type: ignore[misc]


class Model(TypedDict, total=False):
    """Settings of conf/model, of the lab's own networks and of pretrained ones; each model has some of them."""

    width: Count
    attention_width: Count
    cutoffs: list[Count] | None
    factor: Annotated[float, Ge(1)]
    tied_projections: bool
    softmax_dropout: Dropout
    gate: bool
    memory_size: Size | list[Size]
    backbone: Part
    embedding: Part
    head: Part
    name: str | None
    top_k: Count | Annotated[list[Count | None], FILLED] | None
    search: TopKSearch
    chunk: Count
    per_head: bool
    recall: Size
    position: Extension
    cached_keys: CachedKeys
    query_size: Size | Annotated[list[Size | None], FILLED] | None
    prefill: Literal["chunked", "guided", "whole"]
    end: Literal["flush", "drain"]
    outputs: Count
    causal: bool | None
    dtype: Dtype
    lora: Lora | None

    __pydantic_config__ = STRICT  # type: ignore[misc]


@dataclass(frozen=True)
class Settings(Section):
    """The whole configuration: sections, and groups (folders of conf/) whose choices are given by GROUP=NAME."""

    name: Name = free("trime_lab", "name of the run; experiments set it")
    seed: Size = setting(0, "seed of weights, batches and random draws")
    threads: Count | None = free(None, "threads of computations on the CPU; null: all cores")
    task: Part = setting(LANGUAGE_MODEL, "class of the experiment's data flow; experiments set it")
    stages: list[str] = free(STAGES, "stages to run, in this order; existing artefacts are reused")
    checkpoint: str | None = setting(
        None, "use instead of training: a folder fit-… or import-…, or a released fairseq checkpoint"
    )
    dictionary: str | list[str] | None = setting(
        None, "dict.txt of a released checkpoint; for translation [dict.de.txt,dict.en.txt]"
    )
    similarity: Metric = setting("ip", "of contexts, in training and at test: ip (inner product, as in TRIME), l2 or cosine")
    prompt_file: str | None = free(None, "stages=[generate]: the text to continue; null: standard input")
    explain: bool = free(False, "show how each generated token's probability splits between vocabulary and memories")
    search: bool = free(False, "set by sweep=optuna: jobs end with their result on dev, and test is not scored")

    paths: Paths = section(Paths, free=True)
    artefacts: Artefacts = section(Artefacts, free=True)
    export: Export = section(Export, free=True)
    storage: Storage = section(Storage, free=True)
    vocabulary: Vocabulary = section(Vocabulary)
    segments: Segments = section(Segments)
    train: Train = section(Train)
    long: Long = section(Long)
    evaluate: Evaluate = section(Evaluate)
    datastore: Datastore = section(Datastore)
    tune: Tune = section(Tune)
    index: Index = section(Index)
    mixture: Mixture = section(Mixture)
    generate: Generate = section(Generate, free=True)
    serve: Serve = section(Serve, free=True)
    small: Small = section(Small)
    answering: Answering = section(Answering)
    translation: Translation = section(Translation)
    trainer: Trainer = section(Trainer)
    callbacks: dict[str, Any] = setting({}, "Lightning callbacks, +callbacks.NAME={_target_: CLASS}")
    report: Report = section(Report, free=True)
    compatibility: Compatibility = section(Compatibility)
    logger: Logger = section(Logger, free=True)

    dataset: Part = setting(None, "the text to train and evaluate on")
    batching: Part = setting(None, "which segments make a training batch")
    neighbours: Part = setting(None, "BM25 neighbours of segments")
    model: Model = setting(None, "sizes and parts of the network")
    memory: Part = setting(None, "the memory in training")
    test_memories: dict[str, Part | None] = setting({}, "memories at test: test_memories@test_memories.NAME=FILE")
    optimizer: Part = setting(None, "the optimizer; schedule= sets its learning rate")
    schedule: Part = setting(None, "the learning-rate schedule")
    eviction: Part = setting(None, "eviction policy of the memory inside the model, or of the long memory, at evaluation")
    questions: Part = setting(None, "questions over long contexts")
    engine: Part = free(None, "what makes the parts of an artefact that do not depend on one another")
