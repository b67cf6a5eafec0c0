"""answer: a pretrained model answers questions over long contexts with memories; measures exact match."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby, islice
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from trime.common.components import build
from trime.common.identity import Free
from trime.common.io import read_json_lines, to_json, write_atomically, write_json
from trime.common.metrics import ResourceUsage, Usage, processor_ms
from trime.common.pretrained import load_pretrained
from trime.config.schema import Answering
from trime.data.questions.base import SEPARATOR, Example, Questions, contains_answer, exact_match, prompt, prompt_parts
from trime.errors import UserError
from trime.kv.answering import Answerer, greedy
from trime.lab.artefact import Artefact, Lab
from trime.lab.engines import Advance
from trime.lab.provenance import QUESTION_PLACES, without
from trime.lab.shards import ShardedArtefact, Work
from trime.models.pretrained.tokenizer import encode_text, load_tokenizer, prompt_frame
from trime.stages.pretrained import build_answerer, model_fingerprint
from trime.stages.train_small import batched
from trime.training.hardware import Hardware

DEPTHS = 5  # sections of a text with results of their own
READING = (
    *("memory_size", "query_size", "chunk", "top_k", "search", "cached_keys", "prefill", "per_head", "end", "outputs"),
    *("position", "factor", "causal", "dtype"),
)


class Prompt(NamedTuple):
    """The tokens of a prompt: as far as the end of the text, which questions about the same text may share, and the rest."""

    shared: list[int]
    rest: list[int]

    @property
    def tokens(self) -> list[int]:
        """Return the whole prompt."""
        return self.shared + self.rest


class PromptMaker:
    """Makes the prompts of a model, with the settings ``answering`` and ``solved`` questions before each.

    With ``answering.order=last`` the shared part is everything before the question; otherwise nothing is shared. ``is_guided``:
    the question decides which entries of the text before it are kept, so that the two are separate where it also comes first.
    """

    def __init__(self, tokenizer: Any, settings: Answering, solved: list[Example], is_guided: bool = False):
        self.tokenizer, self.settings, self.is_split = tokenizer, settings, is_guided or settings.order == "last"
        before, self.after = prompt_frame(tokenizer, settings.chat_template)
        shown = [f"{prompt(example, settings.order)} {example.answers[0]}{SEPARATOR}" for example in solved]
        self.before = before + encode_text(tokenizer, "".join(shown))

    def __call__(self, example: Example) -> Prompt:
        """Return the prompt of an example, or as much of the end of its own text as ``max_prompt_tokens`` leaves.

        UserError if that leaves nothing.
        """
        before, after = prompt_parts(example, self.settings.order)
        parts = (before, after) if self.is_split else ("", before + after)
        text, rest = (encode_text(self.tokenizer, part) for part in parts)
        limit, frame, excess = self.settings.max_prompt_tokens, len(self.before) + len(self.after), 0
        if limit is not None:
            if limit <= frame:
                raise UserError(
                    f"answering.max_prompt_tokens={limit}: chat template and examples have {frame} tokens, raise it"
                )
            excess = max(0, frame + len(text) + len(rest) - limit)
        text, rest = text[excess:], rest[max(0, excess - len(text)) :]
        return Prompt(self.before + text, rest + self.after) if self.is_split else Prompt([], self.before + rest + self.after)


PromptedQuestion = tuple[Example, Prompt]


@dataclass(frozen=True, eq=False, repr=False)
class Answer(ShardedArtefact):
    """The answers, a line per example in ``answers.jsonl``; exact match, speed and memory in ``answer.json``."""

    kind, format = "answer", 6
    summary_file = "answer.json"

    small_model: Artefact | None  # the model that this experiment trains; None: model.name
    eviction: dict[str, Any]
    answering: Answering
    asked: Free[dict[str, Any]]  # conf/questions, with places
    model_settings: Free[dict[str, Any]]  # conf/model; reading() has the settings that decide the answers
    hardware: Free[Hardware]
    lab: Free[Lab]

    def reading(self) -> dict[str, Any]:
        """Return the settings that decide how the model reads."""
        recall = ["recall"] if self.model_settings["recall"] else []  # without it, as before it was a setting
        return {name: self.model_settings[name] for name in (*READING, *recall)}

    def identity(self) -> Any:
        return super().identity() | {
            "questions": without(dict(self.asked), [key.removeprefix("questions.") for key in QUESTION_PLACES]),
            "reading": self.reading(),
            "model": None if self.small_model else model_fingerprint(self.model_settings["name"]),
            "files": self.files,
        }

    @cached_property
    def files(self) -> list[str]:
        """Hashes of the files of the questions, and of the solved ones shown before them; empty where there are none."""
        splits = [self.answering.split, *(["train"] if self.answering.examples else [])]
        return [self.questions.fingerprint(split) for split in splits]

    @cached_property
    def questions(self) -> Questions:
        """The set of questions that ``questions=`` chooses; UserError where its files are missing."""
        return build(self.asked, "questions")

    def summary(self) -> Any:
        """Return the results, with those of questions whose answers have a known depth, by depth."""
        lines = read_json_lines(self.path() / "answers.jsonl")
        return super().summary() | {"prompt_tokens": round(mean(line["tokens"] for line in lines)), "by_depth": by_depth(lines)}

    def work(self, folder: Path) -> Work:
        """Return the work on the questions about ``answering.batch_size`` texts each, or on as many with a text of their own.

        A shard ends between texts, so that no text is read twice.
        """
        examples, size = self.examples(), self.answering.batch_size
        texts = groupby(enumerate(examples), key=lambda one: one[1].context if self.shares_texts else one[0])
        sizes = [sum(batch) for batch in batched((len([*asked]) for _, asked in texts), size)]
        starts = [0, *accumulate(sizes)]
        files = [folder / f"part-{start:05d}-{count}.json" for start, count in zip(starts, sizes, strict=False)]
        model, prompts = cache(self.model), cache(self.prompts)

        def make(number: int, advance: Advance) -> None:
            tokenizer, answerer = model()
            make_prompt = prompts(tokenizer)
            meter, lines, asked = ResourceUsage(), [], []
            # By the text as the prompts have it: one that shares nothing has a key, and so a group, of its own.
            for count, example in enumerate(examples[starts[number] : starts[number + 1]]):
                made = make_prompt(example)
                asked.append(((made.shared if self.shares_texts else None) or [-1, count], (example, made)))
            of_texts = ([pair for _, pair in group] for _, group in groupby(asked, key=lambda one: one[0]))
            for groups in batched(of_texts, size):
                answers = self.answer(groups, tokenizer, answerer)
                lines += answers
                advance(len(answers))
            write_json(files[number], {"answers": lines} | meter.note(), indent=None)

        return Work(files, sizes, make)

    def build(self, folder: Path) -> None:
        work, done, usage = self.work(folder), [], Usage()
        self.make_shards(work, folder, "answer", "question")
        for file in work.files:
            content = json.loads(file.read_text(encoding="utf-8"))
            done += content["answers"]
            usage.add(content)
        file = folder / "answers.jsonl"
        write_atomically(file, "".join(to_json(line, file, None) + "\n" for line in done))
        tokens = sum(line["read"] for line in done)
        content = {
            "exact_match": sum(line["right"] for line in done) / len(done),
            "contained": sum(line["contained"] for line in done) / len(done),
            "questions": len(done),
            "tokens": tokens,
            "tokens_per_second": round(tokens / max(sum(line["seconds"] for line in done), 1e-9), 1),
            **processor_ms(usage.processor_seconds, tokens),
            "peak_memory_mb": usage.peak_memory_mb,
        }
        if missing := getattr(self.questions, "missing_evidence", 0):
            content["missing_evidence"] = missing  # number of missing files, which makes some contexts shorter
        write_json(folder / "answer.json", content)

    def examples(self) -> list[Example]:
        """Return the questions of the split; UserError if there are none."""
        examples = list(self.questions.examples(self.answering.split))
        if not examples:
            raise UserError(f"questions: there are none in split {self.answering.split}")
        return examples

    def model(self) -> tuple[Any, Answerer]:
        """Return the model's tokenizer, and the model with its memories."""
        name = str(self.small_model.path()) if self.small_model else self.model_settings["name"]
        model = load_pretrained(name, self.model_settings["dtype"])
        return load_tokenizer(name), build_answerer(self.model_settings, self.eviction, model, self.hardware)

    def prompts(self, tokenizer: Any) -> PromptMaker:
        """Return the maker of the prompts of questions."""
        solved = solved_examples(self.asked, self.answering.examples)
        return PromptMaker(tokenizer, self.answering, solved, self.model_settings["prefill"] == "guided")

    @property
    def shares_texts(self) -> bool:
        """Whether a text is read once for all its questions: none of them comes before it, or decides which of it is kept."""
        return self.answering.order == "last" and self.model_settings["prefill"] != "guided"

    def answer(self, groups: list[list[PromptedQuestion]], tokenizer: Any, answerer: Answerer) -> list[dict[str, Any]]:
        """Return the answers to groups of questions, with whether they are right; the text of a group is read once."""
        started, lines = time.perf_counter(), []
        texts, questions = zip(*(group[0][1] for group in groups), strict=True)
        # A guided reading knows the questions beforehand.
        reading = answerer.start([*texts], questions=[*questions])
        # The text's tokens count for the first question about it, the others read only their own.
        asked = [(text, *pair, pair is group[0]) for text, group in enumerate(groups) for pair in group]
        for batch in batched(asked, self.answering.batch_size):
            session = reading.ask([made.rest for _, _, made, _ in batch], [text for text, *_ in batch])
            answers = greedy(session, tokenizer.eos_token_id, self.answering.max_new_tokens)
            for (_, example, made, first), tokens in zip(batch, answers, strict=True):
                text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
                lines.append(
                    {
                        "name": example.name,
                        "answer": text,
                        "right": exact_match(text, example),
                        "contained": contains_answer(text, example),
                        "depth": example.depth,
                        "tokens": len(made.tokens),
                        # The tokens of a guiding question, read again after each chunk, are a cost of the text's tokens.
                        "read": len(made.tokens) if first else len(made.rest),
                    }
                )
        seconds = (time.perf_counter() - started) / len(lines)
        return [line | {"seconds": round(seconds, 4)} for line in lines]


def by_depth(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return questions and results in each fifth of the texts, from the beginning on; none where no depth is known."""
    bins: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        if line["depth"] is not None:
            bins.setdefault(min(int(line["depth"] * DEPTHS), DEPTHS - 1), []).append(line)
    return [
        {
            "depth": (number + 0.5) / DEPTHS,
            "questions": len(bins[number]),
            "exact_match": mean(line["right"] for line in bins[number]),
            "contained": mean(line["contained"] for line in bins[number]),
        }
        for number in sorted(bins)
    ]


def solved_examples(questions: dict[str, Any], count: int) -> list[Example]:
    """Return questions of train whose contexts are only their facts; UserError if the set has no such contexts."""
    if not count:
        return []
    if "words" not in questions:
        raise UserError("answering.examples: these questions have no context of facts alone, set it to 0")
    # Without words of filler a context is only its facts.
    short = build(questions, "questions", words=0, min_words=None, count=count)
    return [*islice(short.examples("train"), count)]
