"""Random views of images: whole uint8 batches are augmented at once, on the device they live on.

Every image draws its own parameters, nothing runs per sample in Python, and nothing waits for the
device: a batch's parameters come from one `torch.rand`, and "apply with probability p" means a
neutral parameter (factor 1, shift 0, sigma 0) for the others, not a selection of rows. Pixels keep
the range 0..255 until `Augment._normalize`, where the division is free; color operations do not
care, except for their clamp. They reproduce those of torchvision
(`torchvision.transforms.v2.functional` on float images).
"""

import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedx_pl.data.options import AugmentOptions

WHITE = 255.0
LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights for gray
LOG_RATIO = math.log(4 / 3)  # random resized crop: aspect ratios 3/4 .. 4/3
SIGMA = (0.1, 2.0)  # SimCLR's range of blur


class _Uniforms(NamedTuple):
    """Uniform numbers in [0, 1), one per image and decision, each of shape (B,).

    All are drawn whatever the options are, so that switching one step off leaves the other steps'
    randomness as it was.
    """

    crop_y: Tensor
    crop_x: Tensor
    area: Tensor
    ratio: Tensor
    flip: Tensor
    angle: Tensor
    jitter: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor
    grayscale: Tensor
    blur: Tensor
    sigma: Tensor


class Augment:
    """Turns stored uint8 batches into network inputs, at random (`__call__`) or not (`plain`).

    Args:
        options: What to do.
        mean: Per channel, of pixels in 0..1.
        std: Per channel, of pixels in 0..1.
    """

    def __init__(
        self, options: AugmentOptions, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        if len(mean) != len(std) or not all(s > 0 for s in std):
            raise ValueError(
                f"mean and std need one number per channel and std > 0, got {mean} and {std}"
            )
        self.options = options
        self.mean = tuple(mean)
        self.std = tuple(std)
        self._rows: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Draws one random view of every image.

        Args:
            images: (B, H, W, C) uint8.
            generator: The only source of randomness. It may live on the CPU while the images do
                not: the parameters are then copied over, and a seed means the same views on every
                device.

        Returns:
            (B, C, h, w) float32, normalized, in channels_last memory; h = w = `size`, or the stored
            H and W.
        """
        self._check(images)
        if len(images) == 0:  # torch makes no grid for an empty batch
            return self.plain(images)
        shape = (len(_Uniforms._fields), len(images))
        u = torch.rand(shape, generator=generator, device=generator.device).to(
            images.device, non_blocking=True
        )
        draws = _Uniforms(*u.unbind(0))
        x = self._geometry(images, draws)
        x = self._color(
            x, draws, order=torch.randperm(4, generator=host_generator(generator)).tolist()
        )
        return self._normalize(x)

    def plain(self, images: Tensor) -> Tensor:
        """Normalizes images without randomness; if `size` says so, resizes their center square.

        Args:
            images: (B, H, W, C) uint8.

        Returns:
            (B, C, h, w) float32 in channels_last memory.
        """
        self._check(images)
        return self._normalize(self._fit(images).permute(0, 3, 1, 2))

    def _check(self, images: Tensor) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] != len(self.mean):
            want = f"(B, H, W, {len(self.mean)}) of torch.uint8"
            raise ValueError(f"images must be {want}, got {tuple(images.shape)} of {images.dtype}")

    def _fit(self, images: Tensor) -> Tensor:
        """Resizes the center square of (B, H, W, C) to the output size, if it has another one."""
        size = self.options.size
        height, width = images.shape[1:3]
        if size == 0 or (height, width) == (size, size):
            return images
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        x = images[:, top : top + side, left : left + side].permute(0, 3, 1, 2).float()
        return F.interpolate(x, (size, size), mode="bilinear", antialias=True).permute(0, 2, 3, 1)

    def _geometry(self, images: Tensor, draws: _Uniforms) -> Tensor:
        """Crops, flips and rotates: (B, H, W, C) to (B, C, h, w), any dtype, any memory order."""
        options = self.options
        flip = draws.flip < options.flip
        degrees = (2 * draws.angle - 1) * options.rotation if options.rotation else None
        if options.crop == "resized":
            size = (
                (options.size, options.size) if options.size else (images.shape[1], images.shape[2])
            )
            box = crop_box(images.shape[1], images.shape[2], draws, scale_min=options.scale_min)
            return warp(images.permute(0, 3, 1, 2).float(), size, box, flip=flip, degrees=degrees)
        images = self._fit(images)
        pad = options.pad if options.crop == "pad" else 0
        if pad or options.flip:
            images = shift_and_flip(images, draws.crop_y, draws.crop_x, pad=pad, flip=flip)
        x = images.permute(0, 3, 1, 2)
        return (
            x
            if degrees is None
            else warp(x.float(), (x.shape[2], x.shape[3]), None, flip=None, degrees=degrees)
        )

    def _color(self, x: Tensor, draws: _Uniforms, order: list[int]) -> Tensor:
        """Applies jitter, its four steps in the given order, then gray and blur to (B, C, h, w)."""
        options = self.options
        rgb = x.shape[1] == 3
        jitter: list[tuple[float, Tensor, Callable[[Tensor, Tensor], Tensor]]] = [
            (options.brightness, draws.brightness, brightness_),
            (options.contrast, draws.contrast, contrast_),
            (options.saturation * rgb, draws.saturation, saturation_),
            (options.hue * rgb, draws.hue, hue_),
        ]
        steps = [jitter[i] for i in order if jitter[i][0] and options.jitter_prob]
        if not (steps or options.grayscale * rgb or options.blur):
            return x
        # One plane per channel from here on: channels side by side in memory would make each
        # operation crawl.
        x = x.to(torch.float32, memory_format=torch.contiguous_format)
        on = draws.jitter < options.jitter_prob
        for strength, u, apply in steps:
            neutral, low = (0.0, -strength) if apply is hue_ else (1.0, max(0.0, 1 - strength))
            factor = low + (neutral + strength - low) * u
            x = apply(x, torch.where(on, factor, neutral))
        if options.grayscale * rgb:
            x = saturation_(x, (draws.grayscale >= options.grayscale).float())
        if options.blur:
            sigma = SIGMA[0] + (SIGMA[1] - SIGMA[0]) * draws.sigma
            x = gaussian_blur(x, torch.where(draws.blur < options.blur, sigma, 0.0))
        return x

    def _normalize(self, x: Tensor) -> Tensor:
        """Maps (B, C, h, w) in 0..255 to (x/255 - mean)/std, float32, channels_last."""
        batch, channels, height, width = x.shape
        x = x.to(torch.float32, memory_format=torch.channels_last).permute(0, 2, 3, 1)
        key = (x.device, width)
        if key not in self._rows:  # kept: making a tensor from Python numbers waits for the device
            mean = torch.tensor(self.mean, dtype=torch.float64)
            std = torch.tensor(self.std, dtype=torch.float64)
            rows = (1 / (WHITE * std)).repeat(width), (-mean / std).repeat(width)
            self._rows[key] = (rows[0].float().to(x.device), rows[1].float().to(x.device))
        scale, shift = self._rows[key]
        # A whole image row against a row of constants: six times faster on a CPU than broadcasting
        # over 3 channels.
        rows_view = x.view(batch, height, width * channels)
        return (
            rows_view.mul_(scale)
            .add_(shift)
            .view(batch, height, width, channels)
            .permute(0, 3, 1, 2)
        )


def host_generator(generator: torch.Generator) -> torch.Generator:
    """The generator itself on a CPU, else a CPU generator that is seeded by its state.

    A device generator keeps its state (seed and offset) in host memory, so reading it does not wait
    for the device; and as the result depends on nothing else, there is no hidden counter that a
    resumed run would have to restore.
    """
    if generator.device.type == "cpu":
        return generator
    digest = hashlib.sha256(generator.get_state().numpy().tobytes()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def shift_and_flip(images: Tensor, u_y: Tensor, u_x: Tensor, pad: int, flip: Tensor) -> Tensor:
    """Reflect-pads by `pad`, crops the stored size at a random place and mirrors, in one gather.

    Args:
        images: (B, H, W, C), any dtype.
        u_y: (B,) in [0, 1): vertical place of the crop.
        u_x: (B,) in [0, 1): horizontal place of the crop.
        pad: Any size, even beyond the image (the reflection is repeated).
        flip: (B,) bool.

    Returns:
        (B, H, W, C).
    """
    batch, height, width, channels = images.shape
    rows = torch.arange(height, device=images.device)
    cols = torch.arange(width, device=images.device)
    dy = (u_y * (2 * pad + 1)).long() - pad
    dx = (u_x * (2 * pad + 1)).long() - pad
    y = _reflect(rows + dy[:, None], height)  # (B, H)
    x = _reflect(torch.where(flip[:, None], width - 1 - cols, cols) + dx[:, None], width)  # (B, W)
    y = y + torch.arange(batch, device=images.device)[:, None] * height
    # (B, H, W), numbers of pixels in the whole batch
    pixels = (y * width)[:, :, None] + x[:, None, :]
    return (
        images.reshape(-1, channels)
        .index_select(0, pixels.flatten())
        .view(batch, height, width, channels)
    )


def _reflect(index: Tensor, size: int) -> Tensor:
    """Folds any index into 0..size-1 by mirroring at the edge pixels, which are not repeated."""
    period = max(2 * (size - 1), 1)
    index = index % period
    return torch.minimum(index, period - index)


def crop_box(height: int, width: int, draws: _Uniforms, scale_min: float) -> Tensor:
    """Draws torchvision's random resized crop: share of area, log of ratio and place are uniform.

    A box that does not fit is clamped to the image (torchvision draws again), and its borders need
    not be whole pixels.

    Returns:
        (4, B): half width, half height, center x, center y, in the -1..1 coordinates of
        `grid_sample`.
    """
    area = (scale_min + (1 - scale_min) * draws.area) * (height * width)
    ratio = torch.exp((2 * draws.ratio - 1) * LOG_RATIO)
    half_w = ((area * ratio).sqrt() / width).clamp_(max=1)
    half_h = ((area / ratio).sqrt() / height).clamp_(max=1)
    return torch.stack(
        [
            half_w,
            half_h,
            (2 * draws.crop_x - 1) * (1 - half_w),
            (2 * draws.crop_y - 1) * (1 - half_h),
        ]
    )


def warp(
    x: Tensor,
    size: tuple[int, int],
    box: Tensor | None,
    flip: Tensor | None,
    degrees: Tensor | None,
) -> Tensor:
    """Crops a box, mirrors, resizes and rotates about the center, with one bilinear resampling.

    A rotation shows what the image holds beyond the box, and black beyond the image.

    Args:
        x: (B, C, H, W) float.
        size: (h, w) of the result.
        box: (4, B) from `crop_box`, or None for the whole image.
        flip: (B,) bool, or None.
        degrees: (B,) counter-clockwise, or None.

    Returns:
        (B, C, h, w).
    """
    batch, channels, height, width = x.shape
    zeros, ones = x.new_zeros(batch), x.new_ones(batch)
    half_w, half_h, center_x, center_y = (
        (ones, ones, zeros, zeros) if box is None else box.unbind(0)
    )
    if flip is not None:
        half_w = torch.where(flip, -half_w, half_w)
    radians = zeros if degrees is None else degrees * (math.pi / 180)
    cos = radians.cos()
    sin = radians.sin()
    aspect = size[1] / size[0]
    theta = torch.stack(
        [
            half_w * cos,
            half_w * -sin / aspect,
            center_x,
            half_h * sin * aspect,
            half_h * cos,
            center_y,
        ],
        dim=1,
    ).view(batch, 2, 3)
    # When shrinking, several samples per output pixel are averaged, or fine texture would turn into
    # noise (aliasing).
    per_pixel = max(1, min(height // size[0], width // size[1]))
    grid = F.affine_grid(
        theta, [batch, channels, size[0] * per_pixel, size[1] * per_pixel], align_corners=False
    )
    padding = "border" if degrees is None else "zeros"
    out = F.grid_sample(x, grid, mode="bilinear", padding_mode=padding, align_corners=False)
    return F.avg_pool2d(out, per_pixel) if per_pixel > 1 else out


def brightness_(x: Tensor, factor: Tensor) -> Tensor:
    """Scales (B, C, H, W) pixels in 0..255 by (B,) factors, in place."""
    return x.mul_(factor.view(-1, 1, 1, 1)).clamp_(0, WHITE)


def contrast_(x: Tensor, factor: Tensor) -> Tensor:
    """Moves (B, C, H, W) pixels in 0..255 from their mean gray by (B,) factors, in place."""
    means = x.mean((2, 3))
    # The mean of the gray image is the gray of the mean: no gray image is made.
    gray = _gray(means[:, :, None, None]) if x.shape[1] == 3 else means.mean(1).view(-1, 1, 1, 1)
    return _blend_(x, gray, factor)


def saturation_(x: Tensor, factor: Tensor) -> Tensor:
    """Moves (B, 3, H, W) pixels from their gray by (B,) factors, in place; 0 drops all color."""
    return _blend_(x, _gray(x), factor)


def _blend_(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Sets x to factor * x + (1 - factor) * other, clamped.

    `torch.lerp` is three times slower when it must broadcast.
    """
    factor = factor.view(-1, 1, 1, 1)
    return x.mul_(factor).add_(other * (1 - factor)).clamp_(0, WHITE)


def _gray(x: Tensor) -> Tensor:
    """Converts (B, 3, H, W) to gray (B, 1, H, W)."""
    r: Tensor
    r, g, b = x.split(1, dim=1)
    return (r * LUMA[0]).add_(g, alpha=LUMA[1]).add_(b, alpha=LUMA[2])


def hue_(x: Tensor, shift: Tensor) -> Tensor:
    """Turns the hue of (B, 3, H, W) pixels by (B,) shifts of the color circle, in place.

    Value and chroma stay, so no HSV image is needed: a channel is at full value while the hue is
    within 1/6 turn of that channel's own hue (red 0, green 1/3, blue 2/3) and falls linearly by the
    chroma until 1/3 turn.
    """
    r, g, b = x.split(1, dim=1)
    value = torch.maximum(torch.maximum(r, g), b)
    chroma = value - torch.minimum(torch.minimum(r, g), b)
    # Gray pixels have no hue; any will do, as their chroma is 0
    sixth = (6 * chroma).clamp_min_(1e-6).reciprocal_()
    red, green, blue = (
        (g - b).mul_(sixth),
        (b - r).mul_(sixth).add_(1 / 3),
        (r - g).mul_(sixth).add_(2 / 3),
    )
    hue = torch.where(value == r, red, torch.where(value == g, green, blue)).add_(
        shift.view(-1, 1, 1, 1)
    )
    # One by one: temporaries of one plane stay in the cache
    for channel, home in (
        (r, 0),
        (g, 1 / 3),
        (b, 2 / 3),
    ):
        away = hue - home
        away.sub_(away.round()).abs_()  # distance around the circle, 0..1/2
        torch.sub(value, away.mul_(6).sub_(1).clamp_(0, 1).mul_(chroma), out=channel)
    return x


def gaussian_blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Blurs each image with its sigma; the kernel is a tenth of the shorter side, at least 3.

    Args:
        x: (B, C, H, W) float.
        sigma: (B,) in pixels; 0 leaves the image as it is.

    Returns:
        (B, C, H, W).
    """
    side = min(x.shape[2:])
    radius = min(max(1, side // 20), side - 1)
    offsets = torch.arange(-radius, radius + 1, device=x.device)
    # Sigma 0: exactly one tap of 1
    kernel = torch.exp(-0.5 * (offsets / sigma.clamp_min(1e-3)[:, None]) ** 2)
    taps = (kernel / kernel.sum(1, keepdim=True)).T.reshape(-1, len(x), 1, 1, 1)
    # A sum of shifted images: a convolution would need B * C groups, and autocast would round it to
    # half precision.
    for dim, pads in ((2, (0, 0, radius, radius)), (3, (radius, radius, 0, 0))):
        padded = F.pad(x, pads, mode="reflect")
        size = x.shape[dim]
        x = padded.narrow(dim, 0, size) * taps[0]
        for i in range(1, len(taps)):
            x.addcmul_(padded.narrow(dim, i, size), taps[i])
    return x
