"""The command line as users see it: help, commands of the documentation, sweeps."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import NO_PICTURES, ROOT, composed
from trime.config.check import validate
from trime.lab import command_line
from trime.lab.main import main
from trime.lab.runner import run
from trime.lab.stage import known_stages
from trime.lab.sweep import count_runs

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "results").glob("*.md"))]


def test_help_names_groups_and_stages() -> None:
    shown = subprocess.run([sys.executable, "cli.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    groups = [path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name not in ("hydra", "rows")]
    assert len(groups) <= 24 and all(re.search(rf"\b{word}\b", shown) for word in groups)
    listed = re.split(r"stages=\[\w+,\w+\] runs some\):", shown)[1]
    named = re.findall(r"\w+", re.sub(r"by name:|of all runs:", "", listed))
    assert {*named} == {*known_stages()}, "those that exist, and no others"


def test_help_needs_no_heavy_package() -> None:
    """Importing them takes longer than all that --help and messages about settings do."""
    code = (
        "import sys, trime.lab.main as entry; sys.argv[1:] = ['--help']; entry.main(); "
        "assert not {'hydra', 'pydantic'} & {*sys.modules}; import trime.lab.command_line; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_threads_are_known_before_libraries_are_imported() -> None:
    code = (
        "from trime.lab import command_line; command_line.limit_threads(['threads=0', 'threads=1']); import torch, numba; "
        "print(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["1", "1"]


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("experiment=trime-ext", "experiment=trime_ext"),
        ("experiment=reproduce/table2/trime_et", "experiment=reproduce/table2/trime_ext"),
        ("size=large", "paper, "),
        ("train.updtes=3", "train.updates"),
        ("exprimnt=trime", "experiment"),
        ("stages=[fit", "stages=[fit"),
    ],
)
def test_a_wrong_word_is_one_line_with_a_similar_name(
    word: str, near: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cli.py", word])
    assert main() == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and len(message.splitlines()) == 1
    assert re.split(r"[=,]", word)[0].rpartition(".")[2] in message and near in message


def commands(page: Path) -> list[str]:
    """Return every `python cli.py …` line of a page's code blocks, on one line and without its size or comment."""
    blocks = re.findall(r"^```(?:bash|sh)?\n(.*?)^```|^```\w+\n.*?^```", page.read_text(), re.S | re.M)
    lines = [" ".join(line.split()) for line in "\n".join(blocks).replace("\\\n", "").splitlines()]
    return [re.sub(r" size=\w+|\s+#.*", "", line) for line in lines if line.startswith("python cli.py")]


DOCUMENTED = [*dict.fromkeys(one for page in PAGES for one in commands(page) if not re.search(r"--help|\$\(", one))]
# Places of the documentation, what needs the network or earlier runs, what serves for ever: left to tests of their stages.
PLACES = (
    r"=(multi30k|wikitext103)\b|stages=\[serve\]|outputs/runs|checkpoint_best.pt|=\[?dict\.|"
    r"=(DIR|NOVELS|WIKITEXT2|BYTES|MULTI30K|FILE|HOST:\S+|\S*(?:TEXT|CODE)2?)\b"
)
SHORT = ["size=tiny", "train.updates=2", "evaluate.tokens=200", "index.k=16", "index.factory=null", "report.samples.passages=0"]


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=[pytest.mark.slow] if n % 12 else []) for n, one in enumerate(DOCUMENTED)]
)
def test_a_documented_command_is_valid(command: str) -> None:
    """Hydra composes it, the first run of a sweep, and its settings are those of the schema."""
    words = [word for word in shlex.split(command, comments=True)[2:] if not word.startswith("-")]
    validate(composed(*(first_value(word) for word in words if not word.startswith(("sweep=", "hydra")))))


def test_pages_name_stages_that_exist() -> None:
    recipe = ROOT / "docs" / "extend" / "workflow.md"  # makes one
    pages = [ROOT / "README.md", *({*(ROOT / "docs").rglob("*.md")} - {recipe})]
    named = re.findall(r"stages=\[([\w,]+)\]", "\n".join(page.read_text() for page in pages))
    assert {*",".join(named).split(",")} <= {*known_stages()}


def first_value(word: str) -> str:
    """Return a word of a sweep with the first of its values."""
    key, _, value = word.partition("=")
    return word if value[:1] in "[{'\"" else f"{key}={value.split(',')[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in DOCUMENTED if not re.search(PLACES, command)])
def test_a_documented_command_runs(command: str, session_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, with the tiny size and the session's artefacts."""
    words = shlex.split(command, comments=True)[2:]
    if not any(word.startswith("report.runs") for word in words):
        places = [f"paths.data={session_folder}/data", f"paths.outputs={session_folder}/outputs"]
        trials = ["hydra.sweeper.n_trials=1"] if "sweep=optuna" in words else []
        words += [*SHORT, *places, *NO_PICTURES, "logger=none", *trials]
    with_all_stages = [word for word in words if not word.startswith("stages=")]  # single stages find what these leave
    for each in [with_all_stages, words] if with_all_stages != words else [words]:
        monkeypatch.setattr("sys.argv", ["cli.py", *each])
        assert command_line.main() == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["wikitext103", "enwik8"])
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
    assert "results: " in done.stdout and ("bits/byte" in done.stdout) is (target == "enwik8")


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
    training += ["trainer.precision=32-true"]  # as tests have it
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


def test_a_pattern_without_a_match_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["cli.py", "-m", "experiment=glob(nothing*)"])
    assert main() == 1
    assert capsys.readouterr().err == "error: nothing matches experiment=glob(nothing*), so nothing was run\n"


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("experiment=vanilla,trime seed=0,1,2 size=tiny", 6),
        ("index=exact,cells,ivf index.k=8,64 index=exact", 2),
        ("seed=range(4) tune.memory_size=[64,128]", 4),
        ("seed=0", 1),
        ("seed=[", 0),
    ],
)
def test_the_later_choice_of_a_setting_counts_once(words: str, runs: int) -> None:
    """As those on a command line, beside those of a table."""
    assert count_runs(words.split()) == runs
