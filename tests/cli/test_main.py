"""The command line as users meet it: what it prints, what it refuses, with which exit code."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from commands import Command, fedx_pl
from federation_parts import wait_until
from helpers import PATIENCE, THREADS

from fedx_pl import __version__
from fedx_pl.cli import completion
from fedx_pl.cli import main as cli
from fedx_pl.config import renamed
from fedx_pl.config.compose import choices


def test_train_runs_and_ends_with_a_summary(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *tiny, "method=byol", "fedx=true"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("profile paper: made for a GPU") != torch.cuda.is_available()
    first = next(line for line in out.splitlines() if not line.startswith("profile"))
    assert first == "cifar10-byol-fedx-paper: 2 rounds x 1 epochs, 3 clients, resnet10, seed 0"
    assert re.search(rf"240 images, 32-true on {THREADS} CPU threads?: about \d", out)
    assert re.search(r"untrained +kNN +\d", out)
    assert re.search(r"round +2/2 +loss +\d.*ETA", out)
    assert re.search(
        r"linear: last \d+\.\d\d, best on the test images \d+\.\d\d, untrained \d+\.\d\d", out
    )
    assert re.search(r"^run folder: \S+$", out, flags=re.MULTILINE)
    assert re.search(r"^  encoder.safetensors ", out, flags=re.MULTILINE)
    after = out.partition("\nnext:\n")[2].splitlines()
    for command in ("tensorboard --logdir ", "fedx-pl evaluate ", "fedx-pl export "):
        assert any(command in line for line in after)
    # Finished: the summary again, no training.
    assert cli.main(["train", *tiny, "method=byol", "fedx=true"]) == 0
    assert "linear: last" in (again := capsys.readouterr().out)
    assert "ETA" not in again


def test_dry_run_prints_the_plan_and_writes_nothing(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *tiny, "method=fedu", "fedx=true", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "about",
        "steps per round",
        "trainable parameters",
        "private per client",
        "steps in all",
    ):
        assert expected in out
    assert not (tmp_path / "runs").exists()


def test_the_cpu_profile_names_itself_and_the_paper_s_profile(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(
            ["train", *tiny, "profile=cpu", "data.limit=100", "data.test_limit=50", "--dry-run"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "profile cpu" in out
    assert "PROFILE=paper" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--help"], 0, "fedx-pl train data=cifar10"),
        ([], 2, "fedx-pl train data=cifar10"),
        (["federate"], 2, "fedx-pl federate COMMAND"),
        (["export", "run", "--to", "onnx"], 2, "error: --to onnx needs onnx and onnxscript; type "),
        (["evaluate", "nowhere"], 2, "has no config.yaml; type fedx-pl evaluate runs/NAME\n"),
        (["--version"], 0, f"fedx-pl {__version__}, Python 3."),
        (["sweep", "--help"], 0, "--seeds"),
        (["data", "--help"], 0, "A data set. Without it, list all."),
        (["federate", "server", "--help"], 0, "--clients"),
        (
            ["trian"],
            2,
            "error: no such command 'trian'. Did you mean 'train'? See fedx-pl --help\n",
        ),
        (
            ["federate", "sever"],
            2,
            "error: no such command 'sever'. Did you mean 'server'? See fedx-pl federate --help\n",
        ),
        (["completion"], 2, "missing argument 'SHELL'. Choose from: bash, zsh, fish; see"),
        (["completion", "csh"], 2, "'csh' is not one of 'bash', 'zsh', 'fish'; see"),
        (["export", "run", "--to"], 2, "'--to' requires an argument; see fedx-pl export --help"),
        (["evaluate", "--round", "x", "run"], 2, "'--round': 'x' is not a valid integer; see"),
        (["neighbours", "run"], 2, "neighbours has a new name; type fedx-pl neighbors\n"),
        (
            ["train", "--dryrun"],
            2,
            "no such option '--dryrun'. Did you mean '--dry-run'? See fedx-pl train --help\n",
        ),
        (
            ["embed", "run"],
            2,
            "error: missing argument 'IMAGES'; see fedx-pl embed --help\n",
        ),
        (
            ["federate", "keys", "--sites", "a"],
            2,
            "error: a federation of sites needs Flower; type ",
        ),
    ],
)
def test_help_and_mistakes_in_the_command_need_no_torch(
    arguments: list[str], code: int, message: str
) -> None:
    heavy = ("torch", "pytorch_lightning", "lightly", "rich", "omegaconf")
    missing = 'sys.modules["flwr"] = sys.modules["onnxscript"] = None'
    done = imports_none_of(heavy, arguments, before=missing)
    assert done.returncode == code
    assert message in done.stdout + done.stderr


def imports_none_of(
    heavy: Sequence[str], arguments: list[str], before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a new process, and fails if it imports one of some modules."""
    script = f"""import atexit, runpy, sys
{before}
atexit.register(lambda: print(sorted({set(heavy)} & set(sys.modules))))
runpy.run_module("fedx_pl", run_name="__main__")"""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "[]"
    return done


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "--help"], 0, "keys of method=fedu"),
        (["train", "federation.ronds=2"], 2, "did you mean federation.rounds?"),
        (["train", "optim.lr=0"], 2, "optim.lr=0"),
        (["sweep", "tabel1"], 2, "there is no experiment tabel1; did you mean table1?"),
    ],
)
def test_mistakes_in_keys_need_no_torch(arguments: list[str], code: int, message: str) -> None:
    done = imports_none_of(("torch", "pytorch_lightning"), arguments)
    assert done.returncode == code
    assert message in done.stdout + done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "train",
        "train data=svhn --dry-run",
        "data svhn",
        "evaluate run",
        "sweep table1",
        "report",
        "export run",
        "embed run images",
        "neighbors run a.png images",
        "federate keys --sites a",
        "completion bash",
    ],
)
def test_something_is_printed_before_torch_is_loaded(line: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    script = """import runpy, sys
class End:
    def find_spec(self, name, *_):
        if name == "torch":
            raise SystemExit(0)
sys.meta_path.insert(0, End())
runpy.run_module("fedx_pl", run_name="__main__")"""
    pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")
    done = subprocess.run(
        [sys.executable, "-c", script, *line.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stderr == "loading PyTorch ...\n"


@pytest.mark.parametrize("width", [80, 100])
def test_help_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for command in completion.commands():
        assert cli.main([*command.path.split(), "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if len(line) > width] == []


def test_old_words_are_answered_with_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(renamed.RENAMED, "federation.cycles", "federation.rounds")
    monkeypatch.setitem(renamed.RENAMED, "partition=dir", "partition=dirichlet")
    monkeypatch.setitem(renamed.RENAMED, "fedx-pl report --to", "fedx-pl report --out")
    monkeypatch.chdir(tmp_path)
    for old, new in (
        ("neighbours RUN a.png IMAGES", "fedx-pl neighbors"),
        ("sweep regularisers", "fedx-pl sweep regularizers"),
        ("report --to FOLDER", "fedx-pl report --out"),
        ("train federation.cycles=3", "federation.rounds"),
        ("train partition=dir", "partition=dirichlet"),
    ):
        assert cli.main(old.split()) == 2
        assert capsys.readouterr().err.endswith(f" has a new name; type {new}\n")


def test_help_lists_groups_keys_and_every_method_s_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "method=simclr | moco | byol",
        "federation.rounds=100",
        "keys of method=fedu",
        "method.mu=0.4",
    ):
        assert expected in out


def test_help_lists_the_keys_of_the_method_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "my_ssl.py").write_text(
        "from fedx_pl.methods import SimCLR\n"
        "class Mine(SimCLR):\n"
        "    def __init__(self, backbone, *, covariance: float = 1.5, **base):\n"
        '        """Sets the weight.\n\n        Args:\n'
        '            covariance: weight of a term.\n        """\n'
        "        super().__init__(backbone, **base)\n"
    )
    for words in (["method=my_ssl:Mine", "--help"], ["--help", "method=my_ssl:Mine"]):
        done = fedx_pl("train", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        own = done.stdout.partition("keys of method=my_ssl:Mine:\n")[2]
        assert re.match(r"  method\.covariance=1\.5 +weight of a term\.\n", own)
    missing = fedx_pl("train", "method=my_ssl:Yours", "--help", cwd=tmp_path)
    assert missing.returncode == 2
    assert "error: method=my_ssl:Yours: my_ssl has no 'Yours'; it has Mine" in missing.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=bioll"], "did you mean method=byol"),
        (["federation.rond=3"], "did you mean federation.rounds?"),
        (["federation.clients=500"], "500"),
        (["partition.beta=-1"], "partition.beta=-1"),
        (["partition.file=/nowhere/split.json"], "partition.file"),
        (["run.device=cuda:7"], "run.device=cuda:7"),
        (["run.dir=/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["name=" + "x" * 300], "has more than 150 bytes; type letters"),
        (["data.std=[0,0,0]"], "data.std=[0.0, 0.0, 0.0]"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tiny: list[str], overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *tiny, *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_traceback_is_shown_only_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "method=bioll"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    debug = fedx_pl("train", "method=bioll", "--debug")
    assert debug.returncode != 0
    assert "Traceback" in debug.stderr


def test_a_full_disk_is_an_error_of_one_line_and_loses_nothing(
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = os.fsync

    def full_after_the_first_round(handle: int) -> None:
        if any(tmp_path.glob("**/checkpoints/round_00001")):
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr("os.fsync", full_after_the_first_round)
    assert cli.main(["train", *tiny]) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "free some space" in error
    monkeypatch.undo()
    assert cli.main(["train", *tiny]) == 0
    assert "resuming after round 1" in capsys.readouterr().out


def test_overrides_may_follow_flags_and_hold_brackets(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--dry-run", *tiny, "name=a[b]", f"run.root={tmp_path / '[/x]'}"]
    assert cli.main([*arguments, "--debug", "federation.rounds=1000000000"]) == 0
    out = capsys.readouterr().out
    assert "a[b]: 1000000000 rounds" in out
    assert str(tmp_path / "[/x]" / "a[b]") in out
    assert cli.main(["train", "--faster"]) == 2


def test_data_alone_lists_the_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in choices("data"):
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert f"fedx-pl data {name}" in line


def test_data_describes_a_set(tiny_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            [
                "data",
                "cifar10",
                f"data.root={tiny_root}",
                "data.verify=false",
                "data.download=false",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "240" in out
    assert "mean" in out
    assert cli.main(["data", "cifar11"]) == 2


def test_a_method_in_the_current_folder_is_found(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "my_ssl.py").write_text(
        "from fedx_pl import SSLMethod, Loss\n"
        "from fedx_pl.losses import nt_xent\n"
        "class Mine(SSLMethod):\n"
        "    def loss(self, batch, z):\n"
        "        return Loss(mine=nt_xent(z.first, z.second, 0.1))\n"
    )
    done = fedx_pl(
        "train", *tiny, "method=my_ssl:Mine", "fedx=true", "federation.rounds=1", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    header = next(tmp_path.glob("runs/cifar10-mine-fedx*/metrics.csv")).read_text().splitlines()[0]
    assert "loss_mine,loss_local_relation" in header


def test_ctrl_c_keeps_finished_rounds_and_says_how_to_resume(
    tiny: list[str], tmp_path: Path
) -> None:
    words = ["train", *tiny, "federation.rounds=500", f"run.dir={tmp_path / 'run'}"]
    with Command(tmp_path / "log", *words, errors=tmp_path / "errors") as command:
        table = tmp_path / "run" / "metrics.csv"
        wait_until(lambda: table.exists() or not command.running, "a round was trained")
        command.send(signal.SIGINT)
        assert command.wait() == 130
    error = (tmp_path / "errors").read_text()
    assert "interrupted; run the same command again to resume: fedx-pl train" in error
    assert "Traceback" not in error
    assert (tmp_path / "run" / "metrics.csv").exists()


def test_evaluate_measures_a_run_again(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *tiny, f"run.dir={tmp_path / 'run'}"]) == 0
    last = json.loads((tmp_path / "run" / "metrics.json").read_text())["rounds"][-1]
    capsys.readouterr()
    assert cli.main(["evaluate", str(tmp_path / "run"), "knn", "linear"]) == 0
    output = capsys.readouterr().out
    assert f"{last['linear_top1']:.2f}" in output
    assert f"{last['knn_top1']:.2f}" in output
    assert cli.main(["evaluate", str(tmp_path / "run"), "linaer"]) == 2
    assert (
        "RUN linaer is not known; did you mean fedx-pl evaluate RUN linear?"
        in capsys.readouterr().err
    )
    assert cli.main(["evaluate", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: "
            "you tried\nto"
        ),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    ],
)
def test_too_little_memory_is_one_line_with_the_keys_to_change(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fedx_pl.cli.train.build", fail)
    assert cli.main(["train"]) == 2
    said = capsys.readouterr().err
    assert re.match(r"error: not enough memory .*backbone\.width.*data\.image_size", said)
    assert said.count("\n") == 1


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("fedx_pl.cli.train.build", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["train"])


@pytest.mark.parametrize(
    "line", [["export", "a\0b"], ["train", "--fork", "a\0b"], ["report", "a\x1b[31m"]]
)
def test_a_character_that_cannot_be_printed_is_refused(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line) == 2
    assert "holds a character that cannot be printed" in capsys.readouterr().err


def test_a_device_is_refused_as_a_split_file(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *tiny, "partition.file=/dev/zero", "--dry-run"]) == 2
    assert "partition.file=/dev/zero cannot be read (not a regular file)" in capsys.readouterr().err
