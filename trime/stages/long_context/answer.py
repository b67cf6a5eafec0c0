"""answer: a pretrained model reads questions and their long contexts with memories; exact match. A killed run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from trime.data.questions.base import Example, exact_match, prompt
from trime.io import complete_lines, plain
from trime.metrics import ResourceUsage
from trime.models.pretrained.answering import Answerer, greedy
from trime.models.pretrained.loading import load_pretrained
from trime.models.pretrained.tokenizer import encode_prompt, load_tokenizer
from trime.pipeline.artefact import Artefact
from trime.pipeline.pretrained import answerer_of, model_fingerprint
from trime.types import UserError

READING = (
    "memory_size",
    "query_size",
    "chunk",
    "top_k",
    "search",
    "stored",
    "end",
    "outputs",
    "position",
    "factor",
    "causal",
    "dtype",
)


class Answer(Artefact):
    """``answers.jsonl``, a line an example; ``answer.json``: exact match, speed and memory."""

    kind, stage = "answer", "answer"

    def __init__(self, config: DictConfig, small_model: Artefact | None):
        super().__init__(config)
        self.small_model = small_model  # a model that this experiment trains, or none: model.name

    def needs(self) -> list[Artefact]:
        return [self.small_model] if self.small_model else []

    def reading(self) -> dict[str, Any]:
        """How the model reads."""
        return {name: plain(self.config.model[name]) for name in READING}

    def settings(self) -> Any:
        chosen = {name: plain(self.config[name]) for name in ("questions", "eviction", "answering")}
        return chosen | {
            "reading": self.reading(),
            "model": None if self.small_model else model_fingerprint(self.config.model.name),
        }

    def build(self, folder: Path) -> None:
        place = str(self.small_model.path()) if self.small_model else self.config.model.name
        questions = instantiate(self.config.questions, _convert_="all")
        examples = list(questions.examples(self.config.answering.split))
        if not examples:
            raise UserError(f"questions: there is none in split {self.config.answering.split}")
        tokenizer, answerer = load_tokenizer(place), answerer_of(self.config, load_pretrained(place, self.config.model.dtype))
        file, meter, size = folder / "answers.jsonl", ResourceUsage(), self.config.answering.batch
        done = [json.loads(line) for line in complete_lines(file)]
        with tqdm(total=len(examples), initial=len(done), unit="question", desc="answer", mininterval=1) as bar:
            for start in range(len(done), len(examples), size):
                rows = examples[start : start + size]
                found = self.of(rows, tokenizer, answerer)
                with open(file, "a", encoding="utf-8") as out:
                    out.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in found))
                done += found
                bar.update(len(rows))
        tokens = sum(line["tokens"] for line in done)
        content = {
            "exact_match": sum(line["right"] for line in done) / len(done),
            "questions": len(done),
            "tokens": tokens,
            "tokens_per_second": round(tokens / max(meter.seconds, 1e-9), 1),  # of what was read in one go
            "peak_memory_mb": meter.peak_memory_mb,
        }
        if missing := getattr(questions, "missing_evidence", 0):
            content["missing_evidence"] = missing  # files, without which some contexts are shorter
        (folder / "answer.json").write_text(json.dumps(content, indent=1))

    def of(self, rows: list[Example], tokenizer: Any, answerer: Answerer) -> list[dict[str, Any]]:
        """Answers to some examples, side by side."""
        asked = self.config.answering
        prompts = [encode_prompt(tokenizer, prompt(row, asked.question_first)) for row in rows]
        prompts = [own[-asked.last :] if asked.last else own for own in prompts]
        found = greedy(answerer.read(prompts), tokenizer.eos_token_id, asked.longest)
        texts = [tokenizer.decode(own, skip_special_tokens=True).strip() for own in found]
        return [
            {"name": row.name, "answer": text, "right": exact_match(text, row), "tokens": len(own)}
            for row, text, own in zip(rows, texts, prompts, strict=True)
        ]

    def results(self) -> dict[str, Any]:
        return self.read("answer.json")
