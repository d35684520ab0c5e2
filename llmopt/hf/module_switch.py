"""Other forwards for modules of a model while a step runs, and their own again afterwards.

While any step runs on a model, its switched modules carry a detour as their ``forward``. The detour looks for the
switches of its own thread. Without one (another thread uses the model meanwhile) it calls the module's own forward, so
the model behaves as if it had not been touched. Hooks on modules run as ever, because ``Module.__call__`` runs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]


class _Local(threading.local):
    def __init__(self) -> None:
        self.forwards: Mapping[int, Forward] = {}  # by id of the module: what this thread's step calls


class _Record:
    """One module that pipelines switch, for all of them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module  # keeps it alive, so that its id is its own
        self.fields = vars(module)  # a module's __setattr__ costs more than the rest of a step's bookkeeping
        self.detour = _detour(module)
        self.num_active = 0  # steps that run right now
        self.num_switches = 0  # switches that are not closed


_local = _Local()
_records: dict[int, _Record] = {}  # by id of the module
_switching = threading.Lock()  # guards the records and the modules' fields


def _detour(module: nn.Module) -> Forward:
    key, original = id(module), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a tracer wants the operations, which it fuses by itself
            return original(*args, **kwargs)
        return _local.forwards.get(key, original)(*args, **kwargs)

    return forward


def why_not(module: nn.Module) -> str | None:
    """Why a module cannot be switched: its forward is not that of its class; None when it can."""
    if "forward" in vars(module) and id(module) not in _records:
        return "it carries a forward of its own (a hook of accelerate, or a patch)"
    if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        return "it is compiled already"
    return None


class ModuleSwitch:
    """Gives modules other forwards for the duration of a ``with`` block, on this thread.

    Several pipelines may switch the same modules, each on its own thread and with its own forwards. Blocks may be
    nested: the inner one has its way where both switch a module.

    :param forwards: module -> what takes the place of its ``forward``; the same arguments, without ``self``.
    :raises ValueError: for a module that cannot be switched; see `why_not`.
    """

    def __init__(self, forwards: Mapping[nn.Module, Forward]) -> None:
        for module in forwards:
            if reason := why_not(module):
                raise ValueError(f"the forward of {type(module).__name__} cannot be replaced: {reason}.")
        self._forwards = {id(module): forward for module, forward in forwards.items()}
        self._outer: Mapping[int, Forward] = {}
        self._merged: tuple[Mapping[int, Forward], Mapping[int, Forward]] | None = None  # outer -> with ours
        with _switching:
            self._records = []
            for module in forwards:
                record = _records.get(id(module))
                if record is None:
                    record = _records[id(module)] = _Record(module)
                record.num_switches += 1
                self._records.append(record)

    def __len__(self) -> int:
        return len(self._records)

    def __enter__(self) -> None:
        with _switching:
            for record in self._records:
                if record.num_active == 0:
                    record.fields.setdefault("forward", record.detour)  # a hook that came meanwhile keeps its place
                record.num_active += 1
        outer = self._outer = _local.forwards
        if outer:
            if self._merged is None or self._merged[0] is not outer:
                self._merged = outer, {**outer, **self._forwards}
            _local.forwards = self._merged[1]
        else:
            _local.forwards = self._forwards

    def __exit__(self, *exception: object) -> None:
        _local.forwards = self._outer
        with _switching:
            for record in self._records:
                record.num_active -= 1
                if record.num_active == 0 and record.fields.get("forward") is record.detour:
                    del record.fields["forward"]

    def close(self) -> None:
        """Forget the modules that no other pipeline switches. Harmless the second time."""
        with _switching:
            for record in self._records:
                record.num_switches -= 1
                if record.num_switches == 0:
                    del _records[id(record.module)]
            self._records = []
            self._forwards = {}
