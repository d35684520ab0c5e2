"""Every option of every built-in plugin refuses what it cannot mean, and says its name."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from llmopt.errors import PluginOptionError
from llmopt.plugin_info import info_of
from llmopt.plugin_options import parse_plugin
from llmopt.plugin_search import make_plugin
from llmopt_plugins import BUILTIN

_VALUES: dict[str, tuple[Any, ...]] = {  # kind of value -> some of it
    "bool": (True, False),
    "int": (1, -1),
    "float": (1.5, 4.0, 8.0, math.nan, -1.0),
    "str": ("nonsense", ""),
    "list": ([], [1]),
    "object": (object(),),
}
_TAKEN = {  # what stands in an annotation -> kinds of values that may be meant
    "bool": ("bool",),
    "int": ("int",),
    "float": ("int", "float"),
    "str": ("str",),
    "Sequence[int]": ("list",),
}
_NEVER = (-1, "")  # whatever the option is; and NaN


def options() -> list[Any]:
    """Plugin, option, and kinds of values that its annotation allows."""
    found = []
    for plugin in BUILTIN:
        name = info_of(plugin).name
        for option in inspect.signature(plugin).parameters.values():
            annotation = str(option.annotation).replace("Literal['auto']", "str")
            taken = {kind for part in annotation.split(" | ") for kind in _TAKEN.get(part, ())}
            found.append(pytest.param(name, option.name, taken, id=f"{name}-{option.name}"))
    return found


@pytest.mark.parametrize(("name", "option", "taken"), options())
def test_an_option_of_a_wrong_type_or_an_impossible_value_is_refused_by_name(
    name: str, option: str, taken: set[str]
) -> None:
    for kind, values in _VALUES.items():
        for value in values:
            if kind not in taken or value in _NEVER or value != value:
                with pytest.raises(PluginOptionError, match=rf"\b{option} (is|goes with) .*, found"):
                    make_plugin(name, {option: value})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("weight_quant:minimum=true", "minimum goes with bits=4 or head_bits=4, found minimum=True without that"),
        ("kv_offload:file_bytes=1000000", "file_bytes goes with a folder, found file_bytes=1000000"),
        ("ngram:shared_tokens=100", "shared_tokens goes with shared=True"),
        ("medusa:heads=x,epsilon=0.5,delta=0.5", "epsilon, delta go with lossy=True, found epsilon=0.5, delta=0.5"),
        ("chunked_prefill:chunk_size=64,max_itl_ms=5", "max_itl_ms goes with chunk_size=auto"),
        ("request_order:policy=fcfs,ageing_s=5", "ageing_s goes with policy="),
        ("pd_separation:workers=2", 'workers goes with mode="process", found workers=2'),
        ("pd_separation:mode=process,slice_ms=3,patience_ms=5", 'slice_ms, patience_ms go with mode="slices"'),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_with_what_it_needs(text: str, told: str) -> None:
    spec = parse_plugin(text)
    with pytest.raises(PluginOptionError, match=told):
        make_plugin(spec.name, spec.options)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("draft_model:fixed=7", "fixed is a whole number from 1 to 6, which is num_draft=6, or None, found 7"),
        ("eagle:fixed=13", "fixed is a whole number from 1 to 12, which is num_draft=12"),
        ("medusa:fixed=13", "fixed is a whole number from 1 to 12, which is num_draft=12"),
        ("ngram:num_draft=17", "num_draft is a whole number from 1 to 16"),
        ("weight_quant:bits=4,group=0", "group is None, 32, 64 or 128, found 0"),
        ("draft_model:bits=4,native=false", "found bits=4 and native=False"),
        ("draft_model:device=nowhere", "device is the name of a device, .*found 'nowhere'"),
        ("pd_separation:slice_ms=0", 'slice_ms is a number of milliseconds above 0, or "auto", found 0'),
        ("pd_separation:patience_ms=0", "patience_ms is a number of milliseconds above 0, found 0"),
        ("pd_separation:mode=process,listen=nowhere", "listen is \"host:port\", or None, found 'nowhere'"),
    ],
)
def test_an_option_beyond_its_limits_is_refused_with_the_limits(text: str, told: str) -> None:
    spec = parse_plugin(text)
    with pytest.raises(PluginOptionError, match=told):
        make_plugin(spec.name, spec.options)


def test_a_tokenizer_beside_a_draft_model_that_is_only_named_is_refused() -> None:
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {}

    with pytest.raises(PluginOptionError, match="tokenizer goes with a model that is given loaded"):
        make_plugin("draft_model", {"model": "somewhere", "tokenizer": Tokenizer()})
