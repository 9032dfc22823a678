"""The record of which site is which client of a run."""

import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from fedx_pl.errors import UserError
from fedx_pl.files import write_atomically


class SiteBook:
    """Numbers the sites of a run as its clients; the numbers never change."""

    def __init__(self, file: Path) -> None:
        """Opens or creates the file, which also holds the run's name among its sites."""
        self._file = file
        try:
            found = (
                json.loads(file.read_text())
                if file.exists()
                else {"run": secrets.token_hex(8), "sites": []}
            )
            self.run = str(found["run"])
            self._sites = [str(name) for name in found["sites"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{file} is damaged ({error}), and only it knows the sites; type run.dir=ANOTHER"
            ) from error
        self._write()

    def expect(self, names: Sequence[str]) -> None:
        """Numbers sites before they come."""
        for name in names:
            self.client_of(name)

    def client_of(self, name: str) -> int:
        """The number of a site; a new site gets the next one."""
        if name not in self._sites:
            self._sites.append(name)
            self._write()
        return self._sites.index(name)

    def knows(self, name: str) -> bool:
        """Whether a site has a number."""
        return name in self._sites

    def name_of(self, client: int) -> str:
        """The site that has a number."""
        return self._sites[client]

    def _write(self) -> None:
        write_atomically(
            self._file, json.dumps({"run": self.run, "sites": self._sites}, indent=1).encode()
        )
