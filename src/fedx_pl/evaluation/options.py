"""Options of the evaluations; nothing here needs torch."""

from dataclasses import dataclass, field

from fedx_pl.options import Options, option


@dataclass(frozen=True, kw_only=True)
class LinearOptions(Options):
    """Options of the linear probe; the defaults are those of the FedX authors."""

    preset: str = option(
        "fedx",
        "whose values the others start from: fedx | fedema; keys of your own win",
        choices=("fedx", "fedema"),
    )
    epochs: int = option(100, "passes over the labeled train features", at_least=1)
    lr: float = option(1e-3, "learning rate of Adam", above=0)
    weight_decay: float = option(1e-6, "L2 penalty inside Adam's gradient (not AdamW)", at_least=0)
    batch_size: int = option(64, "features per step", at_least=1)


# What `evaluation.linear.preset` brings with it, before any other key. FedEMA's and FedU's code
# has a batch size of 512 among its options, which goes to the extraction of features; the
# classifier's own is 2048. It does not shuffle; here every epoch is.
PRESETS = {
    "fedx": LinearOptions(),
    "fedema": LinearOptions(
        preset="fedema", epochs=200, lr=3e-3, weight_decay=0.0, batch_size=2048
    ),
}


@dataclass(frozen=True, kw_only=True)
class SemiOptions(Options):
    """Options of fine-tuning on few labels; most defaults are the paper's."""

    fractions: list[float] = option(
        [0.01, 0.05, 0.1], "shares of the training labels, one result each", above=0, at_most=1
    )
    epochs: int = option(100, "passes over the labeled images", at_least=1)
    lr: float = option(1e-3, "learning rate of SGD", above=0)
    momentum: float = option(0.9, "SGD momentum", at_least=0, below=1)
    batch_size: int = option(64, "images per step", at_least=1)

    def steps(self, images: int) -> int:
        """The number of optimizer steps on so many labeled images."""
        return self.epochs * -(-images // self.batch_size)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Options):
    """Options of the evaluation of the encoder."""

    labels: str = option(
        "all",
        "all: of every labeled training image | limit: only of those data.limit keeps",
        choices=("all", "limit"),
    )
    knn_every: int = option(1, "rounds between kNN evaluations", at_least=1)
    knn_k: int = option(200, "neighbors that vote", at_least=1)
    linear_every: int = option(
        10, "rounds between linear probes; the last round always has one", at_least=1
    )
    geometry_clients: int = option(
        10, "evaluate RUN geometry: clients trained once more, at most", at_least=1
    )
    linear: LinearOptions = field(default_factory=LinearOptions)
    semi: SemiOptions = field(default_factory=SemiOptions)
