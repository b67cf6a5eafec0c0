"""A finished run as an object: it scores text token by token, continues it, and says where each token came from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from trime.errors import UserError
from trime.evaluation.generation import Step
from trime.inspection.writers import GeneratedToken, Writer
from trime.plan.language_model import Plan


def load(folder: str | Path) -> LoadedModel:
    """Return the model of a finished run with its memories, by the run's folder, ``outputs/runs/NAME/seedN-HASH``.

    Raises UserError if the folder is no run's, or if its artefacts are gone.
    """
    file = Path(folder).expanduser().resolve() / "config.yaml"
    if not file.is_file():
        raise UserError(f"{folder} is no folder of a run: it holds no config.yaml")
    config: DictConfig = OmegaConf.load(file)  # type: ignore[assignment]
    outputs, configured = file.parents[3], Path(config.paths.outputs)  # of runs/NAME/seedN-HASH/config.yaml
    started_in = outputs if configured.is_absolute() else outputs.parents[len(configured.parts) - 1]
    config.paths.outputs, config.paths.data = str(outputs), str(started_in / config.paths.data)
    for dataset in (config.dataset, config.evaluate.get("dataset"), config.datastore.get("dataset")):
        if dataset and dataset.get("path"):
            dataset.path = str(started_in / Path(dataset.path).expanduser())
    return LoadedModel(Plan(config))


class LoadedModel:
    """A run's model with the memories and the mixture of its own row, in the state in which a text begins."""

    def __init__(self, plan: Plan):
        self.plan, self.writer = plan, Writer(plan)
        self.label = self.writer.label

    def start(self, **settings: Any) -> Writer:
        """Return the writer at the start of a text, with settings of ``generate`` for it; UserError at an unknown one."""
        generate = self.plan.config.generate
        if unknown := settings.keys() - generate.keys():
            raise UserError(f"there is no setting {', '.join(sorted(unknown))}: choose from {', '.join(generate)}")
        self.writer.restart(OmegaConf.merge(generate, settings))  # type: ignore[arg-type]
        return self.writer

    def score(self, texts: str | Iterable[str]) -> list[list[GeneratedToken]]:
        """Return each text's tokens, with the probability of each after the ones before and its parts by memory."""
        return [self.score_text(text) for text in ([texts] if isinstance(texts, str) else texts)]

    @torch.no_grad()
    def score_text(self, text: str, entries: int = 0) -> list[GeneratedToken]:
        """Return the tokens of a text as ``score`` does, each with some of the memory entries that contributed most."""
        writer = self.start()
        scored = []
        for token in writer.token_ids(text):
            attribution, seen = writer.continuation.next()
            scored.append(writer.describe_step(Step(token, attribution, seen), entries))
            writer.continuation.read([token])
        return scored

    def generate(self, prompt: str, max_new_tokens: int = 50, seed: int = 0, **settings: Any) -> str:
        """Return a continuation of a prompt; another ``seed`` samples another; ``settings``: temperature and top_p."""
        writer = self.start(max_new_tokens=max_new_tokens, **settings)
        writer.read(prompt)
        for _ in writer.write(seed=seed):
            pass
        return writer.text(writer.written)

    def explain(self, prompt: str, max_new_tokens: int = 20, entries: int = 3, **settings: Any) -> list[GeneratedToken]:
        """Return the generated tokens with the parts of their probability and the entries that contributed most."""
        writer = self.start(max_new_tokens=max_new_tokens, entries=entries, **settings)
        writer.read(prompt)
        return [*writer.write(explain=True)]
