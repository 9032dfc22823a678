"""Limits on what a coordinator may ask of a site, checked before anything is allocated."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedx_pl.config.build import make_model
from fedx_pl.config.compose import code_words
from fedx_pl.config.groups import SiteOptions
from fedx_pl.config.schema import Config
from fedx_pl.data.images import cache_folder, root_folder
from fedx_pl.data.sources.folder import list_files
from fedx_pl.errors import UserError, first_line
from fedx_pl.federation.device import resolve_device
from fedx_pl.files import size_of
from fedx_pl.printing import byte_size

GB = 1e9
# Copies of the weights that training needs at least: those received, those trained, and their
# gradients.
_COPIES = 3


def require_within(
    limits: SiteOptions, config: Config, tree: dict[str, Any], state: Path | None = None
) -> None:
    """Raises a `UserError` if a run needs more than its site allows.

    Args:
        limits: the limits of the site.
        config: the configuration of the run, as this site would train it.
        tree: the part of it that the coordinator has sent.
        state: the folder of the site's private state.
    """
    _require("site.max_epochs", config.federation.epochs, limits.max_epochs, "epochs in a round")
    side = max(config.data.image_size, config.augment.size)
    _require("site.max_side", side, limits.max_side, "pixels on a side")
    count = _count(config)
    _require_room(limits, config, count, state)
    if not code_words(tree):  # Code that the site trusts may not work on the meta device.
        needed = _needed_memory(config, count) / GB
        most = _memory_limit(limits, config) / GB
        _require("site.max_memory_gb", needed, most, "GB of memory at least")


def max_message(config: Config) -> float:
    """The largest message, in bytes, whose weights a site could train within its memory limit."""
    return _memory_limit(config.site, config) / _COPIES


def _memory_limit(limits: SiteOptions, config: Config) -> float:
    return limits.max_memory_gb * GB or device_memory(config)


def device_memory(config: Config) -> float:
    """The memory of the training device, in bytes."""
    device = resolve_device(config.run.device)
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # Not on Windows.
        return float("inf")


def _require(key: str, asked: float, most: float, what: str) -> None:
    if not asked <= most:
        raise UserError(
            f"the coordinator asks for {asked:,.6g} {what}; this site allows {key}={most:.6g}"
        )


def _count(config: Config) -> int:
    """The number of possible image files of this site; 0 for data sets of a fixed image size."""
    root = root_folder(config.data)
    data = config.data
    folders = {
        "folder": [root],
        "imagenet10": [root / part / name for part in ("train", "val") for name in data.classes],
    }
    places = [place for place in folders.get(data.name, []) if place.is_dir()]
    return sum(len(list_files(place, lambda _: None)) for place in places)


def _require_room(limits: SiteOptions, config: Config, count: int, state: Path | None) -> None:
    """Checks that decoded copies fit into what the site allows, and on the disk.

    All copies in the cache count, and so does the private state of all runs: a coordinator that
    asks for one image size after the other, or for one run after the other, must not fill the disk.
    """
    channels = 1 if config.data.grayscale else 3
    side = config.data.image_size
    folder = cache_folder(config.data)
    copies = list(folder.glob("*/images.npy"))
    there = any(_shape(file)[1:] == (side, side, channels) for file in copies)
    needed = 0 if there else count * side**2 * channels
    kept = list(state.glob("*/**/*.safetensors")) if state is not None else []
    used = sum(file.stat().st_size for file in (*copies, *kept))
    _require(
        "site.max_cache_gb",
        (used + needed) / GB,
        limits.max_cache_gb,
        "GB on disk, for decoded images and private state",
    )
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if needed > (free := shutil.disk_usage(place).free):
        raise UserError(
            f"the coordinator asks for {byte_size(needed)} of decoded images, the disk of their "
            f"folder has room for {byte_size(free)}; type data.cache=ANOTHER"
        )


def _shape(file: Path) -> tuple[int, ...]:
    """The shape of the array in a file; empty if it cannot be read."""
    try:
        with open(file, "rb") as content:
            np.lib.format.read_magic(content)
            return tuple(np.lib.format.read_array_header_1_0(content)[0])
    except (OSError, ValueError):
        return ()


def _needed_memory(config: Config, count: int) -> float:
    """The bytes that training takes at least, found with the network on the meta device."""
    channels = 1 if config.data.grayscale else 3
    side = config.data.image_size
    side = config.augment.size if 0 < config.augment.size < side else side
    try:
        with torch.device("meta"):
            model = make_model(config, channels=channels, image_size=side)
            images = (
                min(config.optim.batch_size, count or config.optim.batch_size) * model.online_views
            )
            activations = _activations(model.backbone, torch.empty(images, channels, side, side))
    except UserError:
        raise
    except Exception as error:  # Sizes that overflow, or layers that do not fit each other.
        reason = first_line(error)
        raise UserError(
            f"the coordinator asks for a network that cannot be made ({reason})"
        ) from error
    half = 2 if resolve_device(config.run.device).type == "cuda" else 1
    return _COPIES * size_of(model.state_dict()) + activations / half


def _activations(network: nn.Module, images: Tensor) -> float:
    """The bytes of a network's activations, which are kept until the gradients are computed."""
    total = 0.0

    def count(module: nn.Module, _: Any, output: Any) -> None:
        nonlocal total
        if isinstance(output, Tensor) and not getattr(module, "inplace", False):
            total += output.numel() * output.element_size()

    hooks = [
        module.register_forward_hook(count)
        for module in network.modules()
        if not list(module.children())
    ]
    network(images)
    for hook in hooks:
        hook.remove()
    return total
