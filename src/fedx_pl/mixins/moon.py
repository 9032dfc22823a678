"""MOON (Li et al., CVPR 2021) without labels: the method's loss replaces the supervised one.

The local embedding should be closer to that of the round's global model than to that of the
client's own model at the end of its last round. The paper calls this MOON-unsup.
"""

from typing import Any

from lightly.models.utils import deactivate_requires_grad
from torch import nn

from fedx_pl.errors import options_of
from fedx_pl.losses import model_contrast
from fedx_pl.methods.base import Embeddings, Loss, Views, copy_state
from fedx_pl.mixins.base import Mixin
from fedx_pl.mixins.options import MoonOptions
from fedx_pl.mixins.teacher import Frozen, copy_network


class MoonMixin(Mixin):
    """Adds MOON's model-contrastive term, on the first view, to the method that follows it.

    In a client's first round its previous model is the global one. Both similarities are then the
    same, and the term has no gradient.
    """

    def __init__(self, *args: Any, moon: MoonOptions | None = None, **kwargs: Any) -> None:
        """Adds the client's previous model.

        Args:
            args: arguments of the method.
            moon: weight and temperature.
            kwargs: keyword arguments of the method.
        """
        super().__init__(*args, **kwargs)
        self.moon = options_of("moon", moon, MoonOptions)
        self.moon_previous = nn.Sequential(
            copy_network(self.backbone), copy_network(self.projector)
        )
        deactivate_requires_grad(self.moon_previous)
        self._moon_global = Frozen()
        self._moon_before = Frozen()

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """The method's own terms, and the model contrast."""
        contrast = model_contrast(
            z.first,
            self._moon_global(batch.first),
            self._moon_before(batch.first),
            tau=self.moon.tau,
        )
        return super().loss(batch, z) | Loss(model_contrast=self.moon.mu * contrast)

    def private_names(self) -> set[str]:
        """The previous model stays with the client."""
        return super().private_names() | {"moon_previous"}

    def reset_private(self) -> None:
        """Takes the global model as the previous one."""
        super().reset_private()
        self._remember()

    def refresh_teachers(self) -> None:
        """Freezes both models for the round."""
        super().refresh_teachers()
        self._moon_global.refresh(nn.Sequential(self.backbone, self.projector))
        self._moon_before.refresh(self.moon_previous)

    def on_round_end(self) -> None:
        """Keeps the trained model as the previous one of the next round."""
        super().on_round_end()
        self._remember()

    def teachers(self) -> list[Frozen]:
        """The global and the previous model."""
        return [*super().teachers(), self._moon_global, self._moon_before]

    def _remember(self) -> None:
        copy_state(
            self.moon_previous.state_dict(),
            nn.Sequential(self.backbone, self.projector).state_dict(),
        )
