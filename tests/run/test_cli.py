"""The command line as users see it: help, commands of the documentation, reports."""

from __future__ import annotations

import csv
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import DictConfig

from tests.conftest import NO_PICTURES, ROOT, composed
from tests.golden.checkpoints import checkpoint, corpus_of, models
from tests.golden.texts import DATA
from tests.helpers.fairseq_translation import Released
from tests.helpers.pretrained import save_model
from trime.config.schema import STAGES
from trime.plan.language_model import Plan
from trime.run import command_line
from trime.run.command_line import without_dashes
from trime.run.runner import OPTIONAL_STAGES, run

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_help_names_groups_stages_and_common_overrides() -> None:
    shown = subprocess.run([sys.executable, "cli.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for group in (path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name not in ("reproduce", "hydra")):
        assert f"{group}: " in shown
    assert "\n  experiment/reproduce/table2: cache, knn_lm, " in shown
    for word in (*STAGES, *OPTIONAL_STAGES, "dataset.path=DIR", "report.runs", "seed=0,1,2", "logger.offline"):
        assert word in shown


def test_the_command_line_answers_without_torch() -> None:
    """Importing it takes longer than all that --help and messages about settings do."""
    code = (
        "import sys, trime.run.command_line as line; sys.argv[1:] = ['--help']; line.main(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_a_command_without_words_prints_the_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["cli.py"])
    assert command_line.main() == 0 and "experiment=NAME" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--experiment trime seed=1", "experiment=trime seed=1"),
        ("--experiment=trime --seed 1", "experiment=trime seed=1"),
        ("-m --cfg job experiment=trime", "-m --cfg job experiment=trime"),
        ("--config-dir=own experiment=trime checkpoint= seed=1", "--config-dir=own experiment=trime checkpoint= seed=1"),
        ("--experiment --seed 1", "experiment seed=1"),
    ],
)
def test_settings_may_have_dashes(words: str, meant: str) -> None:
    assert without_dashes(words.split()) == meant.split()


def test_arguments_of_lightnings_trainer_need_no_plus() -> None:
    words = ["-m", "trainer.devices=2", "trainer.max_time=00:00:01:00", "+trainer.profiler=simple", "experiment=trime"]
    assert command_line.with_trainer_arguments(words) == [*words[:2], f"++{words[2]}", *words[3:]]


def test_threads_are_known_before_libraries_are_imported() -> None:
    code = (
        "from trime.run import command_line; command_line.limit_threads(['threads=0', 'threads=1']); import torch, numba; "
        "print(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["1", "1"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("experiment=trime-ext", "experiment=trime-ext: is it trime_ext?"),
        ("size=large", "size=large: choose from paper, "),
        ("model.backbone.head=3", "there is no setting model.backbone.head: is it model.backbone.heads?"),
    ],
)
def test_a_wrong_choice_is_told_with_the_nearest(
    word: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cli.py", word])
    assert command_line.main() == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: {said}") and len(message.splitlines()) == 1


def test_make_help_lists_every_target() -> None:
    targets = re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(targets) > 8 and all(re.search(rf"^{target} ", shown, re.M) for target in targets)


def commands(page: Path) -> list[str]:
    """Return every `python cli.py …` line of a page's code blocks, on one line and without its size or comment."""
    blocks = re.findall(r"^```(?:bash|sh)?\n(.*?)^```|^```\w+\n.*?^```", page.read_text(), re.S | re.M)
    lines = [" ".join(line.split()) for line in "\n".join(blocks).replace("\\\n", " ").splitlines()]
    return [re.sub(r" size=\w+|\s+#.*", "", line) for line in lines if line.startswith("python cli.py")]


def documented_commands() -> list[Any]:
    """Return each command of README and docs/ once, as it is to be tested.

    Those of the README run whole, and of all others the settings are checked; they run whole as slow tests.
    """
    first, *others = (dict.fromkeys(commands(page)) for page in PAGES)
    later = dict.fromkeys(command for page in others for command in page if command not in first)
    return [*first, *(without_stages(command) for command in later), *(pytest.param(c, marks=pytest.mark.slow) for c in later)]


def without_stages(command: str) -> str:
    """Return a command that only checks its settings, without Hydra's own command line, which composes them twice."""
    return re.sub(r" stages=\S+|$", " stages=[]", command.replace(" sweep=optuna", ""), count=1)


def few_values(words: list[str], most: int) -> list[str]:
    """Return the words of a sweep with the first ``most`` values of the setting that has as many, and the first of others."""
    few = []
    for word in words:
        key, _, value = word.partition("=")
        if re.fullmatch(r"[\w./@]+=[\w./]+(,[\w./]+)+", word):
            few.append(f"{key}={','.join(value.split(',')[:most])}")
            most = 1
        else:
            few.append(word)
    return few


@pytest.mark.parametrize("command", documented_commands())
def test_readme_command_runs(
    command: str, session_folder: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As written, with the tiny size, the session's artefacts, and small things in place of one's own text and model.

    A sweep goes over the first two values of one setting and the first of the others; settings alone are checked for one each.
    """
    words = shlex.split(command, comments=True)[2:]
    words = few_values(words, 1 if "stages=[]" in words else 2)
    if any(word.startswith("prompt_file=") for word in words):
        (tmp_path / "prompt.txt").write_text("import os")
        if "stages=[]" not in words and not any("train_small" in word for word in words):
            run(
                composed_tiny(session_folder, "experiment=trime_ext", "index.k=16", "index.factory=null", "evaluate.tokens=200")
            )
        words = [word.replace("=FILE", f"={tmp_path}/prompt.txt") for word in words]
    if "export.path=DIR" in words:  # of a finished run
        places = {"export.path=DIR": f"export.path={tmp_path}/bundle", "stages=[export]": f"stages=[{','.join(STAGES)},export]"}
        words = [places.get(word, word) for word in words]
    if "model=smollm2" in words:
        place_of = words.index("model=smollm2")
        words[place_of : place_of + 1] = ["model=pretrained", "model.name=DIR"]
    if "model.name=DIR" in words:
        pytest.importorskip("peft", reason="peft is not installed")
        words = [word.replace("model.name=DIR", f"model.name={save_model('Llama', tmp_path / 'model')}") for word in words]
    if "dataset=multi30k" in words:
        pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
        words = [
            "dataset=phrases" if word == "dataset=multi30k" else word for word in words if not word.startswith("dataset.path")
        ]
    words = ["questions=rooms" if word.startswith("questions.path=") else word for word in words]
    if "questions=babilong" in words:
        words = [word for word in words if not word.startswith("questions")] + ["questions=rooms", "questions.count=6"]
    if any(word.startswith("experiment=attendre/") for word in words):
        words += ["model.memory_size=8,16", "model.chunk=8", "eviction=fifo"]
    words = [re.sub(r"(path=)(DIR|NOVELS|WIKITEXT2|BYTES|\S*(?:TEXT|CODE))$", rf"\1{text_folder}", word) for word in words]
    words = [re.sub(r"^((?:dataset|dataset@\w+\.dataset)=)wikitext\d+$", r"\1folder", word) for word in words]
    if "dataset=enwik8" in words and f"dataset.path={text_folder}" in words:
        (text_folder / "enwik8").write_bytes(b"one byte after another " * 2000)
    if "table=passkey" in words:
        words = [word.replace("questions.background=DIR", f"questions.background={text_folder}") for word in words]
        words += ["model=pretrained", f"model.name={save_model('Llama', tmp_path / 'model')}", "questions.count=2"]
        words = ["-m", *words, "questions.words=40,60", "eviction=fifo,sink"]
    for table in [word for word in words if word.startswith("table=") and word != "table=passkey"]:
        params = composed(table, return_hydra=True).hydra.sweeper.params
        rows = [f"experiment={','.join(params.experiment.split(',')[-2:])}"] if "experiment" in params else ["index=exact"]
        words = ["-m", *words, *rows]
    if "experiment=ablation/test_memory" in words:
        words = ["-m", *words, "trained_with=plain,local", "tested_with=local"]
    if any(word.endswith("engine=ray") for word in words):
        pytest.importorskip("ray", reason="pip install -e '.[cluster]'")
    words = [re.sub(r"^trainer.devices=\d+$", "trainer.devices=2", word) for word in words]
    words += ["hydra.sweeper.n_trials=1"] * ("sweep=optuna" in words)
    if "stages=[plan]" in words:
        words = [re.sub(r"^plan.check=.*", "plan.check=[900]", word) for word in words] + ["plan.probes=[300,500,700]"]
    large = ("size=", "train.", "small.", "datastore.tokens", "evaluate.tokens", "logger", "segments.length", "batching.size")
    words = [word for word in words if not word.startswith(large)]
    if "experiment=reproduce/released/trime_mt" in words:
        pytest.importorskip("sacremoses", reason="sacremoses is not installed")
        (tmp_path / "iwslt14").mkdir()
        given = Released(tmp_path / "iwslt14", (False, True), seed=0).overrides[:3]  # checkpoint, dictionaries, text
        words = [word for word in words if not word.startswith(("checkpoint=", "dictionary=", "dataset.path="))] + given
    elif any(word.startswith("checkpoint=") for word in words):
        words = released(words)
    if any("report.runs" in word for word in words):
        run(composed_tiny(session_folder, "experiment=vanilla", f"paths.outputs={tmp_path}/outputs"))
        words = [word.replace("outputs/", f"{tmp_path}/outputs/") for word in words]
    tiny = [
        "size=tiny",
        "train.updates=2",
        "trainer.enable_progress_bar=false",
        "logger=none",
        "report.samples.passages=0",
        "index.k=16",
        "index.factory=null",
        "evaluate.tokens=200",
        f"paths.data={session_folder}/data",
        f"paths.outputs={session_folder}/outputs",
        *NO_PICTURES,
    ]
    if "stages=[audit]" in words:  # of a finished run
        monkeypatch.setattr("sys.argv", ["cli.py", *(word for word in words if not word.startswith("stages=")), *tiny])
        assert command_line.main() == 0
    if "stages=[]" in words:
        run(composed(*without_dashes([word for word in few_values(words, 1) if word != "-m"]), *tiny))
        return
    monkeypatch.setattr("sys.argv", ["cli.py", *words, *tiny])
    assert command_line.main() == 0


def released(words: list[str]) -> list[str]:
    """Replace a downloaded checkpoint by a small one of the same format, with its dictionary and text."""
    corpus = DATA / corpus_of(models()[0])
    kept = [word for word in words if not word.startswith(("checkpoint=", "dictionary=", "dataset", "experiment=reproduce"))]
    text = ["dataset=folder", f"dataset.path={corpus}/text", "dataset.tokenizer._target_=trime.data.tokenizers.Whitespace"]
    given = [f"checkpoint={checkpoint(models()[0])}", f"dictionary={corpus}/dict.txt"]
    return [*kept, *text, *given, "evaluate.block=16", "evaluate.context=16"]


@pytest.mark.parametrize("target", ["wikitext103", pytest.param("enwik8", marks=pytest.mark.slow)])
def test_make_targets_run_on_files_of_the_same_form(target: str, session_folder: Path, tmp_path: Path) -> None:
    """Run the command of `make TARGET SIZE=tiny`, from text to report."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "house", "while", "it", "rained", "."]
    lines = [" ".join(words[(i * 7 + j * (1 + i % 3)) % len(words)] for j in range(25)) for i in range(60)]
    articles = "".join(f" = Title {n} = \n \n {line} \n {line} \n {lines[-n]} \n \n" for n, line in enumerate(lines))
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text(" \n" + articles * 4)
    (tmp_path / "enwik8").write_text("\n".join(lines) * 40)
    dry = subprocess.run(
        ["make", "-n", "-o", "install", target, "SIZE=tiny", f"ARGS=dataset.path={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    command = shlex.split(next(line for line in dry.splitlines() if "cli.py" in line))[1:]
    places = [f"paths.data={session_folder}/data", f"paths.outputs={tmp_path}/outputs"]
    fixed = ["logger=none", "train.updates=2", *places, *NO_PICTURES]
    done = subprocess.run([sys.executable, *command, *fixed], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "results: " in done.stdout and ("bits/char" in done.stdout) is (target == "enwik8")


def composed_tiny(session_folder: Path, *overrides: str) -> DictConfig:
    places = [f"paths.data={session_folder}/data", f"paths.outputs={session_folder}/outputs"]
    return composed("size=tiny", "train.updates=2", "trainer.enable_progress_bar=false", "logger=none", *places, *overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_found_wherever_blocks_of_other_languages_stand(page: Path) -> None:
    assert len(commands(page)) == len(re.findall("^python cli.py", page.read_text(), re.M))


def test_report_of_several_runs(tiny: Callable[..., DictConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = f"paths.outputs={tmp_path}"
    for experiment in ("vanilla", "trime", "knn_lm"):
        run(tiny(f"experiment={experiment}", outputs))
    config = tiny("stages=[report]", outputs)
    config.report.runs = f"{config.paths.outputs}/runs/**"
    capsys.readouterr()
    run(config)
    folder = Path(config.paths.outputs) / "reports" / "latest"
    shown, table = capsys.readouterr().out, (folder / "table.md").read_text()
    assert table in shown and str(folder.resolve() / "picture.png") in shown and (folder / "picture.png").stat().st_size > 5000
    lines = (folder / "table.csv").read_text().splitlines()
    header = next(csv.reader(lines))
    assert {
        "params",
        "dev perplexity",
        "test perplexity",
        "vs vanilla, 95 % interval",
        "processor ms/token",
        "paper 7M*, test",
    } <= {*header}
    assert "54.78 / 54.69" in table, "the paper's result beside a published row"
    results = json.loads((Plan(tiny("experiment=trime", outputs)).run_folder / "results.json").read_text())
    assert f"{results['metrics']['test'][-1]['perplexity']:.2f}" in table


def test_wandb_is_offline_by_default_and_in_the_runs_folder(session_folder: Path, tmp_path: Path) -> None:
    config = composed(
        "size=tiny",
        "train.updates=2",
        "experiment=trime",
        "trainer.enable_progress_bar=false",
        f"paths.data={session_folder}/data",
        f"paths.outputs={tmp_path}",
    )
    assert config.logger.offline is True
    folder = Plan(config).run_folder
    run(config)
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert "train/loss" in (folder / "metrics.csv").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_in_other_processes_are_one_sweep(launcher: str, session_folder: Path, tmp_path: Path) -> None:
    """Their runs are reported together; failed jobs are listed at the end, and the exit status is 1."""
    given = ["-m", "experiment=trime,vanilla", "evaluate.block=32,0", "size=tiny", "train.updates=2", "logger=none"]
    places = [f"paths.data={session_folder}/data", f"paths.outputs={tmp_path}", "report.samples.passages=0"]
    line = [sys.executable, "cli.py", *given, *places, f"hydra/launcher={launcher}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stderr.count("error: job ") == 2 and "evaluate.block=0" in done.stderr
    table = (tmp_path / "reports" / "latest" / "table.csv").read_text()
    assert "vanilla" in table and "trime" in table and not [*(tmp_path / "sweeps").glob("jobs-*")]


@pytest.mark.slow
def test_a_job_that_is_preempted_is_requeued_and_resumes(session_folder: Path, tmp_path: Path) -> None:
    """As by SLURM, with submitit's local executor: the signal comes in the middle of the training."""
    launcher = ["hydra/launcher=submitit_local", "-m"]
    training = ["experiment=trime", "size=tiny", "train.updates=300", "train.checkpoint_every=20", "logger=none"]
    places = [f"paths.data={session_folder}/data", f"paths.outputs={tmp_path / 'preempted'}", "report.samples.passages=0"]
    command = subprocess.Popen([sys.executable, "cli.py", *training, *places, *launcher], cwd=ROOT, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("preempted/artefacts/*/checkpoints/update-*.ckpt")):
        assert command.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (folder,) = (tmp_path / "preempted" / "sweeps" / ".submitit").glob("[0-9]*")
    (job,) = psutil.Process(int(folder.name)).children()
    job.send_signal(signal.SIGTERM)  # which SLURM sends first
    time.sleep(1)
    job.send_signal(signal.SIGUSR2)
    assert command.wait(240) == 0
    printed = "".join(log.read_text() for log in folder.glob("*_log.out"))
    assert "Requeued job" in printed and "resuming from update-" in printed
    uninterrupted = composed(*training, *places[:1], f"paths.outputs={tmp_path / 'whole'}", *places[2:])
    run(uninterrupted)
    files = [next(tmp_path.glob(f"{name}/runs/*/*/results.json")) for name in ("preempted", "whole")]
    one, other = ([row["perplexity"] for row in json.loads(file.read_text())["metrics"]["test"]] for file in files)
    assert one == other


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("-m experiment=vanilla,trime seed=0,1,2 size=tiny", 6),
        ("-m seed=range(4) tune.memory_size=[64,128]", 4),
        ("experiment=vanilla,trime", 0),
        ("-m seed=0,1 sweep=optuna", 0),
        ("-m seed=[", 0),
    ],
)
def test_a_sweep_says_how_many_runs_it_has(words: str, runs: int) -> None:
    assert command_line.sweep_size(words.split()) == runs
