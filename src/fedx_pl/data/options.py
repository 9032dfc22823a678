"""Options of the augmentation; nothing here needs torch."""

from dataclasses import dataclass, replace

from fedx_pl.options import Options, option

CROPS = ("pad", "resized", "none")


@dataclass(frozen=True, kw_only=True)
class AugmentOptions(Options):
    """Options of augmentation: geometry, then color, gray and blur; 0 skips a step."""

    crop: str = option(
        "pad",
        "pad: reflect-pad and crop back; resized: random resized crop; none: no crop",
        choices=CROPS,
    )
    pad: int = option(4, "crop=pad: pixels of reflection on each side", at_least=0, at_most=2**16)
    scale_min: float = option(
        0.2, "crop=resized: smallest share of the image's area", above=0, at_most=1
    )
    size: int = option(
        0, "output side in pixels; 0 keeps the stored size", at_least=0, at_most=2**16
    )
    flip: float = option(0.5, "probability of a horizontal flip", at_least=0, at_most=1)
    brightness: float = option(0.4, "factor drawn from 1 ± this", at_least=0)
    contrast: float = option(0.4, "factor drawn from 1 ± this", at_least=0)
    saturation: float = option(0.4, "factor drawn from 1 ± this; color images only", at_least=0)
    hue: float = option(
        0.1, "turns drawn from ± this, at most 0.5; color images only", at_least=0, at_most=0.5
    )
    jitter_prob: float = option(
        1.0, "probability of the four color changes, as one", at_least=0, at_most=1
    )
    grayscale: float = option(0.0, "probability of dropping color", at_least=0, at_most=1)
    blur: float = option(
        0.0, "probability of a Gaussian blur, sigma 0.1 to 2", at_least=0, at_most=1
    )
    rotation: float = option(
        0.0, "degrees, drawn from ± this; corners turn black", at_least=0, at_most=180
    )

    def for_side(self, side: int) -> "AugmentOptions":
        """The options for stored images of a side: none are made larger than they are."""
        return replace(self, size=self.size if 0 < self.size < side else 0)
