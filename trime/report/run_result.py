"""The results of a run, as results.json holds them: written by ``run/collect.py``, read by every report.

Fields that other versions of the code wrote are kept as they are, so that results may be read and written again without
loss. A field with a default may be missing in results of earlier versions.
"""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from trime.metrics import MEASURES

FEW_TOKENS = 10_000  # scored tokens below which a reader is referred to the intervals
FEWEST = 10  # units (documents, parts or sentences, of each seed) below which an interval means too little for a verdict
VOCABULARY = "vocabulary"  # the name of the row without memory
PATH_SETTINGS = re.compile(
    r"((?:[\w.]*path|paths\.\w+|report\.keep|questions\.(?:babi|background))=).+"
)  # settings that are paths on a machine
PLACES = ("path", "babi", "background")  # settings of texts and questions that are paths
WITHOUT_EFFECT = ("seed=", "report.", "logger", "hydra", "sweep=")  # settings that do not set runs apart, by their beginning

Number = int | float
MemorySize = int | tuple[int, ...]  # entries, or one number per layer


class Record(BaseModel):
    """A part of results.json: its fields cannot be set again, and only those that were given are written."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def to_json(self) -> dict[str, Any]:
        """Return the content for a JSON file."""
        return self.model_dump(exclude_unset=True)


class Hardware(Record):
    """The machine of a run."""

    cpu: str = ""
    cores: int | None = None
    gpu: str | None = None


class Dataset(Record):
    """A text; numbers are by split, ``unknown`` is the share of tokens that are ``<unk>``."""

    name: str
    fingerprint: str
    path: str | None = None
    own: bool = False
    test_hash: str | None = None  # of test's token ids, which differ between tokenisations
    tokens: dict[str, int] = {}
    bytes: dict[str, int] = {}
    unknown: dict[str, float] = {}
    vocabulary: int | None = None
    notes: list[str] = []


class ScoredText(Record):
    """How many tokens of a split are scored, of how many documents, and how many bytes they predict."""

    tokens: int
    bytes: int
    documents: int


class Training(Record):
    """What training took; empty if a model was read as it is."""

    updates: int | None = None
    processor_ms_per_token: float | None = None


class MeanCell(Record):
    """A mean over the tokens of a bucket; None if it has none."""

    bucket: str
    tokens: int
    mean: float | None


class LossCell(Record):
    """The mean loss of the tokens of a bucket, in nats; None if it has none."""

    bucket: str
    tokens: int
    loss: float | None
    perplexity: float | None


class Row(Record):
    """The result of a combination of memories on a split; ``loss`` is in nats per token.

    ``documents`` has the summed loss and the tokens of each unit that a bootstrap resamples, ``bleu_statistics`` the ten
    numbers of each sentence from which BLEU is computed.
    """

    memories: str
    mixture: str = ""
    tuned: dict[str, Number] = {}
    at_grid_edge: list[str] = []  # tuned settings at the edge of their grid
    loss: float
    perplexity: float
    tokens: int
    documents: list[tuple[float, int]]
    bootstrap_unit: str = "documents"
    by_memory_size: dict[str, float] = {}  # loss
    bits_per_byte: float | None = None
    bits_per_character: float | None = None
    metric: str | None = None
    fitted: dict[str, Any] | None = None  # facts on a fitted mixture
    search: str | None = None
    memory_size: MemorySize | None = None  # of the memory that fills while text is read
    eviction: str | None = None
    memory_share: list[MeanCell] = []
    tokens_per_second: float | None = None
    processor_ms_per_token: float | None = None  # earlier versions measured elapsed time alone
    peak_memory_mb: float | None = None
    bleu: float | None = None
    bleu_statistics: list[list[int]] | None = None

    @property
    def metric_name(self) -> str:
        """Return bits/char or bits/byte if tokens are characters or bytes, else perplexity."""
        return self.metric or ("perplexity" if self.bits_per_character is None else "bits/char")

    @property
    def value(self) -> float:
        """Return the result in the row's metric."""
        return MEASURES[self.metric_name](self.loss)


class Datastore(Record):
    """The entries of a memory that is searched, and their index."""

    entries: int
    index: str
    recall: float
    nprobe: int | None = None
    dataset: str | None = None
    text: str | None = None  # its fingerprint, if it is not the text that the model learned from


class Search(Record):
    """How a memory of a datastore was searched; ``keys`` is their precision."""

    k: int
    keys: str


class Cost(Record):
    """The cost of one memory; its peak size, for a datastore that on disk."""

    bytes: Number
    seconds_per_token: float


class MeanWeights(Record):
    """The mean weights of a memory in a mixture, and the share of tokens for which its weight is largest."""

    largest: float
    by_frequency: list[MeanCell] = []
    by_similarity: list[MeanCell] = []
    by_context: list[MeanCell] = []


class Subset(Record):
    """A mixture that was fitted with some of the memories: its losses, and the seconds of the mixture itself."""

    memories: list[str]
    valid_loss: float
    loss: float
    documents: list[tuple[float, int]]
    seconds_per_token: float


class Subsets(Record):
    """A fitted mixture on subsets of its memories; the last has all. ``selection`` is evaluate.subsets."""

    mixture: str
    selection: str
    encode_seconds_per_token: float
    costs: dict[str, Cost]
    weights: dict[str, MeanWeights]
    subsets: list[Subset]

    @property
    def searches(self) -> dict[str, Search]:
        """Return how memories were searched, by their names: each has a field NAME_search."""
        found = {key.removesuffix("_search"): value for key, value in (self.model_extra or {}).items()}
        return {name: Search(**found[name]) for name in self.costs if found.get(name)}


class Analysis(Record):
    """The analysis of a split: losses by frequency, retrieval accuracy by K, loss by size of the memory."""

    buckets: dict[str, list[LossCell]]
    retrieval: dict[str, float]
    by_memory_size: dict[str, float]


class StaleAge(Record):
    """Stored keys of one age in segments: their shares, and their distance from the current key."""

    age: int
    share_stored: float
    share_retrieved: float
    distance: float | None


class StaleLayer(Record):
    """The staleness of a layer's stored keys."""

    layer: int
    ages: list[StaleAge]


class EvaluatedText(NamedTuple):
    """The text of runs that may be compared. Runs of earlier versions have neither ``tokens_hash`` nor ``sample``."""

    name: str
    fingerprint: str
    vocabulary: int | None
    tokens_hash: str | None
    sample: str | None
    scored: int

    @property
    def title(self) -> str:
        """Return a title that sets it apart from other texts, as in ``novels (3fa2c1, 32,000 symbols, starts)``."""
        symbols = f"{self.vocabulary:,} symbols" if self.vocabulary else None
        return f"{self.name} ({', '.join(filter(None, [self.fingerprint[:6], symbols, self.sample]))})"


class RunResult(Record, ABC):
    """The facts that every run records: its name, code, settings and machine, and rows by split."""

    name: str
    seed: int
    created: str | None = None
    commit: str | None = None
    config_hash: str | None = None
    versions: dict[str, str] = {}
    hardware: Hardware = Hardware()
    command: str | None = None
    overrides: list[str] | None = None  # the settings of the command that may set this run apart from others
    made_from: list[str] | None = None  # names of artefacts
    metrics: Mapping[str, Sequence[Record]]

    @property
    def settings(self) -> list[str]:
        """Return ``overrides``; those of results of earlier versions are found in the command."""
        if self.overrides is not None:
            return self.overrides
        return [word for word in effective(split_command(self.command)) if "=" in word or word.startswith("~")]

    @property
    def made_at(self) -> str:
        """Return the commit and the time at which the run was made."""
        return ", ".join(filter(None, [str(self.commit)[:7], self.created]))

    @property
    @abstractmethod
    def identity(self) -> list[Any]:
        """Return the facts that two runs with equal settings and results share if they are one observation."""

    @property
    @abstractmethod
    def texts(self) -> dict[str, str]:
        """Return the fingerprints of texts that neither the settings nor the scored text identify, by their use."""

    @property
    @abstractmethod
    def score(self) -> tuple[str, float]:
        """Return the measure of the main result on test, and the result."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Return the title of the text that was read."""

    @property
    def marks(self) -> list[str]:
        """Return why the result cannot be compared with others at a glance."""
        return []


class ScoredRun(RunResult):
    """The results of a language model or a translation model: rows by split, ``valid`` and ``test``."""

    dataset: Dataset
    parameters: int | None = None
    train: Training = Training()
    trained_with_memory: bool | None = None
    tuned: dict[str, Number] = {}
    sample: str | None = None
    metrics: dict[str, list[Row]]
    scored: dict[str, ScoredText] = {}
    duplicates: list[str] = []
    durations: dict[str, float] = {}  # seconds by stage
    artefacts: dict[str, str] | None = None
    staleness: list[StaleLayer] = []
    subsets: Subsets | None = None
    analysis: dict[str, Analysis] = {}  # by split
    imported: dict[str, Any] | None = None
    evaluation_dataset: Dataset | None = None  # if it is not the one that the model learned from
    datastore: Datastore | None = None

    @property
    def row(self) -> Row:
        """Return the experiment's own row on test, the last."""
        return self.metrics["test"][-1]

    @property
    def dev(self) -> Row:
        """Return the experiment's own row on dev."""
        return self.metrics["valid"][-1]

    @property
    def memory_size(self) -> MemorySize | None:
        """Return the capacity of the memory that fills while text is read."""
        return self.row.memory_size

    @property
    def evaluated(self) -> Dataset:
        """Return the evaluated text."""
        return self.evaluation_dataset or self.dataset

    @property
    def text(self) -> EvaluatedText:
        """Return what runs must share to be compared."""
        data = self.evaluated
        return EvaluatedText(data.name, data.fingerprint, data.vocabulary, data.test_hash, self.sample, self.row.tokens)

    @property
    def other_texts(self) -> dict[str, tuple[str, str]]:
        """Return name and fingerprint of the text that the model learned from, if another is scored, and of the datastore's.

        Runs of earlier versions have no fingerprint of a datastore's text.
        """
        found = {}
        if self.evaluation_dataset:
            found["trained on"] = self.dataset.name, self.dataset.fingerprint
        if self.datastore and self.datastore.dataset:
            found["datastore of"] = self.datastore.dataset, self.datastore.text or ""
        return found

    @property
    def is_trained(self) -> bool:
        """Return False if a model was read as it is; runs of earlier versions, which lack the number of updates, trained."""
        return self.train.updates != 0

    @property
    def is_fitted(self) -> bool:
        """Return True if the mixture of the last row was fitted, which those of the papers are not."""
        return len(self.metrics["test"]) > 1 and self.dev.fitted is not None

    @property
    def is_smoke_test(self) -> bool:
        """Return True if a result says only that the code ran: of few tokens, in too few units for an interval."""
        return self.row.tokens < FEW_TOKENS and len(self.row.documents) < FEWEST

    @property
    def identity(self) -> list[Any]:
        return [self.config_hash or [self.name, self.parameters], self.text, self.other_texts]

    @property
    def texts(self) -> dict[str, str]:
        return {use: fingerprint for use, (_, fingerprint) in self.other_texts.items()}

    @property
    def score(self) -> tuple[str, float]:
        return (self.row.metric_name, self.row.value) if self.row.bleu is None else ("BLEU", self.row.bleu)

    @property
    def title(self) -> str:
        return self.text.title

    @property
    def marks(self) -> list[str]:
        return ["fitted mixture"] * self.is_fitted + ["smoke test"] * self.is_smoke_test


class DepthCell(Record):
    """The answers to questions whose answer is at one depth of the text, 0 to 1."""

    depth: float
    questions: int
    exact_match: Number
    contained: Number


class AnswerRow(Record):
    """Answers to questions: shares by measure, numbers of tokens, and as further fields the settings of reading."""

    exact_match: Number
    contained: Number | None = None
    questions: int
    tokens: int | None = None
    tokens_per_second: float | None = None
    processor_ms_per_token: float | None = None
    peak_memory_mb: float | None = None
    missing_evidence: int | None = None
    prompt_tokens: int | None = None
    by_depth: list[DepthCell] = []
    memory_size: MemorySize
    query_size: int | None
    eviction: str
    max_prompt_tokens: int | None

    @property
    def reading(self) -> dict[str, Any]:
        """Return the settings by which the model reads that have no field of their own."""
        return self.model_extra or {}


class AnsweringRun(RunResult):
    """The results of a model that answers questions: one row, of one split."""

    questions: dict[str, Any]  # settings
    questions_text: str | None = None  # hash of their files
    answering: dict[str, Any] = {}  # settings
    model: str
    small_model: dict[str, Any] | None = None  # how it was trained
    metrics: dict[str, list[AnswerRow]]

    @property
    def row(self) -> AnswerRow:
        """Return the only row."""
        ((row,),) = self.metrics.values()
        return row

    @property
    def measure(self) -> str:
        """Return the measure by which an answer counts: exact_match or contained."""
        return str(self.answering.get("counts", "exact_match"))

    @property
    def share(self) -> float:
        """Return the share of questions that were answered."""
        return float(getattr(self.row, self.measure))

    @property
    def identity(self) -> list[Any]:
        """Return the questions; the seed counts where it trained the model that answers."""
        asked = {key: value for key, value in self.questions.items() if key not in PLACES}
        return [self.config_hash, asked, self.questions_text, self.seed if self.small_model else None]

    @property
    def texts(self) -> dict[str, str]:
        return {"questions": self.questions_text or ""}

    @property
    def score(self) -> tuple[str, float]:
        return f"{self.measure.replace('_', ' ')}, %", 100 * self.share

    @property
    def title(self) -> str:
        return "questions"


def is_run(content: Any) -> bool:
    """Return whether the content of a JSON file has the form of a run's results."""
    return isinstance(content, dict) and {"name", "seed", "metrics"} <= content.keys()


def run_from_json(content: dict[str, Any]) -> RunResult:
    """Return the results of a run of any version; ValueError says in one line which field is missing or of another type."""
    try:
        return (AnsweringRun if "questions" in content else ScoredRun).model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def scored_runs(runs: Iterable[RunResult]) -> list[ScoredRun]:
    """Return those of some runs that scored a text."""
    return [run for run in runs if isinstance(run, ScoredRun)]


def effective(overrides: Iterable[str]) -> list[str]:
    """Return the settings of a command that may change results, without those that are paths."""
    return [word for word in overrides if not PATH_SETTINGS.match(word) and not word.startswith(WITHOUT_EFFECT)]


def split_command(command: str | None) -> list[str]:
    """Return the words of a command line, split as a shell does."""
    try:
        return shlex.split(command or "")
    except ValueError:  # an earlier version could drop a quotation mark
        return (command or "").split()


def without_paths(command: str | None) -> str | None:
    """Return a command line in which paths are replaced by …; None for an empty one."""
    words = [PATH_SETTINGS.sub(r"\1…", w) if PATH_SETTINGS.match(w) else shlex.quote(w) for w in split_command(command)]
    return " ".join(words) or None
