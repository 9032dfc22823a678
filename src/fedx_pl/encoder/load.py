"""The trained encoder: read from a run, it embeds images."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedx_pl import backbones
from fedx_pl.config.build import brought, make_model
from fedx_pl.config.compose import code_words, from_tree, load
from fedx_pl.config.schema import Config
from fedx_pl.data.images import NO_CACHE, VALUE_RANGE_FILE, DataOptions, ValueRange, normalization
from fedx_pl.data.sources import stored_channels, stored_side
from fedx_pl.data.sources.decode import decode
from fedx_pl.data.sources.folder import list_files
from fedx_pl.data.sources.survey import Parts, survey
from fedx_pl.errors import UserError, first_line, say
from fedx_pl.evaluation.features import extract
from fedx_pl.federation.identity import OWN_LAYERS
from fedx_pl.federation.run_folder import read_run
from fedx_pl.files.reading import read_json, read_yaml
from fedx_pl.provenance import foreign_code


class Encoder(nn.Module):
    """A backbone with the normalization it was trained with: images in, features out.

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
        """Keeps the network and what its images need.

        Args:
            backbone: maps normalized (n, C, h, w) to (n, feature_dim).
            mean: per channel, of pixels from 0 to 1.
            std: per channel.
            side: of the images it was trained on.
            value_range: what became 0 and 1 in images of more than 8 bits per value. None if it has
                not seen any: then the first folder with such images decides.
        """
        super().__init__()
        self.value_range = value_range
        self.cache = NO_CACHE  # where decoded copies of images go, as of the key data.cache
        self.backbone = backbone
        self.side = side
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (n, C, h, w), floats from 0 to 1, to features (n, feature_dim)."""
        features: Tensor = self.backbone((images - self.mean) / self.std)
        return features

    @property
    def channels(self) -> int:
        """The number of channels of the images it takes."""
        return self.mean.shape[1]

    @classmethod
    def of(
        cls,
        run: str | Path,
        round_number: int | None = None,
        *,
        allow_code: bool = False,
        backbone: nn.Module | None = None,
    ) -> Encoder:
        """Loads the encoder of a run, in eval mode on the CPU.

        Args:
            run: its folder.
            round_number: of an older checkpoint that was kept, or the best; the newest if not
                given.
            allow_code: the run's backbone may be a class outside this package, whose module is then
                imported.
            backbone: the network of a run that was made in Python with one of your own; it gets the
                run's weights.
        """
        folder = Path(run)
        config = read_config(folder, allow_code=allow_code, with_backbone=backbone is None)
        state, global_state = read_run(folder, round_number)
        weights = {
            name.removeprefix("backbone."): tensor
            for name, tensor in global_state.weights.items()
            if name.startswith("backbone.")
        }
        if bad := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
            raise UserError(
                f"{folder}: backbone.{bad[0]} of round {state.round} has values that are not "
                f"finite; --round NUMBER takes an older round, if one was kept"
            )
        side = _side(config)
        channels = stored_channels(config.data)
        if backbone is None:
            backbone = _backbone(folder, config, channels, side=side, allow_code=allow_code)
        try:
            backbone.load_state_dict(weights)
        except RuntimeError as error:
            reason = first_line(error)
            raise UserError(
                f"{folder}: its weights are not those of its configuration ({reason}); for a "
                f"network of your own, write Encoder.of({str(folder)!r}, backbone=NETWORK)"
            ) from error
        mean, std = normalization(config.data.mean, config.data.std, channels)
        return cls(backbone, mean, std, side=side, value_range=value_range_of(folder)).eval()

    def embed_folder(
        self, folder: Path, report: Callable[[str], None] = say
    ) -> tuple[list[str], Tensor]:
        """Embeds all images in a folder.

        Args:
            folder: searched recursively; it is only read. Decoded copies go to a private folder
                that is deleted when Python ends, or to the folder `cache`.
            report: takes lines about files that are no images, and about images of more than 8
                bits.

        Returns:
            Paths relative to the folder, sorted, and features (N, feature_dim).
        """
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder of images")
        files = list_files(folder, report)
        value_range = self.settle_range([(folder, files)], report)
        decoded = decode(
            folder, files, self.side, options=self._options, report=report, value_range=value_range
        )
        if not decoded.paths:
            raise UserError(f"{folder} holds no readable images ({decoded.skipped} other files)")
        return list(decoded.paths), self.embed(decoded.images)

    def settle_range(self, parts: Parts, report: Callable[[str], None] = say) -> ValueRange | None:
        """Decides how images of more than 8 bits are read, unless training has; None without any.

        Args:
            parts: folders and the files in them, relative.
            report: takes lines about such images.
        """
        origin = "the range of all of them, since the encoder was trained without such images"
        value_range = survey(
            parts,
            self._options,
            report,
            origin="the encoder's range" if self.value_range else origin,
        )
        self.value_range = self.value_range or value_range
        return value_range

    @property
    def _options(self) -> DataOptions:
        bounds = list(self.value_range or ())
        return DataOptions(
            name="folder", cache=self.cache, grayscale=self.channels == 1, value_range=bounds
        )

    def embed(self, images: np.ndarray) -> Tensor:
        """Embeds uint8 images (N, H, W, C)."""
        return extract(self, images, lambda batch: batch.permute(0, 3, 1, 2).float() / 255)


def value_range_of(run: Path) -> ValueRange | None:
    """The value range of a run's images of more than 8 bits per value; None without any."""
    file = run / VALUE_RANGE_FILE
    try:
        bounds = read_json(file) if file.exists() else _read_parts(run)["data"].get("value_range")
        low, high = map(float, bounds or (0, 0))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} is not two numbers ({error})") from error
    return (low, high) if low < high else None


def read_config(folder: Path, *, allow_code: bool = False, with_backbone: bool = True) -> Config:
    """Reads what a run's configuration says of its network and images, not of its method.

    Args:
        folder: of the run.
        allow_code: its images and backbone may be made by code outside this package, whose module
            is then imported.
        with_backbone: False leaves out what it says of the backbone.
    """
    parts = _read_parts(folder)
    if not with_backbone:
        parts.pop("backbone")
    if not allow_code and (foreign := sorted(code_words(parts))):
        raise UserError(
            f"{folder} names code to be run, {foreign[0]}; if you trust it, add --allow-code (in "
            f"Python, allow_code=True)"
        )
    return from_tree(parts | {"method": {"name": "simclr"}}, str(folder / "config.yaml"))


def _read_parts(folder: Path) -> dict[str, Any]:
    file = folder / "config.yaml"
    if not file.is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.yaml; type runs/NAME")
    try:
        tree = read_yaml(file)
        return {key: dict(tree[key]) for key in ("data", "augment", "backbone")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a readable run configuration ({error})") from error


def _backbone(
    folder: Path, config: Config, channels: int, side: int, allow_code: bool
) -> nn.Module:
    """Makes the network of a run, the configuration's or the method's, with fresh weights."""
    record = foreign_code.read_record(folder)
    if not (record.backbone if record else allow_code):  # Without a record, who allows it means it.
        return backbones.build(config.backbone, channels=channels, image_size=side)
    if record and OWN_LAYERS in record.objects and not allow_code:
        raise UserError(
            f"{folder} was made in Python with a backbone of its own, {record.backbone}, which "
            f"its script can make; there, write Encoder.of({str(folder)!r}, backbone=NETWORK), or "
            f"take the weights in encoder.safetensors"
        )
    if record and not allow_code:
        raise UserError(
            f"{folder} trained {record.backbone}, a backbone that its method brings; its code is "
            f"run to make it: if you trust it, add --allow-code (in Python, allow_code=True)"
        )
    whole = load(folder / "config.yaml", trusted=["*"])
    code = foreign_code.code_of(*brought(whole))
    if changed := foreign_code.differing(record.modules, code) if record else []:
        warnings.warn(
            f"{foreign_code.describe(changed)} changed since {folder} was trained; its weights "
            f"are put into the network of today",
            stacklevel=3,
        )
    # FedCA has no part in the backbone.
    whole = replace(whole, fedca=replace(whole.fedca, enabled=False))
    return make_model(whole, channels=channels, image_size=side).backbone


def _side(config: Config) -> int:
    """The side of the images that the network was trained on."""
    stored = stored_side(config.data)
    return config.augment.size if 0 < config.augment.size < stored else stored
