"""A site's private state on disk: what is kept or forgotten, and what a kill or damage leaves."""

import json
from collections.abc import Callable
from pathlib import Path

import federation_parts as parts
import pytest
import torch

from fedx_pl.federation.round import ClientMemory
from fedx_pl.files import store
from fedx_pl.sites import memories
from fedx_pl.sites.memories import KEPT_ROUNDS, MAX_ROUNDS, Memories


def memory(round: int) -> ClientMemory:
    return ClientMemory(private={"target": torch.full((2, 3), float(round))}, last_round=round)


def test_memories_give_back_the_round_that_is_asked_for(tmp_path: Path) -> None:
    for round in (1, 2, 3):
        Memories(tmp_path).save(memory(round))
    found = Memories(tmp_path).load(2)
    assert found is not None
    assert parts.same(found, {"target": torch.full((2, 3), 2.0)})


def test_much_older_ones_are_forgotten_and_newer_ones_kept(tmp_path: Path) -> None:
    """If the newest update is lost, the coordinator asks for the previous one, maybe twice."""
    kept, newest = Memories(tmp_path), KEPT_ROUNDS + 3
    for round in range(1, newest + 1):
        kept.save(memory(round))
    assert kept.load(newest - 1) is not None
    left = [
        f"round_{round:05d}" for round in range(2, newest + 1)
    ]  # From KEPT_ROUNDS before the one asked for.
    assert sorted(file.stem for file in tmp_path.glob("*.safetensors")) == left
    kept.save(memory(newest))
    assert len(json.loads((tmp_path / "memory.json").read_text())) == len(left)
    assert kept.load(newest - 1) is not None
    assert kept.load(newest) is not None
    assert kept.load(1) is None


def test_a_site_that_keeps_nothing_is_found_all_the_same(tmp_path: Path) -> None:
    Memories(tmp_path).save(ClientMemory(last_round=1))
    assert Memories(tmp_path).load(1) == {}


def damage_bytes(folder: Path) -> None:
    file = folder / "round_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        damage_bytes,
        lambda folder: (folder / "round_00001.safetensors").unlink(),
        lambda folder: (folder / "round_00001.safetensors").write_bytes(b""),
        lambda folder: (folder / "memory.json").unlink(),
        lambda folder: (folder / "memory.json").write_text('{"1": '),
        lambda folder: (folder / "memory.json").write_text("[]"),
        lambda folder: (folder / "memory.json").write_text('{"1": null, "x": 3}'),
    ],
)
def test_what_is_damaged_or_missing_is_not_there(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    kept = Memories(tmp_path)
    kept.save(memory(1))
    damage(tmp_path)
    assert kept.load(1) is None
    kept.save(memory(2))  # And the next round is kept as ever.
    assert kept.load(2) is not None


@pytest.mark.parametrize("killed_at", ["round_00002.safetensors", "memory.json"])
def test_a_site_killed_while_it_saves_has_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """Its update of round 2 was not sent, so the coordinator starts from round 1's state."""
    kept = Memories(tmp_path)
    kept.save(memory(1))
    write = memories.write_atomically

    def die(path: Path, content: bytes, **settings: bool) -> None:
        if path.name == killed_at:
            (path.parent / f".{path.name}.1.fedx-pl.tmp").write_bytes(content[: len(content) // 2])
            raise KeyboardInterrupt
        write(path, content, **settings)

    monkeypatch.setattr(memories, "write_atomically", die)
    monkeypatch.setattr(store, "write_atomically", die)
    with pytest.raises(KeyboardInterrupt):
        kept.save(memory(2))
    monkeypatch.undo()
    again = Memories(tmp_path)
    assert not list(tmp_path.glob(".*"))
    assert again.load(1) is not None
    again.save(memory(2))
    found = again.load(2)
    assert found is not None
    assert parts.same(found, {"target": torch.full((2, 3), 2.0)})


def test_a_coordinator_cannot_fill_the_disk_with_rounds(tmp_path: Path) -> None:
    """It names no round to start from, or always the same round, which is kept."""
    kept = Memories(tmp_path)
    for round in range(1, MAX_ROUNDS + 3):
        kept.save(memory(round))
    assert len(list(tmp_path.glob("*.safetensors"))) == MAX_ROUNDS
    base = MAX_ROUNDS + 2
    for round in range(base + 1, base + MAX_ROUNDS + 3):
        assert kept.load(base) is not None
        kept.save(memory(round))
    assert len(list(tmp_path.glob("*.safetensors"))) == MAX_ROUNDS
