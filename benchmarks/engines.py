"""Part ``engines``: clients on two Ray workers against clients one by one in this process."""

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.measure import Lap, best, interleave
from benchmarks.overhead import _NOTHING
from benchmarks.report import Part, Row
from benchmarks.rounds import Setting, backbone, images_of, variant
from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.config.build import Run
from fedx_pl.engines import Engine, Lost
from fedx_pl.engines.local import SerialEngine
from fedx_pl.engines.ray import RayEngine, import_ray, usable_cores
from fedx_pl.errors import UserError
from fedx_pl.federation.aggregate import FedAvg
from fedx_pl.federation.round import RoundContext
from fedx_pl.trainer import FederatedTrainer

WORKERS = 2


@dataclass
class Speaking(RoundCallback):
    """Prints Ray's notes, which are no reason to stop."""

    setting: Setting

    def on_note(self, trainer: FederatedTrainer, text: str) -> None:
        """Prints a note."""
        self.setting.say(text)


def measure(setting: Setting) -> Part:
    """Measures images per second, the overhead per client, and memory."""
    part = Part()
    try:
        import_ray(local=True)
    except UserError as error:
        part.notes.append(str(error))
        return part
    threads = torch.get_num_threads()
    try:
        _training(setting, part)
        _overhead(setting, part)
    finally:
        torch.set_num_threads(threads)
    return part


def _training(setting: Setting, part: Part) -> None:
    """Trains FedX on SimCLR as in the cpu profile, but with the paper's ten clients.

    The five clients of the profile cannot be divided evenly among two workers.
    """
    size = [
        f"data.limit={setting.few(2500, 320)}",
        f"federation.clients={setting.few(10, 4)}",
        "federation.epochs=1",
    ]
    run = _build(setting, *variant("FedX", batch=32), *backbone("thin"), *size)
    cores = usable_cores()
    images = images_of(run)
    serial = SerialEngine(run.trainer)
    started = time.perf_counter()
    with closing(RayEngine(run.trainer, run.config.engine)) as ray:
        _round(ray, threads=1)  # Waits for the workers.
        part.facts["seconds to the end of a first round, with the start of Ray"] = (
            time.perf_counter() - started
        )
        names = (
            f"Ray, {WORKERS} workers x {ray.sizes.threads}",
            f"serial, {cores} threads",
            "serial, 1 thread",
        )
        times = interleave(
            {
                names[0]: lambda: Lap(images, _round(ray, threads=1)),
                names[1]: lambda: Lap(images, _round(serial, threads=cores)),
                names[2]: lambda: Lap(images, _round(serial, threads=1)),
            },
            setting.repeats,
            device=setting.device,
            say=setting.say,
        )
        held = ray.ray.get([seat.actor.__ray_call__.remote(_memory) for seat in ray._seats])
    part.times |= times
    ours, all_cores, one = (best(times)[name] for name in names)
    part.rows += [
        Row("Ray against serial", all_cores / ours),
        Row("Ray against serial on one thread", one / ours),
        Row("Ray: memory per worker", max(worker["Pss"] for worker in held), "MB"),
    ]
    part.facts["memory of each worker, MB"] = held
    part.contenders = [
        {"contender": name, "images/s": 1 / value} for name, value in best(times).items()
    ]


def _overhead(setting: Setting, part: Part) -> None:
    """Measures the wall time per client of many clients whose training costs nothing."""
    clients = setting.few(100, 8)
    run = _build(
        setting,
        "method=benchmarks.methods:EmptySimCLR",
        *_NOTHING,
        *backbone("thin"),
        f"data.limit={2 * clients}",
        f"federation.clients={clients}",
    )
    serial = SerialEngine(run.trainer)
    with closing(RayEngine(run.trainer, run.config.engine)) as ray:
        _round(ray, threads=1)
        contenders: dict[str, Engine] = {"Ray, empty clients": ray, "serial, empty clients": serial}
        times = interleave(
            {
                name: lambda engine=engine: Lap(clients, _round(engine, threads=1))  # type: ignore[misc]
                for name, engine in contenders.items()
            },
            setting.repeats,
            say=setting.say,
        )
    part.times |= times
    ours, alone = best(times).values()
    part.rows.append(Row("Ray: overhead per client", 1e3 * ours, "ms"))
    part.notes.append(f"overhead per client in one process, for comparison: {1e3 * alone:.1f} ms")


def _build(setting: Setting, *overrides: str) -> Run:
    share = ["engine.gpus_per_worker=0.5"] if setting.device.type == "cuda" else []
    run = setting.build(*overrides, f"engine.workers={WORKERS}", *share)
    run.trainer.callbacks = [Speaking(setting)]  # All that an engine tells goes there.
    return run


def _round(engine: Engine, threads: int) -> float:
    """Returns the seconds of one round's training and averaging."""
    torch.set_num_threads(threads)
    trainer = engine.trainer
    state = trainer.first_state().to(trainer.device)
    context = RoundContext(
        round=1,
        rounds=1,
        epochs=trainer.local_epochs,
        seed=trainer.seed,
        global_state=state,
        batchnorm=trainer.batchnorm,
    )
    started = time.perf_counter()
    average = FedAvg(state.tensors())
    for update in engine.run(context, range(trainer.datamodule.num_clients), lambda _client: None):
        if isinstance(update, Lost):
            raise RuntimeError(update.reason)  # It would make the times meaningless.
        average.add(update.state.tensors(), update.num_images)
    average.result()
    return time.perf_counter() - started


def _memory(_: object) -> dict[str, float]:
    """Returns the memory of the process that runs this, in MB.

    ``Rss`` is everything that is mapped; ``Pss`` counts only a share of what others map, too.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    fields = (line.split() for line in lines)
    return {
        name.rstrip(":"): float(kb) / 1e3 for name, kb, *_ in fields if name in ("Rss:", "Pss:")
    }
