"""teach: trains a small model in the transformers format to answer questions over short contexts; resumes."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, count, islice, pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from trime.data.questions.base import Example, Questions, prompt
from trime.io import plain, write_atomically
from trime.metrics import ResourceUsage
from trime.models.pretrained.tokenizer import encode_prompt, encode_text, train_word_level
from trime.pipeline.artefact import Artefact
from trime.pipeline.training import quiet, resolved_precision, run_training, training_callbacks
from trime.tasks.answering import Answering, QuestionBatch
from trime.types import Tensor, UserError

SORTED_BATCHES = 16  # batches among which examples are sorted by length


class TrainSmall(Artefact):
    """A folder in the transformers format (model, tokenizer), and ``train.json``."""

    kind, stage, format = "teach", "teach", 2

    def settings(self) -> Any:
        return self.recipe() | {"seed": self.config.seed}

    def recipe(self) -> dict[str, Any]:
        """What was taught, and how."""
        own = {name: plain(self.config[name]) for name in ("taught", "optimizer", "schedule")}
        return own | {
            "taught_questions": plain(self.questions),
            "updates": self.config.train.updates,
            "clip": self.config.train.clip_norm,
        }

    @property
    def questions(self) -> DictConfig:
        """Those of the answering task, over shorter contexts, all of them."""
        return OmegaConf.merge(self.config.questions, self.config.taught.questions, {"count": None})  # type: ignore[return-value]

    def build(self, folder: Path) -> None:
        taught, questions = self.config.taught, instantiate(self.questions, _convert_="all")
        pl.seed_everything(self.config.seed, verbose=False)
        tokenizer = train_word_level(texts(questions, taught.batch), taught.vocabulary, folder)
        small = instantiate(taught.model, _convert_="all")
        model = small.build(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
        print(f"teach: {sum(part.numel() for part in model.parameters()):,} parameters, {self.config.train.updates:,} updates")
        optimizer = instantiate(self.config.optimizer, _partial_=True, _convert_="all")
        schedule = instantiate(self.config.schedule, _convert_="all")
        task = Answering(model, optimizer, schedule, taught.prompt_share, self.config.seed)
        alone = instantiate(OmegaConf.merge(self.questions, {"words": 0, "least": None}), _convert_="all")
        updates = self.config.train.updates
        first = round(taught.alone_share * updates)
        loader, meter = (
            Examples([(alone, first), (questions, updates - first)], tokenizer, taught, self.config.seed),
            ResourceUsage(),
        )
        with quiet():
            trainer = self.trainer(folder)
            run_training(self.stage, trainer, task, loader, folder)
        model.save_pretrained(folder)
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        write_atomically(folder / "train.json", json.dumps(found | {"seconds": round(meter.seconds, 1)}, indent=1))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def trainer(self, folder: Path) -> pl.Trainer:
        train, own = (
            self.config.train,
            {name: value for name, value in plain(self.config.trainer).items() if name != "strategy"},
        )
        own |= {"precision": resolved_precision(self.config), "devices": 1, "num_nodes": 1}
        return pl.Trainer(
            max_steps=train.updates,
            gradient_clip_val=train.clip_norm or None,
            log_every_n_steps=train.log_every,
            callbacks=training_callbacks(self.stage, folder, self.config),
            enable_checkpointing=False,
            logger=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **own,
        )


def texts(questions: Questions, least: int) -> Iterator[str]:
    """What the vocabulary is made of: prompts and answers of one draw; UserError where they do not fill a batch."""
    examples = list(questions.examples("train"))
    if len(examples) < least:
        raise UserError(f"there are {len(examples)} questions to learn from, fewer than taught.batch={least}")
    for example in examples:
        yield f"{prompt(example)} {example.answers[0]}"


class Examples:
    """Batches of all updates in order, so many of each kind of questions; each epoch draws anew.

    Goes on at the update that it is told.
    """

    def __init__(self, phases: list[tuple[Questions, int]], tokenizer: Any, taught: DictConfig, seed: int):
        self.phases, self.tokenizer, self.taught, self.seed, self.step = phases, tokenizer, taught, seed, 0
        self.ends = set(tokenizer.convert_tokens_to_ids([".", "!", "?"]))

    def __len__(self) -> int:
        return sum(updates for _, updates in self.phases)

    def __iter__(self) -> Iterator[QuestionBatch]:
        first, self.step = self.step, 0
        every = chain.from_iterable(islice(self.batches(questions), updates) for questions, updates in self.phases)
        for number, rows in enumerate(every):
            self.step = number + 1
            if number >= first:
                yield self.collated(rows, random.Random(f"{self.seed} {number}"))

    def batches(self, questions: Questions) -> Iterator[list[Example]]:
        """Examples of about one length, a batch at a time; a rest that fills none is left out."""
        for epoch in count():
            order = random.Random(f"{questions.seed} {epoch}")
            for held in batched(questions.examples("train", draw=epoch), SORTED_BATCHES * self.taught.batch):
                held.sort(key=lambda example: len(example.context))
                batches = list(batched(held, self.taught.batch))
                order.shuffle(batches)
                yield from (rows for rows in batches if len(rows) == self.taught.batch)

    def collated(self, rows: list[Example], draw: random.Random) -> QuestionBatch:
        """Tokens of prompts, and of answers with their end."""
        tokenizer, taught = self.tokenizer, self.taught
        prompts = [encode_prompt(tokenizer, prompt(row, taught.question_first)) for row in rows]
        answers = [[*encode_text(tokenizer, row.answers[0]), tokenizer.eos_token_id] for row in rows]
        longest = max(map(len, prompts)) + (max(map(len, answers)) if taught.spread else 0)
        limit = taught.model.longest
        if longest > limit:
            raise UserError(
                f"a prompt has {longest} tokens: raise taught.model.longest={limit} or lower taught.questions.words"
            )
        asked = QuestionBatch(padded(prompts, -1), padded(answers, -1))
        if not taught.spread:
            return asked
        room = limit - asked.answer.shape[1]
        return asked._replace(position=padded([spread_positions(own, self.ends, room, draw) for own in prompts], 0))

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def batched(examples: Iterable[Example], size: int) -> Iterator[list[Example]]:
    """So many at a time, the last ones fewer."""
    each = iter(examples)
    while held := list(islice(each, size)):
        yield held


def padded(rows: list[list[int]], value: int) -> Tensor:
    """Rows of a batch, filled up on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(own) for own in rows], True, value)


def spread_positions(tokens: list[int], ends: set[int], room: int, draw: random.Random) -> list[int]:
    """Positions below ``room`` with gaps behind sentences, as if texts were missing there (after Zhu et al. 2024, PoSE).

    How long all gaps are together is drawn evenly over its logarithm, and parted at random.
    """
    places = [place for place, token in enumerate(tokens[:-1], 1) if token in ends]
    missing = int((room - len(tokens) + 1) ** draw.random()) - 1
    cuts = sorted(draw.randint(0, missing) for _ in places[1:])
    gaps = dict(zip(places, (end - start for start, end in pairwise([0, *cuts, missing])), strict=False))
    return list(accumulate((1 + gaps.get(place, 0) for place in range(1, len(tokens))), initial=0))
