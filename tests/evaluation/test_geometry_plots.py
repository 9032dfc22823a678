import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from fedx_pl.callbacks.plots import pixels
from fedx_pl.evaluation.geometry_plots import geometry_figure


def found(seed: int, classes: int = 3) -> dict:
    """Made up numbers in the shape that `evaluate_run` gives."""
    rng = np.random.default_rng(seed)
    median = rng.uniform(30, 50, classes)
    boxes = {
        f"class {i}": {
            "mean": m + 1,
            "median": m,
            "q1": m - 5,
            "q3": m + 5,
            "low": m - 15,
            "high": m + 15,
        }
        for i, m in enumerate(median.tolist())
    }
    between = rng.normal(85, 15, classes * (classes - 1) // 2).tolist()
    return {
        "local_global": boxes,
        "interclass": between,
        "interclass_mean": float(np.mean(between)),
    }


def test_boxes_stand_side_by_side_and_are_the_stored_quartiles():
    named = {"plain": found(0), "FedX": found(1)}
    left, _ = geometry_figure(named).axes
    assert [label.get_text() for label in left.get_xticklabels()] == [
        "class 0",
        "class 1",
        "class 2",
    ]
    assert len(left.patches) == 6
    for run, (label, color) in enumerate((("plain", "#0072b2"), ("FedX", "#d55e00"))):
        for place, box in enumerate(named[label]["local_global"].values()):
            patch = left.patches[3 * run + place]
            corners = patch.get_path().vertices
            assert corners[:, 1].min() == pytest.approx(box["q1"])
            assert corners[:, 1].max() == pytest.approx(box["q3"])
            assert (corners[:, 0].mean() > place) == (run == 1)
            assert abs(corners[:, 0] - place).max() < 0.5
            assert to_hex(patch.get_facecolor()) == color


def test_the_histogram_counts_every_pair_and_marks_the_means():
    named = {"plain": found(0, classes=10), "FedX": found(1, classes=10)}
    _, right = geometry_figure(named).axes
    assert sum(bar.get_height() for bar in right.patches) == 90
    assert [line.get_xdata()[0] for line in right.lines] == [
        one["interclass_mean"] for one in named.values()
    ]


@pytest.mark.parametrize("angles", [[80.0, 90.0, 100.0], [90.0]])
def test_an_angle_on_an_edge_falls_into_a_bin(angles):
    run = {"local_global": {}, "interclass": angles, "interclass_mean": 90.0}
    _, right = geometry_figure({"a": run}).axes
    assert sum(bar.get_height() for bar in right.patches) == len(angles)


def test_a_run_without_labels_says_so_and_others_are_still_drawn():
    nothing = {"alignment": 0.1, "local_global_mean": 20.0}
    left, right = (figure := geometry_figure({"mine": nothing})).axes
    assert [text.get_text() for text in (*left.texts, *right.texts)] == ["no labels"] * 2
    assert pixels(figure).size
    left, _ = geometry_figure({"mine": nothing, "theirs": found(0)}).axes
    assert len(left.patches) == 3
    assert not left.texts


def test_a_hundred_classes_and_two_runs_make_a_picture_of_bounded_size():
    figure = geometry_figure({f"run {i}": found(i, classes=100) for i in range(2)})
    assert pixels(figure).shape[1] < 3000


def test_pyplot_is_not_touched():
    pyplot.close("all")
    pixels(geometry_figure({"a": found(0)}))
    assert pyplot.get_fignums() == []
