"""The TensorBoard dashboard of a small run: each chart has its curves, with the right numbers."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import THIN, data_for, fitted, make_model, tiny_federation
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

from fedx_pl.callbacks.angle import Angle
from fedx_pl.callbacks.dashboard import band, layout
from fedx_pl.callbacks.drift import drift_of
from fedx_pl.config.compose import compose
from fedx_pl.evaluation.geometry import angles
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, Update
from fedx_pl.methods.simclr import SimCLR


def run(words: list[str]) -> None:
    fitted(compose(words))


@pytest.fixture(scope="module")
def folder(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of FedU with FedX and three clients, two of which have their own curves."""
    folder = tmp_path_factory.mktemp("dashboard")
    run(
        [
            *tiny_federation(tiny_root, folder),
            *("method=fedu", "fedx=true", "evaluation.linear_every=1", "run.client_curves=2"),
            f"run.dir={folder}",
        ]
    )
    return folder


@pytest.fixture(scope="module")
def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"images": 0, "histograms": 0}
    ).Reload()


def curve(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in events.Scalars(tag)]


def content(events: EventAccumulator, tag: str) -> bytes:
    return events.SummaryMetadata(tag).plugin_data.content


def test_every_chart_of_every_page_has_curves(events: EventAccumulator) -> None:
    layout = Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [page.title for page in layout.category] == [
        "Accuracy",
        "Losses",
        "Clients",
        "Health",
        "System",
    ]
    scalars = events.Tags()["scalars"]
    for chart in (chart for page in layout.category for chart in page.chart):
        for pattern in chart.multiline.tag:
            assert any(re.match(pattern, tag) for tag in scalars), (chart.title, pattern)
        for series in chart.margin.series:
            assert {series.value, series.lower, series.upper} <= set(scalars), chart.title
    bands = [chart.margin.series[0].value for chart in layout.category[1].chart]
    assert bands[::-1] == [
        "loss/total",
        "loss/byol",
        "loss/local_relation",
        "loss/global_contrast",
        "loss/global_relation",
    ]


def test_a_number_that_appears_late_gets_its_chart() -> None:
    """The loss scale of half precision is not shown as a loss."""
    first = {
        "round": 1,
        "loss": 1.0,
        "loss_byol": 1.0,
        "drift": 0.1,
        "rankme": 9.0,
        "bytes_up": 5,
        "knn_top1": 30.0,
    }
    pages = layout([first, {**first, "round": 2, "my_own": 3.0, "loss_scale": 8192.0}])
    assert ["client_my_own/"] in pages["Clients"].values()
    assert ["client_loss_scale/"] in pages["Clients"].values()
    assert ["client_angle/"] in pages["Clients"].values()
    assert [tags[0] for tags in pages["Losses"].values()] == ["loss/byol", "loss/total"]
    assert not [
        tags for tags in pages["Clients"].values() if "rankme" in tags[0] or "bytes" in tags[0]
    ]


def test_only_the_first_clients_have_curves_and_all_are_in_the_spread(
    events: EventAccumulator,
) -> None:
    for name, clients in {"divergence": 3, "images": 3, "loss": 3, "drift": 2, "angle": 2}.items():
        found = [tag for tag in events.Tags()["scalars"] if tag.startswith(f"client_{name}/")]
        assert found == [f"client_{name}/client_000", f"client_{name}/client_001"]
        assert [event.histogram_value.num for event in events.Histograms(f"spread/{name}")] == [
            clients,
            clients,
        ]


def test_the_best_is_the_best_so_far(events: EventAccumulator) -> None:
    measured, best = (curve(events, f"accuracy/linear_{name}") for name in ("top1", "best"))
    assert [step for step, _ in measured] == [0, 1, 2]
    assert best == [measured[1], (2, max(measured[1][1], measured[2][1]))]


def test_traffic_and_shares_add_up(events: EventAccumulator, folder: Path) -> None:
    rows = json.loads((folder / "metrics.json").read_text())["rounds"]
    size = sum(
        tensor.nbytes
        for tensor in torch_file(folder / "checkpoints" / "round_00002" / "global.safetensors")
    )
    assert [(row["bytes_up"], row["bytes_down"]) for row in rows] == [(3 * size, 3 * size)] * 2
    assert curve(events, "system/megabytes_in_all")[1][1] == pytest.approx(12 * size / 1e6)
    shares = [
        curve(events, f"system/share_{kind}")[0][1]
        for kind in ("data", "step", "aggregate", "evaluate")
    ]
    assert sum(shares) == pytest.approx(100, abs=1e-3)
    assert min(shares) > 0
    assert rows[0]["data_seconds"] + rows[0]["step_seconds"] <= rows[0]["train_seconds"]
    assert 0.1 < curve(events, "system/memory_ram_gb")[0][1] < 100


def torch_file(file: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(file).values())


def test_settings_are_columns_to_sort_a_sweep_by(events: EventAccumulator) -> None:
    start = HParamsPluginData.FromString(
        content(events, "_hparams_/session_start_info")
    ).session_start_info.hparams
    assert {key: start[key].string_value for key in ("Data", "FedX", "Method")} == {
        "Data": "cifar10",
        "FedX": "true",
        "Method": "fedu",
    }
    assert (start["Rounds"].number_value, start["Seed"].number_value) == (2, 0)
    assert start["backbone.width"].number_value == 4
    experiment = HParamsPluginData.FromString(content(events, "_hparams_/experiment")).experiment
    for metric in experiment.metric_infos:
        assert metric.name.tag in events.Tags()["scalars"]
    assert "_hparams_/session_end_info" in events.summary_metadata


def test_pictures_of_each_measured_round_and_the_projector_at_the_end(
    events: EventAccumulator, folder: Path
) -> None:
    for tag in ("embedding/neighbors", "embedding/map"):
        assert [event.step for event in events.Images(tag)] == [0, 1, 2]
    projected = folder / "tensorboard" / "00000" / "encoder"
    names = (projected / "metadata.tsv").read_text().split()
    assert len(names) == len((projected / "tensors.tsv").read_text().splitlines()) == 60
    assert names[:2] == ["airplane", "automobile"]
    assert (projected / "sprite.png").exists()


def test_a_finished_run_that_is_started_again_adds_nothing(folder: Path) -> None:
    before = sorted((file, file.stat().st_size) for file in (folder / "tensorboard").rglob("*"))
    config = (folder / "config.yaml").read_text()
    from fedx_pl.config.compose import load

    fitted(load(folder / "config.yaml"))
    assert (
        sorted((file, file.stat().st_size) for file in (folder / "tensorboard").rglob("*"))
        == before
    )
    assert (folder / "config.yaml").read_text() == config


def test_a_projector_that_was_cut_off_is_made_again(folder: Path) -> None:
    """The file that points to the others is written last."""
    from fedx_pl.config.compose import load

    board = folder / "tensorboard"
    (board / "projector_config.pbtxt").unlink()
    (board / "00000" / "encoder" / "tensors.tsv").write_text("torn")
    (board / ".projector.fedx-pl.tmp").mkdir()
    fitted(load(folder / "config.yaml"))
    assert (board / "projector_config.pbtxt").exists()
    assert len((board / "00000" / "encoder" / "tensors.tsv").read_text().splitlines()) == 60
    assert not (board / ".projector.fedx-pl.tmp").exists()


def test_unlabeled_images_have_pictures_too(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "images").mkdir()
    for number in range(12):
        Image.new("RGB", (32, 32), (20 * number, 90, 200 - 10 * number)).save(
            tmp_path / "images" / f"{number}.png"
        )
    run(
        [
            *THIN,
            *(
                "data=folder",
                f"data.root={tmp_path / 'images'}",
                f"data.cache={tmp_path / 'cache'}",
            ),
            *("method=simclr", "federation.clients=2", "federation.rounds=1", "partition.kind=iid"),
            *("federation.epochs=1", "data.image_size=32", "optim.batch_size=4"),
            f"run.dir={tmp_path / 'run'}",
        ]
    )
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in found.Images("embedding/neighbors")] == [0, 1]
    assert (
        "image"
        in (tmp_path / "run" / "tensorboard" / "00000" / "encoder" / "metadata.tsv").read_text()
    )


def test_a_band_is_one_standard_deviation_of_the_clients() -> None:
    """Clients whose mean losses are 1 and 5, 2 away from their mean of 3.

    The weighted mean may be another, here 4.
    """
    updates = [
        Update(
            client=client,
            num_images=1,
            state=GlobalState(weights={}),
            memory=ClientMemory(),
            losses=torch.tensor(losses)[:, None],
            loss_names=("total",),
            images_seen=1,
        )
        for client, losses in enumerate([[0.0, 2.0], [5.0]])
    ]
    assert band("total", 4.0, updates) == {"loss_band/total_low": 2.0, "loss_band/total_high": 6.0}
    broken = replace(updates[0], losses=torch.tensor([[math.inf], [math.nan]]))
    assert all(map(math.isnan, band("total", math.nan, [broken, updates[1]]).values()))
    empty = replace(updates[0], losses=torch.zeros(0, 1))
    assert band("total", 4.0, [empty]) == {"loss_band/total_low": 4.0, "loss_band/total_high": 4.0}


def test_drift_is_the_step_in_lengths_of_the_global_weights() -> None:
    """From (3, 4) to (3, 4 + 2.5): 2.5 of 5. Statistics and counters do not count."""
    before = {
        "w": torch.tensor([3.0]),
        "v": torch.tensor([4.0]),
        "bn.running_var": torch.ones(1),
        "n": torch.tensor(1),
    }
    after = {
        "w": torch.tensor([3.0]),
        "v": torch.tensor([6.5]),
        "bn.running_var": torch.zeros(1),
        "n": torch.tensor(9),
    }
    assert drift_of(after, before) == pytest.approx(0.5)


def test_the_angle_is_between_embeddings_before_and_after_training() -> None:
    model = make_model(SimCLR)
    data, first = (
        data_for(model),
        {name: tensor.clone() for name, tensor in model.shared_state().items()},
    )
    context = RoundContext(
        round=1,
        rounds=10,
        epochs=2,
        seed=0,
        global_state=GlobalState(weights=first),
        batchnorm="average",
    )
    trainer = LocalTrainer(model, device=torch.device("cpu"), callbacks=[Angle(clients=1)])
    update = trainer.run(context, client=0, data=data, memory=None)
    network, embedded = nn.Sequential(model.backbone, model.projector).eval(), []
    for state in (first, update.state.weights):
        model.load_shared(state)
        with torch.no_grad():
            embedded.append(
                network(data.augment.plain(data.store.take(torch.arange(40))))
            )  # all images, in order
    expected = angles(*embedded).mean().item()
    assert expected > 1
    assert update.metrics["angle"] == pytest.approx(expected, rel=1e-4)
    assert "angle" not in trainer.run(context, client=1, data=data, memory=None).metrics
    assert 0 < update.data_seconds < update.seconds
