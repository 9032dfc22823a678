"""Sources of images: named data sets, folders and arrays."""

from fedx_pl.data.sources.arrays import is_array, is_pair, of_arrays, of_datasets
from fedx_pl.data.sources.description import describe, overview
from fedx_pl.data.sources.loading import (
    SOURCES,
    Source,
    load,
    pairs,
    stored_channels,
    stored_side,
)

__all__ = [
    "SOURCES",
    "Source",
    "describe",
    "is_array",
    "is_pair",
    "load",
    "of_arrays",
    "of_datasets",
    "overview",
    "pairs",
    "stored_channels",
    "stored_side",
]
