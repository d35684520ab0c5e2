"""Modules whose forward one fused op can stand for, recognised by what they compute and not by their class.

A norm, a gated MLP or a rotation of an unknown family gains as well: each candidate runs on random input beside the
module's own forward, and is taken when both agree within rounding.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmopt.hf.module_switch import Forward, why_not
from llmopt.ops.fused import ACTIVATIONS, Activation, FusedOps

_GATED_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj"))
_ROTATION = "apply_rotary_pos_emb"  # what every family of transformers calls it


def find_norms(model: nn.Module, ops: FusedOps, dtype: torch.dtype) -> Iterator[tuple[nn.Module, Forward]]:
    """Root mean square norms: modules with one weight, a number that is an epsilon, and nothing else."""
    for module in _switchable(model):
        weight = module._parameters.get("weight")
        has_more = len(module._parameters) > 1 or module._buffers or module._modules
        if weight is None or weight.dim() != 1 or has_more or not _is_here(weight, dtype):
            continue
        for eps in {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.01}:
            forward = _norm_like(module, ops, eps)
            if forward is not None:
                yield module, forward
                break


def _norm_like(module: nn.Module, ops: FusedOps, eps: float) -> Forward | None:
    weight = module._parameters["weight"]
    assert weight is not None
    samples = [_random(3, weight.shape[0], like=weight, scale=scale) for scale in (eps**0.5, 1.0, 30.0)]
    for adds_one in (False, True):
        for rounds_first in (True, False):

            def forward(x: Tensor, adds_one: bool = adds_one, rounds_first: bool = rounds_first) -> Tensor:
                weight = module._parameters["weight"]
                if weight is None or x.dtype is not weight.dtype:
                    return type(module).forward(module, x)  # type: ignore[no-any-return]
                return ops.rms_norm(x, weight, eps, adds_one=adds_one, rounds_first=rounds_first)

            if all(_agrees(forward, module.forward, x) for x in samples):
                return forward
    return None


def find_gated_mlps(model: nn.Module, ops: FusedOps, dtype: torch.dtype) -> Iterator[tuple[nn.Module, Forward]]:
    """``down(act(gate(x)) * up(x))``, with gate and up apart or in one matrix."""
    for module in _switchable(model):
        children = module._modules
        names = next((names for names in _GATED_NAMES if all(name in children for name in names)), None)
        if names is None or module._parameters or module._buffers:
            continue
        others = [child for name, child in children.items() if name not in names and child is not None]
        linear = children[names[0]]
        if len(others) != 1 or not isinstance(linear, nn.Linear) or not _is_here(linear.weight, dtype):
            continue
        activation = _activation_like(others[0], linear.weight)
        if activation is None:
            continue
        forward = _gated_forward(module, ops, names, activation)
        if _agrees(forward, module.forward, _random(3, linear.in_features, like=linear.weight)):
            yield module, forward


def _gated_forward(module: nn.Module, ops: FusedOps, names: tuple[str, ...], activation: Activation) -> Forward:
    children: dict[str, Any] = module._modules  # looked up in each call: an adapter may take a child's place
    if len(names) == 2:
        both_name, down_name = names

        def forward(x: Tensor) -> Any:
            gate, up = children[both_name](x).chunk(2, dim=-1)
            return children[down_name](ops.gated_activation(gate, up, activation))

        return forward
    gate_name, up_name, down_name = names

    def forward_apart(x: Tensor) -> Any:
        return children[down_name](ops.gated_activation(children[gate_name](x), children[up_name](x), activation))

    return forward_apart


def _activation_like(module: nn.Module, weight: Tensor) -> Activation | None:
    x = torch.linspace(-8, 8, 257).to(weight.dtype)
    return next((name for name, function in ACTIVATIONS.items() if _agrees(function, module.forward, x)), None)


def find_rotations(model: nn.Module, ops: FusedOps, dtype: torch.dtype) -> Iterator[tuple[nn.Module, Forward]]:
    """Attention modules that turn queries and keys by a function of their source file.

    The forward is the class's own code, with another function under the name that it looks up: a copy of the globals,
    so neither class nor file are changed.
    """
    rotations: dict[tuple[int, int], Forward | None] = {}  # by function and head size
    for module in _switchable(model):
        dim = getattr(module, "head_dim", None)
        parameter = next(module.parameters(), None)
        function: Any = type(module).forward
        inner = _innermost(function)
        if not isinstance(dim, int) or inner is None or _ROTATION not in inner.__code__.co_names:
            continue
        original = inner.__globals__.get(_ROTATION)
        if original is None or parameter is None or not _is_here(parameter, dtype):
            continue
        key = (id(original), dim)
        if key not in rotations:
            rotations[key] = _rotation_like(original, ops, dim, parameter)
        rotation = rotations[key]
        if rotation is not None:
            yield module, types.MethodType(_with_global(function, _ROTATION, rotation), module)


def _rotation_like(original: Forward, ops: FusedOps, dim: int, like: Tensor) -> Forward | None:
    query, key = (_random(2, num_heads, 3, dim, like=like) for num_heads in (4, 2))

    def make(interleaved: bool, rounds_products: bool, sizes: tuple[int, ...]) -> Forward:
        def rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_known = (
                cos.dim() == 3
                and cos.shape[-1] in sizes
                and query.dtype is key.dtype is cos.dtype is sin.dtype
                and cos.shape == sin.shape
                and cos.shape[1] == query.shape[2] == key.shape[2]
                and not args
                and not kwargs
            )
            if not is_known:
                return original(query, key, cos, sin, *args, **kwargs)
            options = {"interleaved": interleaved, "rounds_products": rounds_products}
            return ops.rotate(query, cos, sin, **options), ops.rotate(key, cos, sin, **options)

        return rotation

    for interleaved in (False, True):
        for rounds_products in (True, False):
            sizes = []
            for size in {dim, dim // 2, dim // 4}:
                if size < 2 or size % 2:
                    continue
                rotation = make(interleaved, rounds_products, (size,))
                angles = _random(1, 3, size, like=like).float()
                cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
                turn = partial(_turn, key=key, cos=cos, sin=sin)
                if all(
                    _agrees(partial(turn, rotation, which), partial(turn, original, which), query) for which in (0, 1)
                ):
                    sizes.append(size)
            if sizes:
                return make(interleaved, rounds_products, tuple(sizes))
    return None


def _turn(rotation: Forward, which: int, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return rotation(query, key, cos, sin)[which]


def find_linears(
    model: nn.Module, ops: FusedOps, dtype: torch.dtype, max_rows: int
) -> Iterator[tuple[nn.Module, Forward]]:
    """Plain linear modules: products with at most ``max_rows`` rows read the weights once and well."""
    for module in _switchable(model):
        if type(module) is nn.Linear and _is_here(module.weight, dtype) and module.weight.stride(1) == 1:
            yield module, _linear_forward(module, ops, dtype, max_rows)


def _linear_forward(module: nn.Linear, ops: FusedOps, dtype: torch.dtype, max_rows: int) -> Forward:
    parameters = module._parameters  # looked up in each call: weights may be exchanged
    num_inputs = module.in_features
    max_size = max_rows * num_inputs
    linear = torch.nn.functional.linear

    def forward(input: Tensor) -> Tensor:
        weight, bias = parameters["weight"], parameters["bias"]
        assert weight is not None
        if not 0 < input.numel() <= max_size or input.dtype is not dtype or weight.dtype is not dtype:
            return linear(input, weight, bias)
        return ops.few_rows_linear(input, weight, bias)

    return forward


def _switchable(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if why_not(module) is None)


def _is_here(weight: Tensor, dtype: torch.dtype) -> bool:
    return weight.dtype is dtype and weight.device.type == "cpu" and type(weight) in (Tensor, nn.Parameter)


def _random(*shape: int, like: Tensor, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(like.dtype)


@torch.no_grad()
def _agrees(candidate: Callable[[Tensor], Any], original: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether two functions give the same but for rounding; in half precision nearly all values are equal."""
    try:
        found, wanted = candidate(x), original(x)
    except Exception:  # the module wants other arguments: it is not what it looks like
        return False
    if not isinstance(wanted, Tensor) or found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return False
    found, wanted = found.float(), wanted.float()
    size = wanted.abs().max().item()
    if x.dtype is torch.float32:
        return torch.allclose(found, wanted, rtol=1e-4, atol=1e-5 * size)
    is_equal = (found - wanted).abs() <= 1e-4 * size
    return torch.allclose(found, wanted, rtol=2**-6, atol=2**-7 * size) and is_equal.float().mean().item() > 0.97


def _innermost(function: Any) -> types.FunctionType | None:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if isinstance(function, types.FunctionType) else None


def _with_global(function: types.FunctionType, name: str, value: Any) -> types.FunctionType:
    """The function with another value under a global name; through decorators, which stay around it.

    A decorator keeps what it wraps in a cell of its closure; the copy has another cell there.
    """
    wrapped = getattr(function, "__wrapped__", None)
    closure = function.__closure__
    scope = function.__globals__
    if wrapped is None:
        scope = {**scope, name: value}
    else:
        inner = _with_global(wrapped, name, value)
        closure = tuple(types.CellType(inner) if c.cell_contents is wrapped else c for c in closure or ())
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy
