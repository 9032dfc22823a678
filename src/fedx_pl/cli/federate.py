"""``fedx-pl federate keys | server | client``: a federation of real sites."""

import argparse

from fedx_pl.errors import UserError, install_hint


def run(options: argparse.Namespace) -> None:
    """Runs the subcommand, if Flower is installed."""
    try:
        from fedx_pl.cli import sites
    except ImportError as error:
        raise UserError(
            f"a federation of sites needs Flower ({error}); type {install_hint('flower')}"
        ) from error
    if options.kind == "server":
        options.host = options.host or ("127.0.0.1" if options.insecure else "0.0.0.0")
    getattr(sites, options.kind)(options)
