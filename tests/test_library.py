"""The library: names are imported lazily and without heavy packages, and examples run."""

from __future__ import annotations

import json
import math
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import trime
from tests.conftest import NO_PICTURES, ROOT
from tests.helpers.decoders import save_decoder, write_texts
from tests.helpers.pretrained import save_model
from tests.helpers.runs import SharedRun
from trime.common.io import write_tensors
from trime.errors import UserError

NOT_NEEDED = ("hydra", "omegaconf", "pytorch_lightning", "wandb", "matplotlib", "transformers", "faiss")


README = (ROOT / "README.md").read_text()


def example(name: str, *words: str) -> str:
    """Run an example and return its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_names_need_no_hydra_lightning_wandb_or_matplotlib() -> None:
    names = [name for name in trime.__all__ if name not in ("load", "EvictingCache")]
    code = (
        "import sys\n"
        f"for name in {NOT_NEEDED}: sys.modules[name] = None\n"
        "import trime\nassert 'torch' not in sys.modules\n"
        f"for name in {names}: assert getattr(trime, name) is getattr(trime, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pytest.importorskip("transformers", reason="the extra decoder")  # which looks for some of them, but imports none
    code = f"import sys, trime\ntrime.EvictingCache\nassert not {{*{NOT_NEEDED}}} - {{'transformers'}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute nothing"):
        _ = trime.nothing  # type: ignore[attr-defined]
    assert {*trime.DEFINED_IN} == {*trime.__all__} <= {*dir(trime)}


@pytest.mark.slow
def test_names_on_the_pages_of_the_api_exist() -> None:
    for page in ("api.md", "parts.md"):
        named = re.findall(r"^::: ([\w.]+)", (ROOT / "docs" / page).read_text(), re.M)
        assert len(named) > 20 and all(pkgutil.resolve_name(name) for name in named)


def wheel_in(folder: Path) -> Path:
    """Build the wheel from a copy of the sources, and return it."""
    source = folder / "source"
    source.mkdir()
    for name in ("trime", "conf", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(folder), str(source)], check=True, capture_output=True)
    shutil.rmtree(source)
    (wheel,) = folder.glob("trime-*.whl")
    return wheel


def test_the_wheel_holds_the_configuration_and_the_command(tmp_path: Path) -> None:
    """Without a checkout, the command composes and checks an experiment, and records itself as the command trime."""
    with zipfile.ZipFile(wheel_in(tmp_path)) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "import sys; from trime.lab.command_line import main; from trime.lab.provenance import commit\n"
        "sys.argv = ['trime', 'experiment=trime', 'size=tiny', 'stages=[prepare]', 'dataset.modules=20']\n"
        f"assert commit() is None and main() == 0 and main.__code__.co_filename.startswith('{tmp_path}')"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    names = (tmp_path / "installed" / f"trime-{trime.__version__}.dist-info" / "entry_points.txt").read_text()
    assert "trime = trime.lab.main:main" in names and (tmp_path / "data" / "prepared").is_dir()


@pytest.mark.slow
def test_the_readme_runs_in_an_empty_environment(tmp_path: Path) -> None:
    """The wheel in an environment of its own: a memory without the lab's packages and FAISS, and then the lab."""
    wheel, python, here = wheel_in(tmp_path), tmp_path / "env" / "bin" / "python", tmp_path / "empty"
    here.mkdir()

    def run(*words: str, fails: bool = False) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(words, cwd=here, capture_output=True, text=True, env=environment, timeout=1200)
        assert (done.returncode != 0) == fails, done.stdout[-1500:] + done.stderr[-1500:]
        return done.stdout + done.stderr

    def install(extras: str) -> None:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "requirements.txt")]
        run(*pip, f"torch=={torch.__version__.partition('+')[0]}", f"trime[{extras}] @ file://{wheel}")

    run(sys.executable, "-m", "venv", str(tmp_path / "env"))
    install("decoder")
    command, decoder = str(python.with_name("trime")), save_decoder(tmp_path)
    write_texts(here / "docs", range(12))
    write_texts(here / "src", range(12, 14))
    lab, own, small = re.findall(r"```(?:bash|python)\n(.*?)```", README.partition("## What do you have?")[2], re.S)[:3]
    given = (
        "import torch, trime\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(decoder)!r})\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(decoder)!r}).eval()\n"
        "inputs = tokenizer('    def lock', return_tensors='pt', return_token_type_ids=False)\n"
    )
    unneeded = "\nimport sys\nassert not {'hydra', 'pytorch_lightning', 'wandb', 'faiss'} & {*sys.modules}\n"
    run(str(python), "-c", given + own + small + unneeded)
    options = ["--model", str(decoder), "--memory", "my-memory"]
    assert "return" in run(command, "memory", "generate", *options, "    def lock", "--max-new-tokens", "30")
    assert "pip install" in run(command, "experiment=trime", fails=True)
    install("decoder,lab,cpu")
    # The first snippet, in small.
    words = lab.replace("\\\n", " ").replace("DIR", "docs").split()[2:]
    words = [word.replace("vanilla,knn_lm_cache,trime_ext", "vanilla,trime").replace("0,1,2", "0") for word in words]
    tiny = ["size=tiny", "train.updates=2", "vocabulary.max_size=300", "report.samples.passages=0", *NO_PICTURES]
    assert "perplexity" in run(command, *words, *tiny, "logger=none")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its cells one after the other as they are printed, but for two updates and no pictures of the run."""
    notebook = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    small = ", ".join(repr(word) for word in ["size=tiny", "train.updates=2", "report.samples.passages=0", *NO_PICTURES])
    code = "\n".join(cells).replace('"size=tiny"', small)
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-1500:]
    (written,) = tmp_path.glob("*/outputs/runs/*/*/results.json")
    for row in json.loads(written.read_text())["metrics"]["test"]:
        assert f"{row['memories']:<50} {row['perplexity']:10.2f}" in done.stdout
    assert " p = " in done.stdout and ": …" in done.stdout


@pytest.mark.parametrize(("visibility", "seen"), [(trime.Local, "same"), (trime.Others, "others"), (trime.External, "both")])
def test_the_loss_is_eq_5(visibility: Callable[[], object], seen: str) -> None:
    """-log of the target's share of the vocabulary and of the visible contexts, written out as loops."""
    torch.manual_seed(1)
    g, logits = torch.randn(2, 4, 8, requires_grad=True), torch.randn(2, 4, 5)
    targets = torch.randint(5, (2, 4))
    targets[1, 3] = -100
    loss = trime.trime_loss(g, logits, targets, visibility=visibility(), reduction="none")  # type: ignore[arg-type]
    expected = []
    for b, i in ((b, i) for b in range(2) for i in range(4) if targets[b, i] != -100):
        mass = logits[b, i].double().exp()
        for c, j in ((c, j) for c in range(2) for j in range(4) if targets[c, j] != -100):
            if (b != c and seen != "same") or (b == c and j < i and seen != "others"):
                mass[targets[c, j]] += (g[b, i].double() @ g[c, j].double() / math.sqrt(8)).exp()
        expected.append(-(mass[targets[b, i]] / mass.sum()).log())
    torch.testing.assert_close(loss, torch.stack(expected).float(), rtol=1e-5, atol=1e-6)
    trime.trime_loss(g, logits, targets).backward()
    assert g.grad is not None and g.grad.abs().sum() > 0


def interrupted_at_the_second() -> Callable[..., None]:
    """Return a function that writes one file of tensors, and no more."""
    written: list[Path] = []

    def write(path: Path, columns: dict[str, torch.Tensor]) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(path)
        write_tensors(path, columns)

    return write


def test_a_datastore_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, tokens = torch.randn(50, 8), torch.arange(50)
    store = trime.Datastore.from_tensors(tmp_path / "store", keys, tokens, dtype="float32")
    assert torch.equal(trime.Datastore.open(tmp_path / "store").token, store.token) and len(store) == 50
    window = trime.window_of(keys[:3] * 100, torch.zeros(3, 50), tokens[:3])
    assert trime.KNNMemory(store, k=1).entries(window.query)[1].flatten().tolist() == [0, 1, 2]
    with pytest.raises(UserError, match="not empty"):
        trime.Datastore.from_tensors(tmp_path / "store", keys, tokens)
    monkeypatch.setattr("trime.token_memory.search.datastore.SHARD", 20)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("trime.token_memory.search.datastore.write_tensors", interrupted_at_the_second())
        trime.Datastore.from_tensors(tmp_path / "killed", keys, tokens)
    with pytest.raises(UserError, match="holds no shards"):
        trime.Datastore.open(tmp_path / "killed")
    assert len(trime.Datastore.from_tensors(tmp_path / "killed", keys, tokens)) == 50
    with pytest.raises(UserError, match="as many of each"):
        trime.Datastore.from_tensors(tmp_path / "other", keys, tokens[1:])


def test_keys_that_fit_no_float16_are_found_in_float32(tmp_path: Path) -> None:
    keys, tokens = torch.randn(50, 8) * 1e6, torch.arange(50)
    with pytest.raises(UserError, match='dtype="float32"'):
        trime.Datastore.from_tensors(tmp_path / "half", keys, tokens)
    store = trime.Datastore.from_tensors(tmp_path / "store", keys, tokens, dtype="float32")
    found = trime.KNNMemory(store, k=1).entries(trime.window_of(keys, torch.zeros(50, 50), tokens).query)[1]
    assert found.flatten().tolist() == (keys @ keys.T).argmax(1).tolist()


def test_documents_may_have_numbers_of_64_bits(tmp_path: Path) -> None:
    """A hash or a time stamp neither wraps nor hides another document's entries."""
    keys, tokens, number = torch.randn(20, 8), torch.arange(20), 2**31 + 5
    documents = torch.where(tokens < 10, number, number - 2**32)
    store = trime.Datastore.from_tensors(tmp_path / "store", keys, tokens, documents)
    window = trime.window_of(keys[:3], torch.zeros(3, 20), tokens[:3], document=number)
    score, token, _ = trime.KNNMemory(store, k=20, hide_own=True).entries(window.query)
    assert (token[score > -torch.inf] >= 10).all() and int((score > -torch.inf).sum()) == 30


def test_misuse_is_refused_in_one_line(tmp_path: Path) -> None:
    """Every wrong call of tests/helpers/misuse.py."""
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "misuse.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    said = json.loads(done.stdout or "{}")
    assert len(said) > 40, done.stderr
    assert not {name: text for name, text in said.items() if not text.startswith("UserError: ") or "\n" in text}


def test_a_mixture_of_memories_learns_what_to_trust() -> None:
    """Text that repeats itself is predicted by the long memory where the model knows nothing."""
    torch.manual_seed(0)
    tokens, size = torch.randint(50, (40,)).repeat(12), 20
    keys = torch.eye(50)[tokens.roll(1)] * 30
    parts = zip(keys.split(size), tokens.split(size), range(0, 480, size), strict=True)
    windows = [trime.window_of(g, torch.zeros(size, 50), targets, start=start) for g, targets, start in parts]
    mixture = trime.MemoryMixture({"long": trime.LongMemory([400], trime.FIFO())})
    assert mixture.fit(windows) < 0.7 * math.log(50)
    scores = torch.cat([*mixture.score(windows)])
    assert -scores[80:].mean() < 0.5 * math.log(50) and len(scores) == 480
    for log_probability, parts in mixture.explain(windows):
        torch.testing.assert_close(sum(parts.values()), log_probability.double().exp(), rtol=1e-4, atol=1e-6)


def test_a_finished_run_scores_and_explains_text(language: SharedRun, tmp_path: Path) -> None:
    """tests/bundle compares its probabilities with those of evaluation."""
    model = trime.load(language.folder)
    (scored,) = model.score("import os\n")
    assert [token.text for token in scored][:2] == ["import", "os"] or len(scored) == 3
    assert all(sum(token.parts.values()) == pytest.approx(token.probability) for token in scored)
    greedy = model.generate("import os", 5, temperature=0)
    assert model.generate("import os", 5, temperature=0, until=["", "\0"]) == greedy
    assert model.generate("import os", 8, seed=1) != model.generate("import os", 8, seed=2), "no setting of a call stays"
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"max_new_tokens": 0}, {"seed": 0.5}, {"temprature": 1}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            model.generate("import os", **wrong)
    writing = model.start(temperature=0).write()
    next(writing)
    assert model.score("import os\n") == [scored]
    with pytest.raises(UserError, match="another text was begun"):
        next(writing)
    assert len(model.explain("import os", 3, entries=1, temperature=0)[0].entries) >= 1
    with pytest.raises(UserError, match="neither a run's folder"):
        trime.load(tmp_path)


@pytest.mark.slow
def test_examples_read_a_finished_run(language: SharedRun, tmp_path: Path) -> None:
    shown = example("loaded_run", str(language.folder))
    assert "vocabulary" in shown and " from " in shown
    picture = tmp_path / "own.png"
    assert str(picture) in example("own_figure", f"{language.outputs}/runs/**/results.json", str(picture)) and picture.is_file()


def test_eq_5_in_ones_own_loop() -> None:
    losses = [float(line.split()[2]) for line in example("own_loop").splitlines()]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_a_text_is_written_with_drafts(tmp_path: Path) -> None:
    """In fewer calls than tokens, with the lines that were copied."""
    pytest.importorskip("transformers", reason="the extra decoder")
    stored = write_texts(tmp_path / "stored", range(3))
    first = (stored / "0.py").read_text()
    shown = example("drafts", str(save_decoder(tmp_path, contrast=4)), str(stored), first[:200], str(stored / "0.py"))
    tokens, calls = map(int, re.search(r"(\d+) tokens in (\d+) calls", shown).groups())  # type: ignore[union-attr]
    assert tokens == 64 and calls < 40 and f"those of {stored / '0.py'}, line" in shown


@pytest.mark.slow
def test_long_reading_with_an_evicting_memory(tmp_path: Path, text_folder: Path) -> None:
    pytest.importorskip("transformers", reason="the extra decoder")
    shown = example("long_reading", str(save_model("Llama", tmp_path / "model")), str(text_folder / "train" / "0.txt"), "16")
    lines = shown.splitlines()
    assert [line.split(":")[0] for line in lines[::2]] == ["fifo", "sink", "lra_sum"]
    assert "read 64 tokens into 16 entries a layer" in lines[0] and "keeps positions 0 to" in lines[2]
    words = str(tmp_path / "model"), str(text_folder / "train" / "0.txt"), "16", "import threading"
    asked = example("long_reading", *words).splitlines()
    assert [line.split(":")[0] for line in asked[::2]] == ["fifo", "sink", "lra_sum", "tova", "snapkv"]


@pytest.mark.slow
def test_knn_lm_over_a_decoder_of_transformers(tmp_path: Path, text_folder: Path) -> None:
    pytest.importorskip("transformers", reason="the extra decoder")
    files = [str(text_folder / split / "0.txt") for split in ("train", "valid", "test")]
    lines = example("knn_lm", str(save_model("Llama", tmp_path / "model")), *files).splitlines()
    with_memories, alone = (float(line.split()[-1]) for line in lines[-2:])
    assert "cross-fitted" in lines[0] and with_memories < alone
