"""Settings of a pipeline: one frozen dataclass per layer that has any, and the whole of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

from llmopt.batch import MAX_DRAFTS
from llmopt.errors import ConfigError

_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # annotation of a setting -> test of a value, and its name
    "int": (lambda v: isinstance(v, Integral) and not isinstance(v, bool), "an int"),
    "float": (lambda v: isinstance(v, Real) and not isinstance(v, bool), "a number"),
    "bool": (lambda v: isinstance(v, bool), "True or False"),
}


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """How many requests and tokens a step may hold."""

    max_num_requests: int = 256  # requests that hold KV at the same time
    max_tokens_per_step: int = 4096  # token budget of one forward; longer prompts are computed in chunks


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """How the KV pool is sized."""

    block_size: int = 32  # tokens per KV block
    pool_bytes: int | None = None  # size of the pool; None: from `memory_fraction` of what this process may still use
    memory_fraction: float = 0.5  # share of the free memory that the pool may take
    max_model_len: int | None = None  # longest sequence, prompt included; None: the model's own limit
    kv_bits: int | None = None  # 8: int8 rows with a scale; None: as the model computes. Set by a plugin, with its loss


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """What a drafter may propose."""

    max_num_draft: int = 0  # draft tokens per request and step, 64 at most; the scheduler reserves KV for them


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """How the model is run."""

    self_test: bool = True  # compare the engine with the plain forward when the pipeline is built
    # how a kernel that packs weights stores them; set by a plugin that states the loss
    weight_bits: int | None = None  # bits per weight; None: as the model has them
    head_bits: int | None = None  # bits per weight of the output head; None: as the others
    weight_group_size: int = 0  # weights that share a scale; 0: all of one output with 8 bits, 32 with 4
    weight_minimum: bool | None = None  # whether groups have a minimum beside the scale; None: where it is worth it


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Everything that `build` fixes. Hooks receive it read-only."""

    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)

    def with_options(self, **options: Any) -> PipelineConfig:
        """Return a copy with flat options set, for example ``block_size=16``.

        :raises ConfigError: for a name that no layer has; the message lists the names.
        """
        sections = {f.name: getattr(self, f.name) for f in fields(self)}
        owner = {f.name: section for section, value in sections.items() for f in fields(value)}
        for name, value in options.items():
            if name not in owner:
                raise ConfigError(f"unknown option {name!r}. Known options: {', '.join(sorted(owner))}.")
            sections[owner[name]] = replace(sections[owner[name]], **{name: value})
        config = PipelineConfig(**sections)
        config.check()
        return config

    def check(self) -> None:
        """Raise `ConfigError` for values of the wrong type or out of range."""
        for section in fields(self):
            for setting in fields(getattr(self, section.name)):
                value = getattr(getattr(self, section.name), setting.name)
                is_right, want = _KINDS[str(setting.type).removesuffix(" | None")]
                if not is_right(value) and not (value is None and str(setting.type).endswith("None")):
                    raise ConfigError(f"the configuration needs {setting.name} as {want}, found {value!r}.")
        wants: tuple[tuple[bool, str, object], ...] = (
            (self.scheduling.max_num_requests >= 1, "max_num_requests >= 1", self.scheduling.max_num_requests),
            (self.scheduling.max_tokens_per_step >= 1, "max_tokens_per_step >= 1", self.scheduling.max_tokens_per_step),
            (self.memory.block_size >= 1, "block_size >= 1", self.memory.block_size),
            (0.0 < self.memory.memory_fraction <= 1.0, "0 < memory_fraction <= 1", self.memory.memory_fraction),
            (self.memory.max_model_len is None or self.memory.max_model_len >= 2, "max_model_len >= 2",
             self.memory.max_model_len),
            (self.memory.kv_bits in (None, 8), "kv_bits 8 or None", self.memory.kv_bits),
            (0 <= self.speculation.max_num_draft <= MAX_DRAFTS, f"0 <= max_num_draft <= {MAX_DRAFTS}",
             self.speculation.max_num_draft),
        )  # fmt: skip
        for holds, want, found in wants:
            if not holds:
                raise ConfigError(f"the configuration needs {want}, found {found!r}.")
