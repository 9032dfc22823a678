"""`fedx-pl evaluate`: the same numbers as during training, and the run folder does not change."""

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import METHOD, fitted, forget_modules, made, silent, tiny_federation
from torch import nn

from fedx_pl.cli.evaluate import evaluate_run
from fedx_pl.config.compose import compose, load
from fedx_pl.errors import UserError
from fedx_pl.evaluation import embedding
from fedx_pl.evaluation.options import PRESETS
from fedx_pl.federation.checkpoint import Checkpoints, RunState
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.round import RoundContext
from fedx_pl.files import unsealed

QUICK = ["evaluation.semi.epochs=1", "evaluation.semi.fractions=[0.05,0.5]"]


def train(*overrides: str) -> Path:
    return fitted(compose(overrides)).folder


@pytest.fixture(scope="module")
def finished(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BYOL with FedX: a BatchNorm in the projector, private state and a global model."""
    return train(
        *tiny_federation(tiny_root, tmp_path_factory.mktemp("runs")), "method=byol", "fedx=true"
    )


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "evaluation" not in path.parts
    }


def saved(run: Path, kind: str) -> dict:
    return unsealed(json.loads((run / "evaluation" / f"{kind}.json").read_text()))


def test_knn_and_linear_are_the_numbers_of_the_last_round(run: Path) -> None:
    last = json.loads((run / "metrics.json").read_text())["rounds"][-1]
    found = evaluate_run(run, ["linear", "knn"], report=silent)
    for kind, keys in {
        "linear": ("linear_top1", "linear_top5"),
        "knn": ("knn_top1", "rankme", "uniformity", "feature_std"),
    }.items():
        assert {key: found[kind][key] for key in keys} == {key: last[key] for key in keys}
        assert len(found[kind]["per_class"]) == 10
        confusion = np.array(found[kind]["confusion"])
        assert confusion.sum() == 60
        assert 100 * confusion.trace() / 60 == pytest.approx(found[kind][f"{kind}_top1"], abs=1e-3)
    assert 1 <= last["rankme"] <= 32  # width 4: 32 features
    assert last["uniformity"] < 0
    assert saved(run, "knn") == {
        "round": 2,
        "settings": {"labels": "all", "k": 200},
        "results": found["knn"],
    }
    assert saved(run, "linear")["settings"]["epochs"] == 5


def test_the_run_folder_does_not_change(run: Path) -> None:
    before = contents(run)
    evaluate_run(run, ["geometry", "semi", "knn", "linear"], QUICK, report=silent)
    assert contents(run) == before
    names = {path.name for path in (run / "evaluation").iterdir()}
    assert names == {"geometry.json", "geometry.png", "semi.json", "knn.json", "linear.json"}


def test_semi_has_a_result_for_each_share_of_the_labels(run: Path) -> None:
    """240 images of ten classes: 5 % are 12, 50 % are 120."""
    ticks: list[tuple[int, int]] = []
    found = evaluate_run(
        run, ["semi"], QUICK, report=silent, tick=lambda done, total: ticks.append((done, total))
    )
    assert {share: result["labels"] for share, result in found["semi"].items()} == {
        "0.05": 12,
        "0.5": 120,
    }
    assert all(0 <= result["top1"] <= 100 for result in found["semi"].values())
    assert ticks == [(1, 3), (2, 3), (3, 3)]  # 12 and 120 images in batches of 64
    assert saved(run, "semi")["settings"] == {
        "labels": "all",
        "fractions": [0.05, 0.5],
        "epochs": 1,
        "lr": 1e-3,
        "momentum": 0.9,
        "batch_size": 64,
    }
    assert evaluate_run(run, ["semi"], QUICK, report=silent) == found


def test_geometry_is_that_of_each_client_after_one_more_round(run: Path) -> None:
    """The test trains each client once more and averages the arccos of the cosines itself."""
    again = made(load(run / "config.yaml"))
    data = again.data.images
    checkpoints = Checkpoints(run)
    state, weights = checkpoints.latest()
    test = torch.from_numpy(data.test.images)

    def z() -> torch.Tensor:
        again.model.eval()
        with torch.no_grad():
            return nn.functional.normalize(again.model.embed(again.data.augment.plain(test)))

    again.load(weights)
    seen = z()
    trainer = LocalTrainer(again.model, device=again.trainer.device)
    angles = []
    for client in range(3):
        memory = checkpoints.load_client(client, state.clients[client])
        trainer.run(
            RoundContext(
                round=3, rounds=3, epochs=1, seed=0, global_state=weights, batchnorm="average"
            ),
            client=client,
            data=again.trainer.client_data(client, 3),
            memory=memory,
        )
        angles.append((seen * z()).sum(1).clamp(-1, 1).arccos().rad2deg())
    angles = torch.stack(angles)

    found = evaluate_run(run, ["geometry"], report=silent)["geometry"]
    assert found["clients"] == 3
    assert found["local_global_mean"] == pytest.approx(angles.mean().item(), rel=1e-3)
    frog = angles[:, torch.from_numpy(data.test.labels) == data.classes.index("frog")]
    assert found["local_global"]["frog"]["median"] == pytest.approx(
        np.median(frog.numpy()), rel=1e-3
    )
    assert list(found["local_global"]) == list(data.classes)
    assert len(found["interclass"]) == 45
    assert found["interclass_mean"] == pytest.approx(np.mean(found["interclass"]), abs=1e-3)
    assert 0 < found["alignment"] < 4
    assert found["uniformity"] < 0
    assert found["rankme"] >= 1
    assert saved(run, "geometry")["results"] == found
    assert (run / "evaluation" / "geometry.png").stat().st_size > 5000


def test_geometry_of_some_of_the_clients(run: Path) -> None:
    found = evaluate_run(run, ["geometry"], ["evaluation.geometry_clients=1"], report=silent)
    assert found["geometry"]["clients"] == 1


def test_geometry_works_with_a_cosine_schedule_and_a_regularizer(
    tiny_root: Path, tmp_path: Path
) -> None:
    """After the last round the schedule is at zero: f would be F, SCAFFOLD would divide by it."""
    folder = train(
        *tiny_federation(tiny_root, tmp_path),
        "federation.rounds=1",
        "optim.schedule=cosine",
        "regularizer=scaffold",
    )
    assert evaluate_run(folder, ["geometry"], report=silent)["geometry"]["local_global_mean"] > 0.01


def test_overrides_apply_and_other_keys_win_over_a_preset(run: Path) -> None:
    evaluate_run(run, ["linear", "knn"], ["evaluation.knn_k=3"], report=silent)
    assert saved(run, "knn")["settings"] == {"labels": "all", "k": 3}
    assert saved(run, "linear")["settings"]["epochs"] == 5  # The run's own.
    words = ["evaluation.linear.epochs=2", "evaluation.linear.preset=fedema"]
    evaluate_run(run, ["linear"], words, report=silent)
    expected = PRESETS["fedema"]
    assert saved(run, "linear")["settings"] == {
        "labels": "all",
        "preset": "fedema",
        "epochs": 2,
        "lr": expected.lr,
        "weight_decay": 0.0,
        "batch_size": expected.batch_size,
    }


@pytest.fixture(scope="module")
def aligned(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with FedCA and its base."""
    words = [*tiny_federation(tiny_root, tmp_path_factory.mktemp("runs")), "federation.rounds=1"]
    base = train(*words, "federation.clients=1")
    return train(*words, "fedca=true", f"fedca.base={base}"), base


def test_fedca_needs_its_base_for_geometry_only_and_takes_a_new_place_for_it(
    aligned: tuple[Path, Path], tmp_path: Path
) -> None:
    run, base = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in aligned)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(aligned[1]), "runs/moved"))
    last = json.loads((run / "metrics.json").read_text())["rounds"][-1]
    assert evaluate_run(run, ["knn"], report=silent)["knn"]["knn_top1"] == last["knn_top1"]
    with pytest.raises(
        UserError, match=r"fedca\.base=runs/moved is not .*; type fedca\.base=FOLDER"
    ):
        evaluate_run(run, ["geometry"], report=silent)
    found = evaluate_run(run, ["geometry"], [f"fedca.base={base}"], report=silent)
    assert found == evaluate_run(aligned[0], ["geometry"], report=silent)


@pytest.mark.parametrize(
    ("kinds", "overrides", "message"),
    [
        (["lineal"], [], "RUN lineal is not known.*linear, knn, semi, geometry"),
        (["knn"], ["federation.rounds=3"], r"federation.rounds cannot be changed.*evaluation\.\*"),
        (["knn"], ["method=moco"], "method cannot be changed"),
        (["knn"], ["evaluation.linear={epochs: 3}"], "evaluation.linear cannot be changed"),
        (["knn"], ["evaluation.knn=3"], "did you mean evaluation.knn_"),
        (["knn"], ["evaluation.knn_k=0"], "evaluation.knn_k=0"),
        (["linear"], ["evaluation.linear.preset=simclr"], "evaluation.linear.preset=simclr"),
        (["semi"], ["evaluation.semi.fractions=[2]"], "evaluation.semi.fractions"),
    ],
)
def test_mistakes_are_explained(
    run: Path, kinds: list[str], overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        evaluate_run(run, kinds, overrides, report=silent)
    assert not (run / "evaluation").exists()


def test_a_folder_without_a_run_or_without_a_round_is_explained(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.yaml; type fedx-pl evaluate runs/NAME"):
        evaluate_run(tmp_path / "nowhere", ["knn"], report=silent)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="no finished round; type fedx-pl train"):
        evaluate_run(run, ["knn"], report=silent)


def test_other_images_are_refused(run: Path, tiny_root: Path, tmp_path: Path) -> None:
    """The last pixel of each file is changed."""
    name = "cifar-10-binary.tar.gz"
    other = tmp_path / "other"
    other.mkdir()
    with tarfile.open(tiny_root / name) as before, tarfile.open(other / name, "w:gz") as after:
        for member in before.getmembers():
            content = bytearray(before.extractfile(member).read())
            content[-1] ^= 255
            after.addfile(member, io.BytesIO(content))
    with pytest.raises(UserError, match=r"trained on other images; type data\.root="):
        evaluate_run(run, ["knn"], [f"data.root={other}"], report=silent)


def train_unlabeled(folder: Path) -> Path:
    """Trains on 24 images of noise; by their names, the second half is brighter."""
    from PIL import Image

    images = folder / "images"
    images.mkdir()
    for i in range(24):
        pixels = np.random.default_rng(i).integers(0, 55, (32, 32, 3), dtype=np.uint8) + np.uint8(
            200 * (i >= 12)
        )
        Image.fromarray(pixels).save(images / f"{i:02d}.png")
    overrides = [
        o for o in tiny_federation(images, folder / "runs") if not o.startswith("data.verify")
    ]
    overrides += ["data=folder", f"data.cache={folder / 'cache'}", "data.image_size=32"]
    return train(*overrides, "partition.kind=iid", "federation.clients=2", "federation.rounds=1")


def test_without_labels_only_geometry_is_measured(tmp_path: Path) -> None:
    folder = train_unlabeled(tmp_path)
    with pytest.raises(
        UserError, match=r"no labels to measure semi with; type fedx-pl evaluate .* geometry"
    ):
        evaluate_run(folder, ["geometry", "semi"], report=silent)
    found = evaluate_run(folder, ["geometry"], report=silent)["geometry"]
    assert found["images"] == 24
    assert found["local_global_mean"] > 0
    assert {"alignment", "uniformity", "rankme"} <= found.keys()
    assert not {"local_global", "interclass", "interclass_mean"} & found.keys()


def test_a_sample_of_the_images_is_not_the_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 of 24 for the angles and 8 of these for the alignment: dark and bright ones in both."""
    folder = train_unlabeled(tmp_path)
    seen: list[tuple[int, set[bool]]] = []
    embed = embedding.embed

    def watched(run: Any, images: np.ndarray, *prepare: Any) -> torch.Tensor:
        seen.append((len(images), {bool(image.mean() > 100) for image in images}))
        return embed(run, images, *prepare)

    monkeypatch.setattr(embedding, "embed", watched)
    monkeypatch.setattr(embedding, "UNLABELED", 12)
    monkeypatch.setattr(embedding, "VIEWED", 8)
    found = evaluate_run(folder, ["geometry"], report=silent)
    assert [count for count, _ in seen] == [12, 8, 8, 12, 12]
    assert all(kinds == {True, False} for _, kinds in seen)
    assert evaluate_run(folder, ["geometry"], report=silent) == found


def test_geometry_without_the_state_of_the_clients_names_other_rounds(run: Path) -> None:
    for file in (run / "clients").glob("*_round_00001.safetensors"):
        file.unlink()
    with pytest.raises(
        UserError,
        match=r"own state of round 1 is not there .*type --round with one of 2, or leave it out",
    ):
        evaluate_run(run, ["geometry"], report=silent, round_number=1)
    assert evaluate_run(run, ["knn"], report=silent, round_number=1)
    for file in (run / "clients").iterdir():
        file.unlink()
    with pytest.raises(
        UserError, match=r"own state of round 2 is not there .*type --round with one of 1$"
    ):
        evaluate_run(run, ["geometry"], report=silent)


def test_geometry_of_the_best_round_can_be_measured_after_later_rounds(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunState, "best", 1)
    folder = train(
        *tiny_federation(tiny_root, tmp_path), "method=byol", "federation.rounds=3", "run.keep=1"
    )
    assert Checkpoints(folder).rounds() == [1, 3]
    assert (
        evaluate_run(folder, ["geometry"], report=silent, round_number=1)["geometry"]["clients"]
        == 3
    )


def test_an_older_round_can_be_measured(run: Path) -> None:
    rounds = json.loads((run / "metrics.json").read_text())["rounds"]
    first, last = (
        {key: row[key] for key in ("knn_top1", "rankme", "uniformity", "feature_std")}
        for row in rounds
    )
    assert first != last  # Of the accuracies alone, two may well be the same.
    found = evaluate_run(run, ["knn"], report=silent, round_number=rounds[0]["round"])["knn"]
    assert {key: found[key] for key in first} == first
    assert (run / "evaluation" / f"knn_round_{rounds[0]['round']:05d}.json").exists()
    with pytest.raises(UserError, match=r"no checkpoint of round 99 .*there are: 1, 2.*run.keep"):
        evaluate_run(run, ["knn"], report=silent, round_number=99)


def test_edited_code_may_measure_weights_but_not_train_them(tiny_root: Path, modules: Path) -> None:
    (modules / "mine.py").write_text(METHOD)
    folder = train(*tiny_federation(tiny_root, modules), "method=mine:Mine", "federation.rounds=1")
    said: list[str] = []
    found = evaluate_run(folder, ["knn", "geometry"], report=said.append, allow_code=True)
    assert not [line for line in said if line.startswith("note:")]
    (modules / "mine.py").write_text(METHOD.replace("mean()", "sum()"))
    forget_modules(modules)
    assert evaluate_run(folder, ["knn"], report=said.append, allow_code=True)["knn"] == found["knn"]
    assert [line for line in said if line.startswith("note: mine.py changed since")]
    with pytest.raises(
        UserError,
        match=r"geometry trains clients once more, and mine\.py changed since .* linear knn",
    ):
        evaluate_run(folder, ["geometry"], report=silent, allow_code=True)
    (folder / "code.json").unlink()
    evaluate_run(folder, ["knn"], report=said.append, allow_code=True)
    assert [line for line in said if "does not say which code trained it" in line]
