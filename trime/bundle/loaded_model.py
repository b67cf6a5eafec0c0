"""A finished run or an exported bundle as an object: it scores text, continues it, and says where each token came from."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from trime.common.checks import check_number, short_repr
from trime.common.identity import with_current_targets
from trime.common.io import checksum_of, plain
from trime.common.urls import local_copy
from trime.config.check import parse_as
from trime.config.paths import make_absolute
from trime.config.registry import EVERY_GROUP, registered_targets, unregistered
from trime.config.schema import Generate
from trime.data import tokenizers
from trime.data.datasets.files import whole_characters
from trime.decoding.explanation import GeneratedToken, in_common
from trime.errors import UserError
from trime.serving.server import HOST, serve
from trime.stages.export import BUNDLE, FORMAT, PRETRAINED, replace_text, roles_of
from trime.stages.graph import Graph
from trime.stages.samples import Writer
from trime.stages.serve import ServedWriter
from trime.text_memory.store import MANIFEST

TINY = 5e-324  # the smallest probability whose logarithm exists


def open_bundle(folder: Path, trusted: bool) -> Graph:
    """Return the graph of a bundle; UserError if it is damaged, of another version, or names code that is not the lab's.

    ``trusted``: every class that it names is imported and called.
    """
    content = read_bundle(folder)
    config, outputs = with_current_targets(content["config"]), folder / "artefacts"
    if not trusted:
        check_targets(folder / BUNDLE, config)
    config["paths"] = {"outputs": str(folder), "data": str(folder / "data")}
    if config["checkpoint"]:
        config["checkpoint"] = str(outputs / config["checkpoint"])
    config["dataset"]["path"] = str(folder)
    for section in (
        config["datastore"],
        *(node["datastore"] for node in config["test_memories"].values() if "datastore" in node),
    ):
        if section.get("dataset"):
            section["dataset"]["path"] = str(folder)
        if section.get("path"):
            section["path"] = str(outputs / section["path"])
    config["model"] = replace_text(config["model"], PRETRAINED, str(folder / PRETRAINED))
    graph = Graph(OmegaConf.create(config))
    graph.run_folder = folder
    for own, artefact in roles_of(graph):
        if name := content["artefacts"].get(own):
            vars(artefact)["fingerprint"] = name.rpartition("-")[2]  # in place of the one that it would compute
    return graph


def read_bundle(folder: Path) -> dict[str, Any]:
    """Return the content of a bundle's description; UserError if it is not as it was written, or of another version."""
    file, remedy = folder / BUNDLE, "export the run again, or copy the folder again"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        checksum = content.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError):
        raise UserError(f"{file} does not describe a bundle: {remedy}") from None
    if checksum != checksum_of(content):
        raise UserError(f"{file} is not as it was written: {remedy}")
    if content["format"] != FORMAT:
        raise UserError(f"{file} is of format {content['format']}, this version reads {FORMAT}: export the run again")
    return content


def check_targets(file: Path, config: Any) -> None:
    """Raise UserError if a configuration names code that no file of conf/ does, or holds references to be resolved."""
    plain_tokenizers = [
        {"_target_": f"{kind.__module__}.{kind.__qualname__}"} for kind in vars(tokenizers).values() if isinstance(kind, type)
    ]
    if unsafe := unregistered(config, plain_tokenizers, registered_targets(EVERY_GROUP)):
        raise UserError(
            f"{file} has {unsafe}, which no file of conf/ names, so that nothing of it was run: if you trust it, call "
            "load(…, trusted=True)"
        )


def load(folder: str | Path, trusted: bool = False) -> LoadedModel:
    """Return a model with its memories, by the folder (or its URL) of a finished run or of an exported bundle.

    A bundle runs no code but the lab's unless it is ``trusted``. The folder of a run, ``outputs/runs/NAME/seedN-HASH``, is one
    of your own. Raises UserError if the folder is neither, or if its artefacts are gone.
    """
    if not isinstance(folder, str | Path):
        raise UserError(f"load takes the folder of a run or a bundle, not {short_repr(folder)}")
    place = Path(os.path.abspath(local_copy(folder)))
    if len(place.parents) < 3 or not (place.parents[2] / "artefacts").is_dir():  # it may be a link to a run; or runs/ is one
        place = place.resolve()
    if (place / BUNDLE).is_file():
        return LoadedModel(open_bundle(place, trusted))
    if (place / MANIFEST).is_file():
        raise UserError(f"{folder} is a text memory: open it with trime.TextMemory(model, tokenizer, {str(folder)!r})")
    file = place / "config.yaml"
    if not file.is_file():
        raise UserError(f"{folder} is neither a run's folder nor a bundle: it holds neither config.yaml nor {BUNDLE}")
    config: DictConfig = OmegaConf.create(with_current_targets(plain(OmegaConf.load(file))))
    if config.trainer.precision == "auto" and not torch.cuda.is_available():  # a run of an earlier version
        config.trainer.precision = "32-true"
    outputs, configured = file.parents[3], Path(config.paths.outputs).expanduser()  # of runs/NAME/seedN-HASH/config.yaml
    make_absolute(config, outputs if configured.is_absolute() else outputs.parents[len(configured.parts) - 1])
    config.paths.outputs = str(outputs)
    return LoadedModel(Graph(config))


class LoadedModel:
    """A run's model with the memories and the mixture of its own row, in the state in which a text begins."""

    def __init__(self, graph: Graph):
        self.graph, self.writer = graph, Writer(graph)
        self.label = self.writer.label

    def start(self, **settings: Any) -> Writer:
        """Return the writer at the start of a text, with settings of ``generate`` for it; UserError at an unknown one."""
        generate = self.graph.config.generate
        if unknown := settings.keys() - generate.keys():
            raise UserError(f"there is no setting {', '.join(sorted(unknown))}: choose from {', '.join(generate)}")
        parse_as(Generate, plain(generate) | settings, "generate")
        self.writer.restart(settings)
        return self.writer

    def score(self, texts: str | Iterable[str]) -> list[list[GeneratedToken]]:
        """Return each text's tokens, with the probability of each after the ones before and its parts by memory."""
        if not isinstance(texts, Iterable):
            raise UserError(f"texts={short_repr(texts)}: pass a text, or several")
        return [self.writer.score(self.token_ids(text)) for text in ([texts] if isinstance(texts, str) else texts)]

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a text; UserError for anything else."""
        if not isinstance(text, str):
            raise UserError(f"a text is of type {type(text).__name__}: pass a str")
        return self.writer.token_ids(whole_characters(text))

    def attribute(self, text: str, entries: int = 3) -> list[GeneratedToken]:
        """Return the tokens of a text as ``score`` does, each with the memory entries that contributed most; this is slower."""
        check_number("entries", entries, at_least=0, whole=True)
        return [*self.start().explain(self.token_ids(text), entries)]

    def log_likelihood(self, text: str) -> float:
        """Return the log-probability of a text in nats, the sum over its tokens."""
        return sum(math.log(max(token.probability, TINY)) for token in self.score(text)[0])

    @torch.no_grad()
    def log_likelihood_after(self, context: str, continuation: str) -> tuple[float, bool]:
        """Return the log-probability of a continuation in nats, and whether each of its tokens is the most probable one."""
        writer = self.start()
        ids, before = self.token_ids(context + continuation), self.token_ids(context)
        shared = in_common(ids, before)
        writer.continuation.read(ids[:shared])
        total, is_greedy = 0.0, True
        for token in ids[shared:]:
            probability = writer.continuation.next()[0].probability
            total += math.log(max(float(probability[token]), TINY))
            is_greedy = is_greedy and int(probability.argmax()) == token
            writer.continuation.read([token])
        return total, is_greedy

    def generate(self, prompt: str, max_new_tokens: int = 50, seed: int = 0, until: Sequence[str] = (), **settings: Any) -> str:
        """Return a continuation of a prompt; another ``seed`` samples another; ``settings``: temperature and top_p.

        It ends before the first of the texts ``until`` that it reaches; empty ones are ignored.
        """
        check_number("seed", seed, whole=True)
        ends = [until] if isinstance(until, str) else until
        if not isinstance(ends, Sequence) or not all(isinstance(end, str) for end in ends):
            raise UserError(f"until={short_repr(until)}: pass a text, or several")
        ends = [end for end in ends if end]
        writer = self.start(max_new_tokens=max_new_tokens, **settings)
        writer.continuation.read(self.token_ids(prompt))
        text = ""
        for _ in writer.write(seed=seed):
            text = writer.text(writer.written)
            if reached := [text.index(end) for end in ends if end in text]:
                return text[: min(reached)]
        return text

    def serve(self, host: str = HOST, port: int = 0, token: str | None = None) -> None:
        """Serve the model as OpenAI's API does, with a page that explains texts by the memories, until it is interrupted.

        ``port`` 0 is one that is free; other machines need ``host`` and ``token``, and send the token as the API key.
        """
        serve(ServedWriter(self.writer), host, port, token)

    def explain(
        self, prompt: str, max_new_tokens: int = 20, entries: int = 3, seed: int = 0, **settings: Any
    ) -> list[GeneratedToken]:
        """Return the tokens that ``generate`` writes, the parts of their probability, and the entries that contributed most."""
        check_number("seed", seed, whole=True)
        writer = self.start(max_new_tokens=max_new_tokens, entries=entries, **settings)
        writer.continuation.read(self.token_ids(prompt))
        return [*writer.write(explain=True, seed=seed)]
