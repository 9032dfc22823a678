"""Descriptions of a run before it starts, and for ``--dry-run``."""

from collections.abc import Callable

import torch
from rich.table import Table

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.config.build import Run
from fedx_pl.config.schema import Config
from fedx_pl.federation.device import resolve_precision
from fedx_pl.federation.estimate import steps_of
from fedx_pl.federation.identity import own_backbone
from fedx_pl.files import size_of
from fedx_pl.methods import BUILT_IN
from fedx_pl.methods.base import SSLMethod
from fedx_pl.printing import byte_size, duration
from fedx_pl.trainer import FederatedTrainer


def announcement(config: Config, *, trains_here: bool = True) -> str:
    """Describes a run before it starts.

    The profile comes first, since it may have been chosen automatically.

    Args:
        config: the configuration of the run.
        trains_here: whether this machine trains; the coordinator of real sites needs no GPU.
    """
    federation = config.federation
    # A method that is not built in may bring its own backbone.
    backbone = f"{config.backbone.name}, " if config.method.name in BUILT_IN else ""
    lines = []
    no_gpu = not torch.cuda.is_available()
    if config.profile == "cpu":
        why = " (no GPU here)" if no_gpu else ""
        lines.append(
            f"profile cpu{why}: a thin network, a subset of the images, few rounds: a quick look."
        )
        lines.append("The paper's full setting needs a GPU: PROFILE=paper (make), profile=paper.")
    elif config.profile == "paper" and no_gpu and trains_here:
        lines.append(
            "profile paper: made for a GPU, and there is none here; in full it takes a CPU weeks."
        )
    lines.append(
        f"{config.name}: {federation.rounds} rounds x {federation.epochs} epochs, "
        f"{federation.clients} clients, {backbone}seed {config.seed}"
    )
    if not trains_here:
        rule = config.aggregate.rule
        share = config.aggregate.max_share
        known = {
            "mean": "a site that lies may ruin the model",
            "clip": "updates are clipped to the usual length",
        }
        meaning = f": {known[rule]}" if rule in known else ""
        lines.append(f"aggregate={rule}{meaning}")
        lines.append(
            f"aggregate.max_share={share:g}: "
            f"no site counts for more than {share:.0%} of a round's images"
        )
    return "\n".join(lines)


def expectation(run: Run, seconds: float) -> str:
    """Describes where a run trains and how long it takes."""
    trainer = run.trainer
    config = run.config
    cuda = trainer.device.type == "cuda"
    threads = torch.get_num_threads()
    where = (
        torch.cuda.get_device_name(trainer.device)
        if cuda
        else f"{threads} CPU thread{'s' * (threads > 1)}"
    )
    backbone = ""
    if config.method.name not in BUILT_IN:
        backbone = (
            f"{own_backbone(trainer.description, run.model, run.data) or config.backbone.name}, "
        )
    precision = resolve_precision(trainer.precision, trainer.device)
    images = len(run.data.images.train.images)
    line = f"{backbone}{images:,} images, {precision} on {where}: about {duration(seconds)}"
    if not cuda and seconds > 3600:
        line += "\nWithout a GPU, profile=cpu gives a small result in minutes."
    return line


class Expectation(RoundCallback):
    """Prints the expected time of a run, once it is known which round comes next."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        """Keeps the run.

        Args:
            run: the run to describe.
            say: prints a line.
        """
        self.run = run
        self.say = say

    def setup(self, trainer: FederatedTrainer) -> None:
        """Measures a few steps, unless the run is finished."""
        first = trainer.current_round + 1
        if first <= trainer.max_rounds:
            self.say(expectation(self.run, trainer.estimate_seconds(first)))


def clients_table(run: Run) -> Table:
    """A table of images and steps per client, for ``--dry-run``."""
    table = Table(title="clients", title_justify="left")
    for column in ("client", "images", "classes", "batch", "relation batch", "steps per round"):
        table.add_column(column, justify="right")
    counts, _ = run.data.class_counts()
    shown = list(range(len(run.data.clients)))
    for client in shown if len(shown) <= 20 else [*shown[:10], *shown[-10:]]:
        data = run.trainer.client_data(client, round_number=1)
        classes = (
            str(int((counts[client] > 0).sum()))
            if run.data.images.train.labels is not None
            else "-"
        )
        relation = str(min(data.relation_size, data.num_images)) if data.relation_size else "-"
        row = (
            client,
            f"{data.num_images:,}",
            classes,
            data.views_size,
            relation,
            f"{steps_of(run.trainer, client):,}",
        )
        table.add_row(*map(str, row))
    if len(shown) > 20:
        table.caption = f"{len(shown) - 20} clients in between are not shown"
    return table


def parameters_text(model: SSLMethod) -> str:
    """The size of the model, and of what is shared in a round."""
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    backbone = sum(p.numel() for p in model.backbone.parameters())
    shared = size_of(model.shared_state())
    private = size_of(model.private_state())
    return (
        f"{type(model).__name__}: {total:,} trainable parameters, "
        f"{backbone:,} of them in the backbone; "
        f"{byte_size(shared)} shared and {byte_size(private)} private per client"
    )
