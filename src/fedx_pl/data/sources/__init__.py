"""Where images come from: named data sets, folders, arrays; fetched, decoded, verified and cached."""

from fedx_pl.data.sources.loading import (
    SOURCES,
    Source,
    describe,
    load,
    of_arrays,
    overview,
    stored_channels,
    stored_side,
)

__all__ = ["SOURCES", "Source", "describe", "load", "of_arrays", "overview", "stored_channels", "stored_side"]
