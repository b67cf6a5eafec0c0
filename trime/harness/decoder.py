"""A decoder of transformers with an EvictingCache or a text memory for EleutherAI's evaluation harness: ``--model trime-hf``.

``--model_args pretrained=DIR,policy=SnapKV,memory=512,recall=512`` or ``pretrained=DIR,memory_folder=DIR``. All else is as for
the harness's own model ``hf``: chat templates, batches, ``generate_until`` and ``loglikelihood``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import trime
from trime.common.checks import check_number, short_repr
from trime.common.pretrained import cache_name
from trime.common.types import Float, Int, Tensor
from trime.errors import UserError
from trime.kv.budgets import AdaKV
from trime.kv.budgets import pyramid as sizes_of_pyramid
from trime.kv.evicting_cache import EvictingCache
from trime.kv.eviction.base import EvictionPolicy
from trime.kv.eviction.kvzip import KVzip, repeats
from trime.kv.rope import key_heads
from trime.text_memory.memory import TextMemory
from trime.text_memory.store import MANIFEST

HEADS = {"together": False, "apart": True, "ada_kv": AdaKV(), "ada_kv_across_layers": AdaKV(across_layers=True)}


@register_model("trime-hf")
class TrimeHF(HFLM):  # type: ignore[misc]
    """The harness's ``hf``, whose layers hold ``memory`` entries of a prompt; what it writes is held beside them.

    ``memory``: entries of each layer, or below 1 a share of the prompt (0: all); a prompt that is too short for the policy
    to choose is kept. ``policy``: a class of ``trime``, with ``policy_settings``. ``recall``: entries that come back of what
    was evicted. ``heads``: together, apart, ada_kv or ada_kv_across_layers. ``pyramid``: beta of PyramidKV (0: layers are
    alike). ``whole``: everything is kept until a prompt ends, as ``KVzip`` and ada_kv ask for. ``chunk`` and ``position`` are
    those of ``EvictingCache``. ``memory_folder``: that of a ``TextMemory`` of this model, which takes part in each prediction.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str | None = None,
        memory: float = 0,
        recall: int = 0,
        heads: str = "together",
        pyramid: float = 0,
        whole: bool = False,
        chunk: int | None = None,
        position: Any = None,
        policy_settings: dict[str, Any] | None = None,
        memory_folder: str | None = None,
        **settings: Any,
    ):
        check_number("memory", memory, at_least=0)
        if memory > 1 and memory != int(memory):
            raise UserError(f"memory={memory}: name a whole number of entries, or a share of a prompt below 1")
        if memory == 1 and isinstance(memory, float):
            raise UserError("memory=1.0 is all of a prompt: leave memory out, or name a number of entries")
        if not memory and (policy or recall or pyramid or whole or heads != "together"):
            raise UserError(
                "policy, recall, heads, pyramid and whole are of a memory: add memory=N, or a share such as memory=0.25"
            )
        kind = getattr(trime, policy or "FIFO", None)
        if not isinstance(kind, type) or not issubclass(kind, EvictionPolicy):
            raise UserError(f"policy={policy}: choose a policy of trime, such as FIFO, SnapKV, H2O or KVzip")
        if heads not in HEADS:
            raise UserError(f"heads={heads}: choose from {', '.join(HEADS)}")
        if not whole and (kind is KVzip or heads.startswith("ada_kv")):
            raise UserError(f"policy={policy}, heads={heads}: prompts must be read as a whole first: add whole=True")
        check_number("pyramid", pyramid, at_least=0)
        check_number("recall", recall, at_least=0, whole=True)
        try:
            self.policy = kind(**policy_settings or {})
        except TypeError as error:
            raise UserError(
                f"policy_settings={short_repr(policy_settings)}: {kind.__name__} does not take them ({error})"
            ) from None
        if memory and str(settings.get("batch_size")).startswith("auto"):
            raise UserError("batch_size=auto tries sizes without a memory: name a number, such as --batch_size 1")
        if memory_folder is not None and memory:
            raise UserError("memory_folder is a memory of texts, memory=N one of a prompt: choose one of them")
        if memory_folder is not None and not (Path(memory_folder) / MANIFEST).is_file():
            raise UserError(f"memory_folder={memory_folder} holds no text memory: trime memory add makes one")
        super().__init__(pretrained=pretrained, **settings)
        self.texts = TextMemory(self.model, self.tokenizer, memory_folder) if memory_folder else None
        self.memory, self.whole, self.beta = memory, whole, pyramid
        self.settings = {"chunk": chunk, "recall": recall or None, "per_head": HEADS[heads], "position": position}
        self.prompts = {"tokens": 0, "seconds": 0.0, "bytes held at most": 0, "bytes held after": 0}

    def cache_for(self, tokens: int) -> EvictingCache | None:
        """Return a cache for prompts of this length; None: the model's own holds all."""
        size = int(self.memory if self.memory >= 1 else max(1, self.memory * tokens))
        if not self.memory or size >= tokens - 1:
            return None
        try:
            self.policy.check_size(size)
        except UserError:  # of a short prompt, where that is its share
            if self.memory >= 1:
                raise
            return None
        sizes = sizes_of_pyramid(size, self.model.config.num_hidden_layers, self.beta, tokens) if self.beta else size
        return EvictingCache(self.model, sizes, self.policy, **self.settings)

    def _model_call(self, inps: Int[Tensor, "b l"], **settings: Any) -> Float[Tensor, "b l v"]:
        if 0 < self.memory < 1 or self.beta:  # a question and a choice are one text here
            raise UserError("a share of a prompt, or a pyramid, is for tasks that write: name a number of entries, memory=N")
        if self.texts is not None:
            if len(inps) > 1:
                raise UserError("likelihoods with a text memory are read text by text: add --batch_size 1")
            # The token behind the last one is not known, and what is predicted there is not asked for.
            tokens = np.append(inps[0].cpu().numpy(), 0)
            rows = [read.prediction.log_probability for read in self.texts.read(tokens)]
            return torch.stack(rows)[None].to(inps.device)
        if (cache := self.cache_for(inps.shape[1])) is None:
            return super()._model_call(inps, **settings)
        if self.whole:
            raise UserError("whole=True is for tasks that write: what follows a prompt would be part of it")
        if len(inps) > 1:  # they are padded on the right, without a word where: padding would evict
            raise UserError("likelihoods with a memory are read text by text: add --batch_size 1")
        with torch.no_grad():
            return self.model(inps, **{cache_name(): cache}).logits

    def _model_generate(self, context: Int[Tensor, "b l"], max_length: int, stop: list[str], **settings: Any) -> Tensor:
        started, cache = time.perf_counter(), self.cache_for(context.shape[1])
        if cache is not None:
            if (self.memory < 1 or self.beta) and not settings["attention_mask"].all():
                raise UserError("a share of a prompt, or a pyramid, is of prompts of one length: add --batch_size 1")
            self.read(cache, context[:, :-1], settings["attention_mask"][:, :-1])
            cache.extend(max_length - context.shape[1] + 1)
            settings[cache_name()] = cache
        if self.texts is not None:
            settings["custom_generate"] = self.texts.drafting()
        written: Tensor = super()._model_generate(context, max_length, stop, **settings)
        self.prompts["tokens"] += context.numel()
        self.prompts["seconds"] += time.perf_counter() - started
        return written

    @torch.no_grad()
    def read(self, cache: EvictingCache, prompts: Int[Tensor, "b l"], mask: Int[Tensor, "b l"]) -> None:
        """Let the model read prompts, and note the memory that they take, for a row."""
        if self.whole:
            if not mask.all():
                raise UserError("whole=True is for prompts of one length: add --batch_size 1")
            questions = repeats(self.tokenizer, prompts) if isinstance(self.policy, KVzip) else None
            cache.read(self.model, prompts, questions, whole=True)
        else:
            places = (mask.cumsum(1) - 1).clamp(min=0)
            self.model(prompts, attention_mask=mask, position_ids=places, logits_to_keep=1, **{cache_name(): cache})
        held = cache.bytes // len(prompts)
        self.prompts["bytes held after"] = max(self.prompts["bytes held after"], held)
        most = held if not self.whole else self.bytes_of(prompts.shape[1])
        self.prompts["bytes held at most"] = max(self.prompts["bytes held at most"], most)

    def bytes_of(self, tokens: int) -> int:
        """Return the size of the keys and values of a text."""
        config = self.model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * tokens * config.num_hidden_layers * key_heads(config) * width * self.model.dtype.itemsize

    def get_model_info(self) -> dict[str, Any]:
        """Return the facts that the harness keeps with results, the cost of prompts among them."""
        return {**super().get_model_info(), "prompts": self.prompts}
