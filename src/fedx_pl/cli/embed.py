"""``fedx-pl embed``: writes the features of a folder of images."""

import argparse

from fedx_pl.callbacks import progress
from fedx_pl.encoder.embed import require_table, write_table
from fedx_pl.encoder.load import Encoder
from fedx_pl.errors import say


def run(options: argparse.Namespace) -> None:
    """Writes the features of a folder of images."""

    require_table(options.out)
    paths, features = load_encoder(options).embed_folder(options.images)
    write_table(options.out, paths, features)
    say(f"{options.out}: {len(paths):,} images, {features.shape[1]} features each")


def load_encoder(options: argparse.Namespace) -> Encoder:
    """The encoder of the run that the options name."""
    with progress.grouped_warnings(progress.make_console()):
        return Encoder.of(options.run, options.round, allow_code=options.allow_code)
