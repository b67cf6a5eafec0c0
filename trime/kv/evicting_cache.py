"""Evicting memories as a cache of transformers: ``model.generate(…, past_key_values=EvictingCache(model, 512, policy))``.

The model's own code computes queries, keys and values. An attention function that is registered with transformers inserts
them into the layer's memory, lets queries attend and shows the policy their scores, chunk by chunk; no query waits. With
``generate`` the model rotates keys to their true positions, so that a text should not be longer than the model's positions; the
lab's own reading passes a score that rotates them instead (``of_layers``).
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
import weakref
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch

from trime.common.checks import check_number, check_object, short_repr
from trime.common.choices import Extension
from trime.common.io import locked, read_tensors, remove_half_written, write_tensors
from trime.common.pretrained import (
    ATTENTION,
    cache_name,
    cache_of,
    check_version,
    device_of,
    identity_of_model,
    positions_of,
    unwrapped,
)
from trime.common.progress import Progress
from trime.common.types import Bool, Int, Tensor
from trime.errors import UserError
from trime.kv.attendre import Attendre
from trime.kv.bounded import BoundedMemory
from trime.kv.budgets import AdaKV
from trime.kv.eviction.base import EvictionPolicy
from trime.kv.head_memories import HeadMemories
from trime.kv.layer_memory import LayerMemories, LayerMemory, numbered
from trime.kv.recall.store import Recall
from trime.kv.rope import RopeDecoder, key_heads, per_layer, sliding_windows

check_version(ATTENTION)  # before the imports below fail with a message of their own

from transformers import AttentionInterface, GenerationMixin
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GENERATION = inspect.unwrap(GenerationMixin.generate).__code__
IMPLEMENTATION = "trime_evicting"  # the name of the attention function in transformers
FILE = "cache.safetensors"
LAYER_TYPES = {"full_attention", "sliding_attention"}
PLACES = {"position_ids", "cache_position"}  # of queries, which the cache knows


class EvictingCache(LayerMemories, Cache):
    """A memory of ``size`` entries for each layer of a decoder whose attention is a function of transformers' own choosing.

    That is nearly every decoder (``AttentionInterface``); others are a UserError. Layers keep their windows, scales and caps.

    A prompt is read in chunks of ``chunk`` tokens, whose entries are inserted before their queries attend, to the ``top_k``
    best of each head (None: all); by default a chunk is a quarter of the smallest memory, at most 128. ``size`` and ``top_k``
    may be lists, with a value for each layer. As long as a memory holds everything it costs as much as transformers' own cache.

    ``recall``: what is evicted is not lost, and the queries of each chunk, or of each token that is written, also attend to
    this number of entries of it, in blocks (``Recall``: of which size, found by what, kept where).

    ``per_head``: each head of keys evicts, and recalls, for itself; with ``AdaKV()`` heads whose entries score higher get more
    room, once ``read`` has read a text as a whole. ``position``: the memories rotate keys, in place of the model, so that
    texts may be longer than its positions: ``lm_infinite`` caps distances at these (Llama, Mistral, Qwen2 and GPT-NeoX alone).
    Blocks are then found by what keys say, wherever they stand.

    Batches may be padded, beams reordered: chunks count from the first token of each row, which evicts what it would evict
    alone. Rows that end before the others read padding until all have ended, which takes room; a mask that hides it in the next
    call removes it. UserError where a chunk or the policy's newest entries leave no room for older ones.
    """

    extension: Extension | None = None  # of positions, where the memories rotate keys
    budget: AdaKV | None = None  # how heads share the room of a text that was read as a whole

    def __init__(
        self,
        model: Any,
        size: int | list[int],
        policy: EvictionPolicy,
        top_k: int | list[int | None] | None = None,
        chunk: int | None = None,
        recall: Recall | int | None = None,
        per_head: bool | AdaKV = False,
        position: Extension | None = None,
    ):
        check_object("policy", policy, EvictionPolicy, "trime.SnapKV()")
        check_object("model", model, torch.nn.Module, "AutoModelForCausalLM.from_pretrained(…)")
        model = without_adapter(model)
        check_attention(model)
        check_settings(size, top_k, chunk, recall, per_head)
        recall = Recall(recall) if isinstance(recall, int) else recall
        count = layers_of(model.config)
        sizes, best = (per_layer(value, count, name) for value, name in ((size, "size"), (top_k, "top_k")))
        attendres = [
            Attendre(BoundedMemory(m, policy), 0, k, True, window)
            for m, k, window in zip(sizes, best, sliding_windows(model.config, count), strict=True)
        ]
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
        config, score = model.config, RopeDecoder(model, position).score_at_0 if position else None
        heads = key_heads(config) if per_head else 1
        if isinstance(per_head, AdaKV) and recall:
            raise UserError("recall returns as much to each head: leave out recall, or set per_head=True")
        self.set_up(model, [LayerMemory(each, chunk, score, heads, recall=recall) for each in attendres])
        self.extension, self.budget = position, per_head if isinstance(per_head, AdaKV) else None

    @classmethod
    def of_layers(cls, model: Any, layers: list[LayerMemory]) -> EvictingCache:
        """Return a cache of these memories, in which no query waits."""
        cache = cls.__new__(cls)
        cache.set_up(unwrapped(model), layers)
        return cache

    def set_up(self, model: Any, layers: list[LayerMemory]) -> None:
        """Take the layers' memories, and let the model announce its calls with a cache (``begin_call``)."""
        LayerMemories.__init__(self, layers)
        Cache.__init__(self, layers=[])  # the memories do all that transformers' own layers of a cache would do
        self.model: Any = weakref.ref(model)  # a copy of the cache is not one of the model
        self.chunk, self.longest = layers[0].chunk, positions_of(model.config)
        # Layers have more for a while, for a text that is read as a whole or for an answer.
        self.sizes = [layer.memory.keys.size for layer in layers]
        self.is_called = False  # by a call of the model that has not ended
        self.layer: int | None = None  # whose new entries have come, and whose queries have not
        self.inserted = set[int]()  # layers, in this call, or in one that ended before all had read
        self.seen = 0  # tokens, padding included
        self.mask: Bool[Tensor, "b s"] | None = None  # False for padding; None: there is none
        self.tokens: tuple[Int[Tensor, "b _"], ...] | None = ()  # of each call; None: a call gave embeddings in their place
        self.is_written = False  # generate has written the newest tokens, and one more that was not read
        AttentionInterface.register(IMPLEMENTATION, attend)
        stack = model.get_decoder()
        if begin_call not in stack._forward_pre_hooks.values():
            stack.register_forward_pre_hook(begin_call, with_kwargs=True)
            stack.register_forward_hook(end_call, with_kwargs=True, always_call=True)

    def begin_reading(self, tokens: Tensor, mask: Tensor | None, position: Int[Tensor, "b l"] | None) -> None:
        """Prepare for tokens [b l ...] at ``position`` (-1: padding), or where the mask [b seen] says."""
        # Rows of a batch are continued in place: another number of them is another batch.
        if self.rows not in (0, len(tokens)):
            raise UserError(
                f"the cache holds {self.rows} texts and {len(tokens)} are continued: for beams, call "
                "cache.batch_repeat_interleave(number of beams) after read"
            )
        if self.rows and self.memories[0].columns[0].is_inference() and not torch.is_inference_mode_enabled():
            self.take_rows(torch.arange(self.rows))  # what was read there cannot be changed in place here
        if position is not None:
            self.begin(position, bool((position < 0).any()))
            return
        new = self.seen + tokens.shape[1]
        if self.seen <= self.longest < new and self.memories[0].model_rotates:
            warnings.warn(
                f"{new:,} tokens are read by a model of {self.longest:,} positions (max_position_embeddings): from there on it "
                "sees positions that it was not trained for",
                stacklevel=2,
            )
        position = self.positions_by(mask, tokens)
        self.begin(position, self.mask is not None)

    def positions_by(self, mask: Tensor | None, tokens: Tensor) -> Int[Tensor, "b l"]:
        """Return the positions of new tokens by the mask, and forget earlier ones that it hides."""
        before, length = self.seen, tokens.shape[1]
        if mask is None and self.mask is not None:
            raise UserError("the texts read so far have padding: pass their attention_mask, with ones for the new tokens")
        if mask is not None and mask.dim() != 2:
            raise UserError("attention_mask: pass a row for each text [b l], with zeros for padding")
        if mask is not None and mask.shape[1] < before + length:
            raise UserError(
                f"attention_mask has {mask.shape[1]} columns: pass one for each of the {before + length} tokens that were read "
                "and that are new"
            )
        if mask is None or (self.mask is None and bool(mask.all())):
            return torch.arange(before, before + length, device=tokens.device).expand(len(tokens), -1)
        mask = mask[:, : before + length].bool()
        earlier = mask[:, :before]
        known = torch.ones_like(earlier) if self.mask is None else self.mask
        if not torch.equal(earlier, known):
            # Of earlier tokens only a row's newest may go: those that it read as padding after it had ended.
            is_same = (earlier.cumsum(1) == known.cumsum(1)) & known
            if not bool((is_same | ~earlier).all()):
                raise UserError(
                    "attention_mask changes what was read: of earlier tokens only a row's newest can be hidden later"
                )
            for layer in self.with_separate_rankings():
                layer.forget(earlier.sum(1).to(layer.columns[0].device))
        self.mask = None if bool(mask.all()) else mask
        return (mask.long().cumsum(1) - 1).masked_fill(~mask, -1)[:, before:]

    @torch.no_grad()
    def read(self, model: Any, text: Any, question: Any = None, whole: bool = False) -> None:
        """Let the model read texts [b l] without padding, before ``generate`` goes on with what follows them.

        After each chunk the ``question`` [b q], if it is given, attends to all that is kept and so decides what is evicted next
        (Finch, Corallo and Papotti 2024); it is not kept itself, so that ``generate`` is given the text and the question. There
        may be a list of questions. With ``whole`` everything is kept until the text and they have been read, and is evicted
        then, as in prompt compression. UserError, before anything is read, if these are not rows of tokens, or the policy does
        not score entries by attention.
        """
        questions = [] if question is None else question if isinstance(question, list) else [question]
        self.check_texts(text, questions, whole)
        model, sizes = without_adapter(model), [layer.memory.keys.size for layer in self.memories]
        chunks = text.split(self.chunk, 1)

        def ask(each: Tensor) -> None:
            self.rescore_with_question(
                each.shape[1], lambda other: model(input_ids=each, logits_to_keep=1, **{cache_name(): other})
            )

        try:
            if whole:
                self.resize([size + text.shape[1] for size in sizes])
            for number, chunk in enumerate(Progress(chunks, unit="chunk", desc="read"), 1):
                model(input_ids=chunk, logits_to_keep=1, **{cache_name(): self})
                for each in questions if not whole or number == len(chunks) else []:
                    ask(each)
        finally:
            if whole:
                self.cut(sizes)

    def check_texts(self, text: Any, questions: list[Any], whole: bool) -> None:
        """Raise UserError unless these are tokens for ``read``."""
        for name, ids in [("text", text), *(("question", each) for each in questions)]:
            if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
                raise UserError(f"{name}: pass the numbers of its tokens as a tensor of integers, a row for each text")
            if len(ids) != (self.rows or len(text)):
                raise UserError(f"{name} has {len(ids)} rows, where the texts have {self.rows or len(text)}")
        if questions and not all(layer.memory.keys.policy.can_be_guided for layer in self.memories):
            raise UserError("this policy does not score entries by attention alone: let a question guide SnapKV or TOVA")
        if self.budget and whole and (len(text) > 1 or self.rows):
            raise UserError("AdaKV shares the room of one text, by what its heads need: make a cache for each text")

    def cut(self, sizes: list[int]) -> None:
        """Evict all but the best entries of each layer, or of each head with a share of its own."""
        layers = self.with_separate_rankings()
        filled = layers[0].filled if self.rows else 0
        if self.budget is None or filled <= min(sizes):
            self.resize(sizes)
            return
        rankings, sizes = [layer.state.ranking for layer in layers], [min(size, filled) for size in sizes]
        policy = layers[0].memory.keys.policy
        scores = [policy.compete(each.position, each.score, size) for each, size in zip(rankings, sizes, strict=True)]
        shares = self.budget(scores, sizes)
        self.memories = [HeadMemories.split(*each) for each in zip(layers, sizes, shares, strict=True)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's new keys and values as they are: they are inserted when their queries arrive in ``attend``."""
        if not self.is_called:
            raise UserError("no EvictingCache was made for this model: make this one with EvictingCache(model, …)")
        if self.layer is not None or layer_idx in self.inserted:
            raise UserError(f"{type(self.model()).__name__} is not supported: layers share entries, or have other attention")
        self.layer = layer_idx
        return key_states, value_states

    def take_rows(self, rows: Int[Tensor, " r"]) -> None:
        """Continue with copies of these rows, in this order; repeats allowed."""
        super().take_rows(rows)
        self.mask = None if self.mask is None else self.mask[rows.to(self.mask.device)]
        if self.tokens:
            self.tokens = (torch.cat(self.tokens, 1)[rows.to(self.tokens[0].device)],)

    def reset(self) -> None:
        self.decoding, self.seen, self.mask, self.tokens = None, 0, None, ()
        self.is_called = self.is_written = False
        self.inserted.clear()
        self.memories = [layer.layer if isinstance(layer, HeadMemories) else layer for layer in self.memories]
        for layer, size in zip(self.memories, self.sizes, strict=True):
            layer.reset()
            layer.resize(size)

    def __len__(self) -> int:
        return len(self.memories)

    def __repr__(self) -> str:
        return f"EvictingCache({len(self)} layers of {self.sizes[0]} entries, {self.seen} tokens read)"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen  # tokens that were read; the memories hold some of them

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # a text may have any length

    @property
    def is_linear(self) -> list[bool]:  # transformers reads a prompt again from its beginning where all layers are
        return [False] * len(self)

    batch_select_indices = reorder_cache = take_rows  # type: ignore[assignment]  # transformers' names of it

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue with every row of the batch ``repeats`` times, copies side by side."""
        self.take_rows(torch.arange(self.rows).repeat_interleave(repeats))

    def inputs(self, more: Int[Tensor, "b q"], output: Int[Tensor, "b l"] | None = None) -> dict[str, Tensor]:
        """Return the arguments of ``generate`` that go on with ``more`` tokens: all that was read, and these, with their mask.

        ``output``: what ``generate`` has returned, if it has written an answer: the cache has not read its last token, and rows
        that ended before others have padding there. UserError where that is missing, where the cache does not know which tokens
        it has read, or where ``more`` are not rows of tokens for its texts.
        """
        if not self.tokens:
            raise UserError(
                "the cache does not know which tokens it has read: pass them to generate yourself, and what follows"
            )
        self.check_texts(more, [], whole=False)
        text = torch.cat(self.tokens, 1)
        if output is None:
            if self.is_written:
                raise UserError(
                    "the last token that generate wrote was not read: pass what it returned, cache.inputs(question, output)"
                )
            output = text
        output = output.to(text.device)
        if output.shape[0] != len(text) or not torch.equal(output[:, : self.seen], text):
            raise UserError("output is not what was written with this cache: pass what generate returned, prompt and answer")
        mask = torch.ones_like(output) if output is text else is_text(output, self.model().generation_config)
        if self.mask is not None:
            mask[:, : self.seen] &= self.mask.to(mask)
        new = more.to(text.device)
        return {"input_ids": torch.cat([output, new], 1), "attention_mask": torch.cat([mask, torch.ones_like(new)], 1)}

    def save(self, folder: str | Path) -> None:
        """Write what was read to a folder, from which a cache of the same settings, for the same model, can ``load`` it."""
        if not self.rows:
            raise UserError("the cache has read nothing yet: let it read a text before it is saved")
        tensors = {
            f"{number} {name}": tensor
            for number, layer in enumerate(self.with_separate_rankings())
            for name, tensor in layer.tensors().items()
        }
        if self.mask is not None:
            tensors["mask"] = self.mask
        if self.tokens:
            tensors["tokens"] = torch.cat(self.tokens, 1)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", f"writing {folder}"):
            remove_half_written(folder, f"{FILE}.*")  # the folder is the user's, and may have other files
            note = {"made with": self.identity(), "seen": self.seen, "is_written": self.is_written}
            write_tensors(folder / FILE, tensors, note)

    def load(self, folder: str | Path) -> EvictingCache:
        """Go on with a text that was read and saved, in place of any other; return the cache.

        UserError where it was read by another model, or by a cache of other settings.
        """
        file = Path(folder) / FILE
        tensors, note = read_tensors(file, "name a folder that save wrote, or read the text again")
        for name, value in self.identity().items():
            if (other := note.get("made with", {}).get(name)) != value:
                raise UserError(f"{file} was made with another {name}, {other} where this is {value}: use the same to go on")
        device = device_of(self.model())
        self.reset()
        for number, layer in enumerate(self.memories):
            of_layer = numbered(tensors, number)
            if "0 key" in of_layer:
                self.memories[number] = HeadMemories.taken(layer, of_layer, device)
            else:
                layer.take(of_layer, device)
        mask, tokens = (None if tensor is None else tensor.to(device) for tensor in map(tensors.get, ("mask", "tokens")))
        self.decoding, self.seen, self.mask, self.tokens = None, note["seen"], mask, None if tokens is None else (tokens,)
        self.is_written = note.get("is_written", False)
        return self

    def identity(self) -> dict[str, Any]:
        """Return the settings that a text read with this cache depends on."""
        layers = [layer.memory for layer in self.memories]
        recall = self.memories[0].recall
        return {
            "model": identity_of_model(self.model()),
            "dtype": str(self.model().dtype),
            "size": self.sizes,
            "top_k": [memory.top_k for memory in layers],
            "policy": describe_part(layers[0].keys.policy),
            "chunk": self.chunk,
            "heads": [self.memories[0].heads, describe_part(self.budget)],
            "position": self.extension,
            "recall": recall and [recall.block, describe_part(recall.key)],
        }

    def crop(self, tokens_to_remove: int) -> None:
        """Raise UserError: what was evicted cannot come back."""
        raise UserError("an evicting cache cannot forget its newest tokens: assisted generation needs another cache")


def is_text(output: Int[Tensor, "b l"], config: Any) -> Int[Tensor, "b l"]:
    """Return a mask of what ``generate`` returned: 0 for what it writes behind the end of rows that ended before others."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends, padding = ([each for each in ids if each is not None] for ids in (ends, [config.pad_token_id]))
    is_end, closes = (torch.isin(output, output.new_tensor(ids)) for ids in (ends, [*ends, *padding]))
    behind = closes.flip(1).long().cumprod(1).flip(1).bool()  # nothing else follows
    first = behind & ~torch.nn.functional.pad(behind, (1, 0))[:, :-1]
    return (~behind | (first & is_end)).long()


def describe_part(part: Any) -> str:
    """Return an object's class and settings as text, those of the objects in it too."""
    if not hasattr(part, "__dict__"):
        return repr(part)
    settings = ", ".join(f"{name}={describe_part(value)}" for name, value in sorted(vars(part).items()))
    return f"{type(part).__name__}({settings})"


def check_settings(size: Any, top_k: Any, chunk: Any, recall: Any, per_head: Any) -> None:
    """Raise UserError where a setting of a cache is not what its docstring says."""
    lists = {name: value if isinstance(value, list | tuple) else [value] for name, value in (("size", size), ("top_k", top_k))}
    for name, values in lists.items():
        for value in values if name == "size" else [each for each in values if each is not None]:
            check_number(name, value, at_least=1, whole=True)
    if chunk is not None:
        check_number("chunk", chunk, whole=True)
    if recall == 0:
        raise UserError("recall=0: leave it out, and nothing is recalled")
    if recall is not None and not isinstance(recall, Recall):
        check_number("recall", recall, at_least=1, whole=True)
    if not isinstance(per_head, bool | AdaKV):
        raise UserError(f"per_head={short_repr(per_head)}: choose False, True or AdaKV()")


def without_adapter(model: Any) -> Any:
    """Return the model itself; UserError where learned prompts come before its text, which its own layers do not know."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UserError(
            "prompt and prefix tuning put learned tokens before a text, which an EvictingCache would leave out: use LoRA"
        )
    return unwrapped(model)


def layers_of(config: Any) -> int:
    """Return the number of a decoder's layers; that of an encoder that it was trained with may be another."""
    return getattr(config, "decoder_layers", None) or config.num_hidden_layers


def check_attention(model: Any) -> None:
    """Raise UserError where a model's attention cannot be replaced, or is none that memories of entries can stand in for."""
    name, config = type(model).__name__, cast(Any, getattr(model, "config", None))
    if not hasattr(config, "num_hidden_layers"):
        raise UserError(f"{name} is not supported: pass a decoder of text, of a model of text and images its language model")
    if not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS") or config.is_encoder_decoder:
        raise UserError(f"{name} is not supported: its attention is not one that transformers can replace (AttentionInterface)")
    if other := sorted({*(getattr(config, "layer_types", None) or [])} - LAYER_TYPES):
        raise UserError(f"{name} is not supported: it has layers of {', '.join(other)}, which keep no entry for each token")


# A cache of transformers sees keys and values, but no queries, and its attention function sees these, but no cache. Two hooks
# on the model join them: a call with an EvictingCache uses the function below, which finds the cache of the call. All other
# calls are left as they are, but that they wait for those of other threads.
READING: ContextVar[EvictingCache | None] = ContextVar("READING", default=None)


class ModelLock:
    """The right to call a model, which one thread has at a time: a call with a cache replaces the model's attention."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.attention: str | None = None  # the model's own, while it is replaced

    def take(self, stack: Any) -> None:
        """Wait for calls of other threads; a call that was interrupted (Ctrl-C), for which hooks do not run, ends here."""
        if self.thread is threading.current_thread():
            if self.attention is not None and calls_of(self.thread, stack).count(CALL.co_name) > 1:
                raise UserError("the model is called within a call of its own with an EvictingCache: call a copy of it there")
            self.end(stack)
        while not self.lock.acquire(timeout=1):
            with MENDING:
                if self.thread is not None and not calls_of(self.thread, stack):
                    self.end(stack)
        self.thread = threading.current_thread()

    def end(self, stack: Any) -> None:
        """Give the model its own attention back, and the turn to the next thread."""
        if self.attention is not None:
            stack.config._attn_implementation, self.attention = self.attention, None
            READING.set(None)  # or the last cache would live as long as the process
        self.thread = None
        self.lock.release()


TURNS: weakref.WeakKeyDictionary[Any, ModelLock] = weakref.WeakKeyDictionary()
MENDING = threading.Lock()  # for one of those who wait
CALL = torch.nn.Module.__call__.__code__


def calls_of(thread: threading.Thread, stack: Any) -> list[str]:
    """Return the names of torch's own functions in which a thread calls a model: none where it does not; compiled ones vary."""
    frame, names = sys._current_frames().get(thread.ident or 0), []
    while frame is not None:
        if frame.f_code.co_filename == CALL.co_filename and frame.f_locals.get("self") is stack:
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def is_generating() -> bool:
    """Return whether this is called within ``generate`` of transformers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not GENERATION:
        frame = frame.f_back
    return frame is not None


def call_input(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the tokens [b l], or their embeddings [b l d], that the model is called with."""
    return next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)


def begin_call(stack: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Let a call of the model with an EvictingCache read with that."""
    if torch.compiler.is_compiling() and not isinstance(cache_of(kwargs), EvictingCache):
        return None  # a graph of the whole model has no room for turns
    return begin(stack, args, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def begin(stack: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Take the turn, and prepare the cache; ``memory_position``: where it reads, if no mask tells it."""
    turn = TURNS.setdefault(stack, ModelLock())
    turn.take(stack)
    cache = cache_of(kwargs)
    if not isinstance(cache, EvictingCache):
        return None
    layers, of_model = len(cache), layers_of(stack.config)
    if layers != of_model:
        raise UserError(f"the cache has {layers} layers and the model {of_model}: make it with EvictingCache(model, …)")
    if kwargs.get("output_attentions", stack.config.output_attentions):
        raise UserError("an EvictingCache returns no attention weights: call the model without output_attentions")
    tokens = call_input(args, kwargs)
    if not tokens.shape[1]:
        raise UserError(
            "nothing follows what the cache has read: pass generate the text and its question, cache.inputs(question)"
        )
    if stack.training and getattr(stack, "gradient_checkpointing", False):
        raise UserError(
            "a model that saves memory in training (gradient checkpointing) drops its cache: call model.eval() first"
        )
    if cache.inserted:
        raise UserError(
            "the last call with this cache ended before all layers had read: cache.reset(), and read the text again"
        )
    cache.begin_reading(tokens, kwargs.get("attention_mask"), kwargs.pop("memory_position", None))
    if not cache.memories[0].model_rotates:  # at position 0 the model's rotation changes nothing
        kwargs["position_ids"] = torch.zeros_like(cache.position)
    cache.is_called, cache.layer, cache.is_written = True, None, is_generating()
    turn.attention = stack.config._attn_implementation
    stack.config._attn_implementation = IMPLEMENTATION
    READING.set(cache)
    return args, kwargs | {"attention_mask": None}


def end_call(stack: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Give the model its own attention back, also after an error; the cache cannot go on if some layers had read by then."""
    if not torch.compiler.is_compiling() or isinstance(cache_of(kwargs), EvictingCache):
        end(stack, args, kwargs, output)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def end(stack: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Give the turn to the next thread, and let the cache know what it has read."""
    turn, cache = TURNS.get(stack), cache_of(kwargs)
    if turn is None or turn.thread is not threading.current_thread():
        return
    was_replaced = turn.attention is not None
    turn.end(stack)
    if not was_replaced or not isinstance(cache, EvictingCache):
        return
    cache.is_called = False
    if output is not None:  # None: it ended by an error
        missing = len(cache) - len(cache.inserted)
        cache.inserted.clear()
        if missing:
            raise UserError(f"{type(stack).__name__} is not supported: some of its layers have attention of their own")
        cache.seen += cache.position.shape[1]
        tokens = call_input(args, kwargs)
        cache.tokens = None if cache.tokens is None or tokens.is_floating_point() else (*cache.tokens, tokens)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, **settings: Any
) -> tuple[Tensor, None]:
    """Return the values [b l h d] that queries [b h l d] attend to, with the entries [b g l d] inserted first."""
    cache, cap = READING.get(), settings.pop("softcap", None)
    if cache is None:
        raise UserError("another model of the same configuration object reads with an EvictingCache: give each its own")
    if cache.layer != module.layer_idx:
        raise UserError(f"{type(module).__name__} is not supported: its layers do not have entries of their own")
    layer = cache.memories[module.layer_idx]
    check_call(module, layer, {"attention_mask": attention_mask, "queries": query.shape[2], **settings})
    cache.layer = None
    cache.inserted.add(module.layer_idx)
    layer.products.scale, layer.products.cap = scaling, cap

    def own(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return sdpa_attention_forward(module, query, key, value, seen, scaling=scaling, **settings)[0]

    columns = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return cache.attend(module.layer_idx, columns, own if cap is None else None), None


def check_call(module: Any, layer: LayerMemory, settings: dict[str, Any]) -> None:
    """Raise UserError where a layer asks for attention that a memory does not compute."""
    name = type(module).__name__
    if ignored := sorted(key for key, value in settings.items() if isinstance(value, Tensor) and key not in PLACES):
        inputs = ", ".join(ignored)
        raise UserError(f"{name} has attention that depends on {inputs}, which an EvictingCache ignores: not supported")
    if settings.get("is_causal", getattr(module, "is_causal", True)) is False and settings["queries"] > 1:
        raise UserError(f"{name} sees what follows a token: pass a causal language model, of BERT one with is_decoder=True")
    window = settings.get("sliding_window", layer.memory.window)
    if window != layer.memory.window:
        raise UserError(
            f"layer {module.layer_idx} attends to {window} tokens, its configuration says {layer.memory.window}: not supported"
        )
