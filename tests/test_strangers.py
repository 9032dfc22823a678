"""Received run folders, checkpoints and configurations: no code in them runs, errors are clean."""

import hashlib
import json
import pickle
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
from helpers import made, tiny_federation
from safetensors.torch import load_file, save

from fedx_pl.cli import main as cli
from fedx_pl.config import compose as config
from fedx_pl.config.compose import load
from fedx_pl.errors import UserError
from fedx_pl.federation.checkpoint import Checkpoints


class Payload:
    """Creates a file when unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.file,))


@pytest.fixture(scope="module")
def finished(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    assert (
        cli.main(
            [
                "train",
                *tiny_federation(tiny_root, runs),
                "federation.rounds=1",
                f"run.dir={runs / 'run'}",
            ]
        )
        == 0
    )
    return runs / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def replace_weights(run: Path, content: bytes) -> None:
    """Replaces the weights as a stranger would, with matching checksums."""
    (folder,) = (run / "checkpoints").glob("round_*")
    (folder / "global.safetensors").unlink()  # The best round shares the file.
    (folder / "global.safetensors").write_bytes(content)
    names = ("global.safetensors", "state.json")
    sums = [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names
    ]
    (folder / "SHA256SUMS").write_text("".join(sums))


def hostile_weights(mark: Path) -> dict[str, bytes]:
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    ).encode()
    torch_file = mark.with_name("weights.pt")
    torch.save({"w": torch.zeros(1), "x": Payload(mark)}, torch_file)
    return {
        "pickle": pickle.dumps(Payload(mark)),
        "torch.save": torch_file.read_bytes(),
        "huge header": struct.pack("<Q", 2**62) + b"{}",
        "large header": struct.pack("<Q", 200_000_000) + b" " * 1000,
        "more data than there is": struct.pack("<Q", len(header)) + header + b"\0" * 16,
        "deep header": struct.pack("<Q", 100_000) + b"[" * 100_000,
        "empty": b"",
        "another network": save({"w": torch.zeros(3)}),
    }


KINDS = [
    "pickle",
    "torch.save",
    "huge header",
    "large header",
    "more data than there is",
    "deep header",
    "empty",
    "another network",
]


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_weights_do_nothing(
    run: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "it ran"
    replace_weights(run, hostile_weights(mark)[kind])
    assert cli.main(["evaluate", str(run), "knn"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize("command", ["evaluate", "export", "train"])
def test_a_stranger_s_callbacks_are_not_imported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Only the command that trained named them, not the user who resumes or evaluates the run."""
    (tmp_path / "evil.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'it ran')!r}).touch()"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    file = run / "config.yaml"
    assert "callbacks: []" in file.read_text()
    file.write_text(file.read_text().replace("callbacks: []", "callbacks: ['evil:Callback']"))
    if command == "train":
        made(load(file))
    else:
        assert cli.main([command, str(run)]) == 0
    assert not (tmp_path / "it ran").exists()


def test_a_stranger_s_configuration_imports_no_code(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evil.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'it ran')!r}).touch()"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        file = run / "config.yaml"
        file.write_text(file.read_text().replace("name: simclr", "name: evil:Method"))
        assert cli.main(["evaluate", str(run), "knn"]) == 2
        assert "names code to be run, method=evil:Method" in capsys.readouterr().err
        assert not (tmp_path / "it ran").exists()
        assert (
            cli.main(["evaluate", str(run), "knn", "allow_code=true"]) == 2
        )  # It runs, and is no method.
        assert (tmp_path / "it ran").exists()
    finally:
        sys.path.remove(str(tmp_path))


def test_yaml_makes_no_objects_and_reads_no_environment(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    file = run / "config.yaml"
    plain = file.read_text()
    file.write_text(
        plain + f"x: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'it ran'}]\n"
    )
    with pytest.raises(UserError, match="not a readable run configuration"):
        config.load(file)
    assert not (tmp_path / "it ran").exists()
    file.write_text(plain.replace("profile: paper", "profile: ${oc.env:SECRET}"))
    assert config.load(file).profile == "${oc.env:SECRET}"


@pytest.mark.parametrize("command", [["evaluate"], ["export", "--to", "safetensors"]])
@pytest.mark.parametrize(
    "text", ["[" * 3000, "a: " + "[" * 60 + "]" * 60, "&a [*a]", "!!bool x", "#" * 10**6]
)
def test_a_configuration_without_end_is_one_line(
    run: Path, command: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.yaml").write_text(text)
    assert cli.main([*command, str(run)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {run / 'config.yaml'} is not a readable run configuration"
    )


def test_a_configuration_of_nested_aliases_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine lines of nested aliases expand to billions of values."""
    lines = ["x0: &x0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 10)]
    file = run / "config.yaml"
    file.write_text("\n".join([*lines, file.read_text().replace("mixins: []", "mixins: *x9")]))
    for command in (["evaluate"], ["export"], ["embed", str(run)]):
        assert cli.main([command[0], str(run), *command[1:]]) == 2
        assert "more than 50,000 values" in capsys.readouterr().err


@pytest.mark.parametrize(
    "state", ["[]", "{}", '{"round": []}', "null", "[" * 50_000, '{"round": 1, "rows": 7}']
)
def test_hostile_state_is_refused(run: Path, state: str) -> None:
    (folder,) = (run / "checkpoints").glob("round_*")
    weights = (folder / "global.safetensors").read_bytes()
    (folder / "state.json").unlink()
    (folder / "state.json").write_text(state)
    replace_weights(run, weights)
    with pytest.warns(UserWarning, match="damaged"):
        assert Checkpoints(run).latest(mend=False) is None


def test_fork_starts_a_new_run_from_a_runs_weights(
    run: Path, quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a learning rate near 0, the first round ends at the other run's weights."""
    words = [*quick, "federation.rounds=1", "optim.lr=1e-12", "optim.weight_decay=0"]
    assert cli.main(["train", *words, f"run.dir={run}"]) == 2
    assert "optim.lr: 0.01 -> 1e-12" in (error := capsys.readouterr().err)
    assert f"--fork {run}" in error
    assert cli.main(["train", *words, f"run.dir={tmp_path / 'fork'}", "--fork", str(run)]) == 0
    before = load_file(next((run / "checkpoints").glob("round_*")) / "global.safetensors")
    after = load_file(
        next((tmp_path / "fork" / "checkpoints").glob("round_*")) / "global.safetensors"
    )
    torch.testing.assert_close(after["backbone.conv1.weight"], before["backbone.conv1.weight"])
    assert (
        cli.main(
            ["train", *words, "backbone.width=8", f"run.dir={tmp_path / 'b'}", "--fork", str(run)]
        )
        == 2
    )
    assert "its weights do not fit" in capsys.readouterr().err
    assert cli.main(["train", *words, f"run.dir={tmp_path / 'c'}", "--fork", str(tmp_path)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
