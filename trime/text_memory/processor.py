"""Memory in ``generate``: a logits processor, and prompts that end within a token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from trime.common.types import Float, Int, Tensor
from trime.errors import UserError
from trime.scoring.mixtures.adaptive import Adaptive
from trime.text_memory.decoder import ANCHOR, Decoder
from trime.text_memory.experts import Experts
from trime.text_memory.mixing import predict


class MemoryProcessor:
    """A logits processor: returns log-probabilities of model and memories together for each row of a batch or beam.

    It uses what is stored when it is made. Tokens that other processors exclude stay excluded. ``healed``: for each prompt,
    the text that its continuation must begin with.
    """

    def __init__(
        self,
        decoder: Decoder,
        scaled: Callable[[Tensor], Tensor],
        experts: Experts,
        mixture: Adaptive,
        healed: list[str] | None = None,
    ):
        self.decoder, self.scaled, self.experts, self.mixture = decoder, scaled, experts, mixture
        self.healed, self.begin = healed, 0
        self.continued: Int[Tensor, "b l"] | None = None  # the rows that were last continued

    @torch.no_grad()
    def __call__(self, input_ids: Int[Tensor, "b l"], scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        queries = self.scaled(self.last_contexts(input_ids))
        log_probability = scores.float().log_softmax(-1)
        rows = []
        for row, tokens in enumerate(input_ids.cpu().numpy().astype(np.int64)):
            before = self.decoder.without_padding(tokens)
            rows.append(predict(self.experts, self.mixture, before, queries[row : row + 1], log_probability[row : row + 1]))
        result = torch.stack([each.log_probability for each in rows]).masked_fill(scores == -torch.inf, -torch.inf)
        return result if self.healed is None else self.heal(input_ids, result)

    def last_contexts(self, input_ids: Int[Tensor, "b l"]) -> Float[Tensor, "b d"]:
        """Return the contexts that the output layer has just read; UserError where they are not those of these rows."""
        (last, calls), before, self.continued = self.decoder.take_last(), self.continued, input_ids
        goes_on = before is not None and torch.equal(before, input_ids[:, :-1])  # a prompt may be read in parts
        if goes_on and calls > 1:
            raise UserError(
                "the model is called more than once for a token: leave out guidance_scale and such processors, and make a new "
                "memory.processor() for each generate"
            )
        if last is None or len(last) != len(input_ids):
            raise UserError("the memory's own model must generate, one token at a time: by sampling, greedily or with beams")
        context = last[:, -1].float()
        if not context.isfinite().all():
            raise UserError(f"the model's contexts hold NaN or infinity in {last.dtype}: load it in bfloat16 or float32")
        return context

    def heal(self, input_ids: Int[Tensor, "b l"], scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        """Exclude tokens that do not continue the text which each row's continuation must begin with.

        Left are those that hold all of it, and more, and those with which the tokenizer would begin it.
        """
        assert self.healed is not None
        self.begin = self.begin or input_ids.shape[1]
        repeats = len(scores) // len(self.healed)  # beams, or several continuations of a prompt
        for row, tokens in enumerate(input_ids[:, self.begin :].tolist()):
            missing = self.healed[row // repeats]
            written = self.decoder.text_of(tokens)
            if len(written) < len(missing):
                rest = missing[len(written) :]
                # Any other beginning of the rest would leave letters that neither the model nor a memory has seen so cut. What
                # follows blanks may take the last of them, and is no blank: an indentation stays as deep as it is.
                begun = self.decoder.inside(rest + ANCHOR if rest.isspace() else rest)[0]
                allowed = [begun] if rest.startswith(self.decoder.text_of([begun])) else []
                allowed += self.decoder.pieces.that_begin_with(rest)
                if not allowed:
                    continue
                excluded = torch.ones(scores.shape[1], dtype=torch.bool, device=scores.device)
                excluded[torch.tensor(allowed, device=scores.device)] = False
                scores[row].masked_fill_(excluded, -torch.inf)
        return scores
