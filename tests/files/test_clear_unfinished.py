from pathlib import Path

from fedx_pl.files import clear_unfinished


def test_hidden_files_of_a_run_folder_are_kept(tmp_path: Path) -> None:
    for name in (".notes.tmp", ".mine.12.tmp", ".state.json.12.fedx-pl.tmp"):
        (tmp_path / name).write_text("?")
    (tmp_path / "checkpoints" / ".round_00001.fedx-pl.tmp").mkdir(parents=True)
    clear_unfinished(tmp_path)
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert names == [".mine.12.tmp", ".notes.tmp", "checkpoints"]
