"""fairseq's encoder-decoder (transformer_iwslt_de_en), written from its conventions over a state dict, for comparison.

Sources are padded on the left as fairseq pads them; nothing is shared with trime.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PAD, EOS = 1, 2


class Sizes(NamedTuple):
    """Of a model whose two sides are alike."""

    source: int
    target: int
    width: int = 16
    layers: int = 2
    heads: int = 4
    inner: int = 24


def arguments(sizes: Sizes, norm_first: tuple[bool, bool]) -> argparse.Namespace:
    """What a checkpoint's ``args`` hold; ``norm_first`` of encoder and decoder."""
    sides: dict[str, Any] = {}
    for side, first in zip(("encoder", "decoder"), norm_first, strict=True):
        sides |= {f"{side}_layers": sizes.layers, f"{side}_embed_dim": sizes.width, f"{side}_ffn_embed_dim": sizes.inner}
        sides |= {f"{side}_attention_heads": sizes.heads, f"{side}_normalize_before": first, f"{side}_learned_pos": False}
    about = {"arch": "transformer_iwslt_de_en", "task": "translation", "criterion": "trime_mt_loss", "activation_fn": "relu"}
    about |= {"share_decoder_input_output_embed": True, "share_all_embeddings": False, "adaptive_softmax_cutoff": None}
    about |= {"adaptive_input": False, "no_scale_embedding": False, "no_token_positional_embeddings": False}
    about |= {"max_source_positions": 1024, "max_target_positions": 1024, "max_tokens": 4096, "seed": 1}
    return argparse.Namespace(**about, **sides)


def random_weights(sizes: Sizes, norm_first: tuple[bool, bool], seed: int = 0) -> dict[str, Tensor]:
    """A state dict as fairseq 0.10 writes it, markers and the tied output projection included."""
    draw, d = torch.Generator().manual_seed(seed), sizes.width
    weights: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        weights[f"{name}.weight"] = torch.randn(rows, columns, generator=draw) * columns**-0.5
        weights[f"{name}.bias"] = torch.randn(rows, generator=draw) * 0.1

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = 1 + 0.2 * torch.randn(d, generator=draw)
        weights[f"{name}.bias"] = 0.1 * torch.randn(d, generator=draw)

    for side, vocabulary, first in zip(("encoder", "decoder"), sizes[:2], norm_first, strict=True):
        weights[f"{side}.version"] = torch.tensor([3.0])
        table = torch.randn(vocabulary, d, generator=draw) * d**-0.5
        table[PAD] = 0
        weights[f"{side}.embed_tokens.weight"] = table
        weights[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
        for number in range(sizes.layers):
            layer = f"{side}.layers.{number}"
            attentions = ["self_attn", *(["encoder_attn"] if side == "decoder" else [])]
            for attention in attentions:
                for part in ("k", "v", "q", "out"):
                    matrix(f"{layer}.{attention}.{part}_proj", d, d)
                norm(f"{layer}.{attention}_layer_norm")
            matrix(f"{layer}.fc1", sizes.inner, d)
            matrix(f"{layer}.fc2", d, sizes.inner)
            norm(f"{layer}.final_layer_norm")
        if first:
            norm(f"{side}.layer_norm")
    weights["decoder.output_projection.weight"] = weights["decoder.embed_tokens.weight"]
    return weights


def write_checkpoint(path: Path, sizes: Sizes, norm_first: tuple[bool, bool], seed: int = 0, **changed: Any) -> Path:
    """A checkpoint in fairseq's form; ``changed`` replaces parts of its arguments."""
    args = arguments(sizes, norm_first)
    vars(args).update(changed)
    content = {
        "args": args,
        "model": random_weights(sizes, norm_first, seed),
        "optimizer_history": [{"criterion_name": "TrimeMTLoss", "optimizer_name": "FairseqAdam", "num_updates": 7}],
        "extra_state": {"train_iterator": {"epoch": 2}, "val_loss": 1.0},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


class Reference:
    """The forward pass."""

    def __init__(self, weights: dict[str, Tensor], sizes: Sizes, norm_first: tuple[bool, bool]):
        self.weights, self.sizes, self.norm_first = weights, sizes, dict(zip(("encoder", "decoder"), norm_first, strict=True))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def attention(self, name: str, x: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        """``hidden`` [b, l, m]: what a query does not see."""
        size = self.sizes.width // self.sizes.heads
        query = self.linear(f"{name}.q_proj", x) * size**-0.5
        key, value = self.linear(f"{name}.k_proj", memory), self.linear(f"{name}.v_proj", memory)
        parts = []
        for head in range(self.sizes.heads):
            own = slice(head * size, (head + 1) * size)
            scores = query[..., own] @ key[..., own].transpose(1, 2)
            parts.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[..., own])
        return self.linear(f"{name}.out_proj", torch.cat(parts, -1))

    def sublayer(self, side: str, norm: str, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first[side]:
            return x + function(self.norm(norm, x))
        return self.norm(norm, x + function(x))

    def embed(self, side: str, tokens: Tensor) -> Tensor:
        kept = tokens != PAD
        position = kept.cumsum(1) * kept + PAD  # the first token has position 2, padding has 1
        half = self.sizes.width // 2
        angle = position[..., None] * torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
        sinusoid = torch.cat([angle.sin(), angle.cos()], -1) * kept[..., None]
        return math.sqrt(self.sizes.width) * self.weights[f"{side}.embed_tokens.weight"][tokens] + sinusoid

    def encode(self, source: Tensor) -> Tensor:
        """``source`` is padded on the left, its end is the last token."""
        x, hidden = self.embed("encoder", source), (source == PAD)[:, None]
        for number in range(self.sizes.layers):
            x = self.layer("encoder", number, x, hidden)
        return self.norm("encoder.layer_norm", x) if self.norm_first["encoder"] else x

    def layer(self, side: str, number: int, x: Tensor, hidden: Tensor, source: Any = None) -> Tensor:
        name = f"{side}.layers.{number}"

        def attend(x: Tensor) -> Tensor:
            return self.attention(f"{name}.self_attn", x, x, hidden)

        def attend_source(x: Tensor) -> Tensor:
            return self.attention(f"{name}.encoder_attn", x, source[0], (source[1] == PAD)[:, None])

        def feed_forward(x: Tensor) -> Tensor:
            self.read = x  # of the last layer, when all are done: what kNN-MT keys contexts by
            return self.linear(f"{name}.fc2", self.linear(f"{name}.fc1", x).relu())

        x = self.sublayer(side, f"{name}.self_attn_layer_norm", x, attend)
        if source is not None:
            x = self.sublayer(side, f"{name}.encoder_attn_layer_norm", x, attend_source)
        return self.sublayer(side, f"{name}.final_layer_norm", x, feed_forward)

    def decode(self, source: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, the decoder's output and what its last feed-forward block read, for ``previous`` output tokens."""
        encoded = self.encode(source)
        length = previous.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)[None]
        x = self.embed("decoder", previous)
        for number in range(self.sizes.layers):
            x = self.layer("decoder", number, x, future, (encoded, source))
        f = self.norm("decoder.layer_norm", x) if self.norm_first["decoder"] else x
        return f @ self.weights["decoder.output_projection.weight"].T, f, self.read


def padded_left(rows: list[list[int]]) -> Tensor:
    """As fairseq pads sources."""
    width = max(map(len, rows))
    return torch.tensor([[PAD] * (width - len(row)) + row for row in rows])


class Released:
    """A checkpoint, its dictionaries and the text that it was trained on, as the published pipeline leaves them."""

    def __init__(self, folder: Path, form: tuple[bool, bool], seed: int):
        self.folder, self.form, draw = folder, form, random.Random(seed)
        words = {"de": [f"d{n}" for n in range(9)] + ["d@@", "e@@"], "en": [f"w{n}" for n in range(7)] + ["w@@"]}
        self.text: dict[str, dict[str, list[list[str]]]] = {}
        for split, count in (("train", 60), ("valid", 8), ("test", 8)):
            lines = {own: [draw.choices(pieces, k=draw.randint(2, 7)) for _ in range(count)] for own, pieces in words.items()}
            self.text[split] = lines
            for language, sentences in lines.items():
                (folder / f"{split}.{language}").write_text("".join(" ".join(own) + "\n" for own in sentences))
        self.symbols = {}
        for language, sentences in self.text["train"].items():
            counts = Counter(piece for own in sentences for piece in own)
            ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
            (folder / f"dict.{language}.txt").write_text("".join(f"{piece} {count}\n" for piece, count in ranked))
            self.symbols[language] = ["<s>", "<pad>", "</s>", "<unk>", *(piece for piece, _ in ranked)]
        self.sizes = Sizes(len(self.symbols["de"]), len(self.symbols["en"]))
        self.checkpoint = write_checkpoint(folder / "iwslt14" / "checkpoint_best.pt", self.sizes, form, seed)
        self.reference = Reference(random_weights(self.sizes, form, seed), self.sizes, form)

    def ids(self, split: str, language: str) -> list[list[int]]:
        """Every sentence with its end."""
        index = {symbol: number for number, symbol in enumerate(self.symbols[language])}
        return [[*(index[piece] for piece in own), EOS] for own in self.text[split][language]]

    @property
    def overrides(self) -> list[str]:
        dictionaries = f"dictionary=[{self.folder}/dict.de.txt,{self.folder}/dict.en.txt]"
        text = [f"dataset.path={self.folder}", "dataset.cut=true", "dataset.detokenize=false"]
        return [f"checkpoint={self.checkpoint}", dictionaries, *text]

    def greedy(self, source: list[int], mixture: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
        """The likeliest piece at every step: at least one, at most 1.2 n + 10, then the end."""
        tokens = [EOS]
        for step in range(int(1.2 * len(source) + 10) + 1):
            logits, f, _ = self.reference.decode(torch.tensor([source]), torch.tensor([tokens]))
            probability = mixture(logits[0, -1].double(), f[0, -1])
            probability[PAD] = 0
            if step == 0:
                probability[EOS] = 0
            best = EOS if step == int(1.2 * len(source) + 10) else int(probability.argmax())
            if best == EOS:
                break
            tokens.append(best)
        return " ".join(self.symbols["en"][token] for token in tokens[1:]).replace("@@ ", "").removesuffix("@@")

    def datastore(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The decoder's output, in half precision, and the target of every target position of the training text."""
        keys, values = [], []
        for source, target in zip(self.ids("train", "de"), self.ids("train", "en"), strict=True):
            keys.append(self.reference.decode(torch.tensor([source]), torch.tensor([[EOS, *target[:-1]]]))[1][0])
            values.extend(target)
        return torch.cat(keys).half().float(), torch.tensor(values)
