"""Has somebody changed the model since its weights were packed?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from llmopt_plugins.kernel.native.late_weights import has_foreign_hooks

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

_SAMPLE_BYTES = 16


class WeightWatch:
    """Notices other modules, parameters, hooks and values. Asked whenever a request starts, so it is quick.

    In-place changes through ``parameter.data`` leave no trace in torch; a few bytes from the middle of every parameter
    are compared for those.

    :param reads_values: False when the weights are not read yet, and looking at them would read them.
    """

    def __init__(self, model: PreTrainedModel, reads_values: bool = True) -> None:
        self.model = model
        self._reads_values = reads_values
        self.reset()

    def reset(self) -> None:
        """Take the model as it is now for unchanged."""
        self._modules: list[tuple[dict[str, Any], str, nn.Module, type]] = []
        self._class = type(self.model)
        self._parameters: list[tuple[dict[str, Any], str, nn.Parameter, int, int, bytes | None, Any]] = []
        for module in self.model.modules():
            for name, child in module._modules.items():
                if child is not None:
                    self._modules.append((module._modules, name, child, type(child)))
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    view = _middle(parameter) if self._reads_values else None
                    self._parameters.append(
                        (
                            module._parameters,
                            name,
                            parameter,
                            _version(parameter),
                            parameter.data_ptr(),
                            None if view is None else view.tobytes(),
                            view,
                        )
                    )

    def has_other_modules(self) -> bool:
        """Whether modules or their classes were exchanged, or have hooks or forwards of their own."""
        for modules, name, child, kind in self._modules:
            if modules.get(name) is not child or type(child) is not kind or child._forward_hooks:
                return True
            if child._forward_pre_hooks and has_foreign_hooks(child):
                return True
            if "forward" in child.__dict__:
                return True
        model = self.model
        return bool(type(model) is not self._class or has_foreign_hooks(model) or "forward" in model.__dict__)

    def has_other_weights(self) -> bool:
        """Whether parameters were exchanged or written to."""
        for parameters, name, parameter, version, address, sample, view in self._parameters:
            if (
                parameters.get(name) is not parameter
                or _version(parameter) != version
                or parameter.data_ptr() != address
                or (view is not None and view.tobytes() != sample)
            ):
                return True
        return False


def _version(parameter: Tensor) -> int:
    """How often torch saw it written to; parameters made in inference mode are not counted, and only compared."""
    return -1 if parameter.is_inference() else parameter._version


def _middle(parameter: Tensor) -> Any:
    """Some bytes from the middle, as an array that shares the memory; None where that cannot be had."""
    data = parameter.detach()
    if not data.is_contiguous() or data.numel() == 0 or data.device.type != "cpu":
        return None
    count = max(1, _SAMPLE_BYTES // data.element_size())
    start = max(0, data.numel() // 2 - count)
    return data.view(-1)[start : start + count].view(torch.uint8).numpy()
