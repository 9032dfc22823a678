"""The encoder without this package: every format gives the embeddings of the backbone."""

import base64
import errno
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from helpers import METHOD, THREADS, forget_modules, tiny_federation
from PIL import Image
from safetensors.torch import load_file

from fedx_pl import federate
from fedx_pl.cli import main as cli
from fedx_pl.encoder.load import Encoder
from fedx_pl.errors import UserError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder, where files without a given path are written."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "run"
    overrides = [
        *("profile=paper", "data.verify=false", "data.download=false", "data.limit=80"),
        *(f"data.root={tiny_root}", f"run.dir={folder}", f"run.threads={THREADS}"),
        *("backbone.name=resnet10", "backbone.width=4", "evaluation.linear.epochs=1"),
        *("federation.clients=2", "federation.rounds=1", "federation.epochs=1"),
    ]
    assert cli.main(["train", *overrides]) == 0
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three red and three blue images, of a size other than the network's."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for name, color in (("red", (220, 30, 30)), ("blue", (20, 40, 210))):
        for i in range(3):
            noisy = np.clip(np.array(color) + rng.normal(0, 12, (48, 64, 3)), 0, 255).astype(
                np.uint8
            )
            (folder / name).mkdir(exist_ok=True)
            Image.fromarray(noisy).save(folder / name / f"{i}.png")
    (folder / "notes.txt").write_text("not an image")
    return folder


def images() -> torch.Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_the_encoder_normalizes_and_has_the_weights_of_the_run(run: Path) -> None:
    """CIFAR-10's mean and std are those of the configuration.

    The weights are RUN/encoder.safetensors'.
    """
    encoder = Encoder.of(run)
    weights = load_file(run / "encoder.safetensors")
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in encoder.backbone.state_dict().items()
    )
    mean, std = (
        torch.tensor(v).view(1, 3, 1, 1)
        for v in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    )
    torch.testing.assert_close(encoder.mean, mean, atol=1e-3, rtol=0)
    torch.testing.assert_close(encoder.std, std, atol=1e-3, rtol=0)
    expected = encoder.backbone((images() - encoder.mean) / encoder.std)
    torch.testing.assert_close(encoder(images()), expected, rtol=0, atol=0)
    assert (encoder.side, encoder.channels) == (32, 3)


def run_alone(code: str, arguments: list[str]) -> np.ndarray:
    """Runs code in a process that cannot import this package."""
    alone = f"import sys; sys.modules['fedx_pl'] = None\n{code}"
    result = subprocess.run(
        [sys.executable, "-c", alone, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert result.returncode == 0, result.stderr
    return np.array(json.loads(result.stdout.splitlines()[-1]), dtype=np.float32)


@pytest.mark.parametrize("to", ["torch", "onnx"])
def test_an_exported_encoder_loads_in_one_line_and_gives_the_same_embeddings(
    run: Path, tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The batch size differs from the one used for the export."""
    if to == "onnx":
        pytest.importorskip("onnxscript", reason="needs ONNX: pip install -e '.[onnx]'")
        pytest.importorskip("onnxruntime", reason="needs ONNX Runtime: pip install -e '.[dev]'")
    file = tmp_path / f"encoder.{to}"
    assert cli.main(["export", str(run), "--to", to, "-o", str(file)]) == 0
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("load it with: ")
    x = tmp_path / "x.npy"
    outputs = {
        "torch": "encoder(torch.from_numpy(x)).detach().numpy()",
        "onnx": "session.run(None, {'images': x})[0]",
    }
    np.save(x, images().numpy())
    code = f"""
import json, numpy as np
{"import torch" if to == "torch" else "import onnxruntime"}
x = np.load(sys.argv[1])
{line}
print(json.dumps({outputs[to]}.tolist()))
"""
    expected = Encoder.of(run)(images()).detach().numpy()
    np.testing.assert_allclose(run_alone(code, [str(x)]), expected, rtol=1e-4, atol=1e-5)


def test_safetensors_are_the_plain_weights(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    assert cli.main(["export", str(run), "--to", "safetensors", "-o", str(file)]) == 0
    assert load_file(file).keys() == load_file(run / "encoder.safetensors").keys()


def test_torchvision_takes_its_own_networks_and_no_others(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torchvision

    assert cli.main(["export", str(run), "--to", "torchvision"]) == 2
    assert (
        "torchvision has no resnet10 with width 4, 3 channels and a 3x3 stem"
        in capsys.readouterr().err
    )
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(8):
        Image.fromarray(rng.integers(0, 255, (96, 96, 3), dtype=np.uint8)).save(
            tmp_path / "images" / f"{i}.png"
        )
    large = tmp_path / "large"
    overrides = [
        *("data=folder", f"data.root={tmp_path / 'images'}", f"data.cache={tmp_path / 'cache'}"),
        *("profile=paper", "federation.clients=1", "federation.rounds=1", "federation.epochs=1"),
        *("optim.batch_size=4", f"run.dir={large}"),
    ]
    assert cli.main(["train", *overrides]) == 0
    file = tmp_path / "resnet18.safetensors"
    assert cli.main(["export", str(large), "--to", "torchvision", "-o", str(file)]) == 0
    model = torchvision.models.resnet18()
    model.fc = torch.nn.Identity()
    model.load_state_dict(load_file(file))
    encoder = Encoder.of(large)
    x = torch.rand(2, 3, 96, 96)
    torch.testing.assert_close(model.eval()((x - encoder.mean) / encoder.std), encoder(x))


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_embed_writes_a_table(run: Path, pictures: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"embeddings{suffix}"
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[tables]'")
    assert cli.main(["embed", str(run), str(pictures), "-o", str(file)]) == 0
    expected = [f"{color}/{i}.png" for color in ("blue", "red") for i in range(3)]
    if suffix == ".npz":
        with np.load(file) as table:
            paths, features = table["path"].tolist(), table["embedding"]
    else:
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(file).to_pydict()
        paths, features = table["path"], np.array(table["embedding"])
    assert paths == expected
    assert features.shape == (6, 32)
    assert np.isfinite(features).all()


def test_neighbors_of_a_red_image_are_red(
    run: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    query = pictures / "red" / "0.png"
    assert (
        cli.main(
            ["neighbors", str(run), str(query), str(pictures), "--count", "3", "-o", str(page)]
        )
        == 0
    )
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if not line.startswith("folder: skipped")
    ]
    assert [line.split()[1].split("/")[0] for line in lines[:3]] == ["red"] * 3
    assert lines[0].split() == ["1.000", "red/0.png"]
    assert page.read_text().count("data:image/jpeg;base64,") == 4
    assert "src='http" not in page.read_text()


def test_embed_writes_npz_unless_asked_otherwise(
    run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["embed", str(run), str(pictures)]) == 0
    with np.load("embeddings.npz") as table:
        assert table["embedding"].shape == (6, 32)


@pytest.mark.parametrize("typed", ["", "data.cache=none", "data.cache=kept"])
@pytest.mark.parametrize("command", ["embed", "neighbors"])
def test_decoded_copies_are_deleted_unless_a_folder_is_typed(
    run: Path,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    typed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    query = [str(pictures / "red" / "0.png")] if command == "neighbors" else []
    assert (
        cli.main(
            [command, str(run), *query, str(pictures), "-o", "out.npz", *([typed] if typed else [])]
        )
        == 0
    )
    error = capsys.readouterr().err
    assert not list((tmp_path / "temporary").iterdir())
    assert not (tmp_path / "data").exists()
    assert bool(list(tmp_path.glob("kept/*/images.npy"))) == (typed == "data.cache=kept")
    assert ("kept in kept" if typed == "data.cache=kept" else str(tmp_path / "temporary")) in error


def test_from_python_copies_go_when_python_ends(run: Path, pictures: Path, tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from fedx_pl.encoder.load import Encoder\n"
        "Encoder.of(sys.argv[1]).embed_folder(pathlib.Path(sys.argv[2]), print)\n"
        "print([oct(f.stat().st_mode)[-3:] for f in pathlib.Path(sys.argv[3]).glob('fedx-pl-*')])\n"
    )
    (tmp_path / "temporary").mkdir()
    place = {"TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, "-c", script, str(run), str(pictures), str(tmp_path / "temporary")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | place
    )
    assert done.stdout.splitlines()[-1] == "['700']"
    assert not list((tmp_path / "temporary").glob("fedx-pl-*"))
    assert not (tmp_path / "data").exists()


def test_mistakes_are_named(
    run: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, message in (
        (["export", str(tmp_path)], "is not a run folder"),
        (
            ["export", str(run), "--to", "tflite"],
            "type --to safetensors, torchvision, torch or onnx",
        ),
        (["embed", str(run), str(tmp_path / "none")], "is not a folder of images"),
        (["embed", str(run), str(pictures), "data.root=x"], "takes data.cache=FOLDER"),
        (["embed", str(run), str(pictures), "-o", "x.csv"], "ends in .npz or .parquet"),
        (
            ["neighbors", str(run), str(pictures / "notes.txt"), str(pictures)],
            "cannot be read as an image",
        ),
        (
            ["neighbors", str(run), "a.png", str(pictures), "--count", "-5"],
            "--count=-5 is not possible; type --count",
        ),
        (["export", str(run), "--round", "7"], "no checkpoint of round 7"),
    ):
        assert cli.main(command) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no readable images"):
        Encoder.of(run).embed_folder(tmp_path / "empty")


def test_a_full_disk_leaves_the_earlier_table(
    run: Path,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(file: IO[bytes], **arrays: np.ndarray) -> None:
        file.write(b"half of")
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "table.npz").write_bytes(b"of last week")
    monkeypatch.setattr(np, "savez", full)
    assert cli.main(["embed", str(run), str(pictures), "-o", "table.npz"]) == 2
    assert "free some space" in capsys.readouterr().err
    assert (tmp_path / "table.npz").read_bytes() == b"of last week"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("command", ["embed", "neighbors", "export"])
def test_a_pipe_or_a_folder_is_no_place_for_a_file(
    run: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "folder.npz").mkdir()
    more = {
        "embed": [pictures],
        "neighbors": [pictures / "red" / "0.png", pictures],
        "export": [],
    }[command]
    for name in ("pipe.npz", "folder.npz"):
        assert cli.main([command, str(run), *map(str, more), "-o", name]) == 2
        assert f"-o {name} is not a file" in capsys.readouterr().err
        assert not (tmp_path / name).is_file()


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_names_that_are_no_text_are_written_readably_and_stay_different(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[tables]'")
    folder = tmp_path / "images"
    folder.mkdir()
    names = [b"caf\xe9.png", rb"caf\xe9.png", b"red\x1b[31m.png", "\N{SNOWMAN}.png".encode()]
    for level, name in enumerate(names):
        Image.new("L", (32, 32), 50 * level).save(folder / "new.png")
        os.rename(folder / "new.png", os.path.join(os.fsencode(folder), name))
    assert cli.main(["embed", str(run), str(folder), "-o", f"table{suffix}"]) == 0
    if suffix == ".npz":
        with np.load(tmp_path / "table.npz") as table:
            paths = table["path"].tolist()
    else:
        import pyarrow.parquet

        paths = pyarrow.parquet.read_table(tmp_path / "table.parquet").to_pydict()["path"]
    expected = ["caf\\\\xe9.png", "caf\\xe9.png", "red\\x1b[31m.png", "\N{SNOWMAN}.png"]
    assert sorted(paths) == sorted(expected)
    capsys.readouterr()
    query = os.fsdecode(os.path.join(os.fsencode(folder), names[0]))
    assert cli.main(["neighbors", str(run), query, str(folder)]) == 0
    shown = capsys.readouterr().out + (tmp_path / "neighbors.html").read_text()
    assert "\x1b" not in shown
    assert shown.count("caf\\xe9.png") >= 3  # a line, its picture and the query


OWN_BACKBONE = f"""
import torch
from torch import nn
{METHOD}
class TinyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_dim, self.layer = 12, nn.Conv2d(3, 12, 3)
    def forward(self, x):
        return torch.tanh(self.layer(x)).mean((2, 3))
class Bringing(Mine):
    def __init__(self, backbone, **base):
        super().__init__(TinyNet(), **base)
class Changing(Mine):
    def __init__(self, backbone, **base):
        backbone.relu = nn.GELU()  # The same weights in another network.
        super().__init__(backbone, **base)
"""


@pytest.mark.parametrize(("kind", "name"), [("Bringing", "TinyNet"), ("Changing", "ResNet")])
def test_a_backbone_that_the_method_brings_is_announced_exported_and_embeds(
    tiny_root: Path,
    pictures: Path,
    modules: Path,
    kind: str,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every format gives what the run's own network gives.

    Code is imported only if that is allowed.
    """
    (modules / "mine.py").write_text(OWN_BACKBONE)
    folder = modules / "run"
    words = [
        *tiny_federation(tiny_root, modules),
        f"method=mine:{kind}",
        "federation.rounds=1",
        f"run.dir={folder}",
    ]
    assert cli.main(["train", *words]) == 0
    shown = capsys.readouterr().out
    assert f"\n{name}, 240 images, 32-true on " in shown
    assert "resnet10" not in shown
    assert cli.main(["export", str(folder), "--to", "torch"]) == 2
    assert (
        f"trained {name}, a backbone that its method brings; its code is run to make it"
        in capsys.readouterr().err
    )
    assert cli.main(["export", str(folder), "--to", "torch", "--allow-code"]) == 0
    program = torch.export.load(folder / "encoder-torch.pt2").module()
    import mine

    network = mine.TinyNet() if kind == "Bringing" else Encoder.of(folder, allow_code=True).backbone
    network.load_state_dict(load_file(folder / "encoder.safetensors"))
    encoder = Encoder.of(folder, allow_code=True)
    expected = network.eval()((images() - encoder.mean) / encoder.std)
    torch.testing.assert_close(program(images()), expected, atol=1e-5, rtol=1e-4)
    if kind == "Changing":
        assert isinstance(encoder.backbone.relu, torch.nn.GELU)
    else:
        assert cli.main(["export", str(folder), "--to", "torchvision", "--allow-code"]) == 2
        assert "torchvision has no TinyNet; type --to torch or --to onnx" in capsys.readouterr().err
    table = modules / "e.npz"
    assert cli.main(["embed", str(folder), str(pictures), "-o", str(table), "--allow-code"]) == 0
    capsys.readouterr()
    (modules / "mine.py").write_text(OWN_BACKBONE + "# edited\n")
    forget_modules(modules)
    assert cli.main(["export", str(folder), "--to", "safetensors", "--allow-code"]) == 0
    assert "mine.py changed since" in capsys.readouterr().out


def test_a_user_defined_method_with_a_built_in_backbone_is_exported_without_its_code(
    tiny_root: Path, modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "mine.py").write_text(METHOD)
    words = [
        *tiny_federation(tiny_root, modules),
        "method=mine:Mine",
        "federation.rounds=1",
        "run.dir=run",
    ]
    assert cli.main(["train", *words]) == 0
    assert "\nresnet10, 240 images, " in capsys.readouterr().out
    (modules / "mine.py").unlink()
    forget_modules(modules)
    assert cli.main(["export", "run", "--to", "torch"]) == 0


def test_the_encoder_reads_images_by_the_range_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The range of a dark folder would make its images as bright as the training images."""
    rng = np.random.default_rng(0)
    for folder, top in (("images", 4095), ("dark", 1000)):
        (tmp_path / folder).mkdir()
        for i in range(4):
            values = rng.integers(0, top, (32, 32), dtype=np.uint16)
            values[0, :2] = 0, top
            Image.fromarray(values).save(tmp_path / folder / f"{i}.png")
    overrides = [
        *("data=folder", f"data.root={tmp_path / 'images'}", f"run.dir={tmp_path / 'deep'}"),
        *("data.image_size=32", "data.grayscale=true", "optim.batch_size=4"),
        *("backbone.name=resnet10", "backbone.width=4"),
        *("federation.clients=1", "federation.rounds=1", "federation.epochs=1"),
    ]
    assert cli.main(["train", *overrides]) == 0
    assert "0..4095 becomes 0..255" in capsys.readouterr().out
    encoder = Encoder.of(tmp_path / "deep")
    assert encoder.value_range == (0, 4095)
    paths, features = encoder.embed_folder(tmp_path / "dark")
    assert "0..4095 becomes 0..255, the encoder's range" in capsys.readouterr().out
    raw = np.stack([np.asarray(Image.open(tmp_path / "dark" / path)) for path in paths])
    torch.testing.assert_close(
        features, encoder.embed((raw.astype(int) * 255 // 4095).astype(np.uint8)[..., None])
    )

    page, query = tmp_path / "page.html", tmp_path / "dark/0.png"
    assert (
        cli.main(
            [
                "neighbors",
                str(tmp_path / "deep"),
                str(query),
                str(tmp_path / "dark"),
                "-o",
                str(page),
            ]
        )
        == 0
    )
    assert "1.000  0.png" in capsys.readouterr().out
    picture = base64.b64decode(page.read_text().partition("base64,")[2].partition("'")[0])
    assert np.asarray(Image.open(io.BytesIO(picture))).max() < 100  # as dark as it is
    assert cli.main(["export", str(tmp_path / "deep"), "--to", "safetensors"]) == 0
    assert "for 16-bit images these are (value - 0) / (4095 - 0)" in capsys.readouterr().out


def test_an_encoder_of_gray_imagenet_has_one_channel(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for folder in ("train/n01", "val/n01"):
        (tmp_path / folder).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(
                tmp_path / folder / f"{i}.JPEG"
            )
    overrides = [
        *(f"data.root={tmp_path}", f"data.cache={tmp_path / 'cache'}", f"run.root={tmp_path}"),
        *("data.classes=[n01]", "data.grayscale=true", "data.mean=[0.45]", "data.std=[0.22]"),
        *("data.image_size=32", "backbone.name=resnet10", "backbone.width=4"),
        *("federation.clients=1", "federation.epochs=1", "optim.batch_size=4"),
    ]
    run = federate("imagenet10-simclr", *overrides, rounds=1, quiet=True)
    assert run.encoder.channels == 1
    assert run.encoder.embed(rng.integers(0, 255, (2, 32, 32, 1), dtype=np.uint8)).shape[0] == 2


def test_an_encoder_that_saw_no_deep_images_takes_one_range_for_query_and_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    Image.fromarray(np.full((32, 32), 300, np.uint16)).save(tmp_path / "query.png")
    Image.fromarray(np.arange(1024, dtype=np.uint16).reshape(32, 32)).save(
        tmp_path / "folder/a.png"
    )
    command = ["neighbors", str(run), str(tmp_path / "query.png"), str(tmp_path / "folder")]
    assert cli.main(command) == 0
    assert (
        "0..1023 becomes 0..255, the range of all of them, since the encoder"
        in capsys.readouterr().out
    )
