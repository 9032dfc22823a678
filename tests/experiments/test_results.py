import json

import pytest
from result_files import write_result

from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
from fedx_pl.experiments.definition import Experiment
from fedx_pl.experiments.results import (
    changes,
    configured,
    evaluation_settings,
    match,
    read_evaluation,
    read_result,
    read_results,
)

VARIANTS = {"plain": ["optim.batch_size=64"], "+ FedX": ["fedx=true"]}
BASE = ["federation.rounds=30"]
TINY = Experiment(name="tiny", title="Tiny", axes={"variant": VARIANTS}, base=BASE)


def found(folder, experiment=TINY):
    outdated: dict[str, list[str]] = {}
    results, problems = read_results(folder)
    return match(experiment, results, outdated), problems, outdated


def test_results_are_found_by_cell_and_seed(tmp_path):
    for seed in (0, 2):
        write_result(tmp_path, TINY, ("+ FedX",), seed, {5: 41.0, 10: 43.0 + seed, 15: 42.0 + seed})
    (tmp_path / "old.csv").write_text("not a result")
    runs, problems, outdated = found(tmp_path)
    assert not problems
    assert not outdated
    assert list(runs.by_cell) == [("+ FedX",)]
    assert runs.missing == [("plain",)]
    first, second = runs.by_cell["+ FedX",][0], runs.by_cell["+ FedX",][2]
    assert (first.last(), first.best(), second.last(), second.best()) == (42.0, 43.0, 44.0, 45.0)
    assert first.measured() == [(5, 41.0), (10, 43.0), (30, 42.0)]
    assert first.last("knn_top1") == 21.0
    assert runs.values(("+ FedX",), lambda result: result.last()) == {0: 42.0, 2: 44.0}


def test_a_last_round_without_accuracy_does_not_take_an_earlier_one(tmp_path):
    path = write_result(tmp_path, TINY, ("plain",), 0, {5: 41.0, 10: 42.0})
    content = json.loads(path.read_text())
    content["rounds"][-1]["linear_top1"] = float("nan")
    path.write_text(json.dumps(content))
    [result] = read_results(tmp_path)[0]
    assert (result.last(), result.best()) == (None, 41.0)


def test_damaged_files_are_named_and_left_out(tmp_path):
    good = write_result(tmp_path, TINY, ("plain",), 0, {5: 40.0})
    (tmp_path / "a.json").write_text('{"format": 1, "na')
    (tmp_path / "b.json").write_text("[1, 2]")
    (tmp_path / "c.json").write_text(json.dumps(json.loads(good.read_text()) | {"format": 7}))
    (tmp_path / "d.json").write_text('{"format": 1, "name": "x"}')
    (tmp_path / "e.json").write_bytes(b"\xff\xfe\x00")
    cut_off = write_result(
        tmp_path, TINY, ("plain",), 1, {5: 40.0}, rounds=[{"round": 3, "linear_top1": 40.0}]
    )
    cut_off.rename(tmp_path / "f.json")
    results, problems = read_results(tmp_path)
    assert [result.seed for result in results] == [0]
    assert [problem.partition(" ")[0] for problem in problems] == [
        f"{letter}.json" for letter in "abcdef"
    ]
    assert "format is 7" in problems[2]
    assert "has no 'hash'" in problems[3]
    assert "end before the last, 30" in problems[5]


def test_a_copy_of_a_result_does_not_count_twice(tmp_path):
    good = write_result(tmp_path, TINY, ("plain",), 0, {5: 40.0})
    good.with_name("z.json").write_text(good.read_text())
    results, [problem] = read_results(tmp_path)
    assert len(results) == 1
    assert problem.startswith("z.json is a second result")


def test_a_result_of_an_older_default_is_left_out_with_the_reason(tmp_path):
    """The hash covers what differs from the defaults, so a new default does not change it."""
    path = write_result(tmp_path, TINY, ("plain",), 0, {5: 40.0})
    content = json.loads(path.read_text())
    content["config"]["optim"]["momentum"] = 0.5
    path.write_text(json.dumps(content))
    runs, _, outdated = found(tmp_path)
    assert not runs.by_cell
    assert outdated == {content["hash"]: ["optim.momentum was 0.5, is 0.9"]}


def test_keys_that_only_one_side_has_do_not_matter(tmp_path):
    path = write_result(tmp_path, TINY, ("plain",), 0, {5: 40.0})
    content = json.loads(path.read_text())
    del content["config"]["optim"]["momentum"]
    content["config"]["optim"]["gone"] = 1
    path.write_text(json.dumps(content))
    assert list(found(tmp_path)[0].by_cell) == [("plain",)]


def test_a_run_without_the_evaluation_of_the_experiment_is_not_its_result(tmp_path):
    semi = Experiment(
        name="semi",
        title="Semi",
        axes={"variant": VARIANTS},
        base=BASE,
        evaluate=["semi"],
        show=["semi"],
    )
    write_result(tmp_path, TINY, ("plain",), 0, {5: 40.0})
    measured = {"0.1": {"labels": 250, "top1": 30.0}}
    write_result(tmp_path, TINY, ("plain",), 1, {5: 40.0}, evaluations={"semi": measured})
    path = write_result(tmp_path, TINY, ("plain",), 2, {5: 40.0})
    content = json.loads(path.read_text())
    del content["evaluations"]
    path.write_text(json.dumps(content))
    assert list(found(tmp_path)[0].by_cell["plain",]) == [0, 1, 2]
    [(seed, result)] = found(tmp_path, semi)[0].by_cell["plain",].items()
    assert (seed, result.evaluations) == (1, {"semi": measured})


def test_an_empty_folder_says_what_to_type(tmp_path):
    with pytest.raises(UserError, match="fedx-pl sweep table1 profile=mini"):
        read_results(tmp_path)
    with pytest.raises(UserError, match="fedx-pl sweep table1 profile=mini"):
        read_results(tmp_path / "nowhere")


def test_profiles_are_not_mixed(tmp_path):
    write_result(tmp_path, TINY, ("plain",), 0, {5: 40.0})
    write_result(tmp_path, TINY, ("plain",), 1, {5: 40.0}, profile="paper")
    with pytest.raises(UserError, match="several profiles"):
        read_results(tmp_path)


def test_values_are_compared_with_the_types_of_json(tmp_path):
    """A tuple equals a list."""
    file = write_result(tmp_path, TINY, ("plain",), 0, {5: 40.0})
    assert changes(read_result(file), configured(TINY, ("plain",), "mini", 0)) == []
    assert changes(read_result(file), configured(TINY, ("plain",), "mini", 1)) == [
        "seed was 0, is 1"
    ]


def test_a_configuration_is_composed_once_for_all_experiments_and_seeds(monkeypatch):
    same = Experiment(
        name="other",
        title="Other",
        axes={"variant": {"none": []}},
        base=[*BASE, *VARIANTS["plain"]],
    )
    first = configured(TINY, ("plain",), "mini", 0)
    second = TINY.config(("plain",), "mini", 1)
    monkeypatch.setattr("fedx_pl.experiments.results.compose", None)
    assert configured(same, ("none",), "mini", 0) == first
    other = configured(same, ("none",), "mini", 1)
    assert (other.hash, other.content()) == (second.hash, second.content())
    assert other.hash != first.hash


def test_a_seed_of_the_definition_wins():
    fixed = Experiment(
        name="fixed", title="Fixed", axes={"variant": {"none": []}}, base=["seed=0", "seed=7"]
    )
    assert (
        configured(fixed, ("none",), "mini", 3).content()
        == fixed.config(("none",), "mini", 3).content()
    )


def test_a_run_that_others_build_on_is_found_for_every_seed():
    """The base's folder has the seed in its name."""
    variants = {"+ FedCA": ["fedca=true", "fedca.base=@base"]}
    needy = Experiment(
        name="needy", title="Needy", axes={"variant": variants}, needs={"base": ["data.limit=2000"]}
    )
    for seed in (0, 1):
        config = configured(needy, ("+ FedCA",), "mini", seed)
        assert config.content() == needy.config(("+ FedCA",), "mini", seed).content()


FEW = Experiment(
    name="few", title="Few", axes={"variant": VARIANTS}, base=[*BASE, "data.limit=2500"]
)


def made_before_all_labels_were_used(path):
    content = json.loads(path.read_text())
    del content["config"]["evaluation"]["labels"]
    path.write_text(json.dumps(content))


def test_results_that_do_not_record_their_labels_had_those_of_the_subset(tmp_path):
    """They are reported as such, ignored by sweeps and never mixed with results on all labels."""
    paths = [write_result(tmp_path, FEW, (variant,), 0, {5: 40.0}) for variant in VARIANTS]
    for path in paths:
        made_before_all_labels_were_used(path)
    runs, _, outdated = found(tmp_path, FEW)
    assert (len(runs.by_cell), outdated) == (2, {})
    assert all(result.few_labels for result in runs.results())
    plain = read_result(paths[0])
    assert changes(plain, configured(FEW, ("plain",), "mini", 0)) == [
        "evaluation.labels was limit, is all"
    ]

    write_result(tmp_path, FEW, ("+ FedX",), 0, {5: 42.0})
    runs, _, outdated = found(tmp_path, FEW)
    assert list(runs.by_cell) == [("+ FedX",)]
    assert list(outdated.values()) == [["evaluation.labels was limit, is all"]]


def test_without_a_limit_older_results_had_all_labels(tmp_path):
    paper = Experiment(
        name="paper", title="Paper", axes={"variant": VARIANTS}, base=[*BASE, "data.limit=0"]
    )
    path = write_result(tmp_path, paper, ("plain",), 0, {5: 40.0})
    made_before_all_labels_were_used(path)
    result = read_result(path)
    assert result.config["evaluation.labels"] == "all"
    assert not result.few_labels
    assert changes(result, configured(paper, ("plain",), "mini", 0)) == []


@pytest.mark.parametrize(("limit", "counts"), [(0, True), (2500, False)])
@pytest.mark.parametrize("kind", ["linear", "knn", "semi"])
def test_an_older_evaluation_counts_if_it_had_the_same_labels(tmp_path, kind, limit, counts):
    config = compose([f"data.limit={limit}"])
    settings = evaluation_settings(kind, config)
    del settings["labels"]
    document = {"round": config.federation.rounds, "settings": settings, "results": {"x": 1.0}}
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / f"{kind}.json").write_text(json.dumps(document))
    assert (read_evaluation(tmp_path, kind, config) is not None) == counts
