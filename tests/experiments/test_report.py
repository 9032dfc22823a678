import json
import os
import random
import re
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure
from result_files import DEFINITION, lines, rows, write_result

from fedx_pl.cli import main as cli
from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
from fedx_pl.experiments import report
from fedx_pl.experiments.definition import load_experiment, load_experiments
from fedx_pl.experiments.report import write_report

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

PAPER = {
    "other": {},
    "tiny": {
        "CIFAR-10": {"plain": [51.31, 52.88], "+ FedX": [56.88, 57.95]},
        "SVHN": {"+ FedX": [None, 77.0]},
    },
}


def test_the_main_table_has_mean_deviation_and_number_of_seeds(results, definitions):
    """Plain: 40, 41, 42. + FedX: 42, 44, 46 (mean 44, deviation 2). The best round is one higher.

    One seed has no deviation.
    """
    written = write_report(results, definitions)
    assert written == [results / "report.md", results / "report.html"]
    assert (
        rows(results, "plain")[0]
        == "| plain | 41.00 ± 1.00 (3) | 42.00 ± 1.00 (3) | 50.00 (1) | 50.00 (1) |"
    )
    assert rows(results, "+ FedX")[0] == (
        "| + FedX | 44.00 ± 2.00 (3) | 45.00 ± 2.00 (3) | 51.50 (1) | 51.50 (1) |"
    )
    assert "| plain | 20.50 ± 0.50 (3) | 25.00 (1) |" in lines(results)  # kNN: half


def test_gains_are_paired_by_seed_and_have_a_verdict(results, definitions):
    """2, 3, 4: mean 3 exceeds 4.303 x 1/sqrt(3) = 2.48. "a<b" equals plain; SVHN has one seed."""
    write_report(results, definitions)
    fedx, by_knn = rows(results, "CIFAR-10", "+ FedX")
    assert (
        fedx
        == "| CIFAR-10 | + FedX | +3.00 ± 1.00 (3) | **above the seed noise** | +2.00 to +4.00 |"
    )
    assert (
        by_knn
        == "| CIFAR-10 | + FedX | +1.50 ± 0.50 (3) | **above the seed noise** | +1.00 to +2.00 |"
    )  # half
    same = rows(results, "CIFAR-10", r"a\<b")[0]
    assert (
        same == r"| CIFAR-10 | a\<b | +0.00 ± 0.00 (3) | within the seed noise | +0.00 to +0.00 |"
    )
    assert (
        rows(results, "SVHN", "+ FedX")[0]
        == "| SVHN | + FedX | +1.50 (1) | one seed: no statement | - |"
    )
    assert (
        rows(results, "SVHN", r"a\<b")[0]
        == r"| SVHN | a\<b | - | no seed in common: no statement | - |"
    )
    text = "\n".join(lines(results))
    assert (
        "**+ FedX** against plain: the mean difference is positive in 2 of 2 rows; "
        "1 above the seed noise, " in text
    )
    assert r"**a\<b** against plain" not in text  # One row is no count.
    assert "improve" not in text


def test_html_and_markdown_say_the_same_and_labels_are_escaped(results, definitions):
    write_report(results, definitions)
    html = (results / "report.html").read_text()
    assert (
        '<h2 id="tiny">Two data sets &amp; &lt;three&gt; variants – the paper\'s Table 9</h2>'
        in html
    )
    assert "a&lt;b" in html
    assert "a<b" not in html
    assert "+3.00 ± 1.00 (3)" in html
    assert "Made up." in html


def test_standard_errors_are_over_five_measured_rounds(results, definitions):
    """The rounds have 1, 2, 3, 4, 5 and 0.

    The last five are 2, 3, 4, 5, 0: mean 2.8, squared deviations .64 + .04 + 1.44 + 4.84 + 7.84 =
    14.8, so the error is sqrt(14.8 / 4) / sqrt(5) = .86. The best five are 1 to 5: mean 3, error
    sqrt(10 / 4 / 5) = .71.
    """
    (definitions / "tiny.yaml").write_text(
        yaml.safe_dump(DEFINITION | {"show": ["errors"]}, sort_keys=False)
    )
    tiny = load_experiment(definitions / "tiny.yaml")
    write_result(
        results, tiny, ("SVHN", "plain"), 0, {5: 1.0, 10: 2.0, 15: 3.0, 20: 4.0, 25: 5.0, 30: 0.0}
    )
    write_report(results, definitions)
    assert "| plain | - | - | 2.80 ± 0.86 (1) | 3.00 ± 0.71 (1) |" in lines(results)
    text = "\n".join(lines(results))
    assert (
        "Our numbers are the mean of the last five measured rounds (10 to 30) and of the best "
        "five, ±" in text
    )
    assert "The paper's five rounds are consecutive" in text
    write_result(results, tiny, ("SVHN", "plain"), 0, dict.fromkeys(range(1, 31), 40.0))
    write_report(results, definitions)
    text = "\n".join(lines(results))
    assert "the last five measured rounds (26 to 30) and" in text
    assert "consecutive" not in text


def test_curves_are_a_file_and_embedded_in_the_page(results, definitions):
    (definitions / "tiny.yaml").write_text(
        yaml.safe_dump(DEFINITION | {"show": ["curves"]}, sort_keys=False)
    )
    written = write_report(results, definitions)
    assert (results / "figures" / "tiny.png") in written
    assert "](figures/tiny.png)" in (results / "report.md").read_text()
    assert (results / "report.html").read_text().count("data:image/png;base64,") == 1


def test_the_papers_numbers_are_beside_ours_with_a_note_on_their_scale(results, definitions):
    """The paper's gain is 56.88 - 51.31 = 5.57."""
    (definitions / "paper" / "tables.yaml").write_text(yaml.safe_dump(PAPER))
    write_report(results, definitions)
    text = "\n".join(lines(results))
    assert "CIFAR-10: the paper's last / best" in text
    assert rows(results, "+ FedX")[0].endswith(
        "| 56.88 / 57.95 | 51.50 (1) | 51.50 (1) | - / 77.00 |"
    )
    assert rows(results, "CIFAR-10", "+ FedX")[0].endswith(
        "| **above the seed noise** | +2.00 to +4.00 | +5.57 |"
    )
    assert rows(results, "SVHN", "+ FedX")[0].endswith("| one seed: no statement | - | - |")
    assert "The paper's numbers have another scale" in text
    assert "This is not the paper's scale." in text


def test_at_the_papers_scale_nothing_differs(tmp_path, definitions):
    (definitions / "paper" / "tables.yaml").write_text(yaml.safe_dump(PAPER))
    tiny = load_experiment(definitions / "tiny.yaml")
    write_result(tmp_path / "paper", tiny, ("CIFAR-10", "plain"), 0, {5: 50.0}, profile="paper")
    write_report(tmp_path / "paper", definitions)
    text = (tmp_path / "paper" / "report.md").read_text()
    assert "| plain | 50.00 (1) | 50.00 (1) | 51.31 / 52.88 | - | - | - |" in text
    assert "another scale" not in text
    assert "All settings of the runs are those of profile `paper`." in text


def test_cells_without_a_run_are_listed(results, definitions):
    for path in [*results.glob("svhn*"), *results.glob("cifar10*s0*")]:
        path.unlink()
    write_report(results, definitions)
    text = "\n".join(lines(results))
    assert (
        "3 of the 6 cells of profile `mini` were run, with 2 seeds each. **Not run:** SVHN." in text
    )
    assert "Not part of profile" not in text
    assert rows(results, "plain")[0] == "| plain | 41.50 ± 0.71 (2) | 42.50 ± 0.71 (2) | - | - |"


def test_a_label_without_any_run_is_listed_once(results, definitions):
    """Left are plain and "a<b" on CIFAR-10 and plain on SVHN."""
    tiny = load_experiment(definitions / "tiny.yaml")
    for path in results.glob("*.json"):
        path.unlink()
    for cell in (("CIFAR-10", "plain"), ("CIFAR-10", "a<b"), ("SVHN", "plain")):
        write_result(results, tiny, cell, 0, {5: 40.0})
    write_report(results, definitions)
    assert r"**Not run:** + FedX; SVHN / a\<b." in "\n".join(lines(results))


@pytest.mark.parametrize(
    ("profiles", "said"),
    [
        ({"mini": {"data": ["CIFAR-10"]}}, "**Not part of profile mini:** SVHN."),
        (
            {"mini": {"data": ["CIFAR-10"], "variant": ["plain"]}},
            r"**Not part of profile mini:** SVHN; a\<b, + FedX.",
        ),
        (
            {"paper": {"data": ["SVHN"]}, "mini": {"data": ["CIFAR-10"]}},
            "**Not part of profile mini:** SVHN (instead: CIFAR-10).",
        ),
        ({"paper": {"data": ["CIFAR-10"]}}, ""),
    ],
)
def test_labels_that_the_profile_leaves_out_are_listed(results, definitions, profiles, said):
    (definitions / "tiny.yaml").write_text(
        yaml.safe_dump(DEFINITION | {"profiles": profiles}, sort_keys=False)
    )
    write_report(results, definitions)
    [line] = [line for line in lines(results) if " cells of profile `mini` w" in line]
    assert line.endswith(said or "each.")


def test_labels_that_are_numbers_are_listed_with_their_axis(tmp_path, definitions):
    axes = {"rounds": {5: "federation.rounds=5", 9: "federation.rounds=9", "5 of two": []}}
    profiles = {"paper": {"rounds": ["5", "9"]}, "mini": {"rounds": ["5 of two"]}}
    content = {"title": "R", "axes": axes, "profiles": profiles}
    (definitions / "more.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    write_result(tmp_path, load_experiment(definitions / "more.yaml"), ("5 of two",), 0, {5: 40.0})
    write_report(tmp_path, definitions)
    assert "each. **Not part of profile mini:** rounds 5, 9 (instead: 5 of two)." in "\n".join(
        lines(tmp_path)
    )


def test_titles_contain_no_numbers_that_differ_between_profiles():
    """Except in `errors`, whose rounds are five at every profile."""
    titles = [
        one.title.lower().split() for one in load_experiments(EXPERIMENTS) if one.name != "errors"
    ]
    assert not [
        words for words in titles if {"two", "three", "four", "five", "ten", "twice"} & set(words)
    ]


def test_the_rule_of_the_verdicts_names_its_quantiles(results, definitions):
    write_report(results, definitions)
    assert "95 %: 12.71 for two seeds, 4.30 for three, 2.78 for five" in "\n".join(lines(results))


def test_the_summary_counts_the_runs_in_use(results, definitions):
    write_report(results, definitions)
    text = "\n".join(lines(results))
    epochs = compose(["profile=mini"]).federation.epochs
    assert "12 runs of 1 experiment at profile `mini`: seeds 0, 1, 2; 30 rounds of " in text
    assert (
        f"{epochs} local epochs; 2.0 hours of wall time, summed over the runs, on 2 CPU threads."
        in text
    )
    [row] = [
        line
        for line in lines(results)
        if line.startswith("| SVHN / + FedX | 0 | svhn-simclr-fedx-mini |")
    ]
    assert row.endswith("| `abc1234` | 10.0 | tiny |")


def test_a_note_says_that_rows_have_different_seeds(results, definitions):
    """On SVHN, "plain" and "+ FedX" have seed 0 and "a<b" has seed 1."""
    write_report(results, definitions)
    assert (
        "Not all rows have the same seeds, which alone makes them differ"
        in (results / "report.md").read_text()
    )


def test_runs_of_several_machines_have_a_column_for_it(results, definitions):
    """Other kernels give other digits for the same seed."""
    write_report(results, definitions)
    assert "| cell | seed | run | hash | commit | minutes | used in |" in lines(results)
    tiny = load_experiment(definitions / "tiny.yaml")
    write_result(results, tiny, ("CIFAR-10", "plain"), 7, {30: 40.0}, machine="CPU with AVX2")
    write_report(results, definitions)
    assert "| cell | seed | run | hash | commit | minutes | machine | used in |" in lines(results)
    (row,) = rows(results, "CIFAR-10 / plain", "7")
    assert "| 10.0 | CPU with AVX2 | tiny |" in row


def test_files_that_are_left_out_are_listed_with_the_reason(results, definitions):
    (results / "broken.json").write_text("{")
    path = sorted(results.glob("cifar10-simclr-mini-s0-*.json"))[0]
    content = json.loads(path.read_text())
    content["config"]["optim"]["momentum"] = 0.5
    path.write_text(json.dumps(content))
    tiny = load_experiment(definitions / "tiny.yaml")
    write_result(results, tiny, ("SVHN", "plain"), 0, {5: 1.0}, hash="00000000", name="stranger")
    said = []
    write_report(results, definitions, report=said.append)
    [line] = said
    assert line.startswith("broken.json is no result")
    text = "\n".join(lines(results))
    assert "- broken.json is no result" in text
    assert (
        "1 result of an older default was left out: "
        "cifar10-simclr-mini (optim.momentum was 0.5, is 0.9)" in text
    )
    assert (
        "1 result in no table (no experiment here has them, or others build on them): stranger"
        in text
    )


def test_results_without_an_experiment_still_make_a_report(tmp_path, results, definitions):
    (definitions / "tiny.yaml").unlink()
    out = tmp_path / "elsewhere"
    assert write_report(results, definitions, out) == [out / "report.md", out / "report.html"]
    assert "None of the 12 results belongs to an experiment" in (out / "report.md").read_text()


def test_without_results_the_error_says_what_to_type(tmp_path, definitions):
    with pytest.raises(UserError, match="fedx-pl sweep table1 profile=mini"):
        write_report(tmp_path / "nothing", definitions)


def test_the_gains_of_the_main_table_open_the_report(results, definitions):
    (definitions / "tiny.yaml").rename(definitions / "table1.yaml")
    write_report(results, definitions)
    text = (results / "report.md").read_text()
    top = text[: text.index("How to read the numbers")]
    assert "### + FedX against plain, last round" in top
    assert "| CIFAR-10 | + FedX | +3.00 ± 1.00 (3) |" in top
    assert "a\\<b" not in top


def test_experiments_are_in_the_order_of_the_paper(results, definitions):
    for name in ("aaa", "zzz"):
        (definitions / f"{name}.yaml").write_text(yaml.safe_dump(DEFINITION | {"title": name}))
    (definitions / "paper" / "tables.yaml").write_text("{zzz: {}, tiny: {}}")
    write_report(results, definitions)
    titles = [line.split()[1] for line in lines(results) if line.startswith("## ")]
    assert titles[:3] == ["zzz", "Two", "aaa"]


def evaluated(definitions, results, name, evaluations):
    """Writes an experiment of plain and + FedX with three seeds, evaluated by `evaluations`."""
    content = {
        "title": name,
        "base": "federation.rounds=30",
        "baseline": "plain",
        "evaluate": [name],
        "show": [name],
        "axes": {"variant": {"plain": "optim.batch_size=64", "+ FedX": "fedx=true"}},
    }
    (definitions / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    experiment = load_experiment(definitions / f"{name}.yaml")
    for seed in range(3):
        for label in experiment.axes["variant"]:
            found = {name: evaluations(label, seed)}
            write_result(results, experiment, (label,), seed, {5: 40.0}, evaluations=found)


def test_fine_tuning_is_a_table_by_share_of_labels(tmp_path, definitions):
    """Plain: 20, 21, 22. + FedX is 2, 3, 4 points above it with 1 % of the labels, 0 with 10 %."""
    results = tmp_path / "semi"

    def semi(label, seed):
        more = (2 + seed) * (label == "+ FedX")
        return {
            "0.1": {"labels": 250 - seed, "top1": 40.0 + seed},
            "0.01": {"labels": 25, "top1": 20.0 + seed + more},
        }

    evaluated(definitions, results, "semi", semi)
    numbers = {"semi": {"plain": {0.01: 21.37, 0.1: 31.14}, "+ FedX": {0.01: 23.33}}}
    (definitions / "paper" / "tables.yaml").write_text(yaml.safe_dump(numbers))
    write_report(results, definitions)
    assert (
        "| variant | 1 % (25 labels) | the paper's | 10 % (248 to 250 labels) | the paper's |"
        in lines(results)
    )
    assert "| plain | 21.00 ± 1.00 (3) | 21.37 | 41.00 ± 1.00 (3) | 31.14 |" in lines(results)
    assert "| + FedX | 24.00 ± 2.00 (3) | 23.33 | 41.00 ± 1.00 (3) | - |" in lines(results)
    (gain,) = rows(results, "+ FedX", "1 % (25 labels)", "+3.00 ± 1.00 (3)")
    assert gain.endswith("| **above the seed noise** | +2.00 to +4.00 | +1.96 |")
    (same,) = rows(results, "+ FedX", "10 % (248 to 250 labels)", "+0.00 ± 0.00 (3)")
    assert same.endswith("| within the seed noise | +0.00 to +0.00 | - |")


def test_geometry_is_a_table_and_the_figure_of_the_first_seed(tmp_path, definitions, monkeypatch):
    results, drawn = tmp_path / "geometry", {}

    def geometry(_, seed):
        return {
            "local_global_mean": 30.0 + seed,
            "interclass_mean": 80.0,
            "alignment": 0.5,
            "rankme": 9.0,
        }

    def figure(named):
        drawn.update(named)
        return Figure()

    evaluated(definitions, results, "geometry", geometry)
    numbers = {"geometry": {"plain": {"interclass_mean": 82.36}}}
    (definitions / "paper" / "tables.yaml").write_text(yaml.safe_dump(numbers))
    monkeypatch.setattr(report, "geometry_figure", figure)
    write_report(results, definitions)
    assert {name: found["local_global_mean"] for name, found in drawn.items()} == {
        "plain": 30.0,
        "+ FedX": 30.0,
    }
    assert (results / "figures" / "geometry.png").exists()
    (row,) = rows(results, "plain", "31.00 ± 1.00 (3)", "80.00 ± 0.00 (3)", "82.36")
    assert row.endswith("| 0.50 ± 0.00 (3) | - | 9.00 ± 0.00 (3) |")


@pytest.mark.parametrize("kind", ["semi", "geometry"])
def test_an_evaluation_that_no_result_has_is_a_sentence(tmp_path, definitions, kind):
    results = tmp_path / kind
    evaluated(definitions, results, kind, lambda *_: {})
    write_report(results, definitions)
    assert f"None of these results has the evaluation `{kind}`." in lines(results)


@pytest.mark.parametrize("kind", ["semi", "geometry"])
def test_an_evaluation_that_some_results_have_is_shown_for_these(tmp_path, definitions, kind):
    results = tmp_path / kind
    values = {
        "semi": {"0.1": {"labels": 250, "top1": 33.0}},
        "geometry": {"local_global_mean": 33.0},
    }
    evaluated(
        definitions,
        results,
        kind,
        lambda label, seed: values[kind] if (label, seed) == ("plain", 1) else {},
    )
    write_report(results, definitions)
    assert len([row for row in rows(results, "plain") if "33.00 (1)" in row]) == 1
    assert not [row for row in rows(results, "+ FedX") if "33.00" in row]


HOSTILE = (
    "</td><script>alert(1)</script>`` <img src=x onerror=alert(2)> ``\n\n<b>\x1b[2J\udce9$\\frac$"
)
ODD = [
    None,
    True,
    -1,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    HOSTILE,
    [],
    {},
    [HOSTILE],
    {HOSTILE: HOSTILE},
]


def places(tree):
    """All pairs (container, key) in the content of a file."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


@pytest.mark.parametrize(
    ("files", "show"),
    [
        (40, ["table", "errors", "semi"]),
        pytest.param(60, ["curves", "geometry"], marks=pytest.mark.slow),
    ],
)
def test_an_odd_value_in_one_result_does_not_stop_the_report(
    tmp_path, definitions, monkeypatch, files, show
):
    """One value is odd: it is shown as text, or its file is named and left out."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # The disk is slow, and nothing can be lost.
    shown = DEFINITION | {"show": show, "evaluate": ["semi", "geometry"]}
    (definitions / "tiny.yaml").write_text(yaml.safe_dump(shown, sort_keys=False))
    tiny = load_experiment(definitions / "tiny.yaml")
    results, rng = tmp_path / "results", random.Random(0)
    box = dict.fromkeys(("median", "q1", "q3", "low", "high", "mean"), 20.0)
    evaluations = {
        "semi": {"0.01": {"labels": 25, "top1": 30.0}, "labels": 50},
        "geometry": {
            "local_global": {"cat": box},
            "local_global_mean": 20.0,
            "interclass": [60.0, 70.0],
            "interclass_mean": 65.0,
            "alignment": 0.5,
            "uniformity": -2.0,
            "rankme": 9.0,
        },
    }
    accuracies = {5: 38.0, 6: 39.0, 7: 40.0, 8: 41.0, 9: 40.0}
    write_result(results, tiny, ("CIFAR-10", "plain"), 0, accuracies, evaluations=evaluations)
    good = write_result(
        results, tiny, ("CIFAR-10", "+ FedX"), 0, accuracies, evaluations=evaluations
    )
    content = good.read_text()
    for _ in range(files):
        damaged = json.loads(content)
        parts = [
            damaged,
            damaged["rounds"][-1],
            damaged["evaluations"],
            damaged["config"]["federation"],
        ]
        where, key = rng.choice(list(places(rng.choice(parts))))
        # Results of two profiles would be an error of their own.
        where[key] = rng.choice(ODD) if key != "profile" else "mini"
        damaged["hash"] = damaged["hash"] if rng.random() < 0.5 else "00000000"
        (results / good.name).write_text(json.dumps(damaged))
        said = []
        write_report(results, definitions, report=said.append)
        text = (results / "report.md").read_text()
        outside = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
        assert not re.search(r"(?<!\\)<(script|img|b)", outside), (where, key)
        assert "<script" not in (results / "report.html").read_text()
        assert "\x1b" not in text + "".join(said)


def test_a_file_that_is_left_out_changes_the_exit_code(results, definitions, capsys):
    command = ["report", str(results), "--definitions", str(definitions)]
    assert cli.main(command) == 0
    (results / "bad\x1b[2J.json").write_text("{")
    os.mkfifo(results / "pipe.json")
    capsys.readouterr()
    assert cli.main(command) == 1
    shown = capsys.readouterr().out
    assert "bad\\x1b[2J.json is no result of a finished run and was left out" in shown
    assert "pipe.json is no result of a finished run and was left out (it is not a file)" in shown
    assert rows(results, "plain")
