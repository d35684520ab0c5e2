"""Does this process still have the weights that the workers loaded?"""

from __future__ import annotations

from typing import Any


class WeightMark:
    """Notices weights that were written to, exchanged or added. Quick: asked for every prompt that is handed over.

    Writes through ``parameter.data`` leave no trace in torch and are not seen.

    :param model: as the workers have it.
    """

    def __init__(self, model: Any) -> None:
        self._is_same = True
        self._sizes: list[tuple[dict[str, Any], int]] = []  # children or parameters of a module, and how many
        self._children: list[tuple[dict[str, Any], str, Any]] = []
        self._parameters: list[tuple[dict[str, Any], str, Any]] = []
        self._counted: list[tuple[Any, int]] = []  # parameters, and how often they had been written to
        for module in model.modules():
            self._sizes += [(owned, len(owned)) for owned in (module._modules, module._parameters)]
            self._children += [(module._modules, name, child) for name, child in module._modules.items()]
            for name, parameter in module._parameters.items():
                self._parameters.append((module._parameters, name, parameter))
                if parameter is not None and not parameter.is_inference():  # torch does not count writes to those
                    self._counted.append((parameter, parameter._version))

    def is_same(self) -> bool:
        """Whether nothing has changed; once False, always False."""
        self._is_same = (
            self._is_same
            and all(len(owned) == count for owned, count in self._sizes)
            and all(owned.get(name) is child for owned, name, child in self._children)
            and all(owned.get(name) is parameter for owned, name, parameter in self._parameters)
            and all(parameter._version == version for parameter, version in self._counted)
        )
        return self._is_same
