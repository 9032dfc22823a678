"""``fedx-pl data``: downloads a data set and describes it."""

from types import SimpleNamespace

from fedx_pl.config.build import load_images
from fedx_pl.data import sources
from fedx_pl.errors import say


def run(options: SimpleNamespace) -> None:
    """Downloads and describes a data set; without a configuration, lists all data sets."""
    if options.config is None:
        say(sources.overview())
    else:
        say(sources.describe(load_images(options.config)))
