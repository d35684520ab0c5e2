"""One entry in transformers' attention interface, through which an unmodified model attends over the block pool.

While a step runs, the model's configs name this entry; outside of it they name what the user chose. The entry looks
for the step of its own thread. Without one (another thread uses the model meanwhile) it hands over to the user's
implementation, so the model behaves as if it had not been touched.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.configuration_utils import PreTrainedConfig

from llmopt.errors import ModelError
from llmopt.hf import traced_attention
from llmopt.hf.attention_options import AttentionOptions

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NAME = "llmopt"  # no "flash", "/" or "|" in it: transformers gives those a meaning

# Keyword arguments that models hand to attention functions and that do not change what is computed here.
_HARMLESS = frozenset(
    {
        "dropout",
        "position_ids",
        "use_cache",
        "cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "is_causal",
        "deterministic",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "position_embeddings",
    }
)


class Step(Protocol):
    """What the attention entry asks of the step that is running on its thread."""

    def update(self, key: Tensor, value: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        """Store keys and values, where the cache has not done so."""

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attend ``query [1, Hq, T, D]`` (packed) or ``[B, Hq, 1, D]`` (rows); return it with heads second to last."""

    def make_mask(self, mask_function: Any) -> Tensor | None:
        """Called when the model makes a mask; ``mask_function(batch, head, query, key)`` says who sees whom."""

    def check_mask(self, mask: Tensor, sliding_window: int | None) -> None:
        """Called when attention is given a mask; raises when it is not what the engine computes."""

    def refuse(self, why: str) -> None:
        """Called for an argument that this entry does not know; raises."""


class _Local(threading.local):
    step: Step | None = None


class _Record:
    """One config that pipelines switch, for all of them."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config  # keeps it alive, so that its id is its own
        self.fields = vars(config)  # a config's __setattr__ costs more than the rest of a step's bookkeeping
        self.original: str | None = self.fields[_FIELD]  # the user's implementation
        self.num_active = 0  # steps that run right now
        self.num_switches = 0  # switches that are not closed


_FIELD = "_attn_implementation_internal"
_local = _Local()
_records: dict[int, _Record] = {}  # by id of the config
_switching = threading.Lock()  # guards the records and the configs' field


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The registered attention function; see `transformers.AttentionInterface`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    if torch.compiler.is_compiling():
        return traced_attention.trace(module, query, key, value, options), None
    step = _local.step
    if step is None:
        original = _original_function(module)
        for name, given in (("sliding_window", sliding_window), ("softcap", softcap), ("s_aux", s_aux)):
            if given is not None:
                kwargs[name] = given
        result: tuple[Tensor, Tensor | None] = original(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    for name, argument in kwargs.items():
        if argument is not None and name not in _HARMLESS:
            step.refuse(f"attention is called with {name!r}, which the engine does not know")
    if attention_mask is not None:
        step.check_mask(attention_mask, sliding_window)
    if kwargs.get("is_causal") is False:
        step.refuse("attention is not causal")
    return step.attention(module, query, key, value, options), None


def mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """The registered mask function: the step's own (none) in a step, the user's outside."""
    if _local.step is not None:
        return _local.step.make_mask(kwargs.get("mask_function"))
    return AttentionMaskInterface()[_original_name(config)](*args, config=config, **kwargs)


def _attend_traced(query: Tensor, key: Tensor, value: Tensor, layer: int, *options: Any) -> Tensor:
    """Store and attend in the step of this thread, for `llmopt.hf.traced_attention`."""
    step = _local.step
    if step is None:
        raise ModelError("a forward that was compiled for the engine ran outside of a step.")
    key, value = step.update(key, value, layer)
    return step.attention(None, query, key, value, AttentionOptions(*options))


traced_attention.bind(_attend_traced)
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


def _original_name(config: Any) -> str | None:
    """The implementation that the user chose.

    :raises ModelError: no pipeline runs a model with this config.
    """
    record = _records.get(id(config))
    if record is None:
        raise ModelError(
            f"the config of this model names the attention {NAME!r}, and no pipeline is running it: it was copied in "
            "the middle of a step. Call model.set_attn_implementation with the one it should have."
        )
    return record.original


def _original_function(module: Any) -> Callable[..., Any]:
    """The function that the module would have used."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    name = _original_name(getattr(module, "config", None))
    function: Callable[..., Any] = AttentionInterface().get_interface(name, eager)
    return function


class AttentionSwitch:
    """Names this library's attention in all configs of a model while a step runs, and the user's afterwards.

    Several pipelines may run one model, each with its own switch: the first to begin a step changes the configs, the
    last to end one restores them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        configs: dict[int, PreTrainedConfig] = {}
        for module in [model, *model.modules()]:
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                configs[id(config)] = config
        for config in list(configs.values()):
            for name in config.sub_configs:
                sub = getattr(config, name, None)
                if isinstance(sub, PreTrainedConfig):
                    configs[id(sub)] = sub
        self._step: Step | None = None
        with _switching:
            self._records = [_records.setdefault(key, _Record(config)) for key, config in configs.items()]
            for record in self._records:
                record.num_switches += 1

    def __call__(self, step: Step) -> AttentionSwitch:
        """For a ``with`` block: this thread's attention calls go to the step. One block at a time."""
        self._step = step
        return self

    def __enter__(self) -> None:
        with _switching:
            for record in self._records:
                if record.num_active == 0 and record.fields[_FIELD] != NAME:
                    record.original = record.fields[_FIELD]  # the user may have changed it since the last step
                    record.fields[_FIELD] = NAME
                record.num_active += 1
        _local.step = self._step

    def __exit__(self, *exception: object) -> None:
        _local.step = None
        with _switching:
            for record in self._records:
                record.num_active -= 1
                if record.num_active == 0 and record.fields[_FIELD] == NAME:
                    record.fields[_FIELD] = record.original

    def close(self) -> None:
        """Forget the configs that no other pipeline switches. Harmless the second time."""
        with _switching:
            for record in self._records:
                record.num_switches -= 1
                if record.num_switches == 0:
                    del _records[id(record.config)]
            self._records = []
