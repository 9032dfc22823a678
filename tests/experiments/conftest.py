"""A made-up experiment with results."""

import pytest
import yaml
from result_files import DEFINITION, write_result

from fedx_pl.experiments.definition import load_experiment


@pytest.fixture
def definitions(tmp_path):
    folder = tmp_path / "experiments"
    (folder / "paper").mkdir(parents=True)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(DEFINITION, sort_keys=False))
    (folder / "paper" / "tables.yaml").write_text(yaml.safe_dump({"other": {}, "tiny": {}}))
    return folder


@pytest.fixture
def results(definitions):
    """Results of the made-up experiment.

    CIFAR-10 has three seeds of everything: "+ FedX" is 2, 3 and 4 above plain, "a<b" equals plain.
    SVHN has plain and "+ FedX" with seed 0, and "a<b" with seed 1.
    """
    folder = definitions / "results"
    tiny = load_experiment(definitions / "tiny.yaml")
    for seed in range(3):
        base = 40.0 + seed
        for label, more in {"plain": 0, "a<b": 0, "+ FedX": 2 + seed}.items():
            write_result(
                folder,
                tiny,
                ("CIFAR-10", label),
                seed,
                {5: 39.0, 10: base + more + 1, 15: base + more},
            )
    write_result(folder, tiny, ("SVHN", "plain"), 0, {5: 50.0})
    write_result(folder, tiny, ("SVHN", "a<b"), 1, {5: 60.0})
    write_result(folder, tiny, ("SVHN", "+ FedX"), 0, {5: 51.5})
    return folder
