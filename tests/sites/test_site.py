"""A site by itself: what it refuses, what it remembers, and what it reports."""

import math
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import federation_parts as parts
import numpy as np
import pytest
import torch
from helpers import THREADS
from PIL import Image
from safetensors.torch import load_file

from fedx_pl.config.compose import compose
from fedx_pl.config.schema import Config
from fedx_pl.encoder.load import Encoder
from fedx_pl.errors import UserError
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.methods import BUILT_IN
from fedx_pl.methods.base import State
from fedx_pl.sites import wire
from fedx_pl.sites.limits import require_within
from fedx_pl.sites.memories import Memories
from fedx_pl.sites.site import Site, offer
from fedx_pl.sites.wire import Content

RUN = "0123456789abcdef"
MakeSite = Callable[..., Site]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts.make_images(tmp_path_factory.mktemp("sites"), {"a": 24}) / "a"


@pytest.fixture
def make_site(images: Path, tmp_path: Path) -> MakeSite:
    """Makes sites on one state folder; a second call acts as a restart."""

    def make(*own: str, said: list[str] | None = None, allow_code: bool = False) -> Site:
        words = [
            f"data.root={images}",
            f"data.cache={tmp_path / 'cache'}",
            f"run.threads={THREADS}",
            *own,
        ]
        report = (lambda line: None) if said is None else said.append
        return Site("a", tmp_path / "state", words, report, allow_code=allow_code)

    return make


def config(*words: str) -> Config:
    return compose([*parts.WORDS, *parts.BYOL_FEDX, "federation.rounds=5", *words])


def hello(*words: str, **changed: Any) -> Content:
    return Content({"run": RUN, "config": offer(config(*words), 3, 16) | changed}, {})


def train(state: State, round: int = 1, last_round: int = 0, **changed: Any) -> Content:
    meta = {
        "run": RUN,
        "round": round,
        "client": 0,
        "last_round": last_round,
        "steps": 0,
        "epochs": 0,
        "health": False,
    }
    return Content(meta | changed, state)


def error(site: Site, kind: str, content: Content) -> str:
    found = site.answer(kind, content)
    assert not found.tensors
    assert found.meta["site"] == "a"
    return str(found.meta["error"])


# --- images of more than 8 bits per value ---------------------------------------------------------


def test_a_site_does_not_choose_its_own_value_range(make_site: MakeSite, tmp_path: Path) -> None:
    """Otherwise the same value would mean different things at different sites."""
    (tmp_path / "deep").mkdir()
    for number in range(4):
        values = np.linspace(0, 1000 * number + 9, 256).astype(np.uint16).reshape(16, 16)
        Image.fromarray(values).save(tmp_path / f"deep/{number}.png")
    root = f"data.root={tmp_path / 'deep'}"
    said: list[str] = []
    refusal = error(make_site(root, said=said), wire.HELLO, hello())
    assert "data.value_range=[LOW,HIGH]" in refusal
    assert "3009" not in refusal  # what its pixels are is the site's own business
    assert any("0..3009" in line for line in said)
    for site, greeting in (
        (make_site(root), hello("data.value_range=[0,4095]")),
        (
            make_site(root, "data.value_range=[0,9999]"),
            hello("data.value_range=[0,4095]"),
        ),  # the coordinator's counts
        (make_site(root, "data.value_range=[0,4095]"), hello()),
        (
            make_site(root),
            hello(data=offer(config(), 3, 16, (0.0, 4095.0))["data"]),
        ),  # of the coordinator's images
    ):
        assert site.answer(wire.HELLO, greeting).meta["images"] == 4
        assert site.run.data.images.value_range == (0, 4095)


# --- a round --------------------------------------------------------------------------------------


def test_a_site_trains_on_all_its_images_with_or_without_a_gpu(make_site: MakeSite) -> None:
    assert make_site().own.data.limit == 0
    assert make_site("data.limit=10").own.data.limit == 10


def test_a_site_says_who_it_is_and_trains(make_site: MakeSite) -> None:
    said: list[str] = []
    site = make_site(said=said)
    assert site.answer(wire.HELLO, hello()).meta == {"site": "a", "images": 24}
    first = site.run.trainer.first_state().tensors()
    found = site.answer(wire.TRAIN, train(first, health=True))
    assert found.meta["site"] == "a"
    assert found.meta["images"] == 24
    assert found.meta["last_round"] == 1
    assert found.meta["steps"] == 3  # 24 images in batches of 16 - 8 for the relation batch
    assert found.meta["remembered"] is True
    assert "total" in found.meta["losses"]
    assert all(math.isfinite(value) for value in found.meta["losses"].values())
    assert found.meta["metrics"].keys() == {
        "lr",
        "angle",
        "rankme",
        "uniformity",
        "feature_std",
        "alignment",
    }
    assert found.tensors.keys() == first.keys()
    assert not parts.same(found.tensors, first)
    assert wire.unpack(*wire.pack(found)).meta["losses"].keys() == found.meta["losses"].keys()
    assert said == [
        "joined run 0123456789abcdef: byol with FedX on 24 images of this site",
        "round 1: training",
        f"round 1: loss {found.meta['losses']['total']:.3f}, 24 images seen",
    ]


def test_the_health_of_a_sorted_folder_is_not_that_of_its_first_images(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first twelve images are equal, so measuring only those would look like a collapse."""
    folder = parts.make_images(tmp_path, {"a": 24}) / "a"
    first, *others = sorted(folder.rglob("*.png"))
    for file in others[:11]:
        shutil.copy(first, file)
    monkeypatch.setattr("fedx_pl.sites.site.HEALTH_IMAGES", 12)
    site = make_site(f"data.root={folder}")
    site.answer(wire.HELLO, hello())
    found = site.answer(wire.TRAIN, train(site.run.trainer.first_state().tensors(), health=True))
    assert found.meta["metrics"]["rankme"] > 2


def test_a_second_greeting_for_the_same_run_does_not_load_anything_again(
    make_site: MakeSite,
) -> None:
    site = make_site()
    site.answer(wire.HELLO, hello())
    before = site.run
    site.answer(wire.HELLO, hello())
    assert site.run is before
    site.answer(wire.HELLO, hello("optim.lr=0.5"))
    assert site.run.config.optim.lr == 0.5


def test_private_state_survives_a_restart(make_site: MakeSite) -> None:
    """Two rounds give the same weights and target network with and without a restart between."""
    staying = make_site()
    staying.answer(wire.HELLO, hello())
    first = staying.run.trainer.first_state().tensors()
    one = staying.answer(wire.TRAIN, train(first))
    memory = {"last_round": 1, "steps": one.meta["steps"], "epochs": 1}
    two = staying.answer(wire.TRAIN, train(one.tensors, 2, **memory))
    kept = load_file(staying.state / RUN / "round_00002.safetensors")
    assert kept

    restarted = make_site()
    restarted.answer(wire.HELLO, hello())
    again = restarted.answer(wire.TRAIN, train(one.tensors, 2, **memory))
    assert parts.same(again.tensors, two.tensors)
    assert parts.same(load_file(staying.state / RUN / "round_00002.safetensors"), kept)
    assert again.meta["remembered"] is True
    assert again.meta["steps"] == 2 * one.meta["steps"]
    without = restarted.answer(wire.TRAIN, train(one.tensors, 2))
    assert not parts.same(without.tensors, two.tensors)  # So it did depend on it.


def test_lost_private_state_starts_anew_and_is_reported_to_both_sides(make_site: MakeSite) -> None:
    said: list[str] = []
    site = make_site(said=said)
    site.answer(wire.HELLO, hello())
    first = site.run.trainer.first_state().tensors()
    found = site.answer(wire.TRAIN, train(first, 3, last_round=2, steps=6, epochs=2))
    assert found.meta["remembered"] is False
    assert "the private state of round 2 is not here; starting anew" in said
    assert parts.same(
        found.tensors, make_new(make_site).answer(wire.TRAIN, train(first, 3)).tensors
    )


def make_new(make_site: MakeSite) -> Site:
    site = make_site()
    site.answer(wire.HELLO, hello())
    return site


def test_a_user_s_function_loads_the_images_of_a_site(make_site: MakeSite, modules: Path) -> None:
    (modules / "scanner.py").write_text(
        "import numpy as np\n"
        "def scans(options, report, count: int = 10):\n"
        "    side = options.image_size\n"
        "    return np.zeros((options.count, side, side, 3), np.uint8), None\n"
        "def small(options, report):\n"
        "    return np.zeros((9, 8, 8, 3), np.uint8), None\n"
    )
    site = make_site("data=scanner:scans", "data.count=20")
    assert site.answer(wire.HELLO, hello()).meta == {"site": "a", "images": 20}
    reason = error(make_site("data=scanner:small"), wire.HELLO, hello())
    assert "images of 8 pixels and 3 channels, the coordinator's have 16 and 3" in reason


# --- what is refused ------------------------------------------------------------------------------


def test_code_of_the_coordinator_s_choice_is_refused(
    make_site: MakeSite, tmp_path: Path, monkeypatch: Any
) -> None:
    """The module exists and would leave a trace if it were imported."""
    trace = tmp_path / "trace"
    (tmp_path / "evil_method.py").write_text(
        f"open({str(trace)!r}, 'w')\nfrom fedx_pl.methods.simclr import SimCLR\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    greeting = hello(method={"name": "evil_method:SimCLR"}, fedx={"enabled": False})
    assert "--allow-code" in error(make_site(), wire.HELLO, greeting)
    assert not trace.exists()
    assert "error" not in make_site(allow_code=True).answer(wire.HELLO, greeting).meta
    assert trace.exists()


@pytest.mark.parametrize("word", ["fedx_pl.cli.main:main", "fedx_pl.api:federate"])
def test_functions_of_this_package_are_not_the_coordinator_s_to_call(
    make_site: MakeSite, word: str
) -> None:
    """As a backbone, one function would end the site, and another would start a run."""
    greeting = hello()
    greeting.meta["config"]["backbone"]["name"] = word
    assert f"backbone.name={word} is code of the coordinator's choice" in error(
        make_site(), wire.HELLO, greeting
    )


@pytest.mark.parametrize(
    "method", [None, [], "simclr", {"name": 3}, {"name": None}, {}, {"name": "nonsense"}]
)
def test_methods_that_are_none_are_refused(make_site: MakeSite, method: Any) -> None:
    assert error(make_site(), wire.HELLO, hello(method=method))


@pytest.mark.parametrize("section", ["run", "engine", "fedca", "evaluation", "name", "nonsense"])
def test_sections_that_are_not_the_coordinator_s_are_refused(
    make_site: MakeSite, section: str
) -> None:
    assert f"not the coordinator's to set: {section}" in error(
        make_site(), wire.HELLO, hello(**{section: {}})
    )


def test_the_coordinator_cannot_say_where_images_lie(
    make_site: MakeSite, images: Path, tmp_path: Path
) -> None:
    site = make_site("run.device=cpu")
    data = {
        "root": str(tmp_path),
        "cache": "/nowhere",
        "labels": "folders",
        "test_root": "/etc",
        "limit": 1,
    }
    assert site.answer(wire.HELLO, hello(data=data | {"image_size": 16})).meta == {
        "site": "a",
        "images": 24,
    }
    assert site.run.config.data.root == str(images)
    assert site.run.config.data.labels == "none"
    assert site.run.config.data.limit == 0
    assert site.run.config.run.device == "cpu"


def test_a_configuration_cannot_ask_for_the_site_s_environment(
    make_site: MakeSite, monkeypatch: Any
) -> None:
    """OmegaConf resolves ${oc.env:NAME}, and an error message would leak the value."""
    monkeypatch.setenv("FEDX_TEST_SECRET", "hunter2")
    for changed in (
        {"augment": {"crop": "${oc.env:FEDX_TEST_SECRET}"}},
        {"method": {"name": "${oc.env:FEDX_TEST_SECRET}"}},
        {"data": {"mean": ["${oc.env:FEDX_TEST_SECRET}"]}},
        {"optim": {"${oc.env:FEDX_TEST_SECRET}": 1}},
    ):
        assert "hunter2" not in error(make_site(), wire.HELLO, hello(**changed))


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"run": RUN},
        {"config": {}},
        {"run": "../../up", "config": {}},
        {"run": 3, "config": {}},
        {"run": RUN, "config": []},
        {"run": RUN, "config": {}},
        {"run": "a" * 65, "config": {}},
        {"run": RUN, "config": {"method": {"name": "simclr"}, "federation": 5}},
        {"run": RUN, "config": {"method": {"name": "simclr"}, "seed": "${seed}"}},
    ],
)
def test_greetings_that_make_no_sense_are_answered_with_the_reason(
    make_site: MakeSite, meta: dict[str, Any]
) -> None:
    site = make_site()
    assert error(site, wire.HELLO, Content(meta, {}))
    assert not list(site.state.parent.glob("up*"))


def test_training_before_a_greeting_is_not_answered(make_site: MakeSite) -> None:
    """The coordinator has not noticed a restart; an error would count against the site."""
    site = make_site()
    assert site.answer(wire.TRAIN, train({})) is None
    site.answer(wire.HELLO, hello())
    assert (
        site.answer(wire.TRAIN, train(site.run.trainer.first_state().tensors(), run="f" * 16))
        is None
    )
    assert error(site, wire.HELLO, hello(method={"name": "nonsense"}))
    assert site.answer(wire.TRAIN, train({})) is None  # A greeting that failed is none.
    assert not site.state.exists()


def test_messages_of_another_kind_are_refused(make_site: MakeSite) -> None:
    assert "kind 'evaluate'" in error(make_site(), "evaluate", hello())


def test_weights_of_another_network_are_refused(make_site: MakeSite) -> None:
    site = make_site()
    site.answer(wire.HELLO, hello())
    state = site.run.trainer.first_state().tensors()
    name = "backbone.conv1.weight"
    assert f"{name} is only on one side" in error(
        site, wire.TRAIN, train({key: value for key, value in state.items() if key != name})
    )
    assert "extra is only on one side" in error(
        site, wire.TRAIN, train(state | {"extra": torch.ones(1)})
    )
    assert "has shape (1,)" in error(site, wire.TRAIN, train(state | {name: torch.ones(1)}))
    assert "torch.float64" in error(site, wire.TRAIN, train(state | {name: state[name].double()}))


def test_numbers_that_are_none_are_refused(make_site: MakeSite) -> None:
    site = make_site()
    site.answer(wire.HELLO, hello())
    for changed in (
        {"round": 0},
        {"round": "1"},
        {"client": -1},
        {"client": True},
        {"last_round": 1.5},
    ):
        assert f"{next(iter(changed))}=" in error(
            site, wire.TRAIN, train(site.run.trainer.first_state().tensors(), **changed)
        )


def test_an_empty_folder_is_reported_to_both_sides_and_its_path_to_the_owner_alone(
    make_site: MakeSite, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    said: list[str] = []
    site = make_site(f"data.root={tmp_path / 'empty'}", said=said)
    reason = error(site, wire.HELLO, hello())
    assert reason == "its images cannot be used; the site's own terminal tells more"
    assert f"no images in {tmp_path / 'empty'}" in said[-1]
    assert "start this site again" in said[-1]


def test_names_of_files_and_labels_stay_at_the_site(
    make_site: MakeSite, images: Path, tmp_path: Path
) -> None:
    (tmp_path / "labels.csv").write_text("path,label\n000.png,benign\n000.png,malignant\n")
    said: list[str] = []
    site = make_site(f"data.labels={tmp_path / 'labels.csv'}", said=said)
    reason = error(site, wire.HELLO, hello())
    assert "images cannot be used" in reason
    assert not any(word in reason for word in ("000.png", "malignant", "labels.csv"))
    assert "000.png has two labels, 'benign' and 'malignant'" in said[-1]


def test_a_fault_of_the_site_s_machine_is_an_answer_and_the_next_round_can_succeed(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    site = make_site(said=said)
    site.answer(wire.HELLO, hello())
    first = site.run.trainer.first_state().tensors()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory at /home/someone")

    monkeypatch.setattr(LocalTrainer, "run", fail)
    assert (
        error(site, wire.TRAIN, train(first)) == "RuntimeError; the site's own terminal tells more"
    )
    assert "CUDA out of memory" in said[-1]
    monkeypatch.undo()
    assert "error" not in site.answer(wire.TRAIN, train(first)).meta


class Panic(BaseException):
    """An error of native code: Rust's panics are not an `Exception`."""


@pytest.mark.parametrize("kind", [wire.HELLO, wire.TRAIN])
def test_a_panic_of_native_code_is_an_answer_and_its_traceback_is_in_a_log(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    said: list[str] = []
    site = make_site(said=said)
    site.answer(wire.HELLO, hello())
    first = site.run.trainer.first_state().tensors()

    def panic(*_: Any, **__: Any) -> None:
        raise Panic("index out of bounds\nnote: run with a backtrace")

    monkeypatch.setattr(LocalTrainer, "run", panic)
    monkeypatch.setattr("fedx_pl.sites.site.load_images", panic)
    content = train(first) if kind == wire.TRAIN else hello("optim.lr=0.5")
    assert error(site, kind, content) == "Panic; the site's own terminal tells more"
    assert "(Panic: index out of bounds note: run with a backtrace)" in said[-1]
    assert "Traceback" not in "".join(said)
    log = site.state / "errors.log"
    assert "Traceback" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    monkeypatch.setattr("fedx_pl.sites.fault_log.MAX_LOG", 10)
    error(site, kind, content)
    assert log.stat().st_size < 40  # A coordinator cannot fill the disk with it.


def test_ctrl_c_is_the_owner_s_and_ends_the_site(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedx_pl.sites.site.load_images", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_site().answer(wire.HELLO, hello())


# --- what a coordinator may ask -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "words", "reason"),
    [
        (
            (),
            ("federation.epochs=1001",),
            "asks for 1,001 epochs in a round; this site allows site.max_epochs=1000",
        ),
        (
            (),
            ("augment.size=5000",),
            "asks for 5,000 pixels on a side; this site allows site.max_side=4096",
        ),
        (
            ("site.max_cache_gb=0.00001",),
            (),
            "GB on disk, for decoded images and private state; "
            "this site allows site.max_cache_gb=1e-05",
        ),
        (
            (),
            ("backbone.width=60000",),
            "GB of memory at least; this site allows site.max_memory_gb=",
        ),
        ((), ("method.hidden_dim=1000000000",), "GB of memory at least"),
        (
            ("site.max_memory_gb=0.0000001",),
            (),
            "GB of memory at least; this site allows site.max_memory_gb=1e-07",
        ),
        (("site.max_epochs=2",), ("federation.epochs=3",), "site.max_epochs=2"),
    ],
)
def test_more_than_a_site_allows_is_refused_before_anything_is_decoded(
    make_site: MakeSite, tmp_path: Path, own: tuple[str, ...], words: tuple[str, ...], reason: str
) -> None:
    assert reason in error(make_site(*own), wire.HELLO, hello(*words))
    assert not (tmp_path / "cache").exists()


def test_images_larger_than_the_disk_are_refused(make_site: MakeSite, monkeypatch: Any) -> None:
    """24 images of 60,000 pixels on a side do not fit into one gigabyte."""
    monkeypatch.setattr(
        "shutil.disk_usage", lambda place: SimpleNamespace(total=10**9, used=0, free=10**9)
    )
    data = offer(config(), 3, 60_000)["data"]
    reason = error(
        make_site("site.max_side=60000", "site.max_cache_gb=1e9"), wire.HELLO, hello(data=data)
    )
    assert "asks for 259.2 GB of decoded images" in reason
    assert "type data.cache=ANOTHER" in reason
    assert "site.max_side=4096" in error(make_site(), wire.HELLO, hello(data=data))


def test_copies_that_are_kept_do_not_grow_beyond_the_limit(
    make_site: MakeSite, tmp_path: Path
) -> None:
    """A coordinator asks for two image sizes: 24 images of side 16 take 18 kB, of 17 21 kB."""
    site = make_site("site.max_cache_gb=0.00004")
    sizes = [16, 17, 18, 16]
    greetings = [hello(data=offer(config(), 3, size)["data"]) for size in sizes]
    found = [site.answer(wire.HELLO, greeting).meta for greeting in greetings]
    assert ["error" in meta for meta in found] == [False, False, True, False]
    assert "this site allows site.max_cache_gb=4e-05" in found[2]["error"]
    assert len(list((tmp_path / "cache").glob("*/images.npy"))) == 2


def test_private_state_of_one_run_after_the_other_does_not_fill_the_disk(
    make_site: MakeSite,
) -> None:
    """The coordinator names the runs; each leaves about 100 kB of BYOL's target network."""
    site = make_site("data.cache=", "site.max_cache_gb=0.0005")
    for number in range(20):
        run = f"{number:016x}"
        found = site.answer(wire.HELLO, Content({**hello().meta, "run": run}, {})).meta
        if "error" in found:
            break
        site.answer(wire.TRAIN, train(site.run.trainer.first_state().tensors(), run=run))
    assert "GB on disk, for decoded images and private state" in found["error"]
    assert 0 < len(list(site.state.glob("*/memory.json"))) < 20


def test_a_round_that_takes_too_long_is_given_up_and_the_next_can_succeed(
    make_site: MakeSite,
) -> None:
    site = make_site("site.max_seconds=0")
    site.answer(wire.HELLO, hello())
    first = site.run.trainer.first_state().tensors()
    assert "site.max_seconds=0" in error(site, wire.TRAIN, train(first))
    assert site.ledger.answers() == {}  # Nothing has left.
    patient = make_site()
    patient.answer(wire.HELLO, hello())
    expected = patient.answer(wire.TRAIN, train(first))
    site.own = patient.own
    assert parts.same(site.answer(wire.TRAIN, train(first)).tensors, expected.tensors)


@pytest.mark.parametrize(
    "words", [(f"method={name}", f"fedx={fedx}") for name in BUILT_IN for fedx in ("true", "false")]
)
def test_what_any_method_needs_is_found_without_its_memory(
    words: tuple[str, ...], images: Path
) -> None:
    asked = compose(
        [*parts.WORDS, *words, f"data.root={images}", "backbone.width=64", "optim.batch_size=24"]
    )
    require_within(asked.site, asked, asdict(asked))
    small = replace(asked.site, max_memory_gb=0.03)
    with pytest.raises(
        UserError, match="GB of memory at least"
    ):  # 4.9 million weights alone are 0.06 GB, thrice.
        require_within(small, asked, asdict(asked))


def test_limits_of_a_site_are_not_part_of_what_a_run_is() -> None:
    usual, other = (
        compose([*parts.WORDS]),
        compose([*parts.WORDS, "site.max_epochs=7", "site.max_side=64"]),
    )
    assert usual.hash == other.hash
    assert usual.content() == other.content()
    assert "site" not in usual.content()


def test_reasons_are_one_printable_line(make_site: MakeSite) -> None:
    reason = error(make_site(), wire.HELLO, hello(**{"\x1b[2Jevil\n" + "x" * 3000: {}}))
    assert wire.text({"error": reason}, "error") == reason


# --- the end --------------------------------------------------------------------------------------


def end(outcome: str, state: State | None = None, **changed: Any) -> Content:
    return Content({"run": RUN, "outcome": outcome, "round": 5} | changed, state or {})


def test_the_encoder_stays_with_the_site_and_the_next_command_is_printed(
    make_site: MakeSite, images: Path
) -> None:
    said: list[str] = []
    site = make_site(said=said)
    site.answer(wire.HELLO, hello())
    state = {name: tensor + 1 for name, tensor in site.run.trainer.first_state().tensors().items()}
    assert site.answer(wire.END, end(wire.FINISHED, state)).meta == {"site": "a"}
    assert site.ended == wire.FINISHED
    folder = site.state / RUN / "encoder"
    assert said[-3:] == [
        "the federation has finished, after round 5",
        f"the encoder is in {folder}",
        f"next: fedx-pl embed {folder} {images}",
    ]
    encoder = Encoder.of(folder)
    weights = {f"backbone.{name}": tensor for name, tensor in encoder.backbone.state_dict().items()}
    assert parts.same(
        weights, {name: tensor for name, tensor in state.items() if name.startswith("backbone.")}
    )
    assert (encoder.side, encoder.channels) == (16, 3)


def test_a_site_that_was_started_after_the_last_round_gets_the_encoder(make_site: MakeSite) -> None:
    """It was never greeted; the coordinator's last message describes the weights."""
    site = make_site()
    site.answer(wire.HELLO, hello())
    state = site.run.trainer.first_state().tensors()
    site = make_site()
    site.answer(wire.END, end(wire.FINISHED, state, config=hello().meta["config"]))
    assert site.ended == wire.FINISHED
    assert Encoder.of(site.state / RUN / "encoder").side == 16
    site = make_site()  # What it cannot take does not keep it from ending.
    found = error(site, wire.END, end(wire.FINISHED, state, config={"method": {"name": "no"}}))
    assert "not known" in found
    assert site.ended == wire.FINISHED


def test_a_site_ends_without_an_encoder_if_it_gets_none_or_a_wrong_one(make_site: MakeSite) -> None:
    for state, line in (
        ({}, "the coordinator leaves no encoder here"),
        ({"w": torch.ones(1)}, "is only on one side"),
    ):
        said: list[str] = []
        site = make_site(said=said)
        site.answer(wire.HELLO, hello())
        site.answer(wire.END, end(wire.FINISHED, state))
        assert site.ended == wire.FINISHED
        assert line in said[-1]
        assert not (site.state / RUN / "encoder").exists()
    site = make_site(said=said)
    site.answer(wire.END, end(wire.FINISHED, {"w": torch.ones(1)}))
    assert site.ended == wire.FINISHED
    assert "has taken no part" in said[-1]


def test_a_site_learns_that_it_is_refused_or_that_the_coordinator_has_stopped(
    make_site: MakeSite,
) -> None:
    said: list[str] = []
    site = make_site(said=said)
    site.answer(wire.END, end(wire.STOPPED))
    assert site.ended == wire.STOPPED
    assert "may resume later" in said[-1]
    site.answer(wire.END, end(wire.REFUSED, reason="no images in /here"))
    assert (site.ended, site.refusal) == (wire.REFUSED, "no images in /here")
    assert "outcome=gone" in error(site, wire.END, end("gone"))
    assert "reason is not a short text" in error(
        site, wire.END, end(wire.REFUSED, reason="\x1b[2J")
    )


# --- the site's privacy budget --------------------------------------------------------------------


def test_another_name_of_a_run_buys_no_further_answers(make_site: MakeSite, tmp_path: Path) -> None:
    """One answer spends 0.79 and two 1.16, so a budget of 1 allows one answer in all runs."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    words, answered = ("privacy.clip=1", "privacy.noise=10"), 0
    for run in (RUN, "f" * 16, "e" * 16):
        said: list[str] = []
        site = make_site(*words, "privacy.max_epsilon=1", said=said)
        assert (
            "error"
            not in site.answer(wire.HELLO, Content({**hello(*words).meta, "run": run}, {})).meta
        )
        found = site.answer(wire.TRAIN, train(site.run.trainer.first_state().tensors(), run=run))
        answered += bool(found.tensors)
    assert answered == 1
    assert "answer 2 of this site would spend epsilon=1.1" in found.meta["error"]
    assert "privacy: epsilon=0.79 of privacy.max_epsilon=1 spent, over all runs so far" in said
    (tmp_path / "state" / "ledger.json").unlink()
    site = make_site(*words, "privacy.max_epsilon=1")
    site.answer(wire.HELLO, hello(*words))
    assert "their record is lost" in error(
        site, wire.TRAIN, train(site.run.trainer.first_state().tensors())
    )


def test_an_answer_is_written_down_before_it_leaves(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk no answer is sent."""
    site = make_site()
    site.answer(wire.HELLO, hello())
    first = site.run.trainer.first_state().tensors()

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedx_pl.sites.ledger.write_atomically", full)
        assert error(site, wire.TRAIN, train(first)).startswith("OSError")
    assert site.ledger.answers() == {}
    with monkeypatch.context() as patch:
        patch.setattr(Memories, "save", full)  # Killed right after: it counts all the same.
        assert error(site, wire.TRAIN, train(first)).startswith("OSError")
    assert site.ledger.answers() == {0.0: 1}


# --- decoded copies of the site's images ----------------------------------------------------------


def open_to_others(folder: Path) -> list[str]:
    """Files and folders that other users could read; files only if their folder is open."""
    found = [path for path in [folder, *folder.rglob("*")] if path.stat().st_mode & 0o077]
    return [str(path.relative_to(folder)) for path in found]


@pytest.mark.parametrize("word", ["data.cache=", "data.cache=none"])
def test_decoded_copies_are_private_and_go_when_the_site_does(
    make_site: MakeSite, word: str
) -> None:
    site = make_site(word)
    assert site.copies == site.state / ".decoded-images"
    site.answer(wire.HELLO, hello())
    site.answer(wire.TRAIN, train(site.run.trainer.first_state().tensors()))
    assert len(list(site.copies.glob("*/images.npy"))) == 1
    assert not open_to_others(site.state)
    site.answer(wire.HELLO, hello(data=offer(config(), 3, 24)["data"]))
    (copy,) = site.copies.glob(
        "*/images.npy"
    )  # The coordinator asks for another size: the former copy is gone.
    assert np.load(copy).shape == (24, 24, 24, 3)
    assert (
        make_site(word).copies == site.copies
    )  # After a kill: what was left is deleted at the next start.
    assert not site.copies.exists()
    site.close()
    assert (site.state / "ledger.json").exists()


def test_a_folder_that_is_not_ours_is_not_deleted(make_site: MakeSite, tmp_path: Path) -> None:
    (tmp_path / "state" / ".decoded-images").mkdir(parents=True)
    (tmp_path / "state" / ".decoded-images" / "mine.png").touch()
    make_site("data.cache=none").close()
    assert (tmp_path / "state" / ".decoded-images" / "mine.png").exists()


def test_copies_are_kept_where_the_site_says(make_site: MakeSite, tmp_path: Path) -> None:
    site = make_site()
    site.answer(wire.HELLO, hello())
    site.close()
    (copy,) = (tmp_path / "cache").glob("*/images.npy")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700
