"""A model for EleutherAI's evaluation harness: python -m trime.harness --model trime --model_args bundle=DIR --tasks NAME.

The harness finds only models that are imported, so that this module registers ``trime`` and then runs its command line. From
Python: ``import trime.harness``, then ``lm_eval.simple_evaluate(model="trime", model_args="bundle=DIR", …)``.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from trime.bundle.loaded_model import load
from trime.errors import UserError, install_command

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError:
    message = f"the evaluation harness needs the package lm_eval: {install_command('harness')}"
    if __name__ == "__main__":
        sys.exit(f"error: {message}")
    raise UserError(message) from None


@register_model("trime")
class TrimeLM(LM):  # type: ignore[misc]
    """The model of a bundle or of a run's folder; every request is a text of its own, with memories that have read nothing."""

    def __init__(self, bundle: str, trusted: bool = False, **_: Any):
        super().__init__()
        self.model = load(bundle, trusted)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation after its context, and whether it is the greedy one."""
        return [self.model.log_likelihood_after(*request.args) for request in tqdm(requests, disable=disable_tqdm)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text."""
        return [self.model.log_likelihood(request.args[0]) for request in tqdm(requests, disable=disable_tqdm)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each prompt, greedy unless the task asks for samples."""
        return [self.generate(*request.args) for request in tqdm(requests, disable=disable_tqdm)]

    def generate(self, prompt: str, settings: dict[str, Any]) -> str:
        """Return the continuation of a prompt under a task's settings."""
        until = settings.get("until", [])
        temperature = settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0
        return self.model.generate(
            prompt,
            int(settings.get("max_gen_toks", 64)),
            until=[until] if isinstance(until, str) else until,
            temperature=temperature,
            top_p=settings.get("top_p", 1.0),
        )


if __name__ == "__main__":
    sys.exit(cli_evaluate())
