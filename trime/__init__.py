"""TRIME Lab: language models with local, long-term and external memory, and their baselines."""

__version__ = "0.1.0"
