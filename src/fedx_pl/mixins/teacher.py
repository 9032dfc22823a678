"""An inference-only copy of a network, with BatchNorm folded into the layers before it."""

import copy

import torch
from lightly.models.utils import deactivate_requires_grad
from torch import Tensor, fx, nn

_Layer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
_BatchNorm = nn.modules.batchnorm._BatchNorm
State = dict[str, Tensor]


class Frozen:
    """A frozen copy of a network, which `refresh` updates in place.

    It is not an `nn.Module`, so that a module can hold it without training, averaging or saving it.
    """

    def __init__(self) -> None:
        """Starts empty; `refresh` makes the copy."""
        self.network: nn.Module | None = None
        self._folded: list[tuple[str, str]] = []  # names of layers and their folded BatchNorms
        self._unfolded: nn.Module | None = None  # to check the folded network once
        self._may_fold = True
        self._compiled = False

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The output of the copy."""
        assert self.network is not None, "refresh() makes the copy"
        if self._unfolded is not None:
            self._check(x)
        output: Tensor = self.network(x)
        return output

    @torch.no_grad()
    def refresh(self, source: nn.Module) -> None:
        """Copies the weights of ``source``.

        The initial statistics of a BatchNorm (0 and 1) would give all images nearly the same
        embedding. So a copy of a BatchNorm that has seen no batch yet uses those of its input.
        """
        has_statistics = _tracked(source)
        fold = self._may_fold and all(has_statistics.values())
        if self.network is None or fold:
            self._may_fold = self._may_fold and not fold  # One try.
            self._start(_copy(source), fold=fold)
        assert self.network is not None
        mine, theirs = self.network.state_dict(), source.state_dict()
        folded = {f"{layer}.{kind}" for layer, _ in self._folded for kind in ("weight", "bias")}
        plain = [name for name in mine if name not in folded]
        if plain:  # Private: see `copy_state`.
            torch._foreach_copy_([mine[name] for name in plain], [theirs[name] for name in plain])
        for layer, norm in self._folded:
            _fold(theirs, layer, norm, eps=source.get_submodule(norm).eps, into=mine)  # type: ignore[arg-type]
        if self._unfolded is not None:
            self._unfolded.load_state_dict(theirs)
        for name, known in has_statistics.items():
            self.network.get_submodule(name).train(not known)

    def compile(self) -> None:
        """Compiles the copy."""
        self._compiled = True
        self._compile()

    def _compile(self) -> None:
        # Not before folding was tried, after which it would have to be compiled again.
        if self._compiled and self.network is not None and not self._may_fold:
            self.network.compile()

    def to(self, device: torch.device) -> None:
        """Moves the copy."""
        for network in (self.network, self._unfolded):
            if network is not None:
                network.to(device)

    def _start(self, network: nn.Module, *, fold: bool) -> None:
        """Takes a copy of the source, and removes foldable BatchNorms if wanted."""
        self.network = network
        self._folded = foldable_pairs(network) if fold else []
        self._unfolded = copy.deepcopy(network) if self._folded else None
        for layer, norm in self._folded:
            parent, _, child = norm.rpartition(".")
            setattr(network.get_submodule(parent), child, nn.Identity().eval())
            folded = network.get_submodule(layer)
            if folded.bias is None:
                folded.bias = nn.Parameter(
                    folded.weight.new_zeros(len(folded.weight)), requires_grad=False
                )
        self._compile()

    def _check(self, x: Tensor) -> None:
        """Compares with the unfolded copy on the first real batch, and takes that if they differ.

        A trace does not show tied weights, weights that are also used elsewhere, or a BatchNorm
        over another axis.
        """
        unfolded = self._unfolded
        self._unfolded = None
        assert self.network is not None
        assert unfolded is not None
        with torch.autocast(x.device.type, enabled=False):
            expected = unfolded(x.float())
            difference = (self.network(x.float()) - expected).abs().max()
        if difference > 1e-3 * expected.abs().max():
            self._start(unfolded, fold=False)


def copy_network(network: nn.Module) -> nn.Module:
    """A deep copy, even of a network with old-style weight normalization.

    Layers such as those of lightly's DINOProjectionHead hold a weight that is computed before each
    forward pass, and results of autograd cannot be deep-copied.
    """
    attributes = [value for module in network.modules() for value in vars(module).values()]
    results = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    return copy.deepcopy(network, {id(result): result.detach().clone() for result in results})


def foldable_pairs(network: nn.Module) -> list[tuple[str, str]]:
    """Names of layers and of the BatchNorms that alone use their output.

    Nothing is folded in a network that cannot be traced because its ``forward`` depends on values.

    Args:
        network: in the mode, train or eval, in which it will run.
    """
    try:
        # A copy, since compiled modules cannot be traced.
        nodes = fx.Tracer().trace(copy.deepcopy(network)).nodes
    except Exception:  # Tracing runs a user's code on proxies of tensors: it may fail in any way.
        return []
    calls = [str(node.target) for node in nodes if node.op == "call_module"]
    modules = dict(network.named_modules())
    state = network.state_dict()
    pairs = []
    for node in nodes:
        before = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        layer = str(before.target)
        norm = str(node.target)
        once = calls.count(layer) == calls.count(norm) == 1
        fits = isinstance(modules[layer], _Layer) and isinstance(modules[norm], _BatchNorm)
        # A layer with weight normalization has no `weight` of its own.
        if once and fits and f"{layer}.weight" in state and f"{norm}.running_mean" in state:
            pairs.append((layer, norm))
    return pairs


def _tracked(network: nn.Module) -> dict[str, bool]:
    """Whether each BatchNorm that keeps statistics has seen a batch; synchronizes only once."""
    counters = {
        name: module.num_batches_tracked
        for name, module in network.named_modules()
        if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None
    }
    seen = (torch.stack(list(counters.values())) > 0).tolist() if counters else []
    return dict(zip(counters, seen, strict=True))


def _copy(source: nn.Module) -> nn.Module:
    network = copy_network(source).eval()
    deactivate_requires_grad(network)
    return network


def _fold(source: State, layer: str, norm: str, eps: float, into: State) -> None:
    """Folds a BatchNorm: ``layer`` of ``into`` computes norm(layer(x)).

    Its channels are scaled by gamma / sqrt(var + eps), then shifted.
    """
    scale = torch.rsqrt(source[f"{norm}.running_var"] + eps)
    if f"{norm}.weight" in source:
        scale = scale * source[f"{norm}.weight"]
    weight = source[f"{layer}.weight"]
    into[f"{layer}.weight"].copy_(weight * scale.view(-1, *[1] * (weight.dim() - 1)))
    shift = source.get(f"{layer}.bias", 0) - source[f"{norm}.running_mean"]
    into[f"{layer}.bias"].copy_(shift * scale + source.get(f"{norm}.bias", 0))
