"""The device and the precision that a process trains with."""

from collections.abc import Sequence

import torch

from fedx_pl.errors import UserError
from fedx_pl.options import OptionError


def resolve_precision(precision: str, device: torch.device) -> str:
    """Replaces ``auto``: bf16-mixed on GPUs that have it, 16-mixed on older ones, else 32-true."""
    if precision == "16-mixed" and device.type == "cpu":
        raise OptionError("precision", precision, "needs a GPU", "auto, 32-true or bf16-mixed")
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "32-true"
    return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"


def resolve_device(name: str) -> torch.device:
    """The device of a name; ``auto`` is the GPU if there is one."""
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        problem = f"asks for a GPU that is not there; usable GPUs: {torch.cuda.device_count()}"
        raise OptionError("accelerator", name, problem, "auto")
    # With its number: Lightning selects the GPU by it.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def device_of(accelerator: str, devices: Sequence[int] | int | str) -> torch.device:
    """The device that `pl.Trainer`'s arguments of the same names would choose.

    Args:
        accelerator: ``auto``, ``cpu``, ``gpu`` or ``cuda``.
        devices: a list that names one GPU; anything else takes the first.
    """
    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        raise UserError(
            f'accelerator="{accelerator}" is not known; write accelerator="auto", "cpu" or "gpu"'
        )
    device = resolve_device("cuda" if accelerator in ("gpu", "cuda") else accelerator)
    if device.type == "cpu" or isinstance(devices, int | str):
        return device
    if len(devices) != 1:
        raise UserError(
            f"devices={list(devices)}: a process trains on one device; write e.g. devices=[0]"
        )
    return resolve_device(f"cuda:{devices[0]}")
