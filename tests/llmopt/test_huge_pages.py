"""The KV pool asks for huge pages, and takes no memory before something is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from llmopt.huge_pages import MIN_BYTES, ask_for_huge_pages
from llmopt.kv_cache import KVCache, LayerShape

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    sys.platform != "linux" or not HUGE.exists(), reason="needs Linux with transparent huge pages"
)


def flags_of(tensor: torch.Tensor) -> list[str]:
    """The kernel's flags of the mapping that holds the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split(maxsplit=1)
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            return rest[0].split()
    raise AssertionError("no mapping holds the tensor")


def resident_bytes() -> int:
    """Anonymous memory of this process that is there."""
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon:")
    )


@needs_huge_pages
def test_the_pool_asks_for_huge_pages_and_takes_no_memory() -> None:
    shape = LayerShape(
        num_key_heads=4, key_dim=64, num_value_heads=4, value_dim=64, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    # The process as a whole is asked: the allocator may hand out heap that was used and freed before, and then pages of
    # the tensor are there already, without anybody having touched it. What it writes before a tensor takes a huge page.
    before = resident_bytes()
    cache = KVCache({0: shape}, num_blocks=4096, block_size=32)
    assert resident_bytes() - before < 8 << 20  # of 128 MiB
    for tensor in (cache.layers[0].key, cache.layers[0].value):
        assert tensor.nbytes == 64 << 20
        assert "hg" in flags_of(tensor)
        tensor[7] = 1
        assert tensor[7].sum() == tensor[7].numel()
    assert resident_bytes() - before < 16 << 20  # a huge page for each block that was written


def test_small_tensors_are_left_alone() -> None:
    assert not ask_for_huge_pages(torch.empty(MIN_BYTES // 2, dtype=torch.uint8))


def test_tensors_without_memory_of_this_machine_are_left_alone() -> None:
    assert not ask_for_huge_pages(torch.empty(1 << 30, device="meta"))


def test_elsewhere_than_on_linux_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not ask_for_huge_pages(torch.empty(4 * MIN_BYTES, dtype=torch.uint8))
