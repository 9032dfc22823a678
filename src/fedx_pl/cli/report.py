"""``fedx-pl report``: writes the tables and figures of finished experiments."""

import argparse

from fedx_pl.experiments.definition import definitions_folder, results_folder
from fedx_pl.experiments.report import write_report
from fedx_pl.experiments.sweep import resolve_profile


def run(options: argparse.Namespace) -> None:
    """Writes the tables and figures of finished experiments."""

    definitions = definitions_folder(options.definitions)
    results = options.results or results_folder(definitions, resolve_profile("auto"))
    for file in write_report(results, definitions, options.out):
        print(file)
