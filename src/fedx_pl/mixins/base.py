"""What all mixins share: they come before the method, and hold frozen networks outside the module's tree."""

from typing import Any

from fedx_pl.methods.base import SSLMethod
from fedx_pl.mixins.teacher import Frozen


class Mixin(SSLMethod):
    """Adds to the loss of the method that follows it in the list of base classes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        own = [
            i for i, base in enumerate(order) if "loss" in vars(base) and issubclass(base, Mixin)
        ]
        last = max(own, default=0)
        if early := [
            base for base in order[1:last] if "loss" in vars(base) and not issubclass(base, Mixin)
        ]:
            mixin, bases = order[last].__name__, ", ".join(base.__name__ for base in cls.__bases__)
            raise TypeError(
                f"{mixin} must come first: class {cls.__name__}({mixin}, {early[0].__name__}), not ({bases})"
            )

    def teachers(self) -> list[Frozen]:
        """The frozen networks, for those who move and compile them."""
        return []

    def refresh_teachers(self) -> None:
        """Makes the frozen networks what they are in the round that begins; all that a mixin's loss needs of it."""

    def on_round_start(self) -> None:
        """Refreshes the teachers."""
        super().on_round_start()
        self.refresh_teachers()

    def compile_networks(self) -> None:
        """The teachers too."""
        super().compile_networks()
        for teacher in self.teachers():
            teacher.compile()

    def on_train_start(self) -> None:
        """Lightning has moved the module by now; teachers are outside of it and follow by hand."""
        super().on_train_start()
        for teacher in self.teachers():
            teacher.to(self.device)


def wrap(mixin: type[Mixin], method: type[SSLMethod]) -> type[SSLMethod]:
    """``class FedXBYOL(FedXMixin, BYOL)``, for methods that are only known by name; itself if it has the mixin."""
    if issubclass(method, mixin):
        return method
    prefix = mixin.__name__.removesuffix("Mixin")
    return type(
        f"{prefix}{method.__name__}",
        (mixin, method),
        {"__doc__": f"{prefix} on {method.__name__}."},
    )
