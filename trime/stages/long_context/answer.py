"""answer: a pretrained model answers questions over long contexts with memories; measures exact match."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from trime.data.questions.base import Example, Questions, contains_answer, exact_match, prompt
from trime.errors import UserError
from trime.io import append_json_lines, plain, read_json_lines
from trime.metrics import ResourceUsage
from trime.models.pretrained.answering import Answerer, greedy
from trime.models.pretrained.loading import load_pretrained
from trime.models.pretrained.tokenizer import encode_prompt, load_tokenizer
from trime.pipeline.artefact import Artefact
from trime.pipeline.pretrained import build_answerer, model_fingerprint
from trime.pipeline.processes import DEVICE

READING = (
    "memory_size",
    "query_size",
    "chunk",
    "top_k",
    "search",
    "cached_keys",
    "end",
    "outputs",
    "position",
    "factor",
    "causal",
    "dtype",
)


class Answer(Artefact):
    """The answers, a line per example in ``answers.jsonl``; exact match, speed and memory in ``answer.json``."""

    kind, depends_on = "answer", ("questions", "eviction", "answering")
    format = 2  # answers.jsonl says of each answer whether it contains an accepted one, and how deep that stands
    summary_file = "answer.json"
    unhashed = ("answering.batch_size", "model", *DEVICE)

    def __init__(self, config: DictConfig, small_model: Artefact | None):
        super().__init__(config)
        self.small_model = small_model  # the model that this experiment trains; if None, model.name

    def needs(self) -> list[Artefact]:
        return [self.small_model] if self.small_model else []

    def reading(self) -> dict[str, Any]:
        """Return the settings that decide how the model reads."""
        return {name: plain(self.config.model[name]) for name in READING}

    def settings(self) -> Any:
        return super().settings() | {
            "reading": self.reading(),
            "model": None if self.small_model else model_fingerprint(self.config.model.name),
        }

    def build(self, folder: Path) -> None:
        questions, examples = self.examples()
        tokenizer, answerer = self.model()
        file, meter, size = folder / "answers.jsonl", ResourceUsage(), self.config.answering.batch_size
        done = read_json_lines(file)
        with tqdm(total=len(examples), initial=len(done), unit="question", desc="answer", mininterval=1) as bar:
            for start in range(len(done), len(examples), size):
                rows = examples[start : start + size]
                answers = self.answer(rows, tokenizer, answerer)
                append_json_lines(file, answers)
                done += answers
                bar.update(len(rows))
        tokens = sum(line["tokens"] for line in done)
        content = {
            "exact_match": sum(line["right"] for line in done) / len(done),
            "contained": sum(line["contained"] for line in done) / len(done),
            "questions": len(done),
            "tokens": tokens,
            "tokens_per_second": round(tokens / max(meter.seconds, 1e-9), 1),  # exact if no run was killed
            "peak_memory_mb": meter.peak_memory_mb,
        }
        if missing := getattr(questions, "missing_evidence", 0):
            content["missing_evidence"] = missing  # number of missing files, which makes some contexts shorter
        (folder / "answer.json").write_text(json.dumps(content, indent=1))

    def examples(self) -> tuple[Questions, list[Example]]:
        """Return the set of questions, and those of the split; UserError if there are none."""
        questions = instantiate(self.config.questions, _convert_="all")
        examples = list(questions.examples(self.config.answering.split))
        if not examples:
            raise UserError(f"questions: there are none in split {self.config.answering.split}")
        return questions, examples

    def model(self) -> tuple[Any, Answerer]:
        """Return the model's tokenizer, and the model with its memories."""
        name = str(self.small_model.path()) if self.small_model else self.config.model.name
        return load_tokenizer(name), build_answerer(self.config, load_pretrained(name, self.config.model.dtype))

    def prompt_tokens(self, row: Example, tokenizer: Any) -> list[int]:
        """Return an example's prompt, or as much of its end as is read."""
        settings = self.config.answering
        return encode_prompt(tokenizer, prompt(row, settings.question_first))[-(settings.max_prompt_tokens or 0) :]

    def answer(self, rows: list[Example], tokenizer: Any, answerer: Answerer) -> list[dict[str, Any]]:
        """Return the answers to a batch of examples, with whether they are right."""
        settings = self.config.answering
        prompts = [self.prompt_tokens(row, tokenizer) for row in rows]
        generated = greedy(answerer.read(prompts), tokenizer.eos_token_id, settings.max_new_tokens)
        texts = [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in generated]
        return [
            {"name": row.name, "answer": text, "right": exact_match(text, row), "contained": contains_answer(text, row)}
            | {"depth": row.depth, "tokens": len(tokens)}
            for row, text, tokens in zip(rows, texts, prompts, strict=True)
        ]
