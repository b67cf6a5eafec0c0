"""Datasets: a place and a function ``documents(split)``. One file and one yaml add one."""

from trime.data.datasets.base import Dataset, Document

__all__ = ["Dataset", "Document"]
