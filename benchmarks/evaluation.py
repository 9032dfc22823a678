"""Parts ``round`` (training, kNN and linear probe) and ``probe`` (the linear probe alone)."""

import torch
from torch import Tensor

from benchmarks import reference
from benchmarks.measure import Contender, as_usual, best, interleave
from benchmarks.report import Part, Row
from benchmarks.rounds import VARIANTS, Setting, backbone, images_of, variant, whole_round
from fedx_pl import backbones
from fedx_pl.backbone_options import BackboneOptions
from fedx_pl.config.build import Run
from fedx_pl.data.images import Split
from fedx_pl.evaluation.features import extract
from fedx_pl.evaluation.linear import linear_probe
from fedx_pl.evaluation.options import LinearOptions


def whole(setting: Setting) -> Part:
    """Measures a round of one epoch on 10,000 images, with its evaluation.

    Ours also has a kNN evaluation, which the reference does not have.
    """
    images = setting.few(10_000, 640)
    epochs = setting.few(100, 5)
    size = [
        f"data.limit={images}",
        f"data.test_limit={images}",
        "federation.clients=5",
        "federation.rounds=1",
    ]
    size += ["federation.epochs=1", f"evaluation.linear.epochs={epochs}", "evaluation.labels=limit"]
    fedx = [name for name in VARIANTS if name != "plain"]
    runs = {
        name: setting.build(*variant(name, batch=64), *backbone("thin"), *size, evaluate=True)
        for name in fedx
    }
    rival = reference.Reference(runs["FedX"])
    test = runs["FedX"].data.images.test
    assert test is not None
    accuracies: list[float] = []

    def run_reference() -> int:
        seen = rival()
        accuracies.append(rival.evaluate(test, epochs))
        return seen

    contenders: dict[str, Contender] = {"reference": as_usual(run_reference)}
    contenders |= {name: lambda run=run: whole_round(run) for name, run in runs.items()}  # type: ignore[misc]
    # Minutes each: two repeats are enough where the ratio is large.
    times = interleave(contenders, min(setting.repeats, 2), device=setting.device, say=setting.say)
    seconds = best(times)
    per_round = {name: per_image * images_of(runs["FedX"]) for name, per_image in seconds.items()}
    rows = [
        Row("whole round against reference", seconds["reference"] / seconds["FedX"]),
        Row("whole round, queue, against reference", seconds["reference"] / seconds["FedX queue"]),
    ]
    table = [{"contender": name, "s per round": per_round[name]} for name in seconds]
    return Part(rows, times, table, {"reference linear top-1": accuracies})


def probe(setting: Setting) -> Part:
    """Measures both linear probes on the same 512 features of an untrained network."""
    count = setting.few(10_000, 500)
    epochs = setting.few(100, 5)
    sizes = [f"data.limit={count}", f"data.test_limit={count}"]
    run = setting.build(*variant("plain", batch=64), *backbone("thin"), *sizes, evaluate=True)
    setting.say("extracting features")
    sets = features(run)
    classes = len(run.data.images.classes)
    accuracies: dict[str, list[float]] = {"reference": [], "ours": []}
    on_cpu = [tensor.cpu() for tensor in sets]

    def run_reference() -> int:
        accuracies["reference"].append(
            reference.linear_probe(*on_cpu, epochs=epochs, device=setting.device)
        )
        return epochs * len(sets[0])

    def run_ours() -> int:
        seed = len(accuracies["ours"])
        found = linear_probe(
            *sets, classes=classes, options=LinearOptions(epochs=epochs), seed=seed
        )
        accuracies["ours"].append(found.top1)
        return epochs * len(sets[0])

    times = interleave(
        {"reference": as_usual(run_reference), "ours": run_ours},
        setting.repeats,
        device=setting.device,
        say=setting.say,
    )
    seconds = best(times)
    mean = {name: sum(values) / len(values) for name, values in accuracies.items()}
    rows = [
        Row("linear probe against reference", seconds["reference"] / seconds["ours"]),
        Row(
            "linear probe, accuracy apart from the reference's",
            abs(mean["ours"] - mean["reference"]),
            "points",
        ),
    ]
    table = [
        {"contender": name, "s": seconds[name] * epochs * len(sets[0]), "linear top-1": mean[name]}
        for name in seconds
    ]
    return Part(rows, times, table, {"linear top-1": accuracies})


def features(run: Run) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns features (N, 512) and labels (N,) of the train images, then of the test images.

    The network is untrained, but its BatchNorm has seen images. That is enough for a linear probe
    to be far above chance.
    """
    device = run.trainer.device
    images = run.data.images
    plain = run.data.augment.plain
    torch.manual_seed(0)
    # 512 features at an eighth of ResNet-18's price.
    network = backbones.build(
        BackboneOptions("resnet10", width=64, stem="half"), channels=3, image_size=32
    )
    network = network.to(device).to(memory_format=torch.channels_last).train()
    with torch.no_grad():
        for _ in range(5):
            network(plain(torch.from_numpy(images.train.images[:500]).to(device)))

    def of(split: Split | None) -> tuple[Tensor, Tensor]:
        assert split is not None
        assert split.labels is not None
        labels = torch.from_numpy(split.labels).to(device)
        return extract(network, split.images, plain), labels

    return (*of(images.train), *of(images.test))
