"""Freed memory stays with the process when asked to."""

import resource

import pytest
import torch

from fedx_pl.allocator import keep_freed_memory


def faults(megabytes: int = 48, times: int = 20) -> int:
    """Pages that the system had to hand out while the same tensor was made again and again."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(megabytes * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_tensor_made_again_takes_the_memory_of_the_one_before() -> None:
    if not keep_freed_memory():
        pytest.skip("not glibc")
    faults(times=1)
    kept = faults()
    assert keep_freed_memory(False)
    usual = faults()
    keep_freed_memory()
    assert kept < usual / 4
