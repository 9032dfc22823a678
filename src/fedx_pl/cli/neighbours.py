"""``fedx-pl neighbours``: finds the images most like one."""

import argparse

from fedx_pl.cli.embed import decoded_copies, load_encoder
from fedx_pl.encoder import neighbors
from fedx_pl.errors import require, say
from fedx_pl.files import require_file


def run(options: argparse.Namespace) -> None:
    """Finds the images most like one."""
    require("--count", options.count, options.count >= 1, instead="--count 12")
    require_file(options.out)
    encoder = load_encoder(options)
    with decoded_copies(options.overrides) as encoder.cache:
        found = neighbors.find(encoder, options.query, options.images, count=options.count)
    neighbors.contact_sheet(
        options.out, options.query, options.images, found=found, value_range=encoder.value_range
    )
    for path, like in found:
        say(f"{like:.3f}  {path}")
    say(f"pictures: {options.out}")
