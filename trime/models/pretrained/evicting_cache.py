"""Evicting memories as a cache of transformers: ``model.generate(…, past_key_values=EvictingCache(model, 512, policy))``.

A layer of the cache is Attendre's memory with no queries waiting. Since a cache sees no queries, attention goes through a
function that is registered with transformers: the model's own code computes queries, keys with their rotary positions, and
values, and the function inserts them, lets queries attend and tells the policy, chunk by chunk. Keys stay rotated by their true
positions, so that a text should not be longer than the model's positions.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._pytree import tree_map

from trime.errors import UserError
from trime.eviction.base import EvictionPolicy
from trime.memory.bounded import BoundedMemory
from trime.models.attendre import Attendre, AttendreState, Queries
from trime.models.layers.rotary import dot_products
from trime.models.pretrained.family import model_class
from trime.models.pretrained.language import per_layer
from trime.models.pretrained.loading import check_version
from trime.models.pretrained.rope import KINDS, sliding_windows
from trime.types import Int, Tensor

check_version()

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

IMPLEMENTATION = "trime_evicting"  # the name of the attention function in transformers


class EvictingCache(Cache):
    """A memory of ``size`` entries for each layer of a Llama, Mistral, Qwen2 or GPT-NeoX model; others are a UserError.

    The model's attention is set to the registered function: ``model.set_attn_implementation("sdpa")`` sets it back. A prompt is
    read in chunks of ``chunk`` tokens, whose entries are inserted before their queries attend, to the ``top_k`` best of each
    head (None: all). ``size`` and ``top_k`` may be lists, with a value for each layer. Batches may be padded, beams reordered.
    """

    def __init__(
        self,
        model: Any,
        size: int | list[int],
        policy: EvictionPolicy,
        top_k: int | list[int | None] | None = None,
        chunk: int = 128,
    ):
        model_class(model, KINDS)
        if chunk < 1:
            raise UserError(f"chunk={chunk}: a prompt is read at least one token at a time")
        count = model.config.num_hidden_layers
        sizes, best = (per_layer(value, count, name) for value, name in ((size, "size"), (top_k, "top_k")))
        parts = zip(sizes, best, sliding_windows(model.config, count), strict=True)
        self.chunk = chunk
        super().__init__(
            layers=[EvictingLayer(Attendre(BoundedMemory(m, policy), 0, k, True, window), chunk) for m, k, window in parts]
        )
        AttentionInterface.register(IMPLEMENTATION, attend)
        AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
        model.set_attn_implementation(IMPLEMENTATION)

    @torch.no_grad()
    def read(self, model: Any, text: Any, question: Any = None) -> None:
        """Let the model read texts [b l] without padding, before ``generate`` goes on with what follows them.

        After each chunk the ``question`` [b q], if it is given, attends to all that is kept and so decides what is evicted next
        (Finch, Corallo and Papotti 2024); it is not kept itself, so that ``generate`` is given the text and the question.
        UserError, before anything is read, if these are not rows of tokens, or the policy does not score entries by attention.
        """
        for name, ids in {"text": text, **({} if question is None else {"question": question})}.items():
            if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
                raise UserError(f"{name}: pass the numbers of its tokens as a tensor of integers, a row for each text")
            if len(ids) != (self.rows or len(text)):
                raise UserError(f"{name} has {len(ids)} rows, where the texts have {self.rows or len(text)}")
        if question is not None and not all(layer.memory.keys.policy.can_be_guided for layer in self.memories):
            raise UserError("this policy does not score entries by attention alone: let a question guide SnapKV or TOVA")
        if model.config._attn_implementation != IMPLEMENTATION or len(self.memories) != model.config.num_hidden_layers:
            raise UserError("the model does not read with this cache: make one of it, and leave its attention as that sets it")
        for part in text.split(self.chunk, 1):
            model(input_ids=part, past_key_values=self, logits_to_keep=1)
            if question is not None:
                self.look_back(model, question)

    def look_back(self, model: Any, question: Int[Tensor, "b q"]) -> None:
        """Let a question attend to all entries, and take the scores that they have after it; the question is forgotten."""
        other = copy.copy(self)
        other.layers = [layer.with_room(question.shape[1]) for layer in self.memories]
        model(input_ids=question, past_key_values=other, logits_to_keep=1)
        for mine, theirs in zip(self.memories, other.memories, strict=True):
            assert mine.state is not None and theirs.state is not None
            mine.state = mine.state.scored_as(theirs.state.keys)

    @property
    def rows(self) -> int:
        """The number of texts that were read; 0 before the first."""
        return self.memories[0].rows

    @property
    def bytes(self) -> int:
        """The size of the entries of all layers in bytes, empty slots included."""
        states = [layer.state for layer in self.memories if layer.state is not None]
        return sum(column.nbytes for state in states for column in state.keys.columns)

    def positions(self, layer: int) -> Int[Tensor, "b m"]:
        """Return the positions of a layer's entries, -1 for empty slots: what it still remembers of the text."""
        state = self.memories[layer].state
        if state is None:
            raise UserError("the cache has read nothing yet")
        return state.keys.ranking.position

    @property
    def memories(self) -> list[EvictingLayer]:
        """The layers of the cache, in the order of the model's."""
        return self.layers  # type: ignore[return-value]


class EvictingLayer(CacheLayerMixin):
    """The memory of a layer; its entries wait in ``update`` until their queries arrive in ``attend``."""

    def __init__(self, memory: Attendre, chunk: int):
        super().__init__()
        self.memory, self.chunk = memory, chunk
        self.state: AttendreState | None = None
        self.seen = 0  # tokens, padding included

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated before the first queries."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return new keys and values [b g l d], marked with this layer for the attention function."""
        self.is_initialized = True
        self.seen += key_states.shape[2]
        keys = key_states.view_as(key_states)
        keys.evicting_layer = self  # type: ignore[attr-defined]
        return keys, value_states

    @property
    def rows(self) -> int:
        """The number of texts that were read; 0 before the first."""
        return 0 if self.state is None else len(self.state.keys.ranking.clock)

    def with_room(self, tokens: int) -> EvictingLayer:
        """Return a layer that holds the same entries, and has slots for so many tokens more."""
        assert self.state is not None
        other = copy.copy(self)
        other.memory, other.chunk = self.memory.with_room(tokens), tokens
        other.state = self.state._replace(keys=other.memory.keys.fit(self.state.keys))
        return other

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Insert entries and return the attended values [b l h d] of queries [b h l d], chunk by chunk."""
        if self.rows not in (0, len(query)):
            raise UserError(
                f"the cache holds {self.rows} texts and {len(query)} are continued: for beams, call "
                "cache.batch_repeat_interleave(number of beams) after read"
            )
        position = self.positions_of(query, mask)
        columns = [part.transpose(1, 2).split(self.chunk, 1) for part in (query, key, value)]
        outputs = []
        for queries, keys, values, at in zip(*columns, position.split(self.chunk, 1), strict=True):
            entries, waiting = (keys, values), Queries((queries,), at)
            state = self.state or self.memory.initial_state(entries, waiting)
            self.state, output = self.memory.step(state, entries, waiting, rotated_score, overwrite=True)
            outputs.append(output.attended)
        return torch.cat(outputs, 1)

    def positions_of(self, query: Tensor, mask: Tensor | None) -> Int[Tensor, "b l"]:
        """Return the positions of the newest tokens; with a padding mask [b seen] those of padding are -1."""
        length = query.shape[2]
        if mask is None:
            return torch.arange(self.seen - length, self.seen, device=query.device).expand(len(query), -1)
        return (mask.long().cumsum(1) - 1).masked_fill(~mask.bool(), -1)[:, -length:]

    def get_seq_length(self) -> int:
        """Return the number of tokens that were read, of which the memory holds some."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of a mask over all that was read."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: a text may have any length."""
        return -1

    def reset(self) -> None:
        """Empty the memory, for another text."""
        self.state, self.seen = None, 0

    def batch_select_indices(self, indices: Int[Tensor, " r"]) -> None:
        """Continue with these rows of the batch, in this order; a row may occur several times."""
        if self.state is not None:
            self.state = tree_map(lambda part: part.index_select(0, indices.to(part.device)), self.state)

    def reorder_cache(self, beam_idx: Int[Tensor, " b"]) -> None:
        """Continue with these beams, each with its own memory."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue with every row of the batch ``repeats`` times, copies side by side."""
        if self.state is not None:
            self.batch_select_indices(torch.arange(len(self.state.queries.position)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise UserError: what was evicted cannot come back."""
        raise UserError("an evicting cache cannot forget its newest tokens: assisted generation needs another cache")


def rotated_score(query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
    """Return scores [b h q m] of queries and keys that the model has rotated."""
    return dot_products(query, key)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Return attended values [b l h d], by the memory that has marked the keys; UserError without one."""
    layer: EvictingLayer | None = getattr(key, "evicting_layer", None)
    if layer is None:
        raise UserError(
            'this model reads with an EvictingCache: pass past_key_values=, or model.set_attn_implementation("sdpa") sets its '
            "own attention back"
        )
    return layer.attend(query, key, value, attention_mask), None


def padding_mask(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """Return the mask of padding [b seen] as it is: the memory masks by position."""
    return attention_mask
