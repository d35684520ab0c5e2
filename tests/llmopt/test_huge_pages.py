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


def mapping_of(tensor: torch.Tensor) -> dict[str, str]:
    """The kernel's account of the mapping that holds the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.numel() * tensor.element_size() // 2
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split(maxsplit=1)
        if first.endswith(":"):
            if inside:
                fields[first[:-1]] = rest[0] if rest else ""
        else:
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= middle < end
    return fields


@needs_huge_pages
def test_the_pool_asks_for_huge_pages_and_stays_untouched() -> None:
    shape = LayerShape(
        num_key_heads=4, key_dim=64, num_value_heads=4, value_dim=64, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    cache = KVCache({0: shape}, num_blocks=4096, block_size=32)
    for tensor in (cache.layers[0].key, cache.layers[0].value):
        mapping = mapping_of(tensor)
        assert "hg" in mapping["VmFlags"].split()
        # The mapping may be shared with a neighbour; most of these 64 MiB must not be there.
        assert int(mapping["Rss"].split()[0]) < 16 << 10
        tensor[7] = 1
        assert tensor[7].sum() == tensor[7].numel()


def test_small_tensors_are_left_alone() -> None:
    assert not ask_for_huge_pages(torch.empty(MIN_BYTES // 2, dtype=torch.uint8))


def test_tensors_without_memory_of_this_machine_are_left_alone() -> None:
    assert not ask_for_huge_pages(torch.empty(1 << 30, device="meta"))


def test_elsewhere_than_on_linux_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not ask_for_huge_pages(torch.empty(4 * MIN_BYTES, dtype=torch.uint8))
