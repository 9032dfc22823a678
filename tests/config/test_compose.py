"""Composing, validating and freezing a configuration."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helpers import EXPERIMENTS
from simsiam import SimSiam
from torch import nn

from fedx_pl import Embeddings, Loss, SSLMethod, Views, methods
from fedx_pl.config import registry
from fedx_pl.config.build import make_model
from fedx_pl.config.compose import CONFIGS, FILE_GROUPS, choices, compose, from_tree, load
from fedx_pl.config.registry import METHOD, find
from fedx_pl.config.schema import all_keys
from fedx_pl.errors import UserError
from fedx_pl.experiments.definition import load_experiment
from fedx_pl.experiments.results import match, read_results
from fedx_pl.methods.parameters import hyper_parameters


def test_the_defaults_are_the_paper_s() -> None:
    config = compose(["data=cifar10", "method=simclr", "fedx=true", "profile=paper"])
    federation, optim = config.federation, config.optim
    assert (federation.rounds, federation.epochs, federation.clients) == (100, 10, 10)
    assert (config.partition.kind, config.partition.beta) == ("dirichlet", 0.5)
    assert (optim.lr, optim.momentum, optim.weight_decay, optim.batch_size) == (
        0.01,
        0.9,
        1e-5,
        128,
    )
    assert (config.backbone.name, config.backbone.width, config.fedx.tau) == ("resnet18", 64, 0.1)
    assert config.relation_size == 64  # "128" of the authors' code: two loaders of 64
    assert config.evaluation.linear.epochs == 100


def test_choices_come_first_and_single_keys_last_whatever_their_order() -> None:
    config = compose(["federation.rounds=7", "profile=cpu", "data=svhn"])
    assert config.federation.rounds == 7
    assert config.backbone.width == 16
    assert (config.augment.flip, config.augment.rotation) == (0.0, 15.0)


def test_svhn_is_augmented_as_in_the_authors_code() -> None:
    augment = compose(["data=svhn"]).augment
    strengths = (augment.brightness, augment.contrast, augment.saturation, augment.hue)
    assert strengths == (0.4, 0.4, 0.4, 0.4)


def test_the_configuration_is_frozen() -> None:
    config = compose([])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.federation.rounds = 3  # type: ignore[misc]


def test_it_is_read_back_from_its_yaml(tmp_path: Path) -> None:
    config = compose(
        ["method=protocl", "fedx=true", "method.cluster_sizes=[8,4]", "profile=cpu", "seed=3"]
    )
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert load(file).content() == config.content()
    assert load(file).hash == config.hash
    assert config.method_options["cluster_sizes"] == [8, 4]


@pytest.mark.parametrize(("limit", "labels"), [(100, "limit"), (0, "all")])
def test_a_run_that_does_not_say_which_labels_were_used_had_those_of_its_images(
    tmp_path: Path, limit: int, labels: str
) -> None:
    """A run on all images can be resumed, since its labels are the same today."""
    config = compose([f"data.limit={limit}"])
    (tmp_path / "config.yaml").write_text(config.to_yaml().replace("  labels: all\n", ""))
    older = load(tmp_path / "config.yaml")
    assert older.evaluation.labels == labels
    assert (older.content() == config.content()) == (limit == 0)


def test_the_hash_tells_results_apart_and_ignores_where_they_lie() -> None:
    assert compose(["run.root=a", "data.root=b"]).hash == compose([]).hash
    assert compose(["seed=1"]).hash != compose([]).hash


def test_paths_may_hold_any_character() -> None:
    path = "/data/my images (old), x=1: #2 ${HOME} [a]"
    assert compose([f"data.root={path}"]).data.root == path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["federation.round=2"], "did you mean federation.rounds?"),
        (["rounds=2"], "did you mean federation.rounds?"),
        (["rond=2"], "did you mean federation.rounds?"),
        (["method=byol", "method.momentm=1"], "did you mean method.momentum?"),
        (["lumber=csv"], "there is no key lumber; `fedx-pl train --help` lists all"),
        (["data=cifr10"], "did you mean data=cifar10"),
        (["profile=mini!"], "did you mean profile=mini? Known: cpu, mini, paper, auto"),
        (["profile=gpu"], "profile=gpu is not known; a GPU takes profile=paper"),
        (["profile=big"], "profile=big is not known; type one of cpu, mini, paper, auto"),
        (
            ["method=dino"],
            "method=dino is not known; type one of simclr, moco, byol, protocl, fedu; "
            "or give your own",
        ),
        (["method=byo"], "did you mean method=byol"),
        (["method=no.such.module:Thing"], "cannot import no.such.module"),
        (["method=simsiam:Sim"], "it has SimSiam, FedXSimSiam"),
        (["method=pathlib:Path"], "not a subclass of fedx_pl.SSLMethod"),
        (
            ["federation.rounds=many"],
            "federation.rounds=many is not a whole number; type e.g. federation.rounds=",
        ),
        (["seed=1.5"], "seed=1.5 is not a whole number; type e.g. seed=0"),
        (["optim.lr=fast"], "optim.lr=fast is not a number; type e.g. optim.lr=0.0"),
        (["fedx=maybe"], "fedx.enabled=maybe is neither true nor false; type fedx.enabled=true"),
        (
            ["federation=3"],
            "federation is a group of keys and has no value of its own; "
            "type e.g. federation.clients=",
        ),
        (["name=[a]"], "name=[a] is not a single text"),
        (["fast"], "type key=value"),
        (["partition.beta=0"], "partition.beta=0"),
        (["partition.beta=-1"], "partition.beta=-1"),
        (["optim.lr=0"], "optim.lr=0"),
        (["optim.schedule=linear"], "optim.schedule=linear"),
        (["optim.precision=8"], "optim.precision=8"),
        (["optim.batch_size=1"], "optim.batch_size=1"),
        (["augment.crop=centre"], "augment.crop=centre"),
        (["augment.hue=0.9"], "augment.hue=0.9"),
        (["federation.clients=0"], "federation.clients=0"),
        (["federation.fraction=0"], "federation.fraction=0"),
        (["federation.fraction=1.5"], "federation.fraction=1.5"),
        (["federation.batchnorm=no"], "federation.batchnorm=no"),
        (["evaluation.knn_every=0"], "evaluation.knn_every=0"),
        (["run.resume=yes"], "run.resume=yes"),
        (["fedx=true", "fedx.relation_size=128"], "fedx.relation_size=128"),
        (["run.threads=-1"], "run.threads=-1"),
        (["run.device=mps"], "run.device=mps"),
        (["optim.momentum=-1"], "optim.momentum=-1"),
        (["optim.momentum=nan"], "optim.momentum=nan"),
        (["optim.weight_decay=-1"], "optim.weight_decay=-1"),
        (["evaluation.linear.batch_size=0"], "evaluation.linear.batch_size=0"),
        (["evaluation.linear.lr=-1"], "evaluation.linear.lr=-1"),
        (["federation.clients=3", "federation.min_clients=4"], "federation.min_clients=4"),
        (
            ["data.mean=[a,b,c]"],
            "data.mean=[a,b,c] is not a list of numbers in brackets; type e.g. data.mean=[0.",
        ),
        (
            ["data.classes=a"],
            "data.classes=a is not a list in brackets; type e.g. data.classes=[a,b]",
        ),
        (["fedx.enabled=${seed}"], "fedx.enabled=${seed} is neither true nor false"),
        (["seed=${"], "seed=${ is not a whole number"),
        (["data.mean=[${a}]"], "data.mean=[${a}] is not a list of numbers"),
        (["optim=${a}"], "optim is a group of keys"),
        (["regularizer.name=${"], "regularizer=${ is not known"),
        (["callbacks=[[1],[2]]"], "is not a list in brackets; type e.g. callbacks=[a,b]"),
        (["seed=???"], "seed=??? is not a whole number"),
        (
            ["data.mean=" + "[" * 3000],
            "... is not a list of numbers in brackets; type e.g. data.mean=",
        ),
        (["data.mean[0]=1"], "data.mean"),
        ([".".join("abcdefgh" * 9) + "=1"], "there is no key a.b.c.d"),
        (["x" * 100_000 + "=1"], "there is no key xxx"),
        (
            ["run.resident_gb=inf"],
            "run.resident_gb=inf is not possible; type a number from 0 to 1000000000, e.g. run.",
        ),
        (["augment.pad=99999999999999999999"], "augment.pad=99999999999999999999 is not possible"),
        (["fedx.tau=inf"], "fedx.tau=inf is not possible; type a number above 0"),
        (["data.limit=-1"], "data.limit=-1 is not possible; type a whole number of at least 0"),
        (
            ["data.test_fraction=nan"],
            "data.test_fraction=nan is not possible; type a number from 0 to 1, e.g. data.",
        ),
        (["data.std=[inf]"], "data.std=[inf] is not possible"),
        (
            ["method=byol", "method.hidden_dim=-2"],
            "method.hidden_dim=-2 is out of range; type a number from 0",
        ),
        (
            ["seed=" + "9" * 30],
            "is not possible; type a whole number from -9223372036854775807 to 9223372036854775807",
        ),
        (
            ["run.threads=100000"],
            "run.threads=100000 is not possible; type a whole number from 0 to 1024",
        ),
        (["name=../../x"], "name=../../x is not the name of one folder"),
        (["name=.."], "name=.. is not the name of one folder"),
        (["name=a\\\\b"], "is not the name of one folder"),
        (["name=" + "x" * 300], "has more than 150 bytes"),
        (["data.root=a\0b"], "'data.root=a\\x00b' holds a character that cannot be printed"),
        (["data.root=a\nb"], "'data.root=a\\nb' holds a character that cannot be printed"),
        (["method=:"], "method=:"),
        (["method=.a:B"], "method=.a:B"),
        (["method=fedx_pl.methods.base:SSLMethod"], "no loss of its own"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_and_what_to_type(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        compose(overrides)
    assert "\n" not in str(caught.value)


def test_a_dollar_sign_is_a_plain_character() -> None:
    config = compose(
        ["data.root=a${seed}", "data.cache=${oc.env:HOME}", "data.classes=['${a}']", "name=$x"]
    )
    assert (config.data.root, config.data.cache, config.data.classes) == (
        "a${seed}",
        "${oc.env:HOME}",
        ["${a}"],
    )
    assert from_tree(yaml.safe_load(config.to_yaml()), "its own file") == config


def test_a_number_without_bound_is_possible_where_it_means_never() -> None:
    assert (
        compose(["health.max_growth=inf", "aggregate.max_growth=inf"]).health.max_growth == math.inf
    )


def test_keys_of_a_part_that_is_not_ours_may_be_below_zero() -> None:
    assert (
        compose(["method=simsiam:SimSiam", "method.bottleneck=-3"]).method_options["bottleneck"]
        == -3
    )
    with pytest.raises(UserError, match=r"method\.bottleneck=.* is out of range"):
        compose(["method=simsiam:SimSiam", f"method.bottleneck={10**20}"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "../x"),
        ("name", "a\nb"),
        ("seed", 10**30),
        ("fork", "a\0b"),
        ("seed", "${oc.env:HOME}"),
    ],
)
def test_a_run_configuration_is_held_to_the_same_rules(
    tmp_path: Path, key: str, value: object
) -> None:
    tree = yaml.safe_load(compose([]).to_yaml()) | {key: value}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match=key):
        load(tmp_path / "config.yaml")


def test_an_unreadable_run_configuration_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for content in ("[", "a: 1", ""):
        file.write_text(content)
        with pytest.raises(UserError, match=r"config\.yaml"):
            load(file)


def test_a_method_s_keyword_arguments_are_its_keys() -> None:
    found = hyper_parameters(SimSiam)
    assert found["bottleneck"] == (int, 64, "hidden units of the predictor.")
    assert found["embed_dim"][1] == 256
    assert "optim" not in found
    config = compose(
        ["method=simsiam:SimSiam", "method.bottleneck=12", "backbone.width=4", "fedx=true"]
    )
    model = make_model(config, channels=3, image_size=32)
    assert type(model).__name__ == "FedXSimSiam"
    assert model.predictor.layers[0].out_features == 12


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=moco", "method.queue_size=0"], "method.queue_size=0"),
        (["method=moco", "method.version=3"], "method.version=3"),
        (["method=byol", "method.momentum=2"], "method.momentum=2"),
        (["method.tau=0"], "method.tau=0"),
        (["method.embed_dim=-1"], "method.embed_dim=-1"),
        (["method=protocl", "method.cluster_sizes=[0]"], "method.cluster_sizes=[0]"),
    ],
)
def test_impossible_hyper_parameters_are_refused_by_name(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        make_model(compose([*overrides, "backbone.width=4"]), channels=3, image_size=32)


def test_a_name_key_is_the_choice_of_its_group() -> None:
    assert compose(["method.name=moco"]).content() == compose(["method=moco"]).content()
    assert compose(["data.name=svhn"]).content() == compose(["data=svhn"]).content()


def test_a_class_that_has_the_mixin_already_is_fedx_and_takes_its_keys() -> None:
    config = compose(["method=simsiam:FedXSimSiam", "fedx.tau=0.5", "backbone.width=4"])
    assert config.fedx.enabled
    assert make_model(config, channels=3, image_size=32).fedx.tau == 0.5


class Loose(SSLMethod):
    """A method without ``*`` and with an argument that no command line can give."""

    def __init__(
        self, backbone: nn.Module, temp: float = 0.5, hook: Callable[[], None] = print, **kw: object
    ) -> None:
        super().__init__(backbone, **kw)
        self.temp = temp

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        return Loss(a=z.first.sum())


class Stubborn(Loose):
    """A method that takes a backbone only."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone)


def test_methods_of_any_signature_work_or_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.BUILT_IN, "loose", Loose)
    monkeypatch.setitem(methods.BUILT_IN, "stubborn", Stubborn)
    config = compose(["method=loose", "method.temp=0.25", "backbone.width=4"])
    assert make_model(config, channels=3, image_size=32).temp == 0.25
    assert "hook" not in hyper_parameters(Loose)
    with pytest.raises(UserError, match=r"method=stubborn cannot be made .* \*\*base"):
        make_model(compose(["method=stubborn", "backbone.width=4"]), channels=3, image_size=32)


def test_a_method_that_is_an_entry_point_is_found_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("sims", "simsiam:SimSiam", "fedx_pl.methods")
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [point] if group == "fedx_pl.methods" else []
    )
    assert find(METHOD, "sims") is SimSiam


def test_every_key_has_help_and_every_choice_composes() -> None:
    for key, _, text in all_keys():
        assert text, f"{key} has no help"
    for group in FILE_GROUPS:
        for choice in choices(group):
            assert group == "data" or (CONFIGS / group / f"{choice}.yaml").exists()
            compose([f"{group}={choice}"])


def test_cosine_schedule_falls_over_the_rounds() -> None:
    optim = compose(["recipe=strong", "optim.lr=0.4"]).optim
    assert [round(optim.lr_at(r, 4), 3) for r in (1, 2, 3, 4)] == [0.4, 0.341, 0.2, 0.059]
    assert compose(["profile=paper"]).optim.lr_at(99, 100) == 0.01


def test_a_preset_gives_the_probe_its_values_and_own_keys_win() -> None:
    linear = compose(
        ["evaluation.linear.epochs=7", "evaluation.linear.preset=fedema"]
    ).evaluation.linear
    assert (linear.epochs, linear.lr, linear.batch_size, linear.weight_decay) == (
        7,
        3e-3,
        2048,
        0.0,
    )
    assert compose(["evaluation.linear.preset=fedx"]).hash == compose([]).hash
    with pytest.raises(UserError, match=r"evaluation.linear.preset=other.*fedx or fedema"):
        compose(["evaluation.linear.preset=other"])


def test_the_size_of_images_is_recorded_only_where_it_is_used() -> None:
    """Profiles choose a size for folders; CIFAR-10 has a fixed one.

    Results that recorded a size are still found under their names.
    """
    small = compose(["profile=mini"])
    assert small.data.image_size == 0
    assert "image_size" not in small.content()["data"]
    results, _ = read_results(EXPERIMENTS / "results" / "mini")
    older = [result for result in results if result.config.get("data.image_size") == 64]
    outdated: dict[str, list[str]] = {}
    assert match(load_experiment(EXPERIMENTS / "table1.yaml"), older, outdated).by_cell
    assert outdated == {}
    assert compose(["profile=mini", "data=folder"]).data.image_size == 64
    assert compose(["data=folder"]).hash != compose(["data=folder", "data.image_size=32"]).hash


@pytest.mark.parametrize("key", ["name", "run.root", "fork", "fedca.base", "partition.file"])
def test_values_that_are_not_utf_8_are_refused_by_key(key: str) -> None:
    with pytest.raises(UserError, match=rf"{key}=ba\\xe9 is not UTF-8"):
        compose([f"{key}=ba\udce9"])
