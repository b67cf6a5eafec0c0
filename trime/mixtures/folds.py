"""Folds of a text, for mixtures that are cross-fitted."""

from __future__ import annotations

import torch

from trime.types import Int, Tensor

BLOCKS = 4  # blocks of text per fold, if there are fewer documents than folds


def folds(document: Int[Tensor, " n"], count: int, seed: int) -> Int[Tensor, " n"]:
    """Return the fold of each token: documents dealt out by size; if they are few, blocks of the text in turn."""
    number, size = document.unique(return_inverse=True, return_counts=True)[1:]
    if len(size) < count:
        block = max(1, -(-len(document) // (count * BLOCKS)))
        return torch.arange(len(document)) // block % count
    fold_size, fold = [0] * count, torch.empty(len(size), dtype=torch.long)
    shuffled = torch.randperm(len(size), generator=torch.Generator().manual_seed(seed))
    for document_number in shuffled[size[shuffled].argsort(descending=True, stable=True)].tolist():
        smallest = fold_size.index(min(fold_size))
        fold[document_number] = smallest
        fold_size[smallest] += int(size[document_number])
    return fold[number]
