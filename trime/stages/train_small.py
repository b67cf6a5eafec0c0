"""train_small: trains a small model in the transformers format to answer questions over short contexts.

init_small: creates one with random weights and a dataset's tokenizer, which model=pretrained then trains.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, count, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch

from trime.common.components import build
from trime.common.identity import Free
from trime.common.io import write_json
from trime.common.metrics import ResourceUsage
from trime.common.types import Tensor
from trime.config.schema import Small
from trime.data.byte_pairs import train_pieces
from trime.data.questions.base import Example, Questions, prompt
from trime.errors import UserError
from trime.lab.artefact import Artefact, Lab
from trime.lab.provenance import QUESTION_PLACES, without
from trime.lab.stage import Stage
from trime.models.pretrained.tokenizer import END, PADDING, encode_prompt, encode_text, save_tokenizer, train_word_level
from trime.stages.prepare import Prepare
from trime.stages.pretrained import is_pretrained
from trime.training.answering import AnsweringModule, QuestionBatch
from trime.training.trainer import TrainerSettings, quiet, run_training

Item = TypeVar("Item")
log = logging.getLogger(__name__)

SORTED_BATCHES = 16  # number of batches within which examples are sorted by length


@dataclass(frozen=True, eq=False, repr=False)
class TrainSmall(Artefact):
    """A small model that is trained to answer questions: model and tokenizer in the transformers format, ``train.json``."""

    kind, format = "train_small", 3

    small: Small
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    seed: int
    trainer: TrainerSettings
    questions: Free[dict[str, Any]]  # all questions of the answering task, over shorter contexts; recipe() says which
    lab: Free[Lab]

    def identity(self) -> Any:
        files = build(self.questions, "questions").fingerprint("train")
        learned = {key: value for key, value in self.recipe().items() if key != "small"}
        return super().identity() | learned | {"files": files}

    def recipe(self) -> dict[str, Any]:
        """Return the settings of the training that results report."""
        places = [key.removeprefix("questions.") for key in QUESTION_PLACES]
        small = {key: value for key, value in asdict(self.small).items() if key not in ("updates", "questions")}
        return {
            "small": small | {"questions": without(dict(self.small.questions), places)},
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "training_questions": without(dict(self.questions), places),
            "updates": self.trainer.updates,
            "clip": self.trainer.clip_norm,
        }

    def build(self, folder: Path) -> None:
        settings, questions = self.small, build(self.questions, "questions")
        pl.seed_everything(self.seed, verbose=False)
        if len(examples := list(questions.examples("train"))) < settings.batch:
            raise UserError(f"there are {len(examples)} questions to learn from, fewer than small.batch={settings.batch}")
        texts = (f"{prompt(example)} {example.answers[0]}" for example in examples)
        tokenizer = train_word_level(texts, settings.vocabulary, folder)
        small = build(settings.model, "small.model")
        model = small.build(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
        parameters, updates = sum(weight.numel() for weight in model.parameters()), self.trainer.updates
        log.info(f"train_small: {parameters:,} parameters, {updates:,} updates")
        optimizer = build(self.optimizer, "optimizer", _partial_=True)
        schedule = build(self.schedule, "schedule")
        task = AnsweringModule(model, optimizer, schedule, settings.prompt_loss_weight, self.seed)
        without_context = build(self.questions, "questions", words=0, min_words=None)
        # A curriculum: bare facts come before facts within text.
        first = round(settings.facts_only_share * updates)
        phases, meter = [(without_context, first), (questions, updates - first)], ResourceUsage()
        loader = ExampleLoader(phases, tokenizer, settings, self.seed)
        with quiet():
            trainer = self.trainer.build(self.stage, folder, [], {"devices": 1, "num_nodes": 1, "logger": False})
            run_training(self.stage, trainer, task, loader, folder)
        model.save_pretrained(folder)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        write_json(folder / "train.json", metrics | {"seconds": round(meter.seconds, 1)})
        # Checkpoints serve only a killed training.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


@dataclass(frozen=True, eq=False, repr=False)
class InitSmall(Artefact):
    """An untrained small model with a tokenizer of ``vocabulary`` byte pairs, in the transformers format."""

    kind, format = "init_small", 2

    model: dict[str, Any]
    vocabulary: int
    seed: int
    text: Free[Prepare]  # the tokenizer learns from its lines, which need not be prepared
    lab: Free[Lab]

    def identity(self) -> Any:
        return super().identity() | self.text.text_identity()

    def build(self, folder: Path) -> None:
        documents = self.text.dataset.kept_documents("train")
        lines = (line.decode("utf-8", "replace") for document in documents for line in document.lines)
        tokenizer = save_tokenizer(train_pieces(lines, self.vocabulary, special_tokens=[PADDING, END]), folder)
        torch.manual_seed(self.seed)
        small = build(self.model, "small.model")
        model = small.build(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
        model.save_pretrained(folder)
        log.info(f"init_small: {sum(weight.numel() for weight in model.parameters()):,} parameters, {len(tokenizer):,} pieces")


class ExampleLoader:
    """The batches of all updates in order; ``phases`` lists questions with their number of updates.

    Each epoch draws new examples. Training resumes from the restored step.
    """

    def __init__(self, phases: list[tuple[Questions, int]], tokenizer: Any, settings: Small, seed: int):
        self.phases, self.tokenizer, self.settings, self.seed, self.step = phases, tokenizer, settings, seed, 0
        self.ends = set(tokenizer.convert_tokens_to_ids([".", "!", "?"]))

    def __len__(self) -> int:
        return sum(updates for _, updates in self.phases)

    def __iter__(self) -> Iterator[QuestionBatch]:
        first, self.step = self.step, 0
        batches = chain.from_iterable(islice(self.batches(questions), updates) for questions, updates in self.phases)
        # Batches before a restored step are drawn as well: the draws of an epoch follow one another.
        for number, rows in enumerate(batches):
            self.step = number + 1
            if number >= first:
                yield self.collate(rows, random.Random(f"{self.seed} {number}"))

    def batches(self, questions: Questions) -> Iterator[list[Example]]:
        """Yield batches of examples of similar length, epoch after epoch; incomplete batches are dropped."""
        for epoch in count():
            order = random.Random(f"{questions.seed} {epoch}")
            for group in batched(questions.examples("train", draw=epoch), SORTED_BATCHES * self.settings.batch):
                # Examples of one length need little padding; batches are shuffled again, so that lengths alternate.
                group.sort(key=lambda example: len(example.context))
                batches = list(batched(group, self.settings.batch))
                order.shuffle(batches)
                yield from (rows for rows in batches if len(rows) == self.settings.batch)

    def collate(self, rows: list[Example], draw: random.Random) -> QuestionBatch:
        """Return a batch: tokens of prompts, and of answers with the end of text; UserError if a prompt is too long."""
        tokenizer, settings = self.tokenizer, self.settings
        prompts = [encode_prompt(tokenizer, prompt(row, settings.order)) for row in rows]
        answers = [[*encode_text(tokenizer, row.answers[0]), tokenizer.eos_token_id] for row in rows]
        longest = max(map(len, prompts)) + (max(map(len, answers)) if settings.spread else 0)
        limit = settings.model["max_positions"]
        if longest > limit:
            raise UserError(
                f"a prompt has {longest} tokens: raise small.model.max_positions={limit} or lower small.questions.words"
            )
        batch = QuestionBatch(pad_rows(prompts, -1), pad_rows(answers, -1))
        if not settings.spread:
            return batch
        # Positions may be anywhere below the limit, but those of the answer follow them.
        room = limit - batch.answer.shape[1]
        return batch._replace(position=pad_rows([spread_positions(tokens, self.ends, room, draw) for tokens in prompts], 0))

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def batched(examples: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of ``size`` examples, the last list may be shorter (itertools.batched of Python 3.12)."""
    iterator = iter(examples)
    while group := list(islice(iterator, size)):
        yield group


def pad_rows(rows: list[list[int]], value: int) -> Tensor:
    """Return the rows as one tensor, padded on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, value)


def spread_positions(tokens: list[int], ends: set[int], room: int, draw: random.Random) -> list[int]:
    """Return positions below ``room`` with gaps after sentences, as if text were missing there (after PoSE, Zhu et al. 2024).

    The total length of the gaps is drawn log-uniformly and divided among them at random.
    """
    breaks = [place for place, token in enumerate(tokens[:-1], 1) if token in ends]
    # Log-uniformly, so that short gaps are as frequent as long ones.
    missing = int((room - len(tokens) + 1) ** draw.random()) - 1
    cuts = sorted(draw.randint(0, missing) for _ in breaks[1:])
    gaps = dict(zip(breaks, (end - start for start, end in pairwise([0, *cuts, missing])), strict=False))
    return list(accumulate((1 + gaps.get(place, 0) for place in range(1, len(tokens))), initial=0))


TRAIN_SMALL = Stage("train_small", lambda graph: [graph.small_model if is_pretrained(graph.config) else None])
INIT_SMALL = Stage("init_small", lambda graph: [graph.initial_model], kept_by_prune=False)
