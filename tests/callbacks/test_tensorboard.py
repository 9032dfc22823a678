"""TensorBoard events: what is written, thinned, cut off, and what a full disk does."""

import errno
import io
import itertools
import math
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedx_pl.callbacks.tensorboard import RunWriter


def events(folder) -> EventAccumulator:
    accumulator = EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
    )
    return accumulator.Reload()


def scalars(folder, tag) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def picture(folder, tag) -> np.ndarray:
    (event,) = events(folder).Images(tag)
    return np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))


def test_accuracies_by_round_without_those_not_measured(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.accuracy(0, {"knn_top1": 20.0, "linear_top1": 30.5})
        writer.accuracy(1, {"knn_top1": 25.0, "linear_top1": None, "linear_top5": math.nan})
    assert scalars(tmp_path, "accuracy/knn_top1") == [(0, 20.0), (1, 25.0)]
    assert scalars(tmp_path, "accuracy/linear_top1") == [(0, 30.5)]
    assert "accuracy/linear_top5" not in events(tmp_path).Tags()["scalars"]


def test_a_round_can_be_read_before_the_writer_is_closed(tmp_path):
    writer = RunWriter(tmp_path)
    writer.round(3, {"system/images_per_second": 1234.0, "clients/dropped": 0})
    assert scalars(tmp_path, "system/images_per_second") == [(3, 1234.0)]
    assert scalars(tmp_path, "clients/dropped") == [(3, 0.0)]
    writer.close()


def test_short_rounds_keep_every_step_and_steps_continue_over_rounds(tmp_path):
    losses = torch.arange(12.0).view(6, 2)  # first term 0, 2, 4 ...; second 1, 3, 5 ...
    with RunWriter(tmp_path) as writer:
        writer.client_losses(7, 0, losses[:4], ["contrastive", "relation"])
        writer.client_losses(7, 4, losses[4:], ["contrastive", "relation"])
    assert scalars(tmp_path, "loss_contrastive/client_007") == [(i, 2.0 * i) for i in range(6)]
    assert scalars(tmp_path, "loss_relation/client_007") == [(i, 2.0 * i + 1) for i in range(6)]


def test_long_rounds_are_means_of_buckets_at_their_last_step(tmp_path):
    """120 rows in buckets of ceil(120 / 50) = 3.

    This makes 40 points, the mean of 0, 1, 2 at step 2, and so on; 2 rounds.
    """
    with RunWriter(tmp_path) as writer:
        for round in range(2):
            writer.client_losses(0, 120 * round, torch.arange(120.0)[:, None], ["total"])
    points = scalars(tmp_path, "loss_total/client_000")
    assert len(points) == 80
    assert points[:2] == [(2, 1.0), (5, 4.0)]
    assert points[39:41] == [(119, 118.0), (122, 1.0)]
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps))


def test_a_round_never_writes_more_than_fifty_points(tmp_path):
    with RunWriter(tmp_path) as writer:
        for client, rows in enumerate((50, 51, 99, 101, 1003)):
            writer.client_losses(client, 0, torch.ones(rows, 1), ["total"])
    for client, rows in enumerate((50, 51, 99, 101, 1003)):
        points = scalars(tmp_path, f"loss_total/client_{client:03d}")
        assert 25 < len(points) <= 50
        assert points[-1] == (rows - 1, 1.0)  # a shorter last bucket still ends on the last step


def test_only_the_first_clients_get_curves(tmp_path):
    with RunWriter(tmp_path, max_clients=2) as writer:
        for client in (5, 1, 0, 2):
            writer.client_losses(client, 0, torch.ones(1, 1), ["total"])
    assert sorted(events(tmp_path).Tags()["scalars"]) == [
        "loss_total/client_000",
        "loss_total/client_001",
    ]


def test_a_broken_loss_is_shown(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.client_losses(0, 0, torch.tensor([[1.0], [math.nan]]), ["total"])
    (_, good), (step, bad) = scalars(tmp_path, "loss_total/client_000")
    assert good == 1.0
    assert step == 1
    assert math.isnan(bad)


def test_names_must_match_the_terms(tmp_path):
    with RunWriter(tmp_path) as writer, pytest.raises(ValueError, match="zip"):
        writer.client_losses(0, 0, torch.ones(3, 2), ["total"])


def test_partition_picture_and_sizes(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.partition(np.array([[1000, 234], [0, 7]]), ["north", "south"], ["cat", "dog"])
    image = picture(tmp_path, "partition/heatmap")
    assert image.shape[2] == 3
    assert image.std() > 10  # not an empty canvas
    (event,) = events(tmp_path).Tensors("partition/sizes/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "| north | 1,234 |" in text
    assert "| south | 7 |" in text


def test_views_show_the_pixels_before_normalization(tmp_path):
    red, blue = torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, 8, 8)
    red[:, 0], blue[:, 2] = 1, 1
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    shift, scale = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)
    with RunWriter(tmp_path) as writer:
        writer.views((red - shift) / scale, (blue - shift) / scale, mean, std)
    colors = {tuple(color) for color in picture(tmp_path, "views/pairs").reshape(-1, 3).tolist()}
    assert colors == {(255, 0, 0), (0, 0, 255), (255, 255, 255)}


def test_one_file_for_everything_and_none_for_nothing(tmp_path):
    with RunWriter(tmp_path / "none"):
        pass
    assert not (tmp_path / "none").exists()
    with RunWriter(tmp_path / "one") as writer:
        writer.text("config", "seed: 1")
        writer.round(0, {"a": 1.0})
        writer.client_losses(0, 0, torch.ones(2, 1), ["total"])
    writer.close()  # a second time
    assert len(list((tmp_path / "one").iterdir())) == 1


def test_tensorboard_is_not_imported_before_the_first_write(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it now raises
    writer = RunWriter(tmp_path)
    writer.close()
    with pytest.raises(ImportError):
        writer.text("config", "seed: 1")


def test_numbers_of_any_size_are_taken(tmp_path):
    """Torch's histograms end at 1e20 and raise if all values lie beyond."""
    with RunWriter(tmp_path) as writer:
        writer.clients("loss", 1, {0: 1e30, 1: math.nan})
        writer.clients("loss", 2, {0: 2.0, 1: -math.inf})
    assert scalars(tmp_path, "client_loss/client_000") == [(1, pytest.approx(1e30)), (2, 2.0)]
    assert [event.step for event in events(tmp_path).Histograms("spread/loss")] == [2]


def test_a_full_disk_is_an_error_of_the_caller_and_no_traceback_of_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard writes in a separate thread, whose error the next call raises."""
    from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    printed: list[threading.ExceptHookArgs] = []

    def usual_hook(error: threading.ExceptHookArgs) -> None:
        printed.append(error)

    monkeypatch.setattr(threading, "excepthook", usual_hook)
    for method in ("write", "append"):
        monkeypatch.setattr(LocalFileSystem, method, full)
    writer = RunWriter(tmp_path / "events")

    def write_until_the_thread_has_failed() -> None:
        for round_number in itertools.count():
            writer.round(round_number, {"loss": 1.0})

    with pytest.raises(OSError, match="No space left"):
        write_until_the_thread_has_failed()
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("tensorboard."):
            thread.join(60)
    writer.close()
    assert printed == []
