"""``python -m benchmarks``: measures, prints small tables and saves everything as JSON."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import engines, evaluation, overhead, report, rival, scale, training
from benchmarks.measure import commit, machine
from benchmarks.rounds import Setting
from fedx_pl.errors import UserError
from fedx_pl.federation.device import resolve_device

# What can be asked for, and its minutes on two cores with three repeats.
PARTS: dict[str, tuple[Callable[[Setting], report.Part], float]] = {
    "training-resnet18": (training.resnet18, 8),
    "training-thin": (training.thin, 4),
    "round": (evaluation.whole, 6),
    "rival": (rival.measure, 3),
    "probe": (evaluation.probe, 3),
    "overhead": (overhead.measure, 3),
    "scale": (scale.measure, 5),
    "engines": (engines.measure, 3),
}
OUT = Path(__file__).parent / "results" / "latest.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts asked for; a missed target is a result, not an error."""
    options = _parser().parse_args(arguments)
    width = None if sys.stdout.isatty() else 120  # A file has no width.
    console = Console(highlight=False, width=width)
    try:
        _run(options, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; parts that were done are in {options.out}", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="How fast a federated round is."
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="NAME",
        help=", ".join(PARTS),
    )
    parser.add_argument(
        "--quick", action="store_true", help="one repeat of few steps: shows that it runs"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each contender; the best counts (default 3)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT,
        help="where the JSON goes (default benchmarks/results/latest.json)",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="configuration keys for our runs, e.g. run.compile=true data.root=FOLDER",
    )
    return parser


def _run(options: argparse.Namespace, console: Console) -> None:
    if options.repeats < 1:
        raise UserError(f"--repeats {options.repeats} is not possible; type --repeats 3")
    repeats = 1 if options.quick else options.repeats
    minutes = sum(PARTS[name][1] for name in options.only) * repeats / 3
    expected = (
        "a minute or two"
        if options.quick
        else f"about {max(minutes, 1):.0f} minutes on two idle cores"
    )
    console.print(
        f"{', '.join(options.only)}: {repeats} repeat(s) of each contender, {expected}",
        soft_wrap=True,
    )
    device = resolve_device(options.device)
    header: dict[str, Any] = {
        "quick": options.quick,
        "repeats": repeats,
        "overrides": options.overrides,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(device),
    }
    load = header["machine"]["load_at_start"]
    cores = header["machine"]["cores"]
    if load and load > cores / 4:
        console.print(
            f"note: other programs keep this machine busy (load {load} on {cores} cores): wait "
            "for a quiet moment"
        )
    parts: dict[str, report.Part] = {}
    for name in options.only:
        started = time.perf_counter()

        def say(line: str, name: str = name) -> None:
            # Lines, not a spinner: whatever redraws itself would run beside what is being timed.
            console.print(f"{name}: {line}", style="dim", soft_wrap=True)

        setting = Setting(device, repeats, options.quick, tuple(options.overrides), say)
        parts[name] = PARTS[name][0](setting)
        parts[name].facts["seconds in all"] = time.perf_counter() - started
        report.show(console, name, parts[name], quick=options.quick)
        # After every part, so that an interruption keeps what is done.
        report.save(options.out, header, parts)
    verdicts = [row.verdict for part in parts.values() for row in part.rows if row.verdict]
    summary = "" if options.quick else f"{verdicts.count('met')} of {len(verdicts)} targets met; "
    console.print(f"{summary}saved in {options.out}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
