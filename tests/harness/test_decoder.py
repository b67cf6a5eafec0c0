"""A decoder with an EvictingCache in EleutherAI's harness."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="the extra harness")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from tests.conftest import ROOT
from tests.helpers.decoders import save_decoder, text_of
from tests.helpers.endpoint import serving
from trime.errors import UserError
from trime.harness.decoder import TrimeHF
from trime.text_memory.memory import TextMemory
from trime.text_memory.served import ServedMemory

ALL = [
    {"policy": "FIFO", "memory": 4000},
    {"policy": "TOVA", "memory": 16, "chunk": 4, "recall": 4000, "policy_settings": {"recent": 2}},
    {"policy": "H2O", "memory": 16, "chunk": 4, "recall": 4000, "heads": "apart"},
    {"policy": "SnapKV", "memory": 0.1},
]
LITTLE = [
    {"policy": "Sink", "memory": 16},
    {"policy": "KVzip", "memory": 0.25, "heads": "ada_kv", "whole": True},
    {"policy": "KVzip", "memory": 40, "heads": "ada_kv_across_layers", "whole": True},
    {"policy": "TOVA", "memory": 16, "pyramid": 4},
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a random decoder and its tokenizer."""
    return save_decoder(tmp_path_factory.mktemp("decoder"), contrast=4)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def written(model: HFLM) -> list[str]:
    """Return what a model writes after two texts."""
    settings = {"max_gen_toks": 8, "until": ["\n"]}
    return model.generate_until(requests("generate_until", (text_of(0, 4), settings), (text_of(1, 5), settings)))


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: settings["policy"])
def test_with_room_for_all_it_is_the_model_of_the_harness(settings: dict[str, Any], decoder: Path) -> None:
    """In batches, of padded prompts; likelihoods of texts one by one. Prompts that are too short for SnapKV are kept."""
    plain = HFLM(pretrained=str(decoder), device="cpu", batch_size=2)
    model = TrimeHF(pretrained=str(decoder), device="cpu", batch_size=2, **settings)
    assert written(model) == written(plain)
    if settings["memory"] < 1:  # of likelihoods nobody knows where the prompt ends
        return
    alone = TrimeHF(pretrained=str(decoder), device="cpu", batch_size=1, **settings)
    ((likelihood, is_greedy),) = alone.loglikelihood(requests("loglikelihood", (text_of(2, 5), text_of(3, 1))))
    ((expected, greedy),) = plain.loglikelihood(requests("loglikelihood", (text_of(2, 5), text_of(3, 1))))
    assert likelihood == pytest.approx(expected, rel=1e-4) and is_greedy == greedy


def test_a_share_is_of_each_prompt(decoder: Path) -> None:
    """What a prompt keeps does not depend on what else is in its batch."""
    model = TrimeHF(pretrained=str(decoder), device="cpu", batch_size=2, policy="TOVA", memory=0.25)
    with pytest.raises(UserError, match="add --batch_size 1"):
        written(model)


def test_likelihoods_are_read_text_by_text(decoder: Path) -> None:
    model = TrimeHF(pretrained=str(decoder), device="cpu", batch_size=2, policy="TOVA", memory=16)
    with pytest.raises(UserError, match="add --batch_size 1"):
        model.loglikelihood(requests("loglikelihood", (text_of(2, 5), "a lock"), (text_of(3, 6), "a queue")))
    for settings in ({"memory": 0.5}, {"memory": 16, "pyramid": 4}):  # choices would be judged by different memories
        model = TrimeHF(pretrained=str(decoder), device="cpu", batch_size=1, policy="TOVA", **settings)
        with pytest.raises(UserError, match="is for tasks that write"):
            model.loglikelihood(requests("loglikelihood", (text_of(2, 5), "a lock")))


@pytest.mark.parametrize("settings", LITTLE, ids=lambda settings: settings["policy"])
def test_with_little_room_it_holds_little(settings: dict[str, Any], decoder: Path) -> None:
    model = TrimeHF(pretrained=str(decoder), device="cpu", batch_size=1, **settings)
    prompt = text_of(0, 20)
    (text,) = model.generate_until(requests("generate_until", (prompt, {"max_gen_toks": 8, "until": []})))
    told = model.get_model_info()["prompts"]
    length = len(model.tokenizer(prompt)["input_ids"])
    size = settings["memory"] if settings["memory"] >= 1 else int(length * settings["memory"])
    assert text and told["tokens"] == length
    assert told["bytes held after"] == model.bytes_of(size)
    assert told["bytes held at most"] == model.bytes_of(length - 1 if settings.get("whole") else size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "LSTM", "memory": 9}, "choose a policy of trime"),
        ({"policy": "TextMemory", "memory": 9}, "choose a policy of trime"),
        ({"heads": "many", "memory": 9}, "heads=many: choose from"),
        ({"policy": "SnapKV"}, "are of a memory: add memory=N"),
        ({"policy": "SnapKV", "memory": 1.0}, "memory=1.0 is all of a prompt"),
        ({"policy": "KVzip", "memory": 9}, "add whole=True"),
        ({"heads": "ada_kv", "memory": 9}, "add whole=True"),
        ({"memory": -5}, "memory=-5"),
        ({"memory": 1.5}, "whole number of entries"),
        ({"memory": float("nan")}, "memory=nan"),
        ({"memory": 9, "recall": 0.5}, "recall=0.5"),
        ({"memory": 9, "pyramid": -1}, "pyramid=-1"),
        ({"policy": "TOVA", "memory": 9, "policy_settings": {"windows": 3}}, "TOVA does not take them"),
        ({"memory": 9, "batch_size": "auto"}, "batch_size=auto"),
    ],
)
def test_impossible_arguments(settings: dict[str, Any], message: str, decoder: Path) -> None:
    with pytest.raises(UserError, match=message):
        TrimeHF(pretrained=str(decoder), device="cpu", **settings)


def test_the_command_line_tells_errors_in_a_line(decoder: Path) -> None:
    model = ["--model", "trime-hf", "--model_args", f"pretrained={decoder},policy=LSTM,memory=9"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "trime.harness", "run", *model, "--tasks", "wikitext", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: policy=LSTM: choose")


def test_a_text_memory_in_the_harness_and_over_its_endpoint(decoder: Path, tmp_path: Path) -> None:
    """The harness's client of endpoints gets the same likelihoods as the model in the same process."""
    pytest.importorskip("tenacity", reason="lm_eval[api]")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text(text_of(4, 30))
    settings = {"pretrained": str(decoder), "device": "cpu", "batch_size": 1}
    with pytest.raises(UserError, match="trime memory add"):
        TrimeHF(memory_folder=str(tmp_path / "memory"), **settings)
    plain = HFLM(**settings)
    TextMemory(plain.model, plain.tokenizer, tmp_path / "memory").add(tmp_path / "texts")
    model = TrimeHF(memory_folder=str(tmp_path / "memory"), **settings)
    pairs = [(text_of(4, 3), text_of(5, 1)), (text_of(6, 4), text_of(4, 2))]
    expected = model.loglikelihood(requests("loglikelihood", *pairs))
    alone = plain.loglikelihood(requests("loglikelihood", *pairs))
    assert sum(value for value, _ in expected) > sum(value for value, _ in alone)
    with serving(ServedMemory(model.texts)) as address:
        client = LocalCompletionsAPI(
            base_url=f"{address}/v1/completions", model="decoder", tokenizer=str(decoder), tokenizer_backend="huggingface"
        )
        found = client.loglikelihood(requests("loglikelihood", *pairs))
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-4)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert written(model) == [model.texts.generate(model.tok_encode(text_of(n, 4 + n)), 8).split("\n")[0] for n in (0, 1)]
