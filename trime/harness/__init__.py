"""Models for EleutherAI's evaluation harness: python -m trime.harness --model trime --model_args bundle=DIR --tasks NAME.

``trime`` is the model of a bundle or of a run, ``trime-hf`` a decoder of transformers with a memory of keys or of texts.
Versions of the harness after 0.4.13 find them by themselves; 0.4.13 only knows models that are imported: this package registers
them, and then runs the harness's command line. From Python: ``import trime.harness``, then
``lm_eval.simple_evaluate(model="trime", model_args="bundle=DIR", …)``.
"""

import importlib.util
import sys

from trime.errors import UserError, install_command

if importlib.util.find_spec("lm_eval") is None:
    message = f"the evaluation harness needs the package lm_eval: {install_command('harness')}"
    if sys.argv[:1] == ["-m"]:  # python -m trime.harness
        sys.exit(f"error: {message}")
    raise UserError(message)

# Each model registers itself when its module is imported; that of a bundle needs the packages of the lab.
from trime.harness.decoder import TrimeHF

if importlib.util.find_spec("hydra"):
    from trime.harness.bundle import TrimeLM

__all__ = ["TrimeHF", "TrimeLM"]
