"""Has the model changed, so that KV of earlier requests is no longer what it would compute?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters")  # of PEFT's layers


class ModelWatch:
    """Notices other parameters, values written to them, and other active adapters. Quick: asked when a request starts.

    Changes through ``parameter.data`` leave no trace in torch and are not seen; `PrefixCache.clear` is for those.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._places = [(m._parameters, name) for m in model.modules() for name in m._parameters]
        self._tuned = [m for m in model.modules() if hasattr(m, "_active_adapter")]
        self._seen = self._look()

    def has_changed(self) -> bool:
        """Whether anything is different from the last call."""
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> tuple[Any, ...]:
        values = tuple(map(_stamp, [parameters.get(name) for parameters, name in self._places]))
        adapters = tuple(repr([getattr(m, name, None) for name in _ADAPTER_STATE]) for m in self._tuned)
        return values, adapters


def _stamp(parameter: Any) -> tuple[int, int]:
    return id(parameter), -1 if parameter is None or parameter.is_inference() else parameter._version
