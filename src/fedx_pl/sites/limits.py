"""What a coordinator may ask of a site: limits of the site's own, looked at before anything is decoded or allocated."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedx_pl.config.build import make_model
from fedx_pl.config.compose import code_words
from fedx_pl.config.schema import Config, SiteOptions
from fedx_pl.data.images import cache_folder, root_folder
from fedx_pl.data.sources.folder import list_files
from fedx_pl.errors import UserError
from fedx_pl.federation.device import resolve_device
from fedx_pl.files import size_of
from fedx_pl.printing import byte_size

GB = 1e9
_COPIES = (
    3  # of the weights, at least: those that came, those that are trained, and their gradients
)


def require_within(limits: SiteOptions, config: Config, tree: dict[str, Any]) -> None:
    """Raises a `UserError` if a run needs more than its site allows.

    Args:
        limits: of the site.
        config: of the run, as this site would train it.
        tree: the part of it that the coordinator has sent.
    """
    _require("site.max_epochs", config.federation.epochs, limits.max_epochs, "epochs in a round")
    side = max(config.data.image_size, config.augment.size)
    _require("site.max_side", side, limits.max_side, "pixels on a side")
    count = _count(config)
    _require_room(limits, config, count)
    if not code_words(tree):  # Code that the site trusts need not work without memory of its own.
        needed = _needed_memory(config, count) / GB
        most = limits.max_memory_gb or device_memory(config) / GB
        _require("site.max_memory_gb", needed, most, "GB of memory at least")


def device_memory(config: Config) -> float:
    """Bytes that the training device has."""
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
    """Files that may be images of this site; 0 for data sets whose images a coordinator cannot enlarge."""
    root = root_folder(config.data)
    return (
        len(list_files(root, lambda line: None))
        if config.data.name == "folder" and root.is_dir()
        else 0
    )


def _require_room(limits: SiteOptions, config: Config, count: int) -> None:
    """Decoded copies fit into what the site allows, and on the disk."""
    channels = 1 if config.data.grayscale else 3
    needed = count * config.data.image_size**2 * channels
    _require("site.max_cache_gb", needed / GB, limits.max_cache_gb, "GB of decoded images")
    folder = cache_folder(config.data)
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if needed > (free := shutil.disk_usage(place).free) and not _decoded_before(folder, needed):
        raise UserError(
            f"the coordinator asks for {byte_size(needed)} of decoded images, {place} has room for "
            f"{byte_size(free)}; type data.cache=ANOTHER"
        )


def _decoded_before(folder: Path, needed: int) -> bool:
    """Whether there is a copy of about that size: then none need be made."""
    return any(
        0.5 * needed < file.stat().st_size < 1.1 * needed for file in folder.glob("*/images.npy")
    )


def _needed_memory(config: Config, count: int) -> float:
    """Bytes that training takes at least: found with the network on the meta device, which has no memory."""
    channels, side = 1 if config.data.grayscale else 3, config.data.image_size
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
    except Exception as error:  # Sizes beyond what numbers can count, or a network that is none.
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"the coordinator asks for a network that cannot be made ({reason})"
        ) from error
    half = 2 if resolve_device(config.run.device).type == "cuda" else 1
    return _COPIES * size_of(model.state_dict()) + activations / half


def _activations(network: nn.Module, images: Tensor) -> float:
    """Bytes of what the layers of a network give, which stay until the gradients are computed."""
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
