"""Loading of pretrained models in the transformers format, from a folder or by name from the hub; nothing is unpickled."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import nn

from trime.common.types import Tensor
from trime.errors import UserError, install_command

OLDEST = "4.57"  # version of transformers
ATTENTION = "5.18"  # version from which attention is replaced as it is here; earlier ones hand it other arguments
CACHES = ("cache", "past_key_values")  # names of a model's cache: since 5.24, and before
HEAD = "lm_head.weight"
SAMPLED = 64  # values of each weight that tell models apart


def load_pretrained(name: str, dtype: str = "float32", oldest: str = ATTENTION) -> Any:
    """Return the model in evaluation mode; UserError where there is none, or transformers is older than ``oldest``."""
    check_version(oldest)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5EncoderModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # loading takes milliseconds

    try:
        config = AutoConfig.from_pretrained(name)
        architecture = (config.architectures or [""])[0]
        default = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model_class = T5EncoderModel if architecture == "T5EncoderModel" else default
        model = model_class.from_pretrained(name, use_safetensors=True, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise load_error(name, "is not a model in the transformers format with safetensors", error) from None
    if not getattr(model.config, "scale_decoder_outputs", True):  # transformers 5 ties this output layer to the embedding
        weight = read_tensor(name, HEAD)
        if weight is None:
            raise UserError(f"model.name={name} says tie_word_embeddings=false, but holds no {HEAD}")
        model.lm_head.weight = nn.Parameter(weight.to(model.dtype))
    return model.eval()


def is_encoder_decoder(name: str) -> bool:
    """Return whether a model is an encoder-decoder; UserError where there is no model of that name."""
    check_version()
    from transformers import AutoConfig

    try:
        return bool(AutoConfig.from_pretrained(name).is_encoder_decoder)
    except (OSError, ValueError) as error:
        raise load_error(name, "is not a model in the transformers format", error) from None


def load_error(name: str, what: str, error: Exception) -> UserError:
    """Return a UserError with the first line of a library's message, or the advice that mends it."""
    if name.lower().endswith(".gguf") or any(Path(name).expanduser().glob("*.gguf")):
        reason = "transformers reads GGUF files by gguf_file=; save the model as a folder, as docs/pretrained.md shows"
    else:
        reason = str(error).strip().splitlines()[0]
    return UserError(f"model.name={name} {what}: {reason}")


def check_version(oldest: str = OLDEST) -> None:
    """Raise UserError unless transformers is installed, in a version that is known to work or newer."""
    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise UserError(f"transformers is not installed: {install_command('decoder')}") from None
    if [int(part) for part in installed.split(".")[:2]] < [int(part) for part in oldest.split(".")]:
        raise UserError(f"transformers {installed} is too old: install transformers>={oldest}")


@cache
def cache_name() -> str:
    """Return the name of a model's cache among its inputs: it was ``past_key_values`` before transformers 5.24."""
    from transformers import GenerationMixin

    known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return next(name for name in CACHES if name in known)


def takes_back(kept: Any) -> bool:
    """Return whether a cache can forget the last tokens that it has read."""
    from transformers import DynamicCache

    if type(kept) is not DynamicCache:  # those that derive from it quantise or move what they keep
        return False
    # Layers with a window take tokens back where they can record them, which transformers 4 has not.
    return hasattr(kept, "activate_past_recording") or not any(getattr(layer, "is_sliding", False) for layer in kept.layers)


def cache_of(inputs: dict[str, Any]) -> Any:
    """Return the cache among a model's inputs, whichever name it has in this version; None where there is none."""
    return next((inputs[name] for name in CACHES if inputs.get(name) is not None), None)


def model_class(model: Any, supported: Collection[str]) -> str:
    """Return the name of a model's class; UserError where it is not among those that are supported."""
    name = type(model).__name__
    if name not in supported:
        raise UserError(f"{name} is not supported: choose one of {', '.join(supported)}")
    return name


def unwrapped(model: Any) -> Any:
    """Return the model that torch.compile or a PeftModel wraps, whose layers hold the updates already; any other as it is."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if type(model).__name__.startswith("Peft") else model


def device_of(model: Any) -> torch.device:
    """Return the device of a model's inputs, also where accelerate keeps its weights elsewhere."""
    hook = getattr(unwrapped(model).get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return torch.device(model.device if device is None else device)


def weights_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights by name, one after another; accelerate's from main memory or disk, quantised ones as floats."""
    for name, tensor in model.state_dict().items():
        for number, part in enumerate(tensor if isinstance(tensor, tuple) else [tensor]):
            if not isinstance(part, torch.Tensor):
                continue  # such as the type of a quantised layer
            if part.device.type == "meta":
                from accelerate.utils import align_module_device

                module, _, leaf = name.rpartition(".")
                with align_module_device(model.get_submodule(module)):
                    part = getattr(model.get_submodule(module), leaf).clone()
            yield f"{name} {number}" if number else name, part.dequantize() if part.is_quantized else part


def positions_of(config: Any) -> int:
    """Return the number of positions that a model was made for; 2**31 where its configuration does not bound them."""
    return getattr(config, "max_position_embeddings", None) or 2**31


def empty_cache(model: Any) -> Any:
    """Return the cache of keys and values that transformers would make for a model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def identity_of_model(model: Any) -> str:
    """Return the identity of this model among those of its class: weights, settings of rotation and windows, adapters in use.

    It does not depend on the type of the weights.
    """
    weights, model = xxhash.xxh3_64(), getattr(model, "_orig_mod", model)
    config = unwrapped(model).config
    settings = {name: getattr(config, name, None) for name in ("rope_parameters", "sliding_window", "layer_types")}
    weights.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in weights_of(model):
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].to("cpu", torch.bfloat16)
        weights.update(f"{name} {tuple(tensor.shape)}".encode() + sample.view(torch.int16).numpy().tobytes())
    # Models of transformers have a method of that name.
    adapted = [layer for layer in model.modules() if getattr(layer, "disable_adapters", None) is False]
    adapters = sorted({name for layer in adapted for name in layer.active_adapters})
    return " ".join([type(unwrapped(model)).__name__, weights.hexdigest(), *adapters])


def read_tensor(name: str, tensor: str) -> Tensor | None:
    """Return a tensor from a model's files; None where they do not hold it."""
    from transformers.utils.hub import cached_file

    index = cached_file(name, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    file = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].get(tensor) if index else "model.safetensors"
    path = cached_file(name, file, _raise_exceptions_for_missing_entries=False) if file else None
    if path is None:
        return None
    with safe_open(path, framework="pt") as weights:
        return weights.get_tensor(tensor) if tensor in weights.keys() else None  # noqa: SIM118 (not a dict)
