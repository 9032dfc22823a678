"""The base of all mixins, which come before the method and hold frozen networks."""

from typing import Any

from fedx_pl.methods.base import SSLMethod
from fedx_pl.mixins.teacher import Frozen


class Mixin(SSLMethod):
    """Adds to the loss of the method that follows it in the list of base classes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        with_loss = [i for i, base in enumerate(order) if "loss" in vars(base)]
        last = max((i for i in with_loss if issubclass(order[i], Mixin)), default=0)
        early = [i for i in with_loss if 0 < i < last and not issubclass(order[i], Mixin)]
        if early:
            mixin = order[last].__name__
            method = order[early[0]].__name__
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise TypeError(
                f"{mixin} must come first: class {cls.__name__}({mixin}, {method}), not ({bases})"
            )

    def teachers(self) -> list[Frozen]:
        """The frozen networks, which are moved and compiled with the module."""
        return []

    def refresh_teachers(self) -> None:
        """Updates the frozen networks for the round that begins."""

    def on_round_start(self) -> None:
        """Updates the teachers."""
        super().on_round_start()
        self.refresh_teachers()

    def compile_networks(self) -> None:
        """Compiles the teachers, too."""
        super().compile_networks()
        for teacher in self.teachers():
            teacher.compile()

    def on_train_start(self) -> None:
        """Moves the teachers to the device of the module, which they are not part of."""
        super().on_train_start()
        for teacher in self.teachers():
            teacher.to(self.device)


def wrap(mixin: type[Mixin], method: type[SSLMethod]) -> type[SSLMethod]:
    """The class that ``class FedXBYOL(FedXMixin, BYOL)`` would define, for any method.

    A method that has the mixin already is returned as it is.
    """
    if issubclass(method, mixin):
        return method
    prefix = mixin.__name__.removesuffix("Mixin")
    return type(
        f"{prefix}{method.__name__}",
        (mixin, method),
        {"__doc__": f"{prefix} on {method.__name__}."},
    )
