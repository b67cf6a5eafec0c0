"""A decoder from a GGUF file, of one's own or of an installed package, converted to a folder in the transformers format."""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trime.errors import UserError, install_command
from trime.models.pretrained.loading import check_version


def find_gguf(package: str | None) -> Path | None:
    """Return the GGUF file of an installed package, which is not imported; None where it is not installed or holds none."""
    if not package:
        return None
    if "." in package:
        raise UserError(f"model.package={package}: name a package, not a part of one")
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def convert(file: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file to ``folder``, dequantized to float32; UserError where it cannot be read."""
    check_version()
    for package in ("gguf", "accelerate"):
        if not find_spec(package):
            raise UserError(f"reading a GGUF file needs the package {package}: {install_command('smollm2')}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    named: dict[str, Any] = {"gguf_file": file.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **named)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **named)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError, ImportError, struct.error) as error:  # of truncated files
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{file} cannot be read ({reason}): download it or install its package again") from None
    # A model read from GGUF is marked as quantized and refuses to be saved; a plain copy does not.
    config = type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
