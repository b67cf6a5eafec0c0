"""Loads a pretrained model in the transformers format, from a folder or by its name on the hub; nothing is unpickled."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from trime.types import Tensor, UserError

TESTED = ("5.23",)  # versions of transformers whose modules the families were tested with
HEAD = "lm_head.weight"


def load_pretrained(name: str, dtype: str = "float32") -> Any:
    """The model, ready to evaluate; UserError where there is none, or transformers is another version."""
    check_version()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5EncoderModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its loading is told in thousandths of a second

    try:
        config = AutoConfig.from_pretrained(name)
        kinds = {"T5EncoderModel": T5EncoderModel}
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        named = (config.architectures or [""])[0]
        model = kinds.get(named, kind).from_pretrained(name, use_safetensors=True, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise refusal(name, "is no model in the transformers format with safetensors", error) from None
    untie(model, name)
    return model.eval()


def is_encoder_decoder(name: str) -> bool:
    """Whether a model reads with an encoder and writes with a decoder."""
    check_version()
    from transformers import AutoConfig

    try:
        return bool(AutoConfig.from_pretrained(name).is_encoder_decoder)
    except (OSError, ValueError) as error:
        raise refusal(name, "is no model in the transformers format", error) from None


def refusal(name: str, what: str, error: Exception) -> UserError:
    """What a library says in many lines, in one."""
    return UserError(f"model.name={name} {what}: {str(error).strip().splitlines()[0]}")


def check_version() -> None:
    """UserError unless a tested version is installed."""
    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise UserError("transformers is not installed: pip install 'trime[pretrained]'") from None
    if not any(found.startswith(f"{version}.") for version in TESTED):
        wanted = ", ".join(TESTED)
        raise UserError(f"transformers {found} is not supported, for its models were not tested here: install {wanted}.*")


def untie(model: Any, name: str) -> None:
    """Gives an encoder-decoder back the output layer of its own that transformers 5 replaces by the embedding."""
    if getattr(model.config, "scale_decoder_outputs", True):
        return
    weight = stored(name, HEAD)
    if weight is None:
        raise UserError(f"model.name={name} says tie_word_embeddings=false, but holds no {HEAD}")
    model.lm_head.weight = nn.Parameter(weight.to(model.dtype))


def stored(name: str, tensor: str) -> Tensor | None:
    """A tensor from a model's files."""
    from transformers.utils.hub import cached_file

    index = cached_file(name, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    file = json.loads(Path(index).read_text())["weight_map"].get(tensor) if index else "model.safetensors"
    path = cached_file(name, file, _raise_exceptions_for_missing_entries=False) if file else None
    if path is None:
        return None
    with safe_open(path, framework="pt") as weights:
        return weights.get_tensor(tensor) if tensor in weights.keys() else None  # noqa: SIM118 (not a dict)
