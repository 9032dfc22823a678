"""The keys of a configuration that decide the result of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedx_pl.data.images import RESIZED
from fedx_pl.data.sources import SOURCES


def decisive(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that decides the result, without paths and engines."""
    content: dict[str, Any] = {
        key: dict(part) if isinstance(part, dict) else part for key, part in tree.items()
    }
    for group in ("run", "engine", "health", "callbacks", "logger", "site"):
        content.pop(group, None)
    # Another value asks a repaired client again.
    content["aggregate"].pop("quarantine", None)
    if content["aggregate"].get("max_share") == 1:  # A later key: runs without it keep their names.
        content["aggregate"].pop("max_share")
    for place in ("cache", "download", "workers"):
        content["data"].pop(place, None)
    # A run's folder is named after its content.
    content["fedca"]["base"] = Path(content["fedca"]["base"]).name
    content["fork"] = Path(content["fork"]).name
    # For a folder the root decides which images, for other data only where they are.
    if content["data"]["name"] != "folder":
        content["data"].pop("root", None)
    if content["data"]["name"] not in RESIZED:
        content["data"].pop("image_size", None)
    # Known only when they are loaded; the images have a fingerprint.
    if content["data"]["name"] not in SOURCES:
        content["data"].pop("grayscale", None)
    return content


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration as dotted keys and values."""
    dotted: dict[str, Any] = {}
    for key, value in tree.items():
        dotted |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return dotted
