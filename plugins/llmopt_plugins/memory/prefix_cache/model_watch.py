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
        self._modules = list(model.modules())
        self._tuned = [m for m in self._modules if hasattr(m, "_active_adapter")]
        self._look()

    def has_changed(self) -> bool:
        """Whether anything is different from the last call."""
        for parameters, name, parameter, version in self._seen:
            if parameters.get(name) is not parameter or parameter._version != version:
                self._look()
                return True
        if self._tuned and self._adapters() != self._active:
            self._look()
            return True
        return False

    def _look(self) -> None:
        self._seen = [
            (m._parameters, name, parameter, parameter._version)
            for m in self._modules
            for name, parameter in m._parameters.items()
            if parameter is not None and not parameter.is_inference()  # torch does not count writes to those
        ]
        self._active = self._adapters()

    def _adapters(self) -> list[Any]:
        return [repr([getattr(m, name, None) for name in _ADAPTER_STATE]) for m in self._tuned]
