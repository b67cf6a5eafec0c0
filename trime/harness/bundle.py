"""The model of a bundle or of a run for EleutherAI's evaluation harness: ``--model trime --model_args bundle=DIR``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from trime.bundle.loaded_model import load
from trime.common.checks import check_number, short_repr
from trime.errors import UserError

FOLLOWED = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "seed")
NEUTRAL = {  # settings of other models, and the values under which they change nothing
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "repetition_penalty": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "n": (None, 1),
    "use_cache": (None, True, False),
}


@register_model("trime")
class TrimeLM(LM):  # type: ignore[misc]
    """The model of a bundle or of a run's folder; every request is a text of its own, with memories that have read nothing."""

    def __init__(
        self,
        bundle: str | None = None,
        trusted: bool = False,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **unknown: Any,
    ):
        """Open a bundle. The harness's sizes of batches change no result; UserError for arguments that would be dropped."""
        super().__init__()
        if unknown:
            raise UserError(f"--model_args: trime has no {', '.join(unknown)}: it takes bundle and trusted")
        if bundle is None:
            raise UserError("--model_args: add bundle=DIR, the folder of a run or of an exported bundle")
        self.model = load(bundle, trusted)
        of_model = self.model.writer.continuation.device
        asked = (device or "").partition(":")[0]
        # The harness itself asks for cuda where nobody does, and its own models take the CPU where there is none.
        if asked not in ("", of_model.type) and not (asked == "cuda" and not torch.cuda.is_available()):
            raise UserError(f"--device {device}: the bundle runs on {of_model.type}: leave --device out")

    @property
    def tokenizer_name(self) -> str:
        """Return a name of the vocabulary, by which the harness tells kept requests apart."""
        return f"trime-{self.model.writer.vocabulary.fingerprint}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the empty template where none is asked for; UserError where one is."""
        if chat_template:
            raise UserError("--apply_chat_template: this model continues plain text and has no chat template: leave it out")
        return ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Raise UserError: a model of running text has no chat template."""
        return self.chat_template(True)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation after its context, and whether it is the greedy one."""
        return [self.model.log_likelihood_after(*request.args) for request in tqdm(requests, disable=disable_tqdm)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text."""
        return [self.model.log_likelihood(request.args[0]) for request in tqdm(requests, disable=disable_tqdm)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each prompt, greedy unless the task asks for samples."""
        written, asked = [], Counter[str]()
        for request in tqdm(requests, disable=disable_tqdm):
            prompt, task = request.args
            settings, key = generation_settings(task), repr(request.args)
            settings["seed"] += asked[key]  # a task that repeats a request wants other samples
            asked[key] += 1
            written.append(self.model.generate(prompt, **settings))
        return written


def generation_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's settings as arguments of ``LoadedModel.generate``; UserError for one that it does not follow.

    As for the harness's own models, max_new_tokens, max_tokens and max_completion_tokens are other names of max_gen_toks, a
    temperature above 0 samples unless do_sample is false, and do_sample without a temperature samples at 1.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if isinstance(until := given.get("until"), tuple):
        given["until"] = [*until]
    try:
        task = dict(normalize_gen_kwargs(given))
    except (TypeError, ValueError) as error:
        raise UserError(f"the task's settings {short_repr(settings)} are not those of a generation ({error})") from None
    for name, value in task.items():
        if name not in FOLLOWED and value not in NEUTRAL.get(name, ()):
            raise UserError(f"the task sets {name}={value}, which trime does not follow: it follows {', '.join(FOLLOWED)}")
    check_number("seed", seed := task.get("seed", 0), whole=True)
    return {
        "max_new_tokens": task["max_gen_toks"],
        "until": [text for text in task["until"] if text],
        "temperature": float(task.get("temperature", 1.0)) if task["do_sample"] else 0.0,
        "top_p": float(task.get("top_p", 1.0)),
        "seed": seed,
    }
