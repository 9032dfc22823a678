"""Experiments are data: every definition composes, and says what is wrong with it."""

from pathlib import Path

import pytest
from helpers import EXPERIMENTS, definition

from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
from fedx_pl.experiments.definition import load_experiment, load_experiments, parse_only
from fedx_pl.experiments.jobs import plan_jobs
from fedx_pl.experiments.results import configured


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("profile", ["paper", "mini"])
def test_every_cell_of_every_experiment_composes_to_a_run_of_its_own(
    path: Path, profile: str
) -> None:
    experiment = load_experiment(path)
    hashes = [configured(experiment, cell, profile, 3).hash for cell in experiment.cells(profile)]
    assert len(set(hashes)) == len(hashes)
    assert len(hashes) >= 2 or (profile == "paper" and not experiment.paper)


def test_the_main_table_has_all_methods_and_data_sets_of_the_paper() -> None:
    table = load_experiment(EXPERIMENTS / "table1.yaml")
    assert len(list(table.cells("paper"))) == 3 * 5 * 3
    config = table.config(("SVHN", "FedU", "+ FedX"), "paper", seed=2)
    assert (config.data.name, config.method.name, config.fedx.enabled, config.seed) == (
        "svhn",
        "fedu",
        True,
        2,
    )
    assert (config.federation.rounds, config.optim.batch_size) == (100, 128)


@pytest.mark.parametrize(("profile", "epochs"), [("paper", 1000), ("mini", 200)])
def test_rounds_times_epochs_is_the_same_for_all(profile: str, epochs: int) -> None:
    experiment = load_experiment(EXPERIMENTS / "rounds.yaml")
    configs = [experiment.config(cell, profile, seed=0) for cell in experiment.cells(profile)]
    assert {c.federation.rounds * c.federation.epochs for c in configs} == {epochs}


def test_experiments_share_runs() -> None:
    """The full FedX of the ablation is a run of the main table: nothing is run twice."""
    experiments = [
        load_experiment(EXPERIMENTS / f"{name}.yaml") for name in ("table1", "ablation", "curves")
    ]
    jobs = plan_jobs(experiments, "mini", seeds=[0, 1])
    assert len(jobs) == 2 * (2 * 5 * 3 + 10 - 1)
    assert [job.config.seed for job in jobs] == sorted(job.config.seed for job in jobs)


def test_a_needed_run_comes_first_and_its_folder_is_filled_in() -> None:
    experiment = load_experiment(EXPERIMENTS / "rivals.yaml")
    jobs = plan_jobs([experiment], "mini", [4], only={"variant": ["+ FedCA"]})
    base, fedca = jobs
    assert (base.config.federation.clients, base.config.seed) == (1, 1000)
    assert fedca.config.fedca.base == str(base.config.run_folder)
    assert fedca.needs == [base.config.hash]
    elsewhere = plan_jobs(
        [experiment], "mini", [4], ["run.root=elsewhere"], only={"variant": ["+ FedCA"]}
    )[1]
    assert elsewhere.config.fedca.base != fedca.config.fedca.base
    assert elsewhere.config.hash == fedca.config.hash  # Where runs lie is not what they are.


def test_the_hash_tells_runs_apart_and_ignores_defaults() -> None:
    assert compose(["fedx.tau=0.1"]).hash == compose([]).hash
    words = [
        ["method=byol"],
        ["fedx=true"],
        ["fedx.tau=0.2"],
        ["seed=1"],
        ["method.embed_dim=64"],
        ["moon=true"],
    ]
    hashes = {compose(word).hash for word in words}
    assert len(hashes) == len(words)
    assert compose([]).hash not in hashes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title: a\naxes: {v: {x: []}}\nbaselin: x", "no key 'baselin'; did you mean baseline\\?"),
        ("title: a\naxes: {v: {x: []}}\nbaseline: y", "baseline: 'y' is not one of x"),
        ("title: a\naxes: {v: {x: []}}\nshow: [pie]", "show: 'pie' is not one of table"),
        ("title: a\naxes: {v: {x: []}}\nprofiles: {mini: {v: [z]}}", "'z' is not one of x"),
        ('title: a\naxes: {v: {"x, y": []}}', "label 'x, y' has a comma"),
        ("title: a", "needs a title and axes"),
        ("title: a\naxes: [x]", "needs a title and axes"),
        ("title: a\naxes: {v: {x: []}}\nevaluate: [sem]", "evaluate: 'sem' is not one of linear"),
        ("title: a\naxes: {v: {x: []}}\nshow: [semi]", "show: needs evaluate: 'semi'"),
        (
            "title: a\naxes: {v: {x: fedca.base=@bas}}\nneeds: {base: seed=1}",
            "'bas' is not one of base",
        ),
        ("- a", "no keys"),
        ("a: [", "not a readable experiment"),
        ("title: a\nruns: ../other", "is not the name of another definition"),
        ("title: a\nruns: mine", "is not the name of another definition"),
        ("title: a\naxes: {v: {x: []}}\nneeds: [a]", "is not an experiment"),
        ("title: a\naxes: {v: {x: 7}}", "is not an experiment"),
    ],
)
def test_a_wrong_definition_says_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_experiment(definition(tmp_path, text))


def test_only_names_axes_and_labels() -> None:
    experiments = load_experiments(EXPERIMENTS)
    assert parse_only(["method=FedBYOL,FedU"], experiments) == {"method": ["FedBYOL", "FedU"]}
    with pytest.raises(UserError, match="there is no axis 'methods'; the axes are"):
        parse_only(["methods=FedU"], experiments)
    assert parse_only(["method=FedBYOL", "method=FedU"], experiments) == {
        "method": ["FedBYOL", "FedU"]
    }
    with pytest.raises(UserError, match="method has no 'FedV'; it has FedSimCLR"):
        parse_only(["method=FedV"], experiments)
