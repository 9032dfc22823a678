"""``fedx-pl neighbours``: finds the images most like one."""

import argparse

from fedx_pl.cli.embed import decoded_copies, load_encoder
from fedx_pl.encoder import neighbors


def run(options: argparse.Namespace) -> None:
    """Finds the images most like one."""
    with decoded_copies(options.overrides) as cache:
        encoder = load_encoder(options)
        encoder.cache = cache
        found = neighbors.find(encoder, options.query, options.images, count=options.count)
    neighbors.contact_sheet(options.out, options.query, options.images, found=found, value_range=encoder.value_range)
    for path, like in found:
        print(f"{like:.3f}  {path}")
    print(f"pictures: {options.out}")
