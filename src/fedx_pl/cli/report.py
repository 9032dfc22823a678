"""``fedx-pl report``: writes the tables and figures of finished experiments."""

from types import SimpleNamespace

from fedx_pl.errors import say
from fedx_pl.experiments.definition import definitions_folder, resolve_profile, results_folder
from fedx_pl.experiments.report import write_report

EXIT_LEFT_OUT = 1


def run(options: SimpleNamespace) -> int:
    """Writes tables and figures; the exit code is 1 if a result file was left out."""
    left_out: list[str] = []
    definitions = definitions_folder(options.definitions)
    results = options.results or results_folder(definitions, resolve_profile("auto"))
    written = write_report(results, definitions, options.out, report=left_out.append)
    for line in [*left_out, *written]:
        say(line)
    return EXIT_LEFT_OUT if left_out else 0
