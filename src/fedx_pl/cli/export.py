"""``fedx-pl export``: writes a run's encoder for use without this package."""

from types import SimpleNamespace

from fedx_pl.callbacks import progress
from fedx_pl.data.sources.survey import number
from fedx_pl.encoder.export import export
from fedx_pl.encoder.load import value_range_of
from fedx_pl.errors import say


def run(options: SimpleNamespace) -> None:
    """Writes a run's encoder for use without this package."""
    with progress.grouped_warnings(progress.make_console()):
        file, line = export(
            options.run,
            options.to,
            options.out,
            round_number=options.round_number,
            allow_code=options.allow_code,
        )
    say(file)
    if value_range := value_range_of(options.run):
        low, high = map(number, value_range)
        say(
            "it takes floats from 0 to 1; for 16-bit images these are "
            f"(value - {low}) / ({high} - {low}), clipped to 0 and 1"
        )
    say(f"load it with: {line}")
