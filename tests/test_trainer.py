"""Whole small federations.

Covers a hand-written loop for comparison, sampling, resuming, dropping and the run folder.
"""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Watching, fitted, made, same
from safetensors.torch import load_file

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.config.compose import compose
from fedx_pl.config.schema import Config
from fedx_pl.errors import UserError
from fedx_pl.federation import pending
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.round import GlobalState, RoundContext, RoundRecord, Update
from fedx_pl.trainer import FederatedTrainer


def run(config: Config, display: Watching | None = None) -> FederatedTrainer:
    return fitted(config, display or Watching())


def weights(result: FederatedTrainer) -> dict[str, torch.Tensor]:
    newest = sorted((result.folder / "checkpoints").iterdir())[-1]
    return load_file(newest / "global.safetensors")


@pytest.mark.parametrize("fedx", [False, True])
def test_rounds_equal_a_hand_written_loop_to_the_bit(quick: list[str], fedx: bool) -> None:
    """Two rounds of BYOL with three clients, without trainer, checkpoints or FedAvg.

    A loop and a plain mean.
    """
    config = compose([*quick, "method=byol", f"fedx={fedx}".lower()])
    result = run(config)

    again = made(config)
    local = LocalTrainer(again.model, device=again.trainer.device)
    state, memories = again.model.shared_state(), dict.fromkeys(range(3))
    for number in (1, 2):
        context = RoundContext(
            round=number,
            rounds=2,
            epochs=1,
            seed=config.seed,
            global_state=GlobalState(weights=state),
            batchnorm="average",
        )
        updates = [
            local.run(
                context, client=c, data=again.trainer.client_data(c, number), memory=memories[c]
            )
            for c in range(3)
        ]
        memories = {update.client: update.memory for update in updates}
        total = sum(update.num_images for update in updates)
        state = {
            name: (sum(u.state.weights[name].double() * u.num_images for u in updates) / total).to(
                tensor.dtype
            )
            if tensor.is_floating_point()
            else (sum(u.state.weights[name].double() * u.num_images for u in updates) / total)
            .round()
            .to(tensor.dtype)
            for name, tensor in state.items()
        }
    assert same(weights(result), state)


def test_the_same_seed_gives_the_same_numbers_and_another_does_not(
    quick: list[str], tmp_path: Path
) -> None:
    first, second, other = (
        run(compose([*quick, f"run.dir={tmp_path / name}", f"seed={seed}"]))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert same(weights(first), weights(second))
    assert not same(weights(first), weights(other))
    assert [row["knn_top1"] for row in first.history] == [row["knn_top1"] for row in second.history]


@pytest.mark.parametrize("method", ["byol", "moco", "protocl", "fedu"])
def test_an_interrupted_run_resumes_to_the_same_weights_and_metrics(
    quick: list[str], tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of round 2, after its first client trained."""
    overrides = [*quick, f"method={method}", "fedx=true", "federation.rounds=3"]
    whole = run(compose([*overrides, f"run.dir={tmp_path / 'whole'}"]))
    config = compose([*overrides, f"run.dir={tmp_path / 'broken'}"])
    train = LocalTrainer.run

    def die(self: LocalTrainer, context: RoundContext, *, client: int, **rest: Any) -> Update:
        if (context.round, client) == (2, 1):
            raise KeyboardInterrupt
        return train(self, context, client=client, **rest)

    monkeypatch.setattr(LocalTrainer, "run", die)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    display = Watching()
    resumed = run(config, display)
    assert any("resuming after round 1" in note for note in display.notes)
    assert same(weights(whole), weights(resumed))
    timeless = [{k: v for k, v in row.items() if "second" not in k} for row in whole.history]
    assert timeless == [
        {k: v for k, v in row.items() if "second" not in k} for row in resumed.history
    ]


def test_a_finished_run_is_not_run_again(quick: list[str]) -> None:
    config = compose(quick)
    first = run(config)
    display = Watching()
    again = run(config, display)
    assert display.steps == 0
    assert again.history == first.history


def test_the_run_folder_holds_what_was_promised(tiny: list[str]) -> None:
    result = run(compose([*tiny, "fedx=true", "evaluation.linear_every=2"]))
    rows = list(csv.DictReader((result.folder / "metrics.csv").open()))
    assert [row["round"] for row in rows] == ["1", "2"]
    assert list(rows[0])[:4] == ["round", "knn_top1", "linear_top1", "linear_top5"]
    assert rows[0]["linear_top1"] == ""  # Not due.
    assert 0 <= float(rows[1]["linear_top1"]) <= float(rows[1]["linear_top5"]) <= 100
    terms = (
        "loss_contrastive",
        "loss_local_relation",
        "loss_global_contrast",
        "loss_global_relation",
    )
    assert float(rows[1]["loss"]) == pytest.approx(
        sum(float(rows[1][term]) for term in terms), rel=1e-4
    )
    split = json.loads((result.folder / "split.json").read_text())
    assert sorted(i for client in split["clients"] for i in client) == list(range(240))
    assert (result.folder / "config.yaml").exists()
    assert json.loads((result.folder / "metrics.json").read_text())["untrained"]["knn_top1"] >= 0
    assert list((result.folder / "tensorboard").glob("events*"))
    assert "conv1.weight" in load_file(result.folder / "encoder.safetensors")
    assert (result.folder / "accuracy.png").stat().st_size > 1000


def test_loss_curves_of_a_client_never_restart(tiny: list[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(compose([*tiny, "federation.rounds=3"]))
    events = EventAccumulator(str(result.folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tag = next(tag for tag in events.Tags()["scalars"] if tag.startswith("loss_contrastive/client"))
    steps = [event.step for event in events.Scalars(tag)]
    assert steps == sorted(set(steps))
    assert len(steps) >= 3
    assert [event.step for event in events.Scalars("accuracy/knn_top1")] == [0, 1, 2, 3]


def test_a_saved_split_can_be_used_again(quick: list[str], tmp_path: Path) -> None:
    first = run(compose([*quick, "partition.beta=0.2"]))
    file = tmp_path / "my-split.json"
    file.write_text((first.folder / "split.json").read_text())
    again = run(compose([*quick, f"partition.file={file}"]))
    assert same(weights(first), weights(again))
    with pytest.raises(UserError, match=r"type federation\.clients=3"):
        run(compose([*quick, f"partition.file={file}", "federation.clients=4"]))


def test_sampled_rounds_train_a_share_of_the_clients_and_find_their_state_again(
    quick: list[str],
) -> None:
    config = compose(
        [
            *quick,
            "method=moco",
            "federation.clients=6",
            "federation.fraction=0.5",
            "federation.rounds=4",
        ]
    )
    chosen = [made(config).trainer.choose_clients(number) for number in range(1, 5)]
    assert all(len(clients) == 3 for clients in chosen)
    assert len({tuple(clients) for clients in chosen}) > 1
    result = run(config)
    assert all(row["clients"] == 3 for row in result.history)
    last = {
        client: max(r for r, clients in enumerate(chosen, 1) if client in clients)
        for client in np.unique(chosen)
    }
    assert {client: record.last_round for client, record in result.state.clients.items()} == last
    for client, record in result.state.clients.items():
        assert "queue" in Checkpoints(result.folder).load_client(client, record).private


def poison(monkeypatch: pytest.MonkeyPatch, clients: set[int]) -> None:
    train = LocalTrainer.run

    def broken(self: LocalTrainer, context: RoundContext, *, client: int, **rest: Any) -> Update:
        update = train(self, context, client=client, **rest)
        if client in clients:
            update.state.weights["backbone.conv1.weight"].fill_(float("nan"))
        return update

    monkeypatch.setattr(LocalTrainer, "run", broken)


def test_a_broken_update_is_dropped_with_a_note_and_the_round_continues(
    quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1})
    display = Watching()
    result = run(compose([*quick, "method=byol"]), display)
    assert [row["dropped"] for row in result.history] == [1, 1]
    assert any("client 1" in note and "conv1.weight holds NaN" in note for note in display.notes)
    assert all(
        tensor.isfinite().all() for tensor in weights(result).values() if tensor.is_floating_point()
    )


def test_too_few_good_updates_stop_the_run_with_its_state_saved(
    quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {0, 1})
    with pytest.raises(UserError, match=r"round 1 has 1 good updates, federation.min_clients=2"):
        run(compose([*quick, "federation.min_clients=2"]))


def test_a_folder_of_another_config_is_refused_with_the_keys_that_differ(
    quick: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    run(compose([*quick, f"run.dir={folder}"]))
    before = (folder / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"optim\.lr: 0\.01 -> 0\.5"):
        run(compose([*quick, f"run.dir={folder}", "optim.lr=0.5"]))
    assert (folder / "config.yaml").read_text() == before
    with pytest.raises(UserError, match="holds a run already"):
        run(compose([*quick, f"run.dir={folder}", "resume=never"]))


def test_a_folder_of_other_files_is_refused(quick: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(UserError, match="not empty and holds no run"):
        run(compose([*quick, f"run.dir={folder}"]))


def test_the_same_keys_with_other_images_are_refused(quick: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(compose([*quick, f"run.dir={folder}"]))
    split = (folder / "split.json").read_text()
    file = tmp_path / "split.json"
    file.write_text(split)
    config = compose([*quick, f"partition.file={file}"])
    run(config)
    content = json.loads(split)
    content["clients"][0], content["clients"][1] = content["clients"][1], content["clients"][0]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="another split of the images"):
        run(config)
    assert (
        json.loads((config.run_folder / "split.json").read_text())["clients"]
        == json.loads(split)["clients"]
    )
    assert first.history


def test_two_folders_of_images_are_two_runs() -> None:
    a, b = (compose(["data=folder", f"data.root=/images/{name}"]) for name in "ab")
    assert a.run_folder != b.run_folder


def test_leaving_out_the_relational_terms_changes_nothing_else(quick: list[str]) -> None:
    whole = made(compose([*quick, "fedx=true"])).trainer
    off = ["fedx.local_relation=0", "fedx.global_relation=0"]
    ablated = made(compose([*quick, "fedx=true", *off])).trainer
    assert whole.client_data(0, 1).batch_size == ablated.client_data(0, 1).batch_size == 16
    assert ablated.client_data(0, 1).relation_size == 0


def test_memory_of_a_round_does_not_hold_every_client_s_weights(
    quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    train = LocalTrainer.run

    def watched(self: LocalTrainer, context: RoundContext, **rest: Any) -> Update:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        update = train(self, context, **rest)
        alive.append(weakref.ref(update.state.weights["backbone.conv1.weight"]))
        return update

    monkeypatch.setattr(LocalTrainer, "run", watched)
    run(compose([*quick, "federation.clients=8", "partition.kind=iid"]))
    assert most <= 1


def test_unlabeled_images_train_without_accuracies_but_with_alarms(
    tmp_path: Path, quick: list[str]
) -> None:
    from PIL import Image

    images = tmp_path / "images"
    for i in range(24):
        (images / f"site{i % 2}").mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 255, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"site{i % 2}" / f"{i}.png")
    overrides = [o for o in quick if not o.startswith(("data.", "federation.clients"))]
    overrides += [
        "data=folder",
        f"data.root={images}",
        f"data.cache={tmp_path / 'cache'}",
        "data.image_size=32",
    ]
    overrides += ["partition.kind=folders", "federation.clients=2", "method=byol", "fedx=true"]
    result = run(compose([*overrides, "health.min_rankme=1000"]))
    assert "knn_top1" not in result.history[-1]
    assert result.history[-1]["loss"] > 0
    assert (
        result.untrained.keys()
        == {"rankme", "uniformity", "feature_std"}
        <= result.history[-1].keys()
    )
    assert any(
        alarm.startswith("round 1: the encoder has collapsed: rankme is") for alarm in result.alarms
    )
    assert not (result.folder / "accuracy.png").exists()


def test_a_run_folder_has_one_writer(quick: list[str], tmp_path: Path) -> None:
    config = compose([*quick, f"run.dir={tmp_path / 'run'}"])

    class Second(RoundCallback):
        def on_round_start(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
            with pytest.raises(
                UserError, match=r"another process is training in .*use another folder"
            ):
                run(config)

    fitted(config, Second())
    run(config)


def test_a_resumed_round_reports_what_an_earlier_process_trained(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and images of its clients do not count as work of this process.

    They count neither for the ETA nor for the images per second.
    """
    monkeypatch.setattr(pending, "WORTH", 0.0)

    class Stop(Exception):
        pass

    class Starts(Watching):
        stop_at = 0

        def __init__(self) -> None:
            super().__init__()
            self.resumed = dict[int, int]()  # steps, by round
            self.seen = dict[int, int]()

        def on_client_update(
            self, trainer: FederatedTrainer, record: RoundRecord, update: Update
        ) -> None:
            if update.client in record.resumed:
                self.resumed[record.number] = self.resumed.get(record.number, 0) + len(
                    update.losses
                )
                return
            self.seen[record.number] = self.seen.get(record.number, 0) + update.images_seen
            if len(record.updates) + 1 == self.stop_at:
                raise Stop

    words = [*quick, f"run.dir={tmp_path / 'run'}"]
    first, second = Starts(), Starts()
    first.stop_at = 1
    with pytest.raises(Stop):
        fitted(compose(words), first)
    result = fitted(compose(words), second)
    assert first.resumed == {}
    assert second.resumed == {1: first.steps}
    for row in result.history:
        assert row["images_per_second"] * row["train_seconds"] == pytest.approx(
            second.seen[row["round"]]
        )
    assert first.seen[1] > 0
