"""``reference``: the procedure of the FedX authors' released code, as a plain loop.

It was written from a description of what that code does, not from the code:

- Images go through torchvision's transforms one by one, as PIL images, in the training process.
- There are two loaders, one for B and one for B_r.
- Networks are float32 in NCHW memory.
- The frozen global model F runs on all three views, although only two are used.
- The loss is read after every step.
- Each client has its own model.
- The linear probe fetches features one by one.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import transforms

from fedx_pl.config.build import Run
from fedx_pl.data.images import Split
from fedx_pl.losses import nt_xent, relational
from fedx_pl.methods.base import SSLMethod
from fedx_pl.mixins.fedx import FedXMixin

TAU = 0.1


class Network(nn.Module):
    """Backbone, projector and the head ``h``, with the weights of one of our models."""

    def __init__(self, model: SSLMethod) -> None:
        """Copies the networks of ``model``, which must have FedX, into NCHW memory."""
        assert isinstance(model, FedXMixin)
        super().__init__()
        parts = copy.deepcopy((model.backbone, model.projector, model.fedx_head))
        self.backbone, self.projector, self.head = (
            part.to(memory_format=torch.contiguous_format) for part in parts
        )

    def forward(self, x: Tensor) -> Tensor:
        """``z``: (n, C, h, w) -> (n, d)."""
        z: Tensor = self.projector(self.backbone(x))
        return z


def step_loss(
    network: Network, frozen: Network, first: Tensor, second: Tensor, relation: Tensor
) -> Tensor:
    """The four terms of FedX on SimCLR in the released code's form, summed.

    Args:
        network: of the client.
        frozen: F, in eval mode.
        first: x, (n, C, h, w).
        second: x~, (n, C, h, w).
        relation: x_r, (r, C, h, w).
    """
    n = len(first)
    views = torch.cat([first, second, relation])
    z = network(views)
    with torch.no_grad():
        g = frozen(views)  # Of x as well, which no term uses.
    z1, z2, z_r = z[:n], z[n : 2 * n], z[2 * n :]
    h1, h2 = network.head(z1), network.head(z2)
    local = nt_xent(z1, z2, TAU) + relational(z1, z2, z_r, TAU, "authors")
    return local + nt_xent(h1, g[n : 2 * n], TAU) + relational(h1, h2, g[2 * n :], TAU, "authors")


class PilImages(Dataset[tuple[list[Tensor], int]]):
    """Images one by one: PIL, then ``transform``, ``views`` times; with the label."""

    def __init__(
        self, split: Split, rows: np.ndarray, transform: transforms.Compose, views: int
    ) -> None:
        assert split.labels is not None
        self.images = split.images
        self.labels = split.labels
        self.rows = rows
        self.transform = transform
        self.views = views

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[list[Tensor], int]:
        image = Image.fromarray(self.images[self.rows[i]])
        return [self.transform(image) for _ in range(self.views)], int(self.labels[self.rows[i]])


class Reference:
    """A federation of resident models; call it for one round of one local epoch."""

    def __init__(self, run: Run) -> None:
        """Copies a run's weights, images, split and batch sizes.

        Args:
            run: a run of FedX on SimCLR with the default relation.
        """
        self.split = run.data.images.train
        self.rows = run.data.clients
        self.device = run.trainer.device
        self.server = Network(run.model).to(self.device)
        self.clients = [copy.deepcopy(self.server) for _ in self.rows]
        data = run.trainer.client_data(0, round_number=1)
        augment = run.data.augment
        self.batch = data.views_size
        self.relation = data.relation_size
        side = self.split.images.shape[1]
        options = augment.options
        self.to_tensor = [transforms.ToTensor(), transforms.Normalize(augment.mean, augment.std)]
        self.augment = transforms.Compose(
            [
                transforms.RandomCrop(side, padding=options.pad, padding_mode="reflect"),
                transforms.RandomHorizontalFlip(),
                transforms.ColorJitter(
                    options.brightness, options.contrast, options.saturation, options.hue
                ),
                *self.to_tensor,
            ]
        )

    def __call__(self) -> int:
        """Runs one round; returns the number of images of ``B`` that all clients saw."""
        frozen = copy.deepcopy(self.server).eval()
        seen = 0
        for network, rows in zip(self.clients, self.rows, strict=True):
            network.load_state_dict(self.server.state_dict())
            seen += self.train(network, frozen, rows)
        average(self.server, self.clients, [len(rows) for rows in self.rows])
        return seen

    def train(self, network: Network, frozen: Network, rows: np.ndarray) -> int:
        """Trains one client for one epoch; returns the number of images of ``B``."""
        network.train()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
        loaders = [
            DataLoader(
                PilImages(self.split, rows, self.augment, views), size, shuffle=True, drop_last=True
            )
            for views, size in ((2, self.batch), (1, self.relation))
        ]
        seen = 0
        self.losses: list[float] = []
        for ((first, second), _), ((relation,), _) in zip(*loaders, strict=False):
            views = (x.to(self.device) for x in (first, second, relation))
            loss = step_loss(network, frozen, *views)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item())
            seen += len(first)
        return seen

    def evaluate(self, test: Split, epochs: int) -> float:
        """Linear top-1 in percent of the global backbone, from images to accuracy."""
        train_x, train_y = self.features(self.split)
        test_x, test_y = self.features(test)
        return linear_probe(train_x, train_y, test_x, test_y, epochs=epochs, device=self.device)

    @torch.no_grad()
    def features(self, split: Split) -> tuple[Tensor, Tensor]:
        """Features (N, D) in eval mode without augmentation, and labels (N,), both on the CPU."""
        self.server.eval()
        plain = transforms.Compose(self.to_tensor)
        loader = DataLoader(
            PilImages(split, np.arange(len(split.images)), plain, views=1), self.batch
        )
        found = [(self.server.backbone(x.to(self.device)).cpu(), y) for (x,), y in loader]
        x, y = zip(*found, strict=True)
        return torch.cat(x), torch.cat(y)


def average(server: Network, clients: Sequence[Network], sizes: Sequence[int]) -> None:
    """FedAvg over state dicts, tensor by tensor."""
    states = [client.state_dict() for client in clients]
    weights = [size / sum(sizes) for size in sizes]
    server.load_state_dict(
        {
            name: sum(w * state[name] for w, state in zip(weights, states, strict=True))
            for name in states[0]
        }
    )


def linear_probe(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    *,
    epochs: int,
    device: torch.device,
) -> float:
    """Adam on frozen features through a loader that collates single rows; top-1 in percent.

    Args:
        train_x: (N, D) on the CPU.
        train_y: (N,) classes.
        test_x: (M, D).
        test_y: (M,).
        epochs: passes over the training features.
        device: where the classifier lives.
    """
    classifier = nn.Linear(train_x.shape[1], int(train_y.max()) + 1).to(device)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=1e-3, weight_decay=1e-6)
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(classifier(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        hits = [
            (classifier(x.to(device)).argmax(1).cpu() == y)
            for x, y in DataLoader(TensorDataset(test_x, test_y), 64)
        ]
    return 100 * torch.cat(hits).double().mean().item()
