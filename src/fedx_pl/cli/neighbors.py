"""``fedx-pl neighbors``: finds the images most similar to one."""

from types import SimpleNamespace

from fedx_pl.cli.embed import decoded_copies, load_encoder
from fedx_pl.encoder import neighbors
from fedx_pl.errors import require, say
from fedx_pl.files import require_file


def run(options: SimpleNamespace) -> None:
    """Finds the images most similar to one, prints their names and writes a page."""
    require("--count", options.count, options.count >= 1, instead="--count 12")
    require_file(options.out)
    encoder = load_encoder(options)
    with decoded_copies(options.overrides) as encoder.cache:
        found = neighbors.find(encoder, options.query, options.images, count=options.count)
    neighbors.contact_sheet(
        options.out, options.query, options.images, found=found, value_range=encoder.value_range
    )
    for path, similarity in found:
        say(f"{similarity:.3f}  {path}")
    say(f"pictures: {options.out}")
