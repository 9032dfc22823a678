"""Every random number of a run derives from (run seed, purpose), so the order of execution never matters."""

import hashlib


def derive(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive(seed, "order", round, client)``; the same on every machine."""
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
