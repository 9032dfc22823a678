"""Tells the C library to keep the memory of freed CPU tensors."""

import ctypes
import sys

# mallopt(3). A training step allocates and frees the same sizes again and again. By default glibc
# returns large blocks to the system at once and asks for them again, and the system zeroes them.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
# Setting any of them ends glibc's own tuning; these are the values that it arrives at.
_USUAL = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 128 << 10}
_KEEP = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 64 << 20}


def keep_freed_memory(keep: bool = True) -> bool:
    """Keeps freed memory for the next tensors; ``keep=False`` returns to the usual behavior.

    The peak stays the same, apart from fragmentation; the memory just stays with the process.

    Returns:
        Whether the C library supports it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none.
    if mallopt is None:
        return False
    wanted = _KEEP if keep else _USUAL
    # Before 2.35 glibc takes at most 32 MB here.
    if not mallopt(_MMAP_THRESHOLD, wanted[_MMAP_THRESHOLD]) and not mallopt(
        _MMAP_THRESHOLD, _USUAL[_MMAP_THRESHOLD]
    ):
        return False
    mallopt(_TRIM_THRESHOLD, wanted[_TRIM_THRESHOLD])
    mallopt(_TOP_PAD, wanted[_TOP_PAD])
    return True
