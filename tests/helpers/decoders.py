"""A tiny random decoder with byte pairs of its own, and some texts."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from trime.text_memory.memory import WEIGHTS, TextMemory

FAMILIES = [
    *("GPT2", "GPTNeoX", "Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3Text", "Phi3"),
    *("Olmo2", "SmolLM3", "Granite", "Falcon", "StableLm"),
]
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
NOUNS = ["lock", "queue", "thread", "socket", "timer", "server", "client", "buffer"]


PROMPT = "    def lock_queue(self, lock_queue"  # its last word has several tokens


class Streamer:
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_ended = False

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        self.is_ended = True


def text_of(seed: int, lines: int = 60) -> str:
    """Return lines like those of a program, in which names come back."""
    chosen = random.Random(seed)
    names = chosen.sample(NOUNS, 4)
    line = "    def {}_{}(self, {}):\n        return self.{}.{}({})\n"
    return "".join(line.format(*(chosen.choice(names) for _ in range(6))) for _ in range(lines))


def tokenizer_of(folder: Path, begins: bool = False) -> Any:
    """Return a tokenizer of byte pairs; ``begins``: it puts a token before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>", "</s>", "<s>"], initial_alphabet=letters)
    pairs.train_from_iterator([text_of(seed) for seed in range(8)], trainer)
    if begins:
        pairs.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=pairs, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


def sentencepiece_of() -> Any:
    """Return a tokenizer as SentencePiece makes it: a space before every text, and bytes for characters that it lacks."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    pairs.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pairs.decoder = decoders.Sequence(spaces)
    pairs.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    pairs.train_from_iterator([text_of(seed) for seed in range(8)], trainer)
    pairs.pre_tokenizer = None
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=pairs, **names)


def model_of(kind: str, vocabulary: int, **settings: Any) -> Any:
    """Return a random decoder of a family."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": False}
    special = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": vocabulary}
    sizes |= settings
    if kind == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    if kind == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if kind in ("GPTNeoX", "Falcon", "Phi3"):
        sizes.pop("head_dim")
    config = getattr(transformers, f"{kind}Config")(**sizes, **special)
    return getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))(config).eval()


def add_contrast(model: Any, factor: float = 4) -> Any:
    """Multiply the matrices of a model, whose attention is else nearly uniform, as that of small weights is."""
    for weight in model.parameters():
        weight.data *= factor if weight.dim() > 1 else 1
    return model


def save_decoder(folder: Path, contrast: float = 1) -> Path:
    """Save a random decoder with its tokenizer, and return the folder."""
    tokenizer = tokenizer_of(folder)
    for part in (tokenizer, add_contrast(model_of("Llama", len(tokenizer), max_position_embeddings=4096), contrast)):
        part.save_pretrained(folder / "decoder")
    return folder / "decoder"


def write_texts(folder: Path, seeds: range) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (folder / f"{seed}.py").write_text(text_of(seed))
    return folder


def take_weights(memory: TextMemory, fitted: TextMemory) -> None:
    """Give a memory the weights that were fitted with another one: to fit takes longer than all else in a test."""
    shutil.copy(fitted.folder / WEIGHTS, memory.folder)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def model(tokenizer: Any) -> Any:
    return model_of("Llama", len(tokenizer))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts to store in ``stored``, and others in ``held_out`` and ``test``."""
    folder = tmp_path_factory.mktemp("texts")
    for name, seeds in (("stored", range(4)), ("held_out", range(10, 14)), ("test", range(20, 22))):
        write_texts(folder / name, seeds)
    return folder


@pytest.fixture(scope="session")
def fitted(model: Any, tokenizer: Any, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> TextMemory:
    """A memory with weights, which no test changes."""
    memory = TextMemory(model, tokenizer, tmp_path_factory.mktemp("memories") / "fitted", window=100, overlap=28)
    memory.add(texts / "stored")
    memory.fit(texts / "held_out")
    return memory
