"""``bound``: only the network's forward and backward passes, on tensors already made."""

import copy

import torch
from torch import Tensor, nn

from benchmarks.measure import matmul_dtype
from fedx_pl.config.build import Run
from fedx_pl.federation.device import resolve_precision
from fedx_pl.mixins.fedx import FedXMixin
from fedx_pl.mixins.teacher import Frozen


class Bound:
    """The fastest training that the hardware allows for a run.

    It has no data, augmentation, loss, optimizer or Trainer. The student's network sees as many
    images as in a step of the run, ``2 B + B_r``. With FedX, its head ``h`` sees the ``2 B``, and a
    frozen copy in eval mode sees what ``F`` has to see, ``B + B_r``. Without a relation batch
    (plain, queue), ``B_r`` is 0.
    """

    def __init__(self, run: Run, steps: int) -> None:
        """Makes networks and inputs.

        Args:
            run: gives the network, batch sizes, device and precision.
            steps: number of forward and backward passes of one call.
        """
        device = run.trainer.device
        data = run.trainer.client_data(0, round_number=1)
        self.batch = data.views_size
        relation = min(data.relation_size, data.num_images)
        network = nn.Sequential(run.model.backbone, run.model.projector)
        self.student = _own(network, device).train()
        self.teacher: Frozen | None = None
        self.head: nn.Module | None = None
        if isinstance(run.model, FedXMixin):
            self.teacher = Frozen()  # Folded like ours: a slower one would be no bound.
            self.teacher.refresh(_own(network, device))
            self.head = _own(run.model.fedx_head, device).train()
        shape = next(data.epoch(0)).first.shape[1:]
        self.x = _images(2 * self.batch + relation, shape, device)
        self.seen_by_teacher = self.x[: self.batch + relation]
        self.steps = steps
        self.device = device
        self.precision = resolve_precision(run.trainer.precision, device)

    def step(self) -> None:
        """Runs one forward and one backward pass."""
        self.student.zero_grad()
        if self.head is not None:
            self.head.zero_grad()
        dtype = matmul_dtype(self.precision)
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            if self.teacher is not None:
                self.teacher(self.seen_by_teacher)
            z = self.student(self.x)
            loss = z.sum() if self.head is None else z.sum() + self.head(z[: 2 * self.batch]).sum()
        loss.backward()

    def __call__(self) -> int:
        """Runs all steps; returns the images of ``B`` they stand for."""
        for _ in range(self.steps):
            self.step()
        return self.steps * self.batch


def _own(network: nn.Module, device: torch.device) -> nn.Module:
    return copy.deepcopy(network).to(device).to(memory_format=torch.channels_last)


def _images(count: int, shape: torch.Size, device: torch.device) -> Tensor:
    """Noise of shape (count, C, h, w) in channels_last memory."""
    return torch.randn(count, *shape, device=device).to(memory_format=torch.channels_last)
