"""samples: what the memories of a model kept of some contexts, and where in them an accepted answer stands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from trime.common.identity import Free
from trime.common.io import read_json_lines, write_json
from trime.data.questions.base import Example
from trime.lab.artefact import Artefact, Lab
from trime.stages.questions.answer import Answer

EXCERPT = 200  # characters around the last place of an answer


@dataclass(frozen=True, eq=False, repr=False)
class AnswerSamples(Artefact):
    """``answer_samples.json``: the first correctly and the first incorrectly answered question, read once more."""

    kind, stage, format = "answer_samples", "answer", 2
    summary_file = "answer_samples.json"

    answer: Answer
    counts: str  # which answers are correct: exact_match or contained
    lab: Free[Lab]

    def build(self, folder: Path) -> None:
        answers = read_json_lines(self.answer.path() / "answers.jsonl")
        counts = {"exact_match": "right", "contained": "contained"}[self.counts]
        # The first of each kind: later entries of the dictionary overwrite earlier ones, hence backwards.
        chosen = {answer[counts]: number for number, answer in reversed([*enumerate(answers)])}
        examples = self.answer.examples()
        tokenizer, answerer = self.answer.model()
        make_prompt, samples = self.answer.prompts(tokenizer), []
        for right in sorted(chosen, reverse=True):
            example, answer = examples[chosen[right]], answers[chosen[right]]
            made = make_prompt(example)
            session = answerer.start([made.shared], questions=[made.rest]).ask([made.rest])
            texts = [tokenizer.decode([token]) for token in made.tokens]
            layers = torch.zeros(len(texts))  # that hold each position of the prompt
            for positions in session.kept:
                held = positions[0][positions[0] >= 0].cpu()
                layers[held[held < len(texts)].unique()] += 1
            kept = (layers / max(len(session.kept), 1)).tolist()
            samples.append(
                {
                    "name": example.name,
                    "question": example.question,
                    "answers": [*example.answers],
                    "answer": answer["answer"],
                    "right": right,
                    "kept": [round(share, 4) for share in kept],
                    "answer_at": answer_places(texts, example.answers),
                    "excerpt": excerpt(example),
                }
            )
        write_json(folder / "answer_samples.json", samples, ensure_ascii=False)


def answer_places(texts: list[str], answers: tuple[str, ...]) -> list[int]:
    """Return the positions of the tokens with which an accepted answer begins, in any case and spacing of its letters."""
    # Compared letter by letter, because tokens cut words anywhere and a tokenizer may change blanks and case.
    owners = [position for position, text in enumerate(texts) for letter in text if not letter.isspace()]
    letters = "".join(letter.lower()[:1] for text in texts for letter in text if not letter.isspace())
    wanted = {"".join(answer.lower().split()) for answer in answers} - {""}
    places = {owners[found.start()] for answer in wanted for found in re.finditer(re.escape(answer), letters)}
    return sorted(places)


def excerpt(example: Example) -> str:
    """Return the context around the last place of an accepted answer, or its end if no answer stands in it."""
    lowered = example.context.lower()
    place = max((lowered.rfind(answer.lower()) for answer in example.answers if answer), default=-1)
    middle = place if place >= 0 else len(lowered)
    begin, end = max(0, middle - EXCERPT // 2), middle + EXCERPT // 2
    shown = " ".join(example.context[begin:end].split())
    return ("… " if begin else "") + shown + (" …" if end < len(lowered) else "")
