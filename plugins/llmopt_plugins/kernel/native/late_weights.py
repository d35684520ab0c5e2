"""A model whose weights are filled in when its own forward is first called.

The native decoder reads packed weights, and the model's parameters are only needed when a call falls back to the
model's own forward. Until then their memory is reserved and not touched, so it is not resident. Modules are filled one
by one, as their forward comes; ``state_dict`` (and so ``save_pretrained``) fills all of them.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt_plugins.kernel.native.packing import WeightSource

logger = logging.getLogger("llmopt")


class LateWeights:
    """Reserves the parameters of a model that is on the meta device, and fills them from a source.

    :param model: parameters on the meta device; buffers as they are to be.
    :param source: hands out every parameter by its name.
    :param what: the source in words, for the warning.
    """

    def __init__(self, model: PreTrainedModel, source: WeightSource, what: str) -> None:
        self.source, self.what = source, what
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._names: dict[nn.Parameter, str] = {}  # those that are not filled yet
        self._hooks: dict[nn.Module, list[Any]] = {}
        names = {id(p): name for name, p in model.named_parameters()}
        memory = {key: _reserve(p) for p in model.parameters() if (key := id(p)) in names}
        for module in model.modules():
            own = {name: p for name, p in module._parameters.items() if p is not None}
            for name, parameter in own.items():
                module._parameters[name] = memory[id(parameter)]  # tied ones stay tied
                self._names[memory[id(parameter)]] = names[id(parameter)]
            if own:
                self._hooks[module] = [
                    module.register_forward_pre_hook(self.before_forward),
                    module.register_state_dict_pre_hook(self.before_state_dict),
                ]
        self.num_bytes = sum(p.numel() * p.element_size() for p in self._names)

    @property
    def is_filled(self) -> bool:
        """Whether every parameter has its values."""
        return not self._names

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Fill the module whose forward is about to run. A forward on shapes alone reads nothing."""
        if not any(p.is_meta for p in module.parameters(recurse=False)):
            self._fill(module)

    def before_state_dict(self, module: nn.Module, *_: Any) -> None:
        """Fill the module whose parameters are about to be read."""
        self._fill(module)

    @torch.no_grad()
    def _fill(self, module: nn.Module) -> None:
        with self._lock:
            for hook in self._hooks.pop(module, ()):
                hook.remove()
            for parameter in module.parameters(recurse=False):
                name = self._names.pop(parameter, None)
                if name is None:  # filled by the module that it is shared with
                    continue
                if self.num_bytes:
                    logger.warning(
                        "the model's own forward is called: its weights are read from %s and become dense, up to "
                        "%.0f MiB. Calls that the native decoder serves need none of them.",
                        self.what,
                        self.num_bytes / 2**20,
                    )
                    self.num_bytes = 0
                parameter.data.copy_(self.source.dense(name))  # .data: the parameter does not count as changed


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks that do more than fill in its weights."""
    own = (isinstance(getattr(hook, "__self__", None), LateWeights) for hook in module._forward_pre_hooks.values())
    return bool(module._forward_hooks) or not all(own)


def _reserve(parameter: Tensor) -> nn.Parameter:
    empty = torch.empty(parameter.shape, dtype=parameter.dtype)  # pages are taken when they are written
    return nn.Parameter(empty, requires_grad=False)
