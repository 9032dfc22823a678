"""Writes an encoder in formats that others read without this package."""

import io
from pathlib import Path

import torch
from torch import nn
from torchvision.models.resnet import ResNet

from fedx_pl.config.schema import Config
from fedx_pl.encoder.load import Encoder, read_config
from fedx_pl.errors import UserError, first_line, install_hint
from fedx_pl.files import require_file, tensor_bytes, write_atomically

FORMATS = ("safetensors", "torchvision", "torch", "onnx")
SUFFIXES = {
    "safetensors": ".safetensors",
    "torchvision": ".safetensors",
    "torch": ".pt2",
    "onnx": ".onnx",
}


def export(
    run: Path,
    to: str,
    file: Path | None = None,
    round_number: int | None = None,
    *,
    allow_code: bool = False,
) -> tuple[Path, str]:
    """Writes the encoder of a run in a format that others read without this package.

    Args:
        run: its folder.
        to: one of `FORMATS`.
        file: where; RUN/encoder-FORMAT.SUFFIX if not given.
        round_number: see `Encoder.of`.
        allow_code: see `Encoder.of`.

    Returns:
        The file, and the line of Python that loads it.
    """
    if to not in FORMATS:
        raise UserError(
            f"--to {to}: there is no such format; type --to {', '.join(FORMATS[:-1])} or "
            f"{FORMATS[-1]}"
        )
    if file is not None:
        require_file(file)
    encoder = Encoder.of(run, round_number, allow_code=allow_code)
    file = file or run / f"encoder-{to}{SUFFIXES[to]}"
    if to == "torchvision":
        content, line = _torchvision(encoder, file, read_config(run, allow_code=allow_code))
    else:
        make = {"safetensors": _safetensors, "torch": _torch, "onnx": _onnx}[to]
        content, line = make(encoder, file)
    # At once: on a full disk, torch's writers abort and leave half a file.
    write_atomically(file, content)
    return file, line


def _safetensors(encoder: Encoder, file: Path) -> tuple[bytes, str]:
    line = f'weights = safetensors.torch.load_file("{file}")'
    return tensor_bytes(encoder.backbone.state_dict()), line


def _torchvision(encoder: Encoder, file: Path, config: Config) -> tuple[bytes, str]:
    """A state dict for torchvision's network, which has a large stem and the full width."""
    backbone = encoder.backbone
    name = config.backbone.name
    conv1 = getattr(backbone, "conv1", None)
    if type(backbone) is not ResNet or not isinstance(conv1, nn.Conv2d):
        raise UserError(
            f"--to torchvision: torchvision has no {type(backbone).__qualname__}; type --to torch "
            f"or --to onnx, which carry the network"
        )
    if (
        config.backbone.width != 64
        or conv1.kernel_size != (7, 7)
        or encoder.channels != 3
        or name == "resnet10"
    ):
        raise UserError(
            f"torchvision has no {name} with width {config.backbone.width}, {encoder.channels} "
            f"channels and a {conv1.kernel_size[0]}x{conv1.kernel_size[1]} stem; type --to torch "
            f"or --to onnx, which carry the network"
        )
    line = (
        f"model = torchvision.models.{name}(); model.fc = torch.nn.Identity(); "
        f'model.load_state_dict(safetensors.torch.load_file("{file}"))'
    )
    return tensor_bytes(backbone.state_dict()), line


def _torch(encoder: Encoder, file: Path) -> tuple[bytes, str]:
    batch = torch.export.Dim("batch", min=1)
    example = torch.zeros(2, encoder.channels, encoder.side, encoder.side)
    try:
        program = torch.export.export(encoder, (example,), dynamic_shapes={"images": {0: batch}})
    except Exception as error:  # Whatever a network of the user's own does that cannot be traced.
        reason = first_line(error)
        name = type(encoder.backbone).__qualname__
        raise UserError(
            f"--to torch: torch.export cannot follow {name} ({reason}); type --to safetensors for "
            f"its weights"
        ) from error
    stream = io.BytesIO()
    torch.export.save(program, stream)
    return stream.getvalue(), f'encoder = torch.export.load("{file}").module()'


def _onnx(encoder: Encoder, file: Path) -> tuple[bytes, str]:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--to onnx needs onnx and onnxscript; type {install_hint('onnx')}"
        ) from error
    example = torch.zeros(2, encoder.channels, encoder.side, encoder.side)
    program = torch.onnx.export(
        encoder,
        (example,),
        input_names=["images"],
        output_names=["features"],
        dynamo=True,
        verbose=False,
        dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}},
        external_data=False,
    )
    assert program is not None  # Given that it writes no file.
    return (
        program.model_proto.SerializeToString(),
        f'session = onnxruntime.InferenceSession("{file}")',
    )
