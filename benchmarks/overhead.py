"""Part ``overhead``: what a client costs besides its training."""

import cProfile
import pstats
from itertools import pairwise

from benchmarks.report import Part, Row
from benchmarks.rounds import Setting, backbone, train
from benchmarks.targets import OVERHEAD
from fedx_pl.config.build import Run

# Two images per client, one step, no augmentation.
_NOTHING = (
    "optim.batch_size=2",
    "federation.epochs=1",
    "augment.crop=none",
    "augment.flip=0",
    "augment.jitter_prob=0",
)
_FEDX = ("fedx=true", "optim.batch_size=4")

# Where the time goes: functions by file and name, whose cumulative times do not overlap.
_STATIONS = {
    "state received": ("federation/client.py", "_receive"),
    "Trainer made": ("federation/client.py", "_new_trainer"),
    "Trainer.fit": ("trainer/trainer.py", "fit"),
    "state copied out": ("federation/client.py", "_update"),
    "FedAvg": ("federation/aggregate.py", "add"),
    "private state read": ("federation/checkpoint.py", "load_client"),
    "private state saved": ("federation/checkpoint.py", "save_client"),
    "round saved": ("federation/checkpoint.py", "commit"),
}


def measure(setting: Setting) -> Part:
    """Milliseconds per client and round of empty training, for several kinds of state."""
    part = Part()
    clients = setting.few(40, 5)
    rounds = max(setting.repeats, 2)
    for case in OVERHEAD:
        setting.say(case)
        method = "EmptyBYOL" if "BYOL" in case else "EmptySimCLR"
        run = setting.build(
            f"method=benchmarks.methods:{method}",
            *_NOTHING,
            *(_FEDX if "FedX" in case else ()),
            *backbone(case.split()[0]),
            f"data.limit={2 * clients}",
            f"federation.clients={clients}",
            f"federation.rounds={rounds}",
        )
        rows, display = train(run)
        part.times[case] = [row["train_seconds"] / clients for row in rows]
        whole = [(end - start) / clients for start, end in pairwise(display.rounds)]
        part.rows.append(Row(f"{case}: overhead per client", 1e3 * min(part.times[case]), "ms"))
        part.contenders.append(
            {
                "contender": case,
                "ms per client": 1e3 * min(part.times[case]),
                "with saving and logging the round": 1e3 * min(whole),
            }
        )
        part.facts[f"{case}: ms per client under a profiler"] = _profile(run, clients * rounds)
    part.notes.append("Where it goes, in ms per client, is in the JSON.")
    return part


def _profile(run: Run, fits: int) -> dict[str, float]:
    """Milliseconds per client at each station; the profiler itself makes all of them slower."""
    with cProfile.Profile() as profiler:
        train(run)
    found = {}
    for (file, _, function), (_, _, _, cumulative, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        for station, (where, name) in _STATIONS.items():
            if function == name and file.endswith(where):
                found[station] = 1e3 * cumulative / fits
    return found
