"""Where images come from: named data sets, folders, arrays; fetched, decoded, verified and cached."""

from fedx_pl.data.sources.loading import describe, load, overview, stored_channels, stored_side

__all__ = ["describe", "load", "overview", "stored_channels", "stored_side"]
