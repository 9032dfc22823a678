import pickle

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF
from torch import Tensor

from fedx_pl.data import augment
from fedx_pl.data.augment import Augment, AugmentOptions
from fedx_pl.errors import UserError

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
OFF = {
    "crop": "none",
    "flip": 0.0,
    "brightness": 0.0,
    "contrast": 0.0,
    "saturation": 0.0,
    "hue": 0.0,
}


def images(
    batch: int = 8, height: int = 32, width: int = 32, channels: int = 3, seed: int = 0
) -> Tensor:
    return torch.randint(
        0, 256, (batch, height, width, channels), dtype=torch.uint8, generator=rng(seed)
    )


def same_images(batch: int, **kwargs: int) -> Tensor:
    """`batch` copies of one image: whatever differs afterwards is due to the parameters drawn."""
    return images(1, **kwargs).repeat(batch, 1, 1, 1)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pixels(options: dict, batch: Tensor, seed: int = 0) -> Tensor:
    """Augments without normalization: (B, C, h, w) in 0..1."""
    channels = batch.shape[3]
    return Augment(AugmentOptions(**{**OFF, **options}), (0.0,) * channels, (1.0,) * channels)(
        batch, rng(seed)
    )


def as_float(batch: Tensor) -> Tensor:
    return batch.permute(0, 3, 1, 2).float() / 255


def distinct(batch: Tensor) -> int:
    return len(torch.unique(batch.flatten(1), dim=0))


@pytest.mark.parametrize(
    ("ours", "theirs", "factors"),
    [
        (augment.brightness_, TF.adjust_brightness, [0.0, 0.3, 1.0, 1.7]),
        (augment.contrast_, TF.adjust_contrast, [0.0, 0.3, 1.0, 1.7]),
        (augment.saturation_, TF.adjust_saturation, [0.0, 0.3, 1.0, 1.7]),
        (augment.hue_, TF.adjust_hue, [-0.5, -0.1, 0.0, 0.37]),
    ],
    ids=["brightness", "contrast", "saturation", "hue"],
)
def test_color_operations_equal_torchvision(ours, theirs, factors):
    x = as_float(images(4, 24, 20))
    # the corners of the color cube and grays, where hue has ties and divisions by zero
    cube = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0])] * 3).T
    x[:, :, :9, :3] = cube.view(3, 9, 3)
    expected = torch.stack(
        [theirs(image, factor) for image, factor in zip(x, factors, strict=True)]
    )
    torch.testing.assert_close(
        ours(x * 255, torch.tensor(factors)) / 255, expected, rtol=0, atol=1e-5
    )


def test_contrast_of_gray_images_equals_torchvision():
    x = as_float(images(3, channels=1))
    expected = torch.stack(
        [TF.adjust_contrast(image, f) for image, f in zip(x, [0.2, 1.0, 1.8], strict=True)]
    )
    torch.testing.assert_close(
        augment.contrast_(x * 255, torch.tensor([0.2, 1.0, 1.8])) / 255, expected
    )


def test_rotation_equals_torchvision():
    x, degrees = as_float(images(4, 24, 30)), [15.0, -40.0, 90.0, 180.0]
    expected = torch.stack(
        [
            TF.rotate(image, d, interpolation=TF.InterpolationMode.BILINEAR)
            for image, d in zip(x, degrees, strict=True)
        ]
    )
    ours = augment.warp(x, (24, 30), None, None, torch.tensor(degrees))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def test_blur_equals_torchvision_and_sigma_zero_changes_nothing():
    x, sigmas = as_float(images(4, 64, 70)), [0.1, 0.8, 2.0]
    ours = augment.gaussian_blur(x, torch.tensor([*sigmas, 0.0]))
    expected = torch.stack(
        [TF.gaussian_blur(image, [7, 7], [s, s]) for image, s in zip(x, sigmas, strict=False)]
    )
    torch.testing.assert_close(ours[:3], expected, rtol=0, atol=1e-5)
    assert torch.equal(ours[3], x[3])


@pytest.mark.parametrize("size", [(32, 32), (20, 24), (48, 48)])
def test_resized_crop_equals_torchvision_for_a_box_on_whole_pixels(size):
    """Box of 24 x 16 pixels at row 6, column 4 of 40 x 32.

    In -1..1 its center is at 2*(12/32)-1, 2*(18/40)-1.
    """
    x = as_float(images(1, 40, 32))
    box = torch.tensor([[16 / 32], [24 / 40], [2 * 12 / 32 - 1], [2 * 18 / 40 - 1]])
    expected = TF.resized_crop(x, 6, 4, 24, 16, list(size), antialias=False)
    ours = augment.warp(x, size, box, torch.tensor([False]), None)
    # At its border torchvision repeats the box's own pixels, ours looks beyond the box: compare the
    # inside.
    torch.testing.assert_close(ours[..., 3:-3, 3:-3], expected[..., 3:-3, 3:-3], rtol=0, atol=1e-4)
    mirrored = augment.warp(x, size, box, torch.tensor([True]), None)
    torch.testing.assert_close(mirrored, ours.flip(3), rtol=0, atol=1e-4)


def test_shrinking_averages_instead_of_skipping_pixels():
    """A checkerboard of single pixels is gray when halved.

    Picking every second pixel would keep it black or white.
    """
    board = ((torch.arange(64)[:, None] + torch.arange(64)) % 2 * 255).to(torch.uint8)
    batch = board.expand(2, 64, 64)[..., None]
    for options in (
        {"crop": "resized", "scale_min": 1.0, "size": 16},
        {"crop": "none", "size": 16},
    ):
        assert (pixels(options, batch) - 0.5).abs().max() < 0.2


@pytest.mark.parametrize(
    ("height", "width", "pad"), [(32, 32, 4), (6, 9, 5), (4, 4, 11), (1, 3, 2)]
)
def test_pad_crop_equals_a_reflect_padded_crop_by_hand(height, width, pad):
    batch = images(20, height, width)
    u = torch.rand(2, 20, generator=rng())
    flip = torch.arange(20) % 2 == 0
    ours = augment.shift_and_flip(batch, u[0], u[1], pad, flip)
    # numpy's reflect mode also keeps reflecting when the pad is wider than the image
    padded = np.pad(batch.numpy(), ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect")
    for i in range(20):
        top, left = int(u[0, i] * (2 * pad + 1)), int(u[1, i] * (2 * pad + 1))
        crop = padded[i, top : top + height, left : left + width]
        assert np.array_equal(ours[i], crop[:, ::-1] if flip[i] else crop)


def test_pad_crop_reaches_every_offset_equally_often():
    """Row 9 and column 9 are marked, pad 2.

    The marks land on rows and columns 7..11, a fifth of the time each.
    """
    batch = torch.zeros(4000, 20, 20, 1, dtype=torch.uint8)
    batch[:, 9, :] = batch[:, :, 9] = 255
    out = pixels({"crop": "pad", "pad": 2}, batch)[:, 0]
    for profile in (out.mean(2), out.mean(1)):
        counts = torch.bincount(profile.argmax(1), minlength=20)
        assert counts.nonzero().flatten().tolist() == [7, 8, 9, 10, 11]
        assert (counts[7:12] - 800).abs().max() < 120


def test_resized_crop_statistics():
    """Areas are uniform in 0.2..1 but for clamped ones, ratios in 3/4..4/3, boxes everywhere."""
    u = augment._Uniforms(
        *torch.rand(len(augment._Uniforms._fields), 20_000, generator=rng()).unbind(0)
    )
    half_w, half_h, x, y = augment.crop_box(40, 40, u, 0.2)
    area, ratio = half_w * half_h, half_w / half_h
    assert 0.199 < area.min() < 0.21
    assert area.max() <= 1
    assert abs(area.mean() - 0.6) < 0.03
    small = area < 0.7  # never clamped, as sqrt(.7 * 4/3) < 1
    assert ratio.min() > 0.749
    assert ratio.max() < 1.334
    assert abs(ratio[small].log().mean()) < 0.01
    for half, center in ((half_w, x), (half_h, y)):
        assert (center.abs() + half <= 1 + 1e-6).all()
        relative = center[small] / (1 - half[small])
        assert abs(relative.mean()) < 0.03
        assert relative.abs().max() > 0.99


def test_resized_crops_at_the_edge_of_the_image_have_no_dark_rim():
    batch = torch.full((500, 8, 8, 3), 200, dtype=torch.uint8)
    torch.testing.assert_close(
        pixels({"crop": "resized"}, batch), torch.full((500, 3, 8, 8), 200 / 255)
    )


def test_rotation_turns_corners_black_and_keeps_the_center():
    batch = torch.full((32, 32, 32, 3), 255, dtype=torch.uint8)
    out = pixels({"rotation": 45.0}, batch)
    assert (out[:, :, 0, 0] < 0.5).float().mean() > 0.5
    torch.testing.assert_close(out[:, :, 12:20, 12:20], torch.ones(32, 3, 8, 8))


@pytest.mark.parametrize(
    "options",
    [
        {"crop": "pad"},
        {"crop": "resized"},
        {"flip": 0.5},
        {"brightness": 0.4},
        {"contrast": 0.4},
        {"saturation": 0.4},
        {"hue": 0.1},
        {"grayscale": 0.5},
        {"blur": 0.5},
        {"rotation": 15.0},
    ],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values()))),
)
def test_each_step_draws_for_each_image_and_obeys_the_generator(options):
    batch = same_images(16)
    out = pixels(options, batch)
    assert distinct(out) >= (2 if set(options) & {"flip", "grayscale"} else 8)
    assert torch.equal(out, pixels(options, batch))
    assert not torch.equal(out, pixels(options, batch, seed=1))


def test_steps_differ_from_the_image_only_by_their_own_effect():
    """Switching a step off leaves the others' draws as they were."""
    batch = images()
    both = pixels({"crop": "pad", "flip": 0.5, "brightness": 0.4}, batch)
    crop = pixels({"crop": "pad", "flip": 0.5}, batch)
    light = pixels({"brightness": 0.4}, torch.full_like(batch, 100)) / (100 / 255)
    torch.testing.assert_close(both, (crop * light).clamp(0, 1), rtol=0, atol=1e-5)


def test_consecutive_calls_differ_but_depend_on_the_generator_only():
    batch, first, second = (
        images(),
        Augment(AugmentOptions(), MEAN, STD),
        Augment(AugmentOptions(), MEAN, STD),
    )
    generator = rng()
    a, b = first(batch, generator), first(batch, generator)
    assert not torch.equal(a, b)
    assert torch.equal(second(batch, rng()), a)
    assert torch.equal(first(batch, rng()), a)  # no hidden counter


def test_the_order_of_the_jitter_changes_between_batches(monkeypatch):
    orders = set()
    for name in ("brightness_", "contrast_", "saturation_", "hue_"):
        monkeypatch.setattr(augment, name, lambda x, _, name=name: calls.append(name) or x)
    for seed in range(40):
        calls: list[str] = []
        pixels(
            {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
            images(2, 4, 4),
            seed,
        )
        assert sorted(calls) == ["brightness_", "contrast_", "hue_", "saturation_"]
        orders.add(tuple(calls))
    assert len(orders) > 12


class DeviceGenerator:
    """A generator with the interface that a CUDA generator offers to the host."""

    device = torch.device("cuda")

    def __init__(self, *state: int) -> None:
        self.state = torch.tensor(state, dtype=torch.uint8)

    def get_state(self) -> Tensor:
        return self.state


def test_a_device_generator_is_followed_on_the_host_by_its_state():
    draws = [
        torch.randperm(1000, generator=augment.host_generator(DeviceGenerator(*s)))
        for s in ((1, 2), (1, 2), (1, 3))
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_flip_probabilities():
    batch = images(400, 4, 4)
    x = as_float(batch)
    torch.testing.assert_close(pixels({"flip": 1.0}, batch), x.flip(3))
    torch.testing.assert_close(pixels({"flip": 0.0}, batch), x)
    flipped = (pixels({"flip": 0.25}, batch) - x).abs().flatten(1).amax(1) > 1e-3
    assert 70 < flipped.sum() < 130


def test_jitter_probability_is_per_image_for_all_four_at_once():
    batch = images(400, 4, 4)
    options = {
        "brightness": 0.4,
        "contrast": 0.4,
        "saturation": 0.4,
        "hue": 0.1,
        "jitter_prob": 0.75,
    }
    changed = (pixels(options, batch) - as_float(batch)).abs().flatten(1).amax(1) > 1e-3
    assert 270 < changed.sum() < 330
    torch.testing.assert_close(pixels({**options, "jitter_prob": 0.0}, batch), as_float(batch))


def test_grayscale_probability():
    batch = images(400, 4, 4)
    out = pixels({"grayscale": 0.2}, batch)
    gray = (out.amax(1) - out.amin(1)).flatten(1).amax(1) < 1e-5
    assert 50 < gray.sum() < 110
    torch.testing.assert_close(
        out[gray], TF.rgb_to_grayscale(as_float(batch), 3)[gray], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(out[~gray], as_float(batch)[~gray])


def test_brightness_factors_fill_their_range():
    values = pixels(
        {"brightness": 0.4}, torch.full((2000, 1, 1, 1), 100, dtype=torch.uint8)
    ).flatten() / (100 / 255)
    assert 0.6 <= values.min() < 0.61
    assert 1.39 < values.max() <= 1.4
    assert abs(values.mean() - 1) < 0.02


def test_a_strength_above_one_never_makes_a_negative_factor():
    values = pixels({"brightness": 3.0}, torch.full((500, 1, 1, 1), 50, dtype=torch.uint8))
    assert (values > 0).all()


def test_all_strengths_zero_is_plain():
    batch = images(5, 9, 11)
    steps = Augment(AugmentOptions(**OFF), MEAN, STD)
    assert torch.equal(steps(batch, rng()), steps.plain(batch))


def test_zero_strength_calls_no_operation(monkeypatch):
    def fail(*_):
        raise AssertionError("called")

    for name in (
        "brightness_",
        "contrast_",
        "saturation_",
        "hue_",
        "gaussian_blur",
        "warp",
        "shift_and_flip",
    ):
        monkeypatch.setattr(augment, name, fail)
    pixels({}, images())
    with pytest.raises(AssertionError, match="called"):
        pixels({"hue": 0.1}, images())


def test_normalization():
    """A pixel 51 is 0.2.

    (0.2 - 0.4) / 0.5 = -0.4 in the first channel, (0.2 - 0.1) / 0.25 = 0.4 in the second.
    """
    batch = torch.full((2, 3, 5, 2), 51, dtype=torch.uint8)
    steps = Augment(AugmentOptions(**OFF), (0.4, 0.1), (0.5, 0.25))
    for out in (steps.plain(batch), steps(batch, rng())):
        torch.testing.assert_close(
            out, torch.tensor([-0.4, 0.4]).view(1, 2, 1, 1).expand(2, 2, 3, 5)
        )
    batch = images(4, 7, 5)
    expected = TF.normalize(as_float(batch), list(MEAN), list(STD))
    torch.testing.assert_close(Augment(AugmentOptions(), MEAN, STD).plain(batch), expected)


@pytest.mark.parametrize("crop", ["pad", "resized", "none"])
@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((4, 32, 32, 3), 0, (32, 32)),
        ((4, 28, 28, 1), 0, (28, 28)),
        ((4, 96, 96, 3), 64, (64, 64)),
        ((4, 20, 30, 3), 0, (20, 30)),
        ((4, 20, 30, 3), 24, (24, 24)),
        ((1, 1, 1, 3), 0, (1, 1)),
        ((1, 5, 1, 1), 0, (5, 1)),
        ((0, 32, 32, 3), 0, (32, 32)),
        ((0, 32, 32, 3), 16, (16, 16)),
    ],
)
def test_every_shape_comes_out_as_promised(crop, shape, size, expected):
    channels = shape[3]
    batch = images(*shape)
    before = batch.clone()
    options = AugmentOptions(crop=crop, size=size, grayscale=0.2, blur=0.5, rotation=10.0)
    steps = Augment(options, MEAN[:channels], STD[:channels])
    for out in (steps(batch, rng()), steps.plain(batch)):
        assert out.shape == (shape[0], channels, *expected)
        assert out.dtype == torch.float32
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert out.isfinite().all()
    assert torch.equal(batch, before)


def test_color_steps_leave_gray_images_alone():
    batch = images(4, 28, 28, 1)
    out = pixels({"saturation": 0.4, "hue": 0.1, "grayscale": 1.0}, batch)
    torch.testing.assert_close(out, as_float(batch))


@pytest.mark.parametrize("crop", ["pad", "none"])
@pytest.mark.parametrize("wide", [True, False])
def test_training_and_evaluation_see_the_center_square_at_the_same_scale(crop, wide):
    batch = images(3, 96, 120) if wide else images(3, 120, 96)
    steps = Augment(AugmentOptions(**{**OFF, "crop": crop, "pad": 0, "size": 64}), MEAN, STD)
    torch.testing.assert_close(steps(batch, rng()), steps.plain(batch))
    square = as_float(batch[:, :, 12:108] if wide else batch[:, 12:108])
    expected = TF.normalize(TF.resize(square, [64, 64], antialias=True), list(MEAN), list(STD))
    torch.testing.assert_close(steps.plain(batch), expected, rtol=0, atol=1e-4)


def test_augment_survives_pickling_after_use():
    steps = Augment(AugmentOptions(), MEAN, STD)
    out = steps(images(), rng())
    assert torch.equal(pickle.loads(pickle.dumps(steps))(images(), rng()), out)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"crop": "resize"}, ["crop='resize' ", "pad or resized or none"]),
        ({"crop": ""}, ["crop='' "]),
        ({"scale_min": 0.0}, ["scale_min=0.0", "scale_min=0.2"]),
        ({"scale_min": float("nan")}, ["scale_min=nan"]),
        ({"pad": -1}, ["pad=-1", "pad=4"]),
        ({"size": -8}, ["size=-8", "size=0"]),
        ({"flip": 1.5}, ["flip=1.5", "from 0 to 1", "flip=0.5"]),
        ({"grayscale": -0.1}, ["grayscale=-0.1"]),
        ({"blur": 2.0}, ["blur=2.0"]),
        ({"jitter_prob": float("nan")}, ["jitter_prob=nan"]),
        ({"brightness": -0.4}, ["brightness=-0.4", "of at least 0"]),
        ({"contrast": float("inf")}, ["contrast=inf"]),
        ({"saturation": float("nan")}, ["saturation=nan"]),
        ({"hue": 0.6}, ["hue=0.6", "from 0 to 0.5", "hue=0.1"]),
        ({"rotation": 200.0}, ["rotation=200.0"]),
    ],
)
def test_bad_options_name_the_argument_the_value_and_what_to_write(changes, words):
    with pytest.raises(UserError) as error:
        Augment(AugmentOptions(**changes), MEAN, STD)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "batch",
    [images().float(), images(channels=1), images()[0], images().permute(0, 3, 1, 2)],
    ids=["float", "C", "3d", "NCHW"],
)
def test_wrong_tensors_are_refused(batch):
    steps = Augment(AugmentOptions(), MEAN, STD)
    for call in (lambda: steps(batch, rng()), lambda: steps.plain(batch)):
        with pytest.raises(ValueError, match=r"\(B, H, W, 3\) of torch.uint8"):
            call()


def test_std_must_be_positive_and_match_the_mean():
    for mean, std in ((MEAN, (0.2,)), (MEAN, (0.2, 0.0, 0.2))):
        with pytest.raises(ValueError, match="one number per channel"):
            Augment(AugmentOptions(), mean, std)
