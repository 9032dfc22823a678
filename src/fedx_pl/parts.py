"""Parts by name, imported when they are asked for: importing torch and Lightning takes seconds."""

import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

Part = TypeVar("Part")


def imported(path: str) -> Any:
    """The object at ``package.module:Name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class Parts(MutableMapping[str, Part]):
    """Built-in parts of one kind, by the word for each on the command line.

    Asking whether a word is known imports nothing; asking for its part imports the part's module.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        """Keeps where the parts are.

        Args:
            paths: ``package.module:Name`` by word.
        """
        self.paths = dict(paths)
        self._added: dict[str, Part] = {}

    def __getitem__(self, word: str) -> Part:
        if word in self._added:
            return self._added[word]
        part: Part = imported(self.paths[word])
        return part

    def __setitem__(self, word: str, part: Part) -> None:
        self._added[word] = part

    def __delitem__(self, word: str) -> None:
        del self._added[word]

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths | self._added)

    def __contains__(self, word: object) -> bool:
        return word in self.paths or word in self._added

    def __len__(self) -> int:
        return len(self.paths | self._added)

    def __or__(self, other: Mapping[str, Part]) -> dict[str, Part]:
        return {**self, **other}


def importing(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose public names are imported when they are asked for.

    Args:
        package: its name.
        homes: the public names by the module that defines them.
    """

    def __getattr__(name: str) -> Any:
        for home, names in homes.items():
            if name in names:
                return getattr(importlib.import_module(home), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
