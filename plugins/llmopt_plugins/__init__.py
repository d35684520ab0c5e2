"""The plugins that come with llmopt, one file each, grouped by layer."""

from llmopt_plugins.hardware.roofline import Roofline
from llmopt_plugins.memory.paged_kv import PagedKv

BUILTIN: tuple[type, ...] = (PagedKv, Roofline)
"""Every built-in plugin, top-down by layer. `plugins="auto"` keeps this order."""
