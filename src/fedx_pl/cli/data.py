"""``fedx-pl data``: fetches a data set and describes it."""

import argparse

from fedx_pl.config.build import load_images
from fedx_pl.config.compose import compose
from fedx_pl.data import sources
from fedx_pl.errors import say


def run(options: argparse.Namespace) -> None:
    """Fetches a data set and describes it; without a name, lists what there is."""
    if options.name is None:
        say(sources.overview())
        return
    # All of it: the limit of a profile is for training.
    config = compose([f"data={options.name}", "data.limit=0", *options.overrides])
    say(sources.describe(load_images(config)))
