"""A frozen copy of a network that only looks: no gradients, eval mode, BatchNorm folded into the layers before it."""

import copy

import torch
from torch import Tensor, fx, nn

_Layer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
_BatchNorm = nn.modules.batchnorm._BatchNorm
State = dict[str, Tensor]


class Frozen:
    """Follows another network by `refresh`, in place, and is called like it.

    Not an `nn.Module`, so that a module may hold it as an attribute without training, averaging or saving it.
    """

    def __init__(self) -> None:
        """Starts empty; `refresh` makes the copy."""
        self.network: nn.Module | None = None
        self._pairs: list[tuple[str, str]] | None = None  # names of a layer and the BatchNorm folded into it
        self._compiled = False

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The copy's output."""
        assert self.network is not None, "refresh() makes the copy"
        return self.network(x)

    @torch.no_grad()
    def refresh(self, source: nn.Module) -> None:
        """Becomes what ``source`` is now, on the same device.

        Where BatchNorm has seen no batch yet, its initial statistics (0 and 1) would give all images nearly the same
        embedding; until it has, the copy uses the statistics of the batch it looks at.
        """
        if not has_statistics(source):
            self.network, self._pairs = _copy(source), None
            for module in self.network.modules():
                if isinstance(module, _BatchNorm):
                    module.train()
            return
        if self.network is None or self._pairs is None:
            self.network, self._pairs = _copy(source), foldable_pairs(source)
            for layer, norm in self._pairs:
                _replace_by_identity(self.network, norm)
                folded = self.network.get_submodule(layer)
                if folded.bias is None:
                    folded.bias = nn.Parameter(folded.weight.new_zeros(len(folded.weight)), requires_grad=False)
            if self._compiled:
                self.network.compile()
        folded_names = {f"{layer}.{kind}" for layer, _ in self._pairs for kind in ("weight", "bias")}
        mine, theirs = self.network.state_dict(), source.state_dict()
        plain = [name for name in mine if name not in folded_names]
        if plain:
            torch._foreach_copy_([mine[name] for name in plain], [theirs[name] for name in plain])
        for layer, norm in self._pairs:
            _fold(theirs, layer, norm, source.get_submodule(norm).eps, mine)  # type: ignore[arg-type]

    def compile(self) -> None:
        """Runs the copy through `torch.compile` from now on; not that of round 1, which lasts for one round."""
        self._compiled = True
        if self.network is not None and self._pairs is not None:
            self.network.compile()

    def to(self, device: torch.device) -> None:
        """Moves the copy."""
        if self.network is not None:
            self.network.to(device)


def has_statistics(network: nn.Module) -> bool:
    """Whether every BatchNorm of the network has seen a batch; one question to the device, not one per layer."""
    seen = [b for name, b in network.named_buffers() if name.endswith("num_batches_tracked")]
    return not seen or bool((torch.stack(seen) > 0).all())


def foldable_pairs(network: nn.Module) -> list[tuple[str, str]]:
    """Names of layers and of the BatchNorms that are the only ones to see their output.

    A network whose ``forward`` depends on values cannot be traced; nothing is folded then, and it runs all the same.
    """
    try:
        nodes = fx.Tracer().trace(copy.deepcopy(network)).nodes  # A copy: compiled modules cannot be traced.
    except Exception:  # Tracing runs foreign code on stand-ins for tensors: it may fail in any way.
        return []
    calls = [str(node.target) for node in nodes if node.op == "call_module"]
    modules = dict(network.named_modules())
    pairs = []
    for node in nodes:
        before = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        layer, norm = str(before.target), str(node.target)
        once = calls.count(layer) == calls.count(norm) == 1
        fits = isinstance(modules[layer], _Layer) and isinstance(modules[norm], _BatchNorm)
        if once and fits and modules[norm].running_mean is not None:
            pairs.append((layer, norm))
    return pairs


def _copy(source: nn.Module) -> nn.Module:
    network = copy.deepcopy(source).eval()
    for parameter in network.parameters():
        parameter.requires_grad = False
    return network


def _replace_by_identity(network: nn.Module, name: str) -> None:
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, nn.Identity().eval())


def _fold(source: State, layer: str, norm: str, eps: float, into: State) -> None:
    """``into`` computes norm(layer(x)) in its ``layer``: channels scaled by gamma / sqrt(var + eps), then shifted."""
    scale = torch.rsqrt(source[f"{norm}.running_var"] + eps)
    if f"{norm}.weight" in source:
        scale = scale * source[f"{norm}.weight"]
    weight = source[f"{layer}.weight"]
    torch.mul(weight, scale.view(-1, *[1] * (weight.dim() - 1)), out=into[f"{layer}.weight"])
    shift = source.get(f"{layer}.bias", 0) - source[f"{norm}.running_mean"]
    into[f"{layer}.bias"].copy_(shift * scale + source.get(f"{norm}.bias", 0))
