"""Freed memory stays with the process when asked to."""

import subprocess
import sys

import pytest

from fedx_pl.federation.allocator import keep_freed_memory

# In a process of its own: what other tests have left in the heap would decide here.
PROGRAM = """
import resource, torch
from fedx_pl.federation.allocator import keep_freed_memory

def faults():  # pages that the system gives while a tensor of 48 MB is made again and again
    for _ in range(20):  # until the heap has found its shape, after six to eight
        torch.ones(48 * 2**18)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(48 * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory(False)
usual = faults()
keep_freed_memory()
print(usual, faults())
"""


def test_a_new_tensor_reuses_the_memory_of_a_freed_one() -> None:
    if not keep_freed_memory(False):
        pytest.skip("needs glibc: run it on Linux with another C library than musl")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    usual, kept = map(int, done.stdout.split())
    assert kept < usual / 4  # Where pages are huge, the usual are some hundreds.
