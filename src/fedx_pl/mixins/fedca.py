"""FedCA (Zhang et al., 2020) without its dictionary, which would share features of images.

What remains is the alignment module: all clients are drawn towards one frozen base encoder, trained
on public images, so that their embedding spaces stay together.
"""

from pathlib import Path
from typing import Any

from torch import nn

from fedx_pl.errors import options_of
from fedx_pl.files import checksum, require_plain, round_folders, tensor_bytes
from fedx_pl.files.store import load_record
from fedx_pl.losses import alignment
from fedx_pl.methods.base import Embeddings, Loss, State, Views
from fedx_pl.mixins.base import Mixin
from fedx_pl.mixins.options import FedCAOptions
from fedx_pl.mixins.teacher import Frozen, copy_network
from fedx_pl.options import OptionError


class FedCAMixin(Mixin):
    """Adds the squared distance of the first view's embedding from that of the base encoder."""

    def __init__(self, *args: Any, fedca: FedCAOptions | None = None, **kwargs: Any) -> None:
        """Loads the base encoder.

        Args:
            args: arguments of the method.
            fedca: weight, and where the base encoder is.
            kwargs: keyword arguments of the method.
        """
        super().__init__(*args, **kwargs)
        self.fedca = options_of("fedca", fedca, FedCAOptions)
        network = nn.ModuleDict(
            {"backbone": copy_network(self.backbone), "projector": copy_network(self.projector)}
        )
        state = _base_state(self.fedca.base)
        try:
            network.load_state_dict(
                {name: tensor for name, tensor in state.items() if name in network.state_dict()}
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[1].strip()  # The first line names the class only.
            problem = f"is of another network ({reason})"
            advice = "the folder of a run with the same backbone, method and {embed_dim}"
            base = self.fedca.base
            raise OptionError("base", base, problem, advice, FedCAOptions) from error
        self.base_checksum = checksum(tensor_bytes(network.state_dict()))
        self._fedca_base = Frozen()
        self._fedca_base.refresh(nn.Sequential(network["backbone"], network["projector"]))

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """The method's own terms, and the alignment."""
        distance = alignment(z.first, self._fedca_base(batch.first))
        return super().loss(batch, z) | Loss(alignment=self.fedca.beta * distance)

    def teachers(self) -> list[Frozen]:
        """The base encoder."""
        return [*super().teachers(), self._fedca_base]


def _base_state(base: str) -> State:
    """The newest global weights of a run folder."""
    if not base:
        problem = "is empty: FedCA aligns to an encoder trained on public images"
        train = "fedx-pl train federation.clients=1 seed=1000 data.limit=2000"
        advice = f"{{base}}=FOLDER, that of a run such as `{train}`"
        raise OptionError("base", ..., problem, advice, FedCAOptions)
    try:
        if not (Path(base) / "encoder.safetensors").exists():
            raise FileNotFoundError("encoder.safetensors")
        require_plain(Path(base), ("checkpoints",))
        newest = round_folders(Path(base) / "checkpoints")[-1]
        tensors, state = load_record(newest)
        if newest.name != f"round_{int(state['round']):05d}":
            raise ValueError(f"{newest.name} is another round")
        return tensors
    except (IndexError, KeyError, TypeError, OSError, ValueError) as error:
        problem = f"is not the folder of a finished run ({error})"
        raise OptionError(
            "base", base, problem, "{base}=FOLDER, where it is", FedCAOptions
        ) from error
