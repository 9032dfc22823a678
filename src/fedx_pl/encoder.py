"""The trained encoder in the user's hands: read it from a run, embed images with it, write it for others."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from torchvision.models.resnet import ResNet

from fedx_pl import backbones, foreign_code, methods
from fedx_pl.config import Config, from_tree, load
from fedx_pl.data.decode import decode
from fedx_pl.data.folder import list_files
from fedx_pl.data.images import VALUE_RANGE_FILE, DataOptions, ValueRange
from fedx_pl.data.sources import stored_channels, stored_side
from fedx_pl.data.survey import Parts, survey
from fedx_pl.errors import UserError, install_hint
from fedx_pl.evaluation.features import extract
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.plan import build_model, normalisation
from fedx_pl.files import tensor_bytes, write_atomically

FORMATS = ("safetensors", "torchvision", "torch", "onnx")
SUFFIXES = {"safetensors": ".safetensors", "torchvision": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}


class Encoder(nn.Module):
    """A backbone with the normalisation it was trained with: images in, features out.

    Example:
        >>> encoder = Encoder.of("runs/NAME")  # doctest: +SKIP
        >>> features = encoder(images)  # doctest: +SKIP

        Images are (n, C, h, w) floats from 0 to 1, features (n, feature_dim).
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        side: int,
        value_range: ValueRange | None = None,
    ) -> None:
        """Joins the two.

        Args:
            backbone: maps normalised (n, C, h, w) to (n, feature_dim).
            mean: per channel, of pixels from 0 to 1.
            std: per channel.
            side: of the images it was trained on.
            value_range: what became 0 and 1 in images of more than 8 bits per value. None if it has not seen any: then
                the first folder with such images decides.
        """
        super().__init__()
        self.value_range = value_range
        self.backbone, self.side = backbone, side
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """(n, C, h, w), floats from 0 to 1 -> (n, feature_dim)."""
        return self.backbone((images - self.mean) / self.std)

    @property
    def channels(self) -> int:
        """Of the images it takes."""
        return self.mean.shape[1]

    @classmethod
    def of(cls, run: str | Path, round: int | None = None, *, allow_code: bool = False) -> Encoder:
        """The encoder of a run, in eval mode on the CPU.

        Args:
            run: its folder.
            round: of an older checkpoint that was kept, or the best; the newest if not given.
            allow_code: the run's backbone may be a class outside this package, whose module is then imported.
        """
        folder = Path(run)
        config = _config(folder)
        checkpoints = Checkpoints(folder)
        found = checkpoints.latest(mend=False) if round is None else checkpoints.read(round)
        if found is None:
            raise UserError(f"{folder} has no finished round; there is no encoder yet")
        weights = {
            name.removeprefix("backbone."): tensor for name, tensor in found[1].items() if name.startswith("backbone.")
        }
        side, channels = _side(config), stored_channels(config.data)
        backbone = _backbone(folder, config, channels, side, allow_code)
        try:
            backbone.load_state_dict(weights)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"{folder}: its weights are not those of its configuration ({reason})") from error
        return cls(backbone, *normalisation(config, channels), side, value_range_of(folder)).eval()

    def embed_folder(self, folder: Path, report: Callable[[str], None] = print) -> tuple[list[str], Tensor]:
        """Features of all images in a folder.

        Args:
            folder: searched recursively; it is only read.
            report: takes lines about files that are no images, and about images of more than 8 bits.

        Returns:
            Paths relative to the folder, sorted, and features (N, feature_dim).
        """
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder of images")
        files = list_files(folder, report)
        value_range = self.settle_range([(folder, files)], report)
        decoded = decode(folder, files, self.side, self._options, report, value_range)
        if not decoded.paths:
            raise UserError(f"{folder} holds no readable images ({decoded.skipped} other files)")
        return list(decoded.paths), self.embed(decoded.images)

    def settle_range(self, parts: Parts, report: Callable[[str], None] = print) -> ValueRange | None:
        """Decides how images of more than 8 bits are read, unless training has; None if none is among these.

        Args:
            parts: folders and the files in them, relative.
            report: takes lines about such images.
        """
        origin = "the range of all of them, since the encoder was trained without such images"
        found = survey(parts, self._options, report, "the encoder's range" if self.value_range else origin)
        self.value_range = self.value_range or found
        return found

    @property
    def _options(self) -> DataOptions:
        return DataOptions(name="folder", grayscale=self.channels == 1, value_range=list(self.value_range or ()))

    def embed(self, images: np.ndarray) -> Tensor:
        """Features of uint8 images (N, H, W, C)."""
        return extract(self, images, lambda batch: batch.permute(0, 3, 1, 2).float() / 255)


def export(
    run: Path, to: str, file: Path | None = None, round: int | None = None, *, allow_code: bool = False
) -> tuple[Path, str]:
    """Writes the encoder of a run in a format that others read without this package.

    Args:
        run: its folder.
        to: one of `FORMATS`.
        file: where; RUN/encoder-FORMAT.SUFFIX if not given.
        round: see `Encoder.of`.
        allow_code: see `Encoder.of`.

    Returns:
        The file, and the line of Python that loads it.
    """
    if to not in FORMATS:
        raise UserError(f"--to {to}: there is no such format; type --to {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    encoder = Encoder.of(run, round, allow_code=allow_code)
    file = file or run / f"encoder-{to}{SUFFIXES[to]}"
    write = {"safetensors": _safetensors, "torchvision": _torchvision, "torch": _torch, "onnx": _onnx}[to]
    return file, write(encoder, file, _config(run))


def write_table(file: Path, paths: Sequence[str], features: Tensor) -> None:
    """Paths and features, as npz (arrays ``path`` and ``embedding``) or as parquet (columns of the same names)."""
    array = features.cpu().numpy()
    if file.suffix == ".npz":
        np.savez(file, path=np.array(paths), embedding=array)
        return
    if file.suffix != ".parquet":
        raise UserError(f"-o {file}: type a name that ends in .npz or .parquet")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        needed = install_hint("tables")
        raise UserError(f"-o {file} needs pyarrow; type -o {file.with_suffix('.npz')}, or first {needed}") from error
    flat = pyarrow.array(array.reshape(-1))
    table = {"path": list(paths), "embedding": pyarrow.FixedSizeListArray.from_arrays(flat, array.shape[1])}
    pyarrow.parquet.write_table(pyarrow.table(table), file)


def _safetensors(encoder: Encoder, file: Path, config: Config) -> str:
    write_atomically(file, tensor_bytes(encoder.backbone.state_dict()))
    return f'weights = safetensors.torch.load_file("{file}")'


def _torchvision(encoder: Encoder, file: Path, config: Config) -> str:
    """A state dict for torchvision's own network, which has a stem for large images and the full width."""
    backbone, name = encoder.backbone, config.backbone.name
    conv1 = getattr(backbone, "conv1", None)
    if type(backbone) is not ResNet or not isinstance(conv1, nn.Conv2d):
        raise UserError(
            f"--to torchvision: torchvision has no {type(backbone).__qualname__}; type --to torch or --to onnx, which "
            f"carry the network"
        )
    if config.backbone.width != 64 or conv1.kernel_size != (7, 7) or encoder.channels != 3 or name == "resnet10":
        raise UserError(
            f"torchvision has no {name} with width {config.backbone.width}, {encoder.channels} channels and a "
            f"{conv1.kernel_size[0]}x{conv1.kernel_size[1]} stem; type --to torch or --to onnx, which carry the network"
        )
    write_atomically(file, tensor_bytes(backbone.state_dict()))
    return (
        f"model = torchvision.models.{name}(); model.fc = torch.nn.Identity(); "
        f'model.load_state_dict(safetensors.torch.load_file("{file}"))'
    )


def _torch(encoder: Encoder, file: Path, config: Config) -> str:
    batch = torch.export.Dim("batch", min=1)
    example = torch.zeros(2, encoder.channels, encoder.side, encoder.side)
    try:
        program = torch.export.export(encoder, (example,), dynamic_shapes={"images": {0: batch}})
    except Exception as error:  # Whatever a network of the user's own does that cannot be traced.
        reason = str(error).strip().partition("\n")[0]
        name = type(encoder.backbone).__qualname__
        raise UserError(
            f"--to torch: torch.export cannot follow {name} ({reason}); type --to safetensors for its weights"
        ) from error
    torch.export.save(program, file)
    return f'encoder = torch.export.load("{file}").module()'


def _onnx(encoder: Encoder, file: Path, config: Config) -> str:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"--to onnx needs onnx and onnxscript; type {install_hint('onnx')}") from error
    example = torch.zeros(2, encoder.channels, encoder.side, encoder.side)
    torch.onnx.export(
        encoder, (example,), str(file), input_names=["images"], output_names=["features"], dynamo=True, verbose=False,
        dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}}, external_data=False,
    )  # fmt: skip
    return f'session = onnxruntime.InferenceSession("{file}")'


def value_range_of(run: Path) -> ValueRange | None:
    """What a run took for black and white in images of more than 8 bits per value; None if it had no such images."""
    file = run / VALUE_RANGE_FILE
    try:
        bounds = json.loads(file.read_text()) if file.exists() else _config(run).data.value_range
        low, high = map(float, bounds or (0, 0))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} is not two numbers ({error})") from error
    return (low, high) if low < high else None


def _config(folder: Path) -> Config:
    """What a run's configuration says of its network and images; its method may be anybody's code and is not read."""
    file = folder / "config.yaml"
    if not file.is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.yaml; type runs/NAME")
    try:
        tree = yaml.safe_load(file.read_text())
        parts = {key: tree[key] for key in ("data", "augment", "backbone")}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{file} is not a readable run configuration ({error})") from error
    return from_tree(parts | {"method": {"name": "simclr"}}, str(file))


def _backbone(folder: Path, config: Config, channels: int, side: int, allow_code: bool) -> nn.Module:
    """The network of a run with fresh weights: the configuration's, or the one that the method brings."""
    record = foreign_code.read_record(folder)
    if not (record.backbone if record else allow_code):  # Without a record, who allows it means it.
        return backbones.build(config.backbone, channels=channels, image_size=side)
    if record and not allow_code:
        raise UserError(
            f"{folder} trained {record.backbone}, a backbone that its method brings; its code is run to make it: if "
            f"you trust it, add --allow-code (in Python, allow_code=True)"
        )
    whole = load(folder / "config.yaml", trusted="*")
    code = foreign_code.code_of(methods.find(whole.method.name))
    if changed := foreign_code.differing(record.modules, code) if record else []:
        warnings.warn(
            f"{foreign_code.describe(changed)} changed since {folder} was trained; its weights are put into the "
            f"network of today",
            stacklevel=3,
        )
    whole = replace(whole, fedca=replace(whole.fedca, enabled=False))  # It has no part in the backbone.
    return build_model(whole, channels=channels, image_size=side).backbone


def _side(config: Config) -> int:
    """Of the images that the network was trained on."""
    stored = stored_side(config.data)
    return config.augment.size if 0 < config.augment.size < stored else stored
