"""Decoding with drafts: a call of the model reads several drafted tokens, and the text is the one that it would have been.

At each place the next token is chosen as ``generate`` would choose it: by the same processors, from the same distribution. If
it is the drafted one, the place behind it counts too; the first other token ends the draft, and what was read behind it is
forgotten (speculative decoding, Leviathan et al. 2023, with a draft that is certain of itself).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from functools import cache
from typing import Any

import torch

from trime.common.pretrained import CACHES, cache_name, cache_of, takes_back
from trime.common.types import Float, Int, Tensor
from trime.errors import UserError
from trime.text_memory.decoder import Decoder
from trime.text_memory.drafts import Continuation, Drafted, Drafts
from trime.text_memory.processor import MemoryProcessor, Place

log = logging.getLogger(__name__)

# Inputs of a model that follow from the tokens; with others, only ``generate`` knows what comes next.
KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "token_type_ids", *CACHES}

MODES = {"greedy_search", "sample", "beam_search", "beam_sample"}


@cache
def say_without(why: str) -> None:
    log.warning("without drafts, because of %s", why)


class Drafting:
    """A ``custom_generate`` of transformers for ``decoder``'s model; ``processor`` mixes the memories in, unless it is None."""

    def __init__(self, decoder: Decoder, drafts: Drafts, processor: MemoryProcessor | None, streamer: Any = None):
        self.decoder, self.drafts, self.processor, self.streamer = decoder, drafts, processor, streamer
        self.calls = self.tokens = 0  # of the model, and written; of all texts
        # Drafted tokens by their source, their place in the draft, and whether they were right.
        self.tried = Counter[tuple[str, int, bool]]()

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Int[Tensor, "b l"],
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> Any:
        processors = self.with_memory(logits_processor)
        if why := hindrance(model, input_ids, generation_config, inputs):
            say_without(why)
            method = model._beam_search if generation_config.num_beams > 1 else model._sample
            rest = {"stopping_criteria": stopping_criteria, "generation_config": generation_config, "streamer": self.streamer}
            return method(input_ids, logits_processor=processors, **rest, **inputs)
        kept = cache_of(inputs)
        # Padding on the left is for the processors alone: the model reads a single row without it.
        padding = 0 if inputs.get("attention_mask") is None else int((inputs["attention_mask"] == 0).sum())
        written, ends, first = input_ids, False, True
        while not ends:
            room = 0 if first else generation_config.max_length - written.shape[1] - 1
            draft = self.drafts.after(self.decoder.without_padding(written[0].cpu().numpy()), room) if room else []
            begin = time.perf_counter()
            unread = written[:, padding + kept.get_seq_length() :]
            drafted = torch.tensor([[token.token for token in draft]], dtype=unread.dtype, device=unread.device)
            queries, logits = self.read(model, torch.cat([unread, drafted], 1), kept, len(draft) + 1)
            if not first:
                self.drafts.pace.took(len(draft), time.perf_counter() - begin)
            self.calls, length = self.calls + 1, written.shape[1]
            for number, own in enumerate(logits.unbind(1)):
                if self.processor is not None:
                    # Neighbours are searched when a place is reached: behind a wrong token they would be for nothing.
                    self.processor.place = Place(queries[number : number + 1], own)
                token, scores = choose(written, own, processors, generation_config.do_sample)
                written = torch.cat([written, token[None]], 1)
                if self.streamer is not None:
                    self.streamer.put(token.cpu())
                ends = bool(stopping_criteria(written, scores).all())
                if ends or (number < len(draft) and int(token) != draft[number].token):
                    break
            near = self.processor and self.processor.found
            self.drafts.near = Continuation.of(self.drafts.segments, near, int(token)) if near else None
            self.note(draft, written[0, length:].tolist())
            roll_back(kept, kept.get_seq_length() + padding + 1 - written.shape[1], first)
            first = False
        if self.streamer is not None:
            self.streamer.end()
        return written

    def note(self, draft: list[Drafted], written: list[int]) -> None:
        """Note what came true of a draft."""
        self.tokens += len(written)
        right = [one.token == token for one, token in zip(draft, written, strict=False)]
        self.drafts.pace.came_true(draft, right)
        self.tried.update((one.source, place, place < len(right) and right[place]) for place, one in enumerate(draft))

    @property
    def sources(self) -> dict[str, tuple[int, int]]:
        """How many tokens each source drafted, and how many of these were right."""
        sums = {source: Counter[bool]() for source, _, _ in self.tried}
        for (source, _, is_right), count in self.tried.items():
            sums[source][is_right] += count
        return {source: (of.total(), of[True]) for source, of in sums.items()}

    def with_memory(self, processors: Any) -> Any:
        """Return processors among which is that of the memory: before those that change a distribution for sampling."""
        if self.processor is None or self.processor in processors:
            return processors
        warpers = [number for number, each in enumerate(processors) if type(each).__name__.endswith("Warper")]
        at = min(warpers, default=len(processors))
        return type(processors)([*processors[:at], self.processor, *processors[at:]])

    def read(
        self, model: Any, tokens: Int[Tensor, "1 l"], kept: Any, count: int
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, "1 n v"]]:
        """Read tokens behind those that are kept; return what is searched by at the last ``count`` places, and their logits."""
        with self.decoder.with_logits_of(count):
            logits = model(input_ids=tokens, use_cache=True, **{cache_name(): kept}).logits[:, -count:]
        if self.processor is None:
            return logits[0, :, :0], logits
        last, _ = self.decoder.take_last()
        if last is None:
            raise UserError("the memory's own model must generate: call its generate, or the memory's")
        return self.processor.scaled(self.decoder.finite(last[0, -count:].float())), logits


def choose(
    written: Int[Tensor, "1 l"], own: Float[Tensor, "1 v"], processors: Any, sampled: bool
) -> tuple[Int[Tensor, " 1"], Float[Tensor, "1 v"]]:
    """Return the next token as ``generate`` chooses it, given the model's own logits, and the scores that it was chosen by."""
    scores = processors(written, own.to(copy=True, dtype=torch.float32, device=written.device))
    return torch.multinomial(scores.softmax(-1), 1)[:, 0] if sampled else scores.argmax(-1), scores


def hindrance(model: Any, input_ids: Int[Tensor, "b l"], settings: Any, inputs: dict[str, Any]) -> str | None:
    """Return why nothing can be drafted for a call of ``generate``; None where drafts are possible."""
    if settings.prompt_lookup_num_tokens:
        raise UserError("the memory drafts by itself: leave out prompt_lookup_num_tokens")
    if (mode := settings.get_generation_mode().value) not in MODES:
        raise UserError(f"a memory continues greedily, by sampling or with beams, and not by {mode.replace('_', ' ')}")
    if settings.num_beams > 1:
        return "beams"
    if len(input_ids) > 1:
        return "several rows"
    if settings.return_dict_in_generate:
        return "return_dict_in_generate"
    if (kept := cache_of(inputs)) is None:
        return "use_cache=False"
    if not takes_back(kept):
        return f"a cache that takes nothing back ({type(kept).__name__})"
    if kept.get_seq_length() >= input_ids.shape[1]:
        return "a cache whose tokens are not among those given"
    if "prepare_inputs_for_generation" in vars(model):
        return "a prompt that was learned"
    if others := sorted(name for name, value in inputs.items() if value is not None and name not in KNOWN):
        return f"inputs of the model that only generate knows ({', '.join(others)})"
    mask = inputs.get("attention_mask")
    if mask is None or bool(mask.all()):
        return None
    return "a mask with gaps" if kept.get_seq_length() or bool((mask.long().diff() < 0).any()) else None


def roll_back(kept: Any, count: int, first: bool) -> None:
    """Forget the last ``count`` tokens of a cache; after the ``first`` call, which reads the prompt, it begins to record."""
    records = hasattr(kept, "activate_past_recording")
    if first and records:
        kept.activate_past_recording()  # layers with a window or a state would keep no more than they need
    elif count or records:
        kept.crop(-count)
