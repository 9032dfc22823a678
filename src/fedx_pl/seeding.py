"""Seeds derived from (run seed, purpose), so that the order of execution never matters."""

import hashlib


def derive(seed: int, *purpose: int | str) -> int:
    """Derives a 63-bit seed for one purpose, e.g. ``derive(seed, "order", round, client)``.

    It is the same on every machine.
    """
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
