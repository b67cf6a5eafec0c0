"""Evicting memories as a cache of transformers: ``model.generate(…, past_key_values=EvictingCache(model, 512, policy))``.

A layer of the cache is Attendre's memory with no queries waiting. Since a cache sees no queries, attention goes through a
function that is registered with transformers: the model's own code computes queries, keys with their rotary positions, and
values, and the function inserts them, lets queries attend and tells the policy, chunk by chunk. Keys stay rotated by their true
positions, so that a text should not be longer than the model's positions.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from trime.errors import UserError
from trime.eviction.base import EvictionPolicy
from trime.memory.bounded import BoundedMemory, MemoryState
from trime.models.attendre import Attendre, scored_as
from trime.models.layers.rotary import dot_products
from trime.models.pretrained.decoding import Decoding, Padding
from trime.models.pretrained.family import model_class, unwrapped
from trime.models.pretrained.filling import Filling, forgotten, seen_by
from trime.models.pretrained.language import per_layer
from trime.models.pretrained.loading import check_version
from trime.models.pretrained.rope import KINDS, sliding_windows
from trime.types import AttentionBlock, Float, Int, Tensor

check_version()

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

IMPLEMENTATION = "trime_evicting"  # the name of the attention function in transformers
OwnAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # the model's, of [b _ _ d] and a mask


class EvictingCache(Cache):
    """A memory of ``size`` entries for each layer of a Llama, Mistral, Qwen2 or GPT-NeoX model; others are a UserError.

    The model's attention is set to the registered function: ``model.set_attn_implementation("sdpa")`` sets it back. A prompt is
    read in chunks of ``chunk`` tokens, whose entries are inserted before their queries attend, to the ``top_k`` best of each
    head (None: all); by default a chunk is a quarter of the smallest memory, at most 128. ``size`` and ``top_k`` may be lists,
    with a value for each layer. As long as a memory holds everything it costs as much as transformers' own cache.

    Batches may be padded, beams reordered: chunks count from the first token of each row, which evicts what it would evict
    alone. Rows that end before the others read padding until all have ended, which takes room; a mask that hides it in the next
    call removes it. UserError where a chunk or the policy's newest entries leave no room for older ones.
    """

    def __init__(
        self,
        model: Any,
        size: int | list[int],
        policy: EvictionPolicy,
        top_k: int | list[int | None] | None = None,
        chunk: int | None = None,
    ):
        model = unwrapped(model)
        model_class(model, KINDS)
        count = model.config.num_hidden_layers
        sizes, best = (per_layer(value, count, name) for value, name in ((size, "size"), (top_k, "top_k")))
        room = min(sizes) - policy.sinks
        chunk = max(1, min(128, room // 4)) if chunk is None else chunk
        if not 1 <= chunk <= room:
            raise UserError(
                f"chunk={chunk}: choose 1 to {room} tokens, for the queries of a chunk see its own entries, which a memory of "
                f"{min(sizes)} has to hold{f' beside {policy.sinks} sinks' if policy.sinks else ''}"
            )
        if chunk == room and chunk > 1 and policy.uses_attention:
            warnings.warn(
                f"chunk={chunk} fills the memory: each chunk replaces the one before it, whatever attention its entries got. "
                f"Choose a smaller one, such as chunk={max(1, room // 4)}",
                stacklevel=2,
            )
        parts = zip(sizes, best, sliding_windows(model.config, count), strict=True)
        self.chunk, self.longest = chunk, model.config.max_position_embeddings
        self.padding, self.decoding = Padding(), None  # type: Padding, Decoding | None
        # One ranking can hold that of all layers if they are alike, and no score depends on the keys.
        self.are_alike = len(set(sizes)) == 1 and len({k is None for k in best}) == 1 and not policy.needs_keys
        super().__init__(
            layers=[EvictingLayer(Attendre(BoundedMemory(m, policy), 0, k, True, window), chunk) for m, k, window in parts]
        )
        AttentionInterface.register(IMPLEMENTATION, attend)
        AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
        model.set_attn_implementation(IMPLEMENTATION)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's new keys and values [b g l d], marked for the attention function.

        Warns once of a text longer than the model's positions. UserError for another number of texts.
        """
        if self.rows not in (0, len(key_states)):
            raise UserError(
                f"the cache holds {self.rows} texts and {len(key_states)} are continued: for beams, call "
                "cache.batch_repeat_interleave(number of beams) after read"
            )
        seen = self.get_seq_length()
        new = seen + key_states.shape[2]
        if layer_idx == 0 and seen <= self.longest < new:
            warnings.warn(
                f"{new:,} tokens are read by a model of {self.longest:,} positions (max_position_embeddings): from there on it "
                "sees positions that it was not trained for",
                stacklevel=2,
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        keys = keys.view_as(keys)
        keys.evicting_cache = self, layer_idx  # type: ignore[attr-defined]
        return keys, values

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, own: OwnAttention) -> Tensor:
        """Insert a layer's entries [b g l d] and return the values [b l h d] that its queries [b h l d] attend to."""
        if index == 0:
            hidden = self.padding.read(query, mask)
            if hidden is not None:
                for one in self.apart():
                    one.forget(hidden)
            self.decoding = self.decoding_next(query.shape[2])
            if self.decoding is not None:
                self.decoding.insert(self.padding.position.to(query.device))
        layer, columns = self.memories[index], [part.transpose(1, 2) for part in (query, key, value)]
        if self.decoding is not None:
            return layer.decode(columns, self.decoding, index, own)
        return layer.attend(columns, self.padding.position.to(query.device), self.padding.mask is not None, own)

    def decoding_next(self, length: int) -> Decoding | None:
        """Return the ranking of all layers together if the next step is one token and all are full; else each has its own."""
        if not self.are_alike or length > 1 or torch.is_grad_enabled():
            self.apart()
            return None
        if self.decoding is not None:
            return self.decoding
        states = [layer.full for layer in self.memories if layer.full is not None]
        if len(states) < len(self.memories) or len({state.ranking.clock.device for state in states}) > 1:
            return None
        return Decoding(self.memories[0].memory, states)

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
        model = unwrapped(model)
        if model.config._attn_implementation != IMPLEMENTATION or len(self.memories) != model.config.num_hidden_layers:
            raise UserError("the model does not read with this cache: make one of it, and leave its attention as that sets it")
        for part in text.split(self.chunk, 1):
            model(input_ids=part, past_key_values=self, logits_to_keep=1)
            if question is not None:
                self.look_back(model, question)

    def look_back(self, model: Any, question: Int[Tensor, "b q"]) -> None:
        """Let a question attend to all entries, and take the scores that they have after it; the question is forgotten."""
        layers = [layer.with_room(question.shape[1]) for layer in self.apart()]
        other = copy.copy(self)
        other.padding, other.layers = copy.copy(self.padding), [*layers]
        model(input_ids=question, past_key_values=other, logits_to_keep=1)
        for mine, theirs in zip(self.memories, other.apart(), strict=True):
            mine.full = scored_as(mine.state, theirs.state)

    @property
    def rows(self) -> int:
        """The number of texts that were read; 0 before the first."""
        return self.memories[0].rows

    @property
    def bytes(self) -> int:
        """The size of the entries of all layers in bytes, empty slots included."""
        return sum(column.nbytes for layer in self.memories for column in layer.columns)

    def positions(self, layer: int) -> Int[Tensor, "b m"]:
        """Return the positions of a layer's entries, -1 for empty slots: what it still remembers of the text."""
        return self.apart()[layer].positions()

    @property
    def memories(self) -> list[EvictingLayer]:
        """The layers of the cache, in the order of the model's."""
        return self.layers  # type: ignore[return-value]

    def apart(self) -> list[EvictingLayer]:
        """Return the layers, each with a ranking of its own, also where the last token was decoded by all together."""
        if self.decoding is not None:
            for layer, ranking in zip(self.memories, self.decoding.rankings(), strict=True):
                layer.full = layer.state._replace(ranking=ranking)
            self.decoding = None
        return self.memories

    def reset(self) -> None:
        """Empty the memories, for another text."""
        self.padding, self.decoding = Padding(), None
        super().reset()

    def batch_select_indices(self, indices: Int[Tensor, " r"]) -> None:
        """Continue with these rows of the batch, in this order; a row may occur several times."""
        for layer in self.apart():
            layer.batch_select_indices(indices)
        self.padding.take_rows(indices)

    def reorder_cache(self, beam_idx: Int[Tensor, " b"]) -> None:
        """Continue with these beams, each with its own memory."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue with every row of the batch ``repeats`` times, copies side by side."""
        self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        """Raise UserError: what was evicted cannot come back."""
        raise UserError("an evicting cache cannot forget its newest tokens: assisted generation needs another cache")


class EvictingLayer(CacheLayerMixin):
    """The memory of a layer; its entries wait in ``update`` until their queries arrive in ``attend``."""

    def __init__(self, memory: Attendre, chunk: int):
        super().__init__()
        self.memory, self.chunk = memory, chunk
        self.reset()

    def reset(self) -> None:
        """Empty the memory, for another text."""
        self.seen = 0  # tokens, padding included
        self.filling: Filling | None = Filling(self.memory, self.chunk)  # until the memory is full
        self.full: MemoryState | None = None  # from then on

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated before the first queries."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return new keys and values as they are: they are inserted when their queries arrive."""
        self.is_initialized = True
        return key_states, value_states

    @property
    def rows(self) -> int:
        """The number of texts that were read; 0 before the first."""
        if self.full is not None:
            return len(self.full.ranking.clock)
        return len(self.filling.columns[0]) if self.filling is not None and self.filling.count else 0

    @property
    def state(self) -> MemoryState:
        """The entries and their ranking, as a memory that may be full; UserError before anything was read."""
        if self.full is None:
            if not self.rows or self.filling is None:
                raise UserError("the cache has read nothing yet")
            self.full, self.filling = self.filling.state(), None
        return self.full

    @property
    def columns(self) -> list[Tensor]:
        """The tensors of keys and values, with the room that they have for more."""
        return [*self.full.columns] if self.full is not None else self.filling.columns[:2] if self.filling else []

    def positions(self) -> Int[Tensor, "b m"]:
        """Return the positions of the entries, -1 for empty slots."""
        if self.filling is None or not self.filling.count:
            return self.state.ranking.position
        return F.pad(self.filling.position, (0, self.memory.keys.size - self.filling.count), value=-1)

    def with_room(self, tokens: int) -> EvictingLayer:
        """Return a layer that holds the same entries, and has slots for so many tokens more."""
        state, other = self.state, copy.copy(self)
        other.memory, other.chunk = self.memory.with_room(tokens), tokens
        other.full = other.memory.keys.fit(state)
        return other

    def attend(self, columns: list[Tensor], position: Int[Tensor, "b l"], has_padding: bool, own: OwnAttention) -> Tensor:
        """Insert entries and return the attended values [b l h d]; queries, keys and values are [b l _ d]."""
        length = position.shape[1]
        self.seen += length
        if self.filling is not None and self.filling.takes(length):
            self.filling.append(columns[0], columns[1], columns[2], position)
            return own(columns[0], self.filling.keys, self.filling.values, self.filling.mask(position, has_padding))
        if not has_padding or bool((position >= 0).all()):
            return self.attend_in_steps(columns, position, has_padding, own)
        # Padding goes to the end, so that the steps of a row are those that it has without the other rows.
        order = (position < 0).byte().argsort(dim=1, stable=True)
        rows = torch.arange(len(order), device=order.device)[:, None]
        attended = self.attend_in_steps([part[rows, order] for part in columns], position[rows, order], True, own)
        return attended[rows, order.argsort(1)]

    def attend_in_steps(
        self, columns: list[Tensor], position: Int[Tensor, "b l"], has_padding: bool, own: OwnAttention
    ) -> Tensor:
        """Insert entries and let their queries attend, chunk by chunk."""
        memory = self.memory.keys
        if not self.rows:
            self.full, self.filling = memory.empty((columns[1], columns[2])), None
        write = memory.update if torch.is_grad_enabled() else memory.overwrite
        outputs = []
        for query, key, value, at in zip(*(part.split(self.chunk, 1) for part in (*columns, position)), strict=True):
            self.full = write(self.state, (key, value), at)
            of = self.full.ranking.position[:, : self.memory.used_slots(self.full.ranking)]
            attended, block = self.look(query, at, of, has_padding or bool((of < 0).any()), own)
            if block is not None:
                self.full = self.full._replace(ranking=self.memory.learn(self.full.ranking, block))
            outputs.append(attended)
        return torch.cat(outputs, 1)

    def decode(self, columns: list[Tensor], decoding: Decoding, index: int, own: OwnAttention) -> Tensor:
        """Insert the entry of one token, as layer ``index`` of those that decode together; return what its query attends to."""
        self.seen += 1
        for kept, new in zip(self.columns, columns[1:], strict=True):
            decoding.writes[index].apply_(kept, new)
        attended, block = self.look(columns[0], decoding.at, decoding.positions[index], decoding.has_gaps, own)
        if block is not None:
            decoding.blocks.append(block)
        return attended

    def look(
        self, query: Tensor, at: Int[Tensor, "b l"], of: Int[Tensor, "b n"], has_gaps: bool, own: OwnAttention
    ) -> tuple[Float[Tensor, "b l h d"], AttentionBlock | None]:
        """Return what queries attend to of the first entries, those at positions ``of``, and the scores, if they matter.

        Where neither the policy nor a top-k needs scores the model's own attention does it. ``has_gaps``: some of the queries
        or entries may be at position -1.
        """
        key, value = (column[:, : of.shape[1]] for column in self.columns)
        sees_all = at.shape[1] == 1 and self.memory.window is None and not has_gaps
        if self.memory.keys.policy.uses_attention or self.memory.top_k is not None:
            logits, attended, retrieved = self.memory.look((query, at, key, of), value, rotated_score, sees_all)
            return attended.transpose(1, 2), AttentionBlock(logits, at, retrieved)
        return own(query, key, value, None if sees_all else seen_by(self.memory, at, of)), None

    def forget(self, length: Int[Tensor, " b"]) -> None:
        """Forget each row's entries from position ``length`` on."""
        if self.filling is not None:
            self.filling.forget(length)
        elif self.full is not None:
            self.full = self.full._replace(ranking=forgotten(self.full.ranking, length))

    def get_seq_length(self) -> int:
        """Return the number of tokens that were read, of which the memory holds some."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of a mask over all that was read."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: a text may have any length."""
        return -1

    def batch_select_indices(self, indices: Int[Tensor, " r"]) -> None:
        """Continue with these rows of the batch, in this order; a row may occur several times."""
        if not self.rows:
            return
        if self.filling is not None:
            self.filling.take_rows(indices.to(self.filling.position.device))
        elif self.full is not None:
            self.full = self.full.take_rows(indices.to(self.full.ranking.clock.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingLayer:
        """Return a layer with entries of its own, which belong to no gradient."""
        other = copy.copy(self)
        other.filling = copy.copy(self.filling)
        with torch.no_grad():
            other.batch_select_indices(torch.arange(self.rows))
        return other


def rotated_score(query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
    """Return scores [b h q m] of queries and keys that the model has rotated."""
    return dot_products(query, key)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Return attended values [b l h d], by the cache that has marked the keys; UserError without one."""
    if settings.get("output_attentions", module.config.output_attentions):
        raise UserError("an EvictingCache returns no attention weights: call the model without output_attentions")
    cache, layer = getattr(key, "evicting_cache", (None, 0))
    if cache is None:
        raise UserError(
            'this model reads with an EvictingCache: pass past_key_values=, or model.set_attn_implementation("sdpa") sets its '
            "own attention back"
        )

    def own(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return sdpa_attention_forward(module, query, key, value, seen, **settings)[0]

    return cache.attend(layer, query, key, value, attention_mask, own), None


def padding_mask(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """Return the mask of padding [b seen] as it is: the memory masks by position."""
    return attention_mask
