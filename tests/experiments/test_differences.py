"""What a report says of settings that differ from the paper's."""

import yaml
from result_files import lines, write_result

from fedx_pl.config.compose import compose
from fedx_pl.experiments.definition import load_experiment
from fedx_pl.experiments.report import write_report


def test_settings_that_differ_from_the_paper_are_listed_with_their_place(results, definitions):
    write_report(results, definitions)
    found = {tuple(line.split(" | ")[:4]) for line in lines(results)}
    mini = compose(["profile=mini"])
    assert ("| `federation.clients`", "`10`", f"`{mini.federation.clients}`", "all runs") in found
    for data in ("cifar10", "svhn"):  # Their jitter differs in the paper.
        paper = compose(["profile=paper", f"data={data}"])
        assert (
            "| `augment.hue`",
            f"`{paper.augment.hue}`",
            f"`{mini.augment.hue}`",
            f"data: {data}",
        ) in found
    keys = {line[0] for line in found}
    assert "| `federation.rounds`" not in keys  # of the definition, the same at both scales
    assert "| `optim.batch_size`" not in keys  # of an axis
    assert "| `data.image_size`" not in keys  # of no effect for these data sets
    assert "- Tested on the full test set." in lines(results)


def test_settings_of_some_experiments_are_listed_with_their_names(results, definitions):
    """All of "tiny" have fewer clients than the paper; one of the two of "more" has as many."""
    clients = {"few": [], "ten": "federation.clients=10"}
    content = {"title": "More", "base": "federation.rounds=30", "axes": {"clients": clients}}
    (definitions / "more.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    more = load_experiment(definitions / "more.yaml")
    for label in clients:
        write_result(results, more, (label,), 0, {5: 40.0})
    write_report(results, definitions)
    [row] = [line for line in lines(results) if line.startswith("| `federation.clients`")]
    assert " | all but some of more | " in row


def test_the_guide_to_the_differences_is_linked_within_the_repository(results, definitions):
    guide = definitions.parent / "docs" / "faithfulness.md"
    guide.parent.mkdir()
    guide.touch()
    write_report(results, definitions)
    assert (
        "[docs/faithfulness.md](../../docs/faithfulness.md)" in (results / "report.md").read_text()
    )


def test_cells_that_the_paper_has_not_are_compared_with_its_usual_settings(results, definitions):
    """Profile paper has no cell of "longer": all settings of its definition are listed."""
    content = {
        "title": "Longer",
        "base": "federation.rounds=40 optim.batch_size=64",
        "axes": {"variant": {"plain": [], "+ FedX": "fedx=true"}},
        "profiles": {"paper": {"variant": []}},
    }
    (definitions / "longer.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    longer = load_experiment(definitions / "longer.yaml")
    for label in ("plain", "+ FedX"):
        write_result(results, longer, (label,), 0, {5: 40.0})
    write_report(results, definitions)
    found = [tuple(line.split(" | ")[:4]) for line in lines(results)]
    assert ("| `federation.rounds`", "`100`", "`40`", "some of longer") in found
    assert ("| `optim.batch_size`", "`128`", "`64`", "some of longer") in found
    assert not [line for line in found if line[0] == "| `fedx.enabled`"]


def test_settings_of_a_user_s_experiment_are_listed_at_any_profile(tmp_path, definitions):
    """4 rounds and 2 clients are not the paper's, although the profile is named so."""
    content = {
        "title": "Own",
        "base": "federation.rounds=4",
        "axes": {"variant": {"two": "federation.clients=2"}},
    }
    (definitions / "own.yaml").write_text(yaml.safe_dump(content))
    write_result(
        tmp_path / "r",
        load_experiment(definitions / "own.yaml"),
        ("two",),
        0,
        {4: 40.0},
        profile="paper",
    )
    write_report(tmp_path / "r", definitions)
    found = [tuple(line.split(" | ")[:4]) for line in lines(tmp_path / "r")]
    assert ("| `federation.rounds`", "`100`", "`4`", "all runs") in found
    assert ("| `federation.clients`", "`10`", "`2`", "all runs") in found


def test_settings_of_a_baseline_that_the_paper_has_not_are_listed(results, definitions):
    """The paper has numbers for "+ FedX" only; "plain" has half its batch."""
    (definitions / "paper" / "tables.yaml").write_text(
        yaml.safe_dump({"tiny": {"CIFAR-10": {"+ FedX": [1.0, 2.0]}}})
    )
    write_report(results, definitions)
    found = [tuple(line.split(" | ")[:4]) for line in lines(results)]
    assert ("| `optim.batch_size`", "`128`", "`64`", "some of tiny") in found


def test_the_report_says_how_often_fedu_was_more_than_byol(results, definitions):
    """A mean divergence of .5 in one of 30 rounds, and of .3 in the others; mu is .4."""
    content = {
        "title": "FedU",
        "base": "federation.rounds=30 method=fedu",
        "axes": {"variant": {"plain": []}},
    }
    (definitions / "fedu.yaml").write_text(yaml.safe_dump(content))
    rounds = [
        {"round": 1 + i, "divergence": 0.3 if i else 0.5, "linear_top1": 40.0} for i in range(30)
    ]
    write_result(
        results, load_experiment(definitions / "fedu.yaml"), ("plain",), 0, {5: 40.0}, rounds=rounds
    )
    write_report(results, definitions)
    [remark] = [line for line in lines(results) if line.startswith("- With FedU")]
    assert "in 1 of 30 rounds" in remark


def test_an_experiment_with_only_shared_runs_has_no_section(results, definitions):
    """The plain run of CIFAR-10 belongs to "tiny" too; "begun" has no other run."""
    axes = {"clients": {"five": [], "seven": "federation.clients=7"}}
    content = {
        "title": "Begun",
        "base": "federation.rounds=30 data=cifar10 optim.batch_size=64",
        "axes": axes,
    }
    (definitions / "zbegun.yaml").write_text(yaml.safe_dump(content))
    write_report(results, definitions)
    text = "\n".join(lines(results))
    assert "## Begun" not in text
    assert "Nothing was run of these, or only runs that are in the tables above: Begun." in text
    (definitions / "zbegun.yaml").write_text(yaml.safe_dump(content | {"show": ["curves"]}))
    write_report(results, definitions)
    assert "## Begun" in lines(results)  # The same runs in another form.
    (definitions / "zbegun.yaml").write_text(yaml.safe_dump(content))
    begun = load_experiment(definitions / "zbegun.yaml")
    write_result(results, begun, ("seven",), 0, {5: 40.0})
    write_report(results, definitions)
    assert "## Begun" in lines(results)
