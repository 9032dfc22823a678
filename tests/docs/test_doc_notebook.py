"""The notebook of examples/ runs as a whole on real CIFAR-10, and is small enough to read."""

import re
from pathlib import Path

import pytest
from doc_blocks import ROOT

nbformat = pytest.importorskip(
    "nbformat", reason="needs Jupyter's libraries: pip install -e '.[docs]'"
)
nbclient = pytest.importorskip(
    "nbclient", reason="needs Jupyter's libraries: pip install -e '.[docs]'"
)
NOTEBOOK = ROOT / "examples" / "first_federation.ipynb"


def test_the_notebook_is_small_and_was_run_in_order() -> None:
    assert NOTEBOOK.stat().st_size < 300_000
    cells = [
        cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"
    ]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert not re.search(r"/home/|/tmp/|/work/| 60 s", NOTEBOOK.read_text())


@pytest.mark.slow
@pytest.mark.xdist_group("docs")
def test_the_notebook_learns_on_cifar10(tmp_path: Path) -> None:
    """Runs in a new folder: a finished run in the repository would be read, not trained."""
    (ROOT / "data").mkdir(exist_ok=True)
    (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / "examples").mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    last = nbformat.v4.new_code_cell("print(history.knn_top1[6] - history.knn_top1[0])")
    notebook.cells.append(last)
    client = nbclient.NotebookClient(
        notebook, timeout=3600, resources={"metadata": {"path": str(tmp_path / "examples")}}
    )
    client.execute()
    gain = float(notebook.cells[-1].outputs[0].text)
    assert gain > 2, f"kNN accuracy gained only {gain:.2f} points over the untrained network"
    assert len(list((tmp_path / "runs").iterdir())) == 1
