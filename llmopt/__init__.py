"""llmopt: pluggable optimizations of LLM inference for Hugging Face models, in seven layers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmopt.version import __version__

if TYPE_CHECKING:
    from llmopt.builder import build
    from llmopt.config import PipelineConfig
    from llmopt.hf.accelerate import accelerate
    from llmopt.hookspecs import hookimpl
    from llmopt.hub import load
    from llmopt.pipeline import InferencePipeline
    from llmopt.plugin_info import PluginInfo
    from llmopt.plugin_search import available_plugins as plugins
    from llmopt.request import SamplingParams

__all__ = [
    "InferencePipeline",
    "PipelineConfig",
    "PluginInfo",
    "SamplingParams",
    "__version__",
    "accelerate",
    "build",
    "hookimpl",
    "load",
    "plugins",
]

# Loaded on first use: `llmopt --help` and `llmopt.__version__` need neither torch nor transformers.
_HOMES = {
    "InferencePipeline": ("llmopt.pipeline", "InferencePipeline"),
    "PipelineConfig": ("llmopt.config", "PipelineConfig"),
    "PluginInfo": ("llmopt.plugin_info", "PluginInfo"),
    "SamplingParams": ("llmopt.request", "SamplingParams"),
    "accelerate": ("llmopt.hf.accelerate", "accelerate"),
    "build": ("llmopt.builder", "build"),
    "hookimpl": ("llmopt.hookspecs", "hookimpl"),
    "load": ("llmopt.hub", "load"),
    "plugins": ("llmopt.plugin_search", "available_plugins"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llmopt' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
