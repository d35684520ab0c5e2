from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmopt.errors import PluginOptionError
from llmopt.plugin_options import PluginSpec, parse_plugin


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("demo", {}),
        ("demo:size=512", {"size": 512}),
        ("demo:a=-1,b=2.5,c=1e-3", {"a": -1, "b": 2.5, "c": 1e-3}),
        ("demo:a=true,b=False,c=none,d=True", {"a": True, "b": False, "c": None, "d": True}),
        ("demo:mode=fast,path=/tmp/x-1.bin", {"mode": "fast", "path": "/tmp/x-1.bin"}),
        ("demo:url=a:b", {"url": "a:b"}),
        ("demo:text='a,b=c',n=1", {"text": "a,b=c", "n": 1}),
        ('demo:text="it\'s"', {"text": "it's"}),
        (r"demo:text='it\'s, really'", {"text": "it's, really"}),
        ("demo:sizes=[1, 2],pair=(3,4)", {"sizes": [1, 2], "pair": (3, 4)}),
        ("demo:map={'a': 1, 'b': [2]}", {"map": {"a": 1, "b": [2]}}),
        ("demo: size = 3 , name = x ", {"size": 3, "name": "x"}),
        ("demo:empty=''", {"empty": ""}),
        ("demo:number='7'", {"number": "7"}),
    ],
)
def test_options_are_read_as_literals_or_bare_words(text: str, options: dict[str, Any]) -> None:
    assert parse_plugin(text) == PluginSpec("demo", options)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a plugin name"),
        ("3x", "not a plugin name"),
        ("demo:", "nothing follows the colon"),
        ("demo:size", "'size' is not key=value"),
        ("demo:size=1,,", "is not key=value"),
        ("demo:2=1", "'2' is not an option name"),
        ("demo:a=1,a=2", "'a' is given twice"),
        ("demo:a=", "'a' has no value"),
        ("demo:a='x", "quotation mark ' is not closed"),
        ("demo:a=[1,2", r"bracket \[ is not closed"),
        ("demo:a=two words", "put quotes around"),
        ("demo:a=__import__('os')", "neither a literal"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, reason: str) -> None:
    with pytest.raises(PluginOptionError, match=reason):
        parse_plugin(text)


literals = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(),
    st.lists(st.integers() | st.text(), max_size=3),
)


@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True), literals, min_size=1, max_size=4))
def test_a_printed_plugin_reads_back(options: dict[str, Any]) -> None:
    spec = PluginSpec("demo", options)
    assert parse_plugin(str(spec)) == spec
