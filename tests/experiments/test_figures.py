import numpy as np
import pytest
from matplotlib.colors import to_hex
from result_files import write_result

from fedx_pl.callbacks.plots import pixels
from fedx_pl.experiments.definition import Experiment
from fedx_pl.experiments.figures import curves_figure
from fedx_pl.experiments.results import match, read_results

BASE = ["federation.rounds=30"]
AXES = {
    "data": {"CIFAR-10": ["data=cifar10"], "SVHN": ["data=svhn"]},
    "method": {"FedSimCLR": ["method=simclr"], "FedBYOL": ["method=byol"]},
    "variant": {"plain": ["optim.batch_size=64"], "+ FedX": ["fedx=true"]},
}


def figure_of(folder, experiment):
    return curves_figure(match(experiment, read_results(folder)[0], {}))


def test_a_line_is_the_mean_over_seeds_in_a_band_from_lowest_to_highest(tmp_path):
    """Round 5: 38 and 40, mean 39; round 30: 41 and 45, mean 43; untrained 30."""
    experiment = Experiment(name="one", title="One", axes={"variant": AXES["variant"]}, base=BASE)
    write_result(tmp_path, experiment, ("+ FedX",), 0, {5: 38.0, 30: 41.0})
    write_result(tmp_path, experiment, ("+ FedX",), 1, {5: 40.0, 30: 45.0})
    figure = figure_of(tmp_path, experiment)
    [axes] = figure.axes
    line, untrained = axes.lines
    assert line.get_xydata().tolist() == [[5, 39], [30, 43]]
    assert list(untrained.get_ydata()) == [30, 30]
    [band] = axes.collections
    corners = {tuple(map(float, point)) for path in band.get_paths() for point in path.vertices}
    assert {(5, 38), (5, 40), (30, 41), (30, 45)} <= corners
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["+ FedX", "untrained"]


def test_one_seed_has_no_band_and_is_dotted(tmp_path):
    experiment = Experiment(name="one", title="One", axes={"variant": AXES["variant"]}, base=BASE)
    write_result(tmp_path, experiment, ("plain",), 0, {5: 38.0, 30: 41.0})
    axes = figure_of(tmp_path, experiment).axes[0]
    assert not axes.collections
    assert axes.lines[0].get_linestyle() == ":"
    write_result(tmp_path, experiment, ("plain",), 1, {5: 38.0, 30: 41.0})
    assert figure_of(tmp_path, experiment).axes[0].lines[0].get_linestyle() == "-"


def test_panels_of_the_columns_axis_are_side_by_side_with_the_same_colors(tmp_path):
    """FedBYOL was run on SVHN only: the place below CIFAR-10 stays empty."""
    experiment = Experiment(name="many", title="Many", axes=AXES, columns="data", base=BASE)
    for cell in (
        ("CIFAR-10", "FedSimCLR", "plain"),
        ("CIFAR-10", "FedSimCLR", "+ FedX"),
        ("SVHN", "FedSimCLR", "+ FedX"),
        ("SVHN", "FedBYOL", "+ FedX"),
    ):
        write_result(tmp_path, experiment, cell, 0, {5: 38.0, 30: 41.0})
    figure = figure_of(tmp_path, experiment)
    titles = [axes.get_title() if axes.get_visible() else None for axes in figure.axes]
    assert titles == ["CIFAR-10, FedSimCLR", "SVHN, FedSimCLR", None, "SVHN, FedBYOL"]
    fedx = {
        to_hex(line.get_color())
        for axes in figure.axes
        for line in axes.lines
        if line.get_label() == "+ FedX"
    }
    plain = {
        to_hex(line.get_color())
        for axes in figure.axes
        for line in axes.lines
        if line.get_label() == "plain"
    }
    assert len(fedx) == len(plain) == 1
    assert fedx != plain


def test_panels_of_one_label_of_the_columns_axis_fill_rows(tmp_path):
    experiment = Experiment(name="many", title="Many", axes=AXES, columns="data", base=BASE)
    for method in AXES["method"]:
        write_result(tmp_path, experiment, ("SVHN", method, "plain"), 0, {5: 38.0, 30: 41.0})
    first, second = figure_of(tmp_path, experiment).axes
    assert first.get_subplotspec().rowspan == second.get_subplotspec().rowspan


@pytest.mark.parametrize("count", [1, 9])
def test_many_labels_look_different_and_the_picture_fits_a_page(tmp_path, count):
    labels = {
        f"weight {number}": [f"fedx.local_relation=0.{number + 1}"] for number in range(count)
    }
    experiment = Experiment(
        name="many", title="Many", axes={"variant": labels}, base=["fedx=true", *BASE]
    )
    for number, label in enumerate(labels):
        write_result(tmp_path, experiment, (label,), 0, {5: 38.0 + number, 30: 41.0})
    figure = figure_of(tmp_path, experiment)
    looks = {(to_hex(line.get_color()), line.get_marker()) for line in figure.axes[0].lines}
    assert len(looks) == count + 1  # and the untrained network
    height, width, _ = pixels(figure).shape
    assert max(height, width) < 1000
    assert np.ptp(pixels(figure)) > 0


def test_runs_that_were_never_measured_have_no_figure(tmp_path):
    experiment = Experiment(name="one", title="One", axes={"variant": AXES["variant"]}, base=BASE)
    write_result(tmp_path, experiment, ("plain",), 0, {5: float("nan")})
    assert figure_of(tmp_path, experiment) is None
