"""Datasets: a location and a method ``documents(split)``. One file and one yaml add a dataset."""

from trime.data.datasets.base import Dataset, Document

__all__ = ["Dataset", "Document"]
