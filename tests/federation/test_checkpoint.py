"""What is on disk after a round, and what is read back."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from fedx_pl.errors import UserError
from fedx_pl.federation.checkpoint import Checkpoints, RunState
from fedx_pl.federation.round import ClientMemory, GlobalState, Update
from fedx_pl.files import write_atomically

STATE = {
    "w": torch.arange(6.0).reshape(1, 2, 3, 1).to(memory_format=torch.channels_last),
    "n": torch.tensor(3),
}


def update(memory: ClientMemory) -> Update:
    return Update(
        client=0,
        num_images=10,
        state=GlobalState(weights={}),
        memory=memory,
        losses=torch.zeros(1, 1),
        loss_names=("total",),
        images_seen=10,
    )


def save_round(checkpoints: Checkpoints, number: int, value: float = 0.0) -> RunState:
    memory = ClientMemory(
        private={"queue": torch.full((2,), value)}, last_round=number, steps=7, epochs=2
    )
    record = checkpoints.save_client(update(memory))
    state = RunState(
        round=number,
        rows=[{"round": number, "loss": 0.1}],
        untrained={"knn_top1": 10.0},
        clients={0: record},
        seconds=1.5,
    )
    checkpoints.commit(
        state, GlobalState(weights={name: tensor + number for name, tensor in STATE.items()})
    )
    return state


def test_a_round_is_read_back_exactly(tmp_path: Path) -> None:
    saved = save_round(Checkpoints(tmp_path), 1, value=5.0)
    checkpoints = Checkpoints(tmp_path)
    state, weights = checkpoints.latest()
    assert state == saved
    assert torch.equal(weights.weights["w"], STATE["w"] + 1)
    assert weights.weights["n"].dtype == torch.int64
    memory = checkpoints.load_client(0, state.clients[0])
    assert memory.private["queue"].tolist() == [5.0, 5.0]
    assert (memory.last_round, memory.steps, memory.epochs) == (1, 7, 2)
    assert checkpoints.load_client(1, None) is None


def test_a_new_folder_has_nothing(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).latest() is None


def test_a_killed_round_leaves_the_private_state_of_the_one_before(tmp_path: Path) -> None:
    """Round 2 is killed after its client was saved and before it was committed."""
    checkpoints = Checkpoints(tmp_path)
    save_round(checkpoints, 1, value=1.0)
    checkpoints.save_client(
        update(ClientMemory(private={"queue": torch.full((2,), 2.0)}, last_round=2))
    )
    reopened = Checkpoints(tmp_path)
    state, _ = reopened.latest()
    assert state.round == 1
    assert reopened.load_client(0, state.clients[0]).private["queue"].tolist() == [1.0, 1.0]


def test_only_the_newest_rounds_and_their_client_files_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in range(1, 6):
        save_round(checkpoints, number)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "round_00004",
        "round_00005",
    ]
    assert len(list((tmp_path / "clients").iterdir())) == 2


def save_measured(checkpoints: Checkpoints, accuracies: list[float]) -> RunState:
    """One client and rounds with these accuracies; its queue holds the number of the round."""
    state, rows = RunState(), []
    for number, accuracy in enumerate(accuracies, start=1):
        memory = ClientMemory(private={"queue": torch.full((2,), float(number))}, last_round=number)
        rows.append({"round": number, "linear_top1": accuracy})
        state = RunState(
            round=number, rows=list(rows), clients={0: checkpoints.save_client(update(memory))}
        )
        checkpoints.commit(state, GlobalState(weights=STATE))
    return state


def test_the_clients_states_after_the_best_round_are_kept_with_it(tmp_path: Path) -> None:
    """Round 2 is the best of five; of the rounds kept, only the fifth and the best have files."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    save_measured(checkpoints, [10.0, 50.0, 20.0, 30.0, 40.0])
    names = sorted(file.name for file in (tmp_path / "clients").iterdir())
    assert names == ["00000_round_00002.safetensors", "00000_round_00005.safetensors"]
    best, _ = checkpoints.read(2)
    assert checkpoints.load_client(0, best.clients[0]).private["queue"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("damaged", "files"), [(True, 2), (False, 1)])
def test_without_a_best_round_nothing_is_kept_for_it_and_of_a_damaged_one_all(
    tmp_path: Path, damaged: bool, files: int
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save_measured(checkpoints, [50.0, 20.0])
    best = tmp_path / "checkpoints" / "best"
    if damaged:
        (best / "state.json").write_text("{")
    else:
        shutil.rmtree(best)
    checkpoints.clear()
    assert len(list((tmp_path / "clients").iterdir())) == files


def test_an_unknown_round_is_answered_with_all_that_can_be_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save_measured(checkpoints, [10.0, 50.0, 20.0, 30.0])
    with pytest.raises(
        UserError, match=r"no checkpoint of round 1 .*there are: 2, 3, 4\. .*and the best"
    ):
        checkpoints.read(1)


def test_the_private_state_of_an_absent_client_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    first = save_round(checkpoints, 1, value=1.0)
    for number in range(2, 6):
        checkpoints.commit(
            RunState(round=number, clients=first.clients), GlobalState(weights=STATE)
        )
    state, _ = checkpoints.latest()
    assert state.clients == first.clients
    assert checkpoints.load_client(0, state.clients[0]).private["queue"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("damage", ["flip", "truncate", "json", "missing"])
def test_a_damaged_newest_round_falls_back_to_the_one_before_loudly(
    tmp_path: Path, damage: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    save_round(checkpoints, 1)
    save_round(checkpoints, 2)
    folder = tmp_path / "checkpoints" / "round_00002"
    weights = folder / "global.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "truncate":
        weights.write_bytes(content[:-3])
    elif damage == "json":
        (folder / "state.json").write_text("{")
    else:
        weights.unlink()
    with pytest.warns(UserWarning, match="damaged"):
        state, _ = Checkpoints(tmp_path).latest()
    assert state.round == 1
    save_round(checkpoints, 2)  # The damaged one is out of the way.
    assert Checkpoints(tmp_path).latest()[0].round == 2


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_damaged_client_file_is_named_and_never_replaced_by_nothing(
    tmp_path: Path, damage: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    state = save_round(checkpoints, 1)
    (file,) = (tmp_path / "clients").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.unlink()
    if damage == "flipped":
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"00000_round_00001\.safetensors is missing or damaged"):
        checkpoints.load_client(0, state.clients[0])


def test_state_is_plain_json(tmp_path: Path) -> None:
    save_round(Checkpoints(tmp_path), 1)
    manifest = json.loads((tmp_path / "checkpoints" / "round_00001" / "state.json").read_text())
    assert manifest["round"] == 1
    assert manifest["clients"]["0"]["bytes"] > 0


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.csv"
    write_atomically(file, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
