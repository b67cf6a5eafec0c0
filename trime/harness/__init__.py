"""Models for EleutherAI's evaluation harness: python -m trime.harness --model trime --model_args bundle=DIR --tasks NAME.

``trime`` is the model of a bundle or of a run, ``trime-hf`` a decoder of transformers with an ``EvictingCache``. The harness
finds only models that are imported: this package registers them, and then runs the harness's command line. From Python:
``import trime.harness``, then ``lm_eval.simple_evaluate(model="trime", model_args="bundle=DIR", …)``.
"""

import importlib.util
import sys

from trime.errors import UserError, install_command

if importlib.util.find_spec("lm_eval") is None:
    message = f"the evaluation harness needs the package lm_eval: {install_command('harness')}"
    if sys.argv[:1] == ["-m"]:  # python -m trime.harness
        sys.exit(f"error: {message}")
    raise UserError(message)

# Each model registers itself when its module is imported.
from trime.harness.bundle import TrimeLM, generation_settings
from trime.harness.decoder import TrimeHF

__all__ = ["TrimeHF", "TrimeLM", "generation_settings"]
