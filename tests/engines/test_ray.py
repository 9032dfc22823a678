"""Ray: the same weights as in one process, workers that die, errors that reach the user, Ctrl-C.

A worker takes seconds to import torch, so all tests but the last share one Ray and its workers.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import METHOD, PATIENCE, THREADS, Watching, fitted, made
from safetensors.torch import load_file
from test_trainer import same, weights

from fedx_pl import IID, FederatedDataModule, FedProx, SimCLR, resnet10
from fedx_pl.cli.main import EXIT_INTERRUPTED, main
from fedx_pl.config.compose import compose
from fedx_pl.config.schema import Config
from fedx_pl.engines import Engine, EngineOptions, Lost
from fedx_pl.engines.base import MemoryOf
from fedx_pl.engines.local import SerialEngine
from fedx_pl.engines.ray import RayEngine, Sizes, import_ray
from fedx_pl.engines.worker import pack, split_name, unpack
from fedx_pl.errors import UserError, install_hint
from fedx_pl.federation.estimate import steps_between
from fedx_pl.federation.round import RoundContext
from fedx_pl.trainer import FederatedTrainer

pytestmark = pytest.mark.xdist_group(
    "ray"
)  # One Ray for all, also where tests run in two processes.

# BYOL whose process dies, or that raises, where a file of that name says so: FOLDER/ROUND-CLIENT. A
# file is used once.
MORTAL = """
import os, signal
from pathlib import Path
from fedx_pl.errors import UserError
from fedx_pl.methods import BYOL

class Mortal(BYOL):
    def __init__(self, backbone, *, fate: str = "", **byol):
        super().__init__(backbone, **byol)
        self.fate = fate

    def on_round_start(self):
        super().on_round_start()
        file = Path(self.fate, f"{self.local.round}-{self.local.client}")
        if file.exists():
            what = file.read_text()
            file.unlink()
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"mistake": UserError, "bug": ZeroDivisionError}[what]("too many apples")
"""


class Workers(Watching):
    """Remembers which worker took which client."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[str, int]] = []

    def working(self, worker: str, client: int | None) -> None:
        if client is not None:
            self.taken.append((worker, client))


MakeEngine = type[RayEngine]


@pytest.fixture(scope="module")
def shared() -> Iterator[MakeEngine]:
    """Makes engines on one Ray that hand their workers on to the next engine."""
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    ray = import_ray(local=True)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=256 << 20,
        _node_ip_address="127.0.0.1",
    )
    spare: list[Any] = []

    class Shared(RayEngine):
        def new_actor(self) -> Any:
            return spare.pop() if spare else super().new_actor()

        def close(self) -> None:
            spare.extend(seat.actor for seat in self._seats)

    yield Shared
    ray.shutdown()


@pytest.fixture
def mortal(quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides for a `Mortal` with its fate in ``tmp_path / "fate"``, on the driver's path."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "mortal.py").write_text(MORTAL)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "mortal", raising=False)
    (tmp_path / "fate").mkdir()
    return [*quick, "method=mortal:Mortal", f"method.fate={tmp_path / 'fate'}"]


def run(
    overrides: list[str], folder: Path, engine: type[Engine] = SerialEngine, display: Any = None
) -> FederatedTrainer:
    config = compose([*overrides, f"run.dir={folder}"])
    return fitted(config, display or Watching(), engine=on(engine, config))


def on(engine: type[Engine], config: Config) -> Callable[[FederatedTrainer], Engine]:
    """Makes an engine with the options of a configuration, if it takes any."""
    return partial(engine, options=config.engine) if issubclass(engine, RayEngine) else engine


# --- the same result ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [["method=moco", "fedx=true"], ["method=barlow_twins:BarlowTwins"]]
)
def test_one_process_and_one_or_two_workers_give_the_same_weights(
    quick: list[str], tmp_path: Path, shared: MakeEngine, method: list[str]
) -> None:
    """The weights are equal to the bit after two rounds.

    MoCo has a queue and a target network, the other method is in examples/.
    """
    serial = run([*quick, *method], tmp_path / "serial")

    class Complete(shared):
        def __init__(self, trainer: FederatedTrainer, options: EngineOptions) -> None:
            super().__init__(trainer, options)
            # Or the first worker could train these small clients before the second is ready.
            self.ray.wait([seat.ready for seat in self._seats], num_returns=self.sizes.workers)

    whole = made(compose([*quick, *method]))
    largest_first = sorted(range(3), key=lambda client: -len(whole.data.clients[client]))
    for workers in (1, 2):
        display = Workers()
        overrides = [*quick, *method, f"engine.workers={workers}"]
        result = run(overrides, tmp_path / f"ray-{workers}", Complete, display)
        assert same(weights(result), weights(serial))
        assert result.history[-1]["loss"] == serial.history[-1]["loss"]
        assert display.steps == steps_between(whole.trainer, 1, 2)
        assert [client for _, client in display.taken] == 2 * largest_first
        assert {worker for worker, _ in display.taken} == {
            f"worker {i + 1}" for i in range(workers)
        }


def test_objects_are_sent_to_workers_too(tmp_path: Path, shared: MakeEngine) -> None:
    """Arrays, a local class and a regularizer give the bits of a run in one process."""

    class Mine(SimCLR):
        """Pickled by value, since it cannot be imported."""

    labels = np.arange(36) % 2
    pixels = np.random.default_rng(0).integers(0, 256, (36, 16, 16, 3), dtype=np.uint8)
    ends = []
    for name, engine in (
        ("serial", SerialEngine),
        ("ray", partial(shared, options=EngineOptions(workers=1))),
    ):
        torch.manual_seed(0)
        trainer = FederatedTrainer(
            max_rounds=1,
            local_epochs=1,
            default_root_dir=tmp_path / name,
            engine=engine,
            evaluation=None,
            regularizer=FedProx(mu=0.1),
            enable_progress_bar=False,
            threads=THREADS,
        )
        data = FederatedDataModule((pixels, labels), partition=IID(clients=3), batch_size=8)
        trainer.fit(Mine(resnet10(width=4)), data)
        ends.append(trainer.model.shared_state())
    assert same(*ends)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_tensors_are_sent_unchanged(memory_format: torch.memory_format) -> None:
    """Memory order is kept, too, since a sum over a tensor may depend on it."""
    state = {
        "weight": torch.randn(4, 3, 2, 2).to(memory_format=memory_format),
        "transposed": torch.randn(3, 5).t(),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(5).bfloat16(),
        "mask": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    back = unpack(pack(state))
    assert same(back, state)
    assert all(back[name].dtype == state[name].dtype for name in state)
    assert back["weight"].stride() == state["weight"].stride()


# --- errors, workers that die ---------------------------------------------------------------------


def test_errors_of_a_client_reach_the_user(
    mortal: list[str], tmp_path: Path, shared: MakeEngine
) -> None:
    """A user's mistake is shown in one line, a bug with the worker's traceback.

    Neither is tried again.
    """
    overrides = [*mortal, "engine.workers=1", f"run.dir={tmp_path / 'run'}"]
    fate = tmp_path / "fate" / "1-0"
    for what, error in (("mistake", UserError), ("bug", ZeroDivisionError)):
        fate.write_text(what)
        with pytest.raises(error) as caught:
            run(overrides, tmp_path / what, shared)
        assert (str(caught.value) == "too many apples") == (what == "mistake")
        assert "too many apples" in str(caught.value)
    assert "mortal.py" in str(caught.value)


def test_a_worker_with_another_split_is_refused(quick: list[str], shared: MakeEngine) -> None:
    whole = made(
        config := compose([*quick, "engine.workers=1"]), Watching(), engine=on(shared, config)
    )
    before = split_name(whole.data)
    whole.data.clients.reverse()
    assert split_name(whole.data) != before
    with pytest.raises(
        UserError, match=r"worker 1 \(process \d+ on .*\) has other images .* type data.root="
    ):
        whole.fit()


def test_a_worker_that_starts_after_an_edit_is_refused(
    quick: list[str], modules: Path, shared: MakeEngine
) -> None:
    (modules / "mid_run.py").write_text(METHOD)

    class Edited(shared):
        def new_actor(self) -> Any:
            (modules / "mid_run.py").write_text(METHOD + "# edited\n")
            return super().new_actor()

    config = compose([*quick, "method=mid_run:Mine", "engine.workers=1"])
    with pytest.raises(
        UserError, match="has other code of Mine or its callbacks than this process"
    ):
        fitted(config, engine=on(Edited, config))


def test_a_worker_without_the_images_says_where_it_is(
    quick: list[str], tmp_path: Path, shared: MakeEngine
) -> None:
    whole = made(config := compose([*quick, "engine.workers=1"]), engine=on(shared, config))
    whole.data.source = replace(config.data, root=str(tmp_path / "nowhere"))
    with pytest.raises(
        UserError, match=r"(?s)^worker 1 on \S+:\n.*data.name=cifar10: no source had it"
    ):
        whole.fit()


def test_the_client_of_a_dead_worker_is_tried_again(
    mortal: list[str], tmp_path: Path, shared: MakeEngine
) -> None:
    """The weights are the same as if the worker had not died."""
    undisturbed = run(mortal, tmp_path / "serial")
    (tmp_path / "fate" / "1-1").write_text("die")
    display = Workers()
    result = run([*mortal, "engine.workers=2"], tmp_path / "ray", shared, display)
    (note,) = (note for note in display.notes if "died" in note)
    assert "died with client 1 (process" in note
    assert note.endswith("trying again")
    assert [client for _, client in display.taken].count(1) == 3
    assert result.history[0]["dropped"] == 0
    assert same(weights(result), weights(undisturbed))


def test_without_a_further_try_the_round_continues_without_the_client(
    mortal: list[str], tmp_path: Path, shared: MakeEngine
) -> None:
    """The weights are those of a round without an update of client 1."""

    class WithoutOne(SerialEngine):
        def run(
            self, context: RoundContext, clients: Sequence[int], memory_of: MemoryOf
        ) -> Iterator[Any]:
            for update in super().run(context, clients, memory_of):
                away = context.round == 2 and update.client == 1
                yield Lost(1, "away") if away else update

    expected = run(mortal, tmp_path / "serial", WithoutOne)
    (tmp_path / "fate" / "2-1").write_text("die")
    display = Watching()
    result = run(
        [*mortal, "engine.workers=2", "engine.retries=0"], tmp_path / "ray", shared, display
    )
    assert any(
        note.startswith("round 2: dropped client 1: worker") and "died" in note
        for note in display.notes
    )
    assert [row["dropped"] for row in result.history] == [0, 1]
    assert same(weights(result), weights(expected))


def test_without_ray_the_error_says_what_to_install(
    quick: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", *quick, "engine=ray"]) == 2
    assert capsys.readouterr().err == f"error: engine=ray needs Ray; type {install_hint('ray')}\n"


def test_signals_wait_until_ray_has_started(
    quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for Ray replaces the SIGTERM handler, as Ray does, while Ctrl-C arrives."""
    calls: list[str] = []

    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.raise_signal(signal.SIGINT)
        calls.append("started")

    fake = SimpleNamespace(
        is_initialized=lambda: False, init=init, shutdown=lambda: calls.append("ended")
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    mine = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(KeyboardInterrupt):
            RayEngine(made(compose([*quick, "engine=ray"])).trainer)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == ["started", "ended"]


def sizes(config: Config, clients: int, cores: int, gpus: int) -> Sizes:
    seen = 0 if config.run.device == "cpu" else gpus
    return Sizes.of(
        config.engine, clients=clients, cores=cores, gpus=seen, threads=config.run.threads
    )


# --- how many workers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "cores", "gpus", "expected"),
    [
        ([], 8, 0, (5, 0, 1)),  # One per core, but not more than clients; 8 // 5 threads.
        (["engine.workers=2"], 8, 0, (2, 0, 4)),
        (["engine.workers=4"], 2, 0, (4, 0, 1)),
        (["engine.workers=2", "run.threads=3"], 8, 0, (2, 0, 3)),
        ([], 8, 2, (2, 1, 4)),  # One per GPU.
        (["engine.gpus_per_worker=0.5"], 8, 2, (4, 0.5, 2)),
        (["engine.gpus_per_worker=0.1", "federation.clients=10"], 8, 1, (10, 0.1, 1)),
        (["engine.gpus_per_worker=2"], 8, 4, (2, 2, 4)),
        (["run.device=cpu", "engine.workers=2"], 8, 2, (2, 0, 4)),
    ],
)
def test_workers_share_the_machine(
    overrides: list[str], cores: int, gpus: int, expected: tuple[int, float, int]
) -> None:
    config = compose(["federation.clients=5", *overrides])
    assert sizes(config, config.federation.clients, cores, gpus) == expected


@pytest.mark.parametrize(
    "overrides", [["engine.workers=3"], ["engine.workers=3", "engine.gpus_per_worker=0.6"]]
)
def test_more_workers_than_gpus_are_refused(overrides: list[str]) -> None:
    """Two shares of 0.6 do not fit on one GPU."""
    with pytest.raises(UserError, match=r"^gpus_per_worker=.*there are 2 GPUs and 3 workers"):
        sizes(compose(overrides), 10, cores=8, gpus=2)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_the_run_can_be_resumed(
    quick: list[str], tmp_path: Path
) -> None:
    """Interrupted on Ray and continued without it.

    The private state of clients is in the run folder.
    """
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    overrides = [*quick, "method=byol", "federation.rounds=10000"]
    command = [
        sys.executable,
        "-m",
        "fedx_pl",
        "train",
        *overrides,
        "engine=ray",
        "engine.workers=1",
        "--yes",
    ]
    folder = tmp_path / "ray"
    # In a session of its own, so that the signal goes to all of its processes, as from a keyboard.
    running = subprocess.Popen(
        [*command, f"run.dir={folder}"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        wait_for(
            lambda: (folder / "checkpoints" / "round_00002").exists() or running.poll() is not None,
            seconds=PATIENCE,
        )
        started = descendants(running.pid)
        assert any("ray" in name for name in started.values())
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=PATIENCE)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == EXIT_INTERRUPTED, err
    assert f"starting Ray (1 x {THREADS} CPU thread" in out
    assert err.strip().removeprefix("loading PyTorch ...").lstrip().startswith("interrupted;")
    assert "Traceback" not in err
    wait_for(lambda: not any(alive(*process) for process in started), seconds=PATIENCE)

    class Until(Watching):
        def __init__(self, last: int) -> None:
            super().__init__()
            self.last = last

        def row(self, row: dict[str, Any]) -> None:
            if row["round"] == self.last:
                raise KeyboardInterrupt

    interrupted = max(
        int(path.name.removeprefix("round_")) for path in (folder / "checkpoints").glob("round_*")
    )
    newest = []
    for place in (folder, tmp_path / "serial"):
        with pytest.raises(KeyboardInterrupt):
            run(overrides, place, SerialEngine, Until(interrupted + 1))
        newest.append(
            load_file(sorted((place / "checkpoints").iterdir())[-1] / "global.safetensors")
        )
    assert same(*newest)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def status(process: int) -> tuple[int, str, str]:
    """A process's parent, when it was started, and its state.

    The name in /proc/PID/stat may hold anything.
    """
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), fields[19], fields[0]


def descendants(process: int) -> dict[tuple[int, str], str]:
    """(number, start) of all processes that come from one, with their command lines."""
    found: dict[tuple[int, str], str] = {}
    children: dict[int, list[tuple[int, str, str]]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It may have ended meanwhile.
            parent, start, _ = status(int(path.name))
            children.setdefault(parent, []).append(
                (int(path.name), start, (path / "cmdline").read_text())
            )
    waiting = [process]
    while waiting:
        for child, start, command in children.get(waiting.pop(), []):
            found[child, start] = command
            waiting.append(child)
    return found


def alive(process: int, start: str) -> bool:
    """Whether the process still runs, and its number was not given to another one."""
    try:
        _, started, state = status(process)
        return started == start and state != "Z"
    except OSError:
        return False
