"""How the C library treats the memory that tensors leave behind on a CPU."""

import ctypes
import sys

# mallopt(3). A training step allocates and frees the same sizes again and again. By default glibc hands large blocks
# back to the system at once and asks for them again a moment later, and the system zeroes every page in between.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
# The first one tells whether the others make sense: setting any of them ends glibc's own tuning.
_USUAL = {
    _MMAP_THRESHOLD: 32 << 20,
    _TRIM_THRESHOLD: 64 << 20,
    _TOP_PAD: 128 << 10,
}  # where that tuning ends up
_KEEP = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 64 << 20}


def keep_freed_memory(keep: bool = True) -> bool:
    """Lets the process keep freed memory for its next tensors, or (``keep=False``) behave as usual again.

    The peak stays what it was, give or take fragmentation; the memory just stays with the process.

    Returns:
        Whether the C library is one that can be told.
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
