"""Evicting memories as a cache of transformers: ``model.generate(…, past_key_values=EvictingCache(model, 512, policy))``.

A layer of the cache is Attendre's memory with no queries waiting. Since a cache sees no queries, attention goes through a
function that is registered with transformers: the model's own code computes queries, keys with their rotary positions, and
values, and the function inserts them, lets queries attend and tells the policy, chunk by chunk. Keys stay rotated by their true
positions, so that a text should not be longer than the model's positions.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch.nn import functional as F

from trime.errors import UserError
from trime.eviction.base import EvictionPolicy
from trime.memory.bounded import BoundedMemory, MemoryState
from trime.models.attendre import Attendre, Queries, scored_as
from trime.models.layers.rotary import dot_products
from trime.models.pretrained.family import model_class, unwrapped
from trime.models.pretrained.filling import Filling, forgotten, seen_by
from trime.models.pretrained.language import per_layer
from trime.models.pretrained.loading import check_version
from trime.models.pretrained.rope import KINDS, sliding_windows
from trime.types import Bool, Int, Tensor

check_version()

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

IMPLEMENTATION = "trime_evicting"  # the name of the attention function in transformers


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
        super().__init__(
            layers=[EvictingLayer(Attendre(BoundedMemory(m, policy), 0, k, True, window), chunk) for m, k, window in parts]
        )
        AttentionInterface.register(IMPLEMENTATION, attend)
        AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
        model.set_attn_implementation(IMPLEMENTATION)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Hand a layer's new keys and values [b g l d] to its memory; warn once of a text longer than the model's positions."""
        seen = self.get_seq_length()
        new = seen + key_states.shape[2]
        if layer_idx == 0 and seen <= self.longest < new:
            warnings.warn(
                f"{new:,} tokens are read by a model of {self.longest:,} positions (max_position_embeddings): from there on it "
                "sees positions that it was not trained for",
                stacklevel=2,
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

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
        other = copy.copy(self)
        other.layers = [layer.with_room(question.shape[1]) for layer in self.memories]
        model(input_ids=question, past_key_values=other, logits_to_keep=1)
        for mine, theirs in zip(self.memories, other.memories, strict=True):
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
        return self.memories[layer].positions()

    @property
    def memories(self) -> list[EvictingLayer]:
        """The layers of the cache, in the order of the model's."""
        return self.layers  # type: ignore[return-value]


class EvictingLayer(CacheLayerMixin):
    """The memory of a layer; its entries wait in ``update`` until their queries arrive in ``attend``."""

    def __init__(self, memory: Attendre, chunk: int):
        super().__init__()
        self.memory, self.chunk = memory, chunk
        self.reset()

    def reset(self) -> None:
        """Empty the memory, for another text."""
        self.seen = 0  # tokens, padding included
        self.mask: Tensor | None = None  # of the tokens seen, False for padding; None: no padding
        self.filling: Filling | None = Filling(self.memory, self.chunk)  # until the memory is full
        self.full: MemoryState | None = None  # from then on

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

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: Any) -> Tensor:
        """Insert entries [b g l d] and return the attended values [b l h d] of queries [b h l d]."""
        if self.rows not in (0, len(query)):
            raise UserError(
                f"the cache holds {self.rows} texts and {len(query)} are continued: for beams, call "
                "cache.batch_repeat_interleave(number of beams) after read"
            )
        position = self.positions_of(query, mask)
        columns = [query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)]
        if self.filling is not None and self.filling.takes(query.shape[2]):
            self.filling.append(columns[0], columns[1], columns[2], position)
            seen = self.filling.mask(position, self.mask is not None)
            return own_attention(module, query, self.filling.keys, self.filling.values, seen, settings)
        if self.mask is None or bool((position >= 0).all()):
            return self.attend_in_steps(module, columns, position, settings)
        # Padding goes to the end, so that the steps of a row are those that it has without the other rows.
        order = (position < 0).byte().argsort(dim=1, stable=True)
        rows = torch.arange(len(order), device=order.device)[:, None]
        attended = self.attend_in_steps(module, [part[rows, order] for part in columns], position[rows, order], settings)
        return attended[rows, order.argsort(1)]

    def attend_in_steps(self, module: Any, columns: list[Tensor], position: Int[Tensor, "b l"], settings: Any) -> Tensor:
        """Insert entries and let their queries attend, chunk by chunk: query, key and value are [b l _ d]."""
        memory = self.memory.keys
        if not self.rows:
            self.full, self.filling = memory.empty((columns[1], columns[2])), None
        write = memory.update if torch.is_grad_enabled() else memory.overwrite
        see = self.see_with_scores if memory.policy.uses_attention or self.memory.top_k is not None else self.see
        outputs = []
        for query, key, value, at in zip(*(part.split(self.chunk, 1) for part in (*columns, position)), strict=True):
            self.full = write(self.state, (key, value), at)
            outputs.append(see(module, query, at, settings))
        return torch.cat(outputs, 1)

    def see_with_scores(self, module: Any, query: Tensor, at: Int[Tensor, "b l"], settings: Any) -> Tensor:
        """Return what queries [b l h d] attend to, by scores that the policy sees."""
        self.full, output = self.memory.attend(self.state, Queries((query,), at), rotated_score)
        return output.attended

    def see(self, module: Any, query: Tensor, at: Int[Tensor, "b l"], settings: Any) -> Tensor:
        """Return what queries [b l h d] attend to by the model's own attention, for a policy that sees no scores."""
        used = self.memory.used_slots(self.state.ranking)
        position = self.state.ranking.position[:, :used]
        sees_all = at.shape[1] == 1 and self.memory.window is None and self.mask is None and bool((position >= 0).all())
        key, value = (column[:, :used] for column in self.state.columns)
        seen = None if sees_all else seen_by(self.memory, at, position)
        return own_attention(module, query.transpose(1, 2), key, value, seen, settings)

    def positions_of(self, query: Tensor, mask: Tensor | None) -> Int[Tensor, "b l"]:
        """Return the positions of the newest tokens; with a padding mask [b seen] those of padding are -1.

        Tokens that an earlier call has read and this mask hides, as rows of a batch that ended early, are forgotten.
        """
        length, before = query.shape[2], self.seen - query.shape[2]
        if mask is None and self.mask is not None:
            raise UserError("the texts read so far have padding: pass their attention_mask, with ones for the new tokens")
        if mask is None or (self.mask is None and bool(mask.all())):
            return torch.arange(before, self.seen, device=query.device).expand(len(query), -1)
        if mask.dim() != 2:
            raise UserError("attention_mask: pass a row for each text [b l], with zeros for padding")
        mask = mask.bool()
        if before and self.rows:
            known = torch.ones_like(mask[:, :before]) if self.mask is None else self.mask
            if not torch.equal(mask[:, :before], known):
                self.hide(mask[:, :before], known)
        self.mask = None if bool(mask.all()) else mask
        return (mask.long().cumsum(1) - 1).masked_fill(~mask, -1)[:, -length:]

    def hide(self, mask: Bool[Tensor, "b s"], known: Bool[Tensor, "b s"]) -> None:
        """Forget the newest tokens of each row that the mask hides; UserError if it changes anything else."""
        same = (mask.cumsum(1) == known.cumsum(1)) & known
        if not bool((same | ~mask).all()):
            raise UserError("attention_mask changes what was read: of earlier tokens only a row's newest can be hidden later")
        length = mask.sum(1)
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
        self.mask = None if self.mask is None else self.mask[indices.to(self.mask.device)]
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

    def reorder_cache(self, beam_idx: Int[Tensor, " b"]) -> None:
        """Continue with these beams, each with its own memory."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue with every row of the batch ``repeats`` times, copies side by side."""
        self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise UserError: what was evicted cannot come back."""
        raise UserError("an evicting cache cannot forget its newest tokens: assisted generation needs another cache")


def rotated_score(query: Tensor, at: Tensor, key: Tensor, of: Tensor) -> Tensor:
    """Return scores [b h q m] of queries and keys that the model has rotated."""
    return dot_products(query, key)


def own_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, settings: Any) -> Tensor:
    """Return the values [b l h d] that queries [b h l d] attend to by the model's own attention; entries are [b n g d]."""
    return sdpa_attention_forward(module, query, key.transpose(1, 2), value.transpose(1, 2), seen, **settings)[0]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Return attended values [b l h d], by the memory that has marked the keys; UserError without one."""
    if settings.get("output_attentions", module.config.output_attentions):
        raise UserError("an EvictingCache returns no attention weights: call the model without output_attentions")
    layer: EvictingLayer | None = getattr(key, "evicting_layer", None)
    if layer is None:
        raise UserError(
            'this model reads with an EvictingCache: pass past_key_values=, or model.set_attn_implementation("sdpa") sets its '
            "own attention back"
        )
    return layer.attend(module, query, key, value, attention_mask, **settings), None


def padding_mask(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """Return the mask of padding [b seen] as it is: the memory masks by position."""
    return attention_mask
