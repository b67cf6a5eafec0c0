"""TRIME Lab: language models with local, long-term and external memory, and their baselines."""

from omegaconf import OmegaConf

from trime.config import register

__version__ = "0.1.0"

OmegaConf.register_new_resolver("quotient", lambda a, b: int(a) // int(b), replace=True)  # ${quotient:4096,512} in a yaml
OmegaConf.register_new_resolver("kind", lambda target: target.rpartition(".")[2].lower(), replace=True)  # ${kind:a.b.Shuffled}
register()
