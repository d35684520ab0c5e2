"""Plugins are found, checked, ordered and blamed; nothing is dropped in silence."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

import llmopt
from llmopt import PluginInfo, hookimpl, plugin_search, registry
from llmopt.cli.plugins import run as list_plugins
from llmopt.errors import (
    ConfigError,
    InvalidPromptError,
    PluginConflictError,
    PluginError,
    PluginHookError,
    PluginNotFoundError,
    PluginOptionError,
    PluginRequirementError,
    PluginUnavailableError,
    StageError,
)
from llmopt.plugin_search import available_plugins, find_plugin, make_plugin
from llmopt.registry import Registry
from llmopt.testing import tiny_model, tiny_prompts, tiny_tokenizer
from llmopt_plugins import BUILTIN
from llmopt_plugins.memory.paged_kv import PagedKv

MODEL = tiny_model()


class Plain:
    """A plugin without hooks."""

    def __init__(self, name: str, **declared: Any) -> None:
        self.info = PluginInfo(name=name, **{"layer": "memory", "promise": "exact", **declared})


class WrapSchedule(Plain):
    """Wraps the scheduler with whatever ``make`` returns."""

    def __init__(self, make: Any, name: str = "wrap_schedule", **declared: Any) -> None:
        super().__init__(name, layer="scheduling", **declared)
        self.make = make

    @hookimpl
    def llmopt_wrap_schedule(self, schedule: Any) -> Any:
        return self.make(schedule)


class WrapVerify(Plain):
    def __init__(self, make: Any, name: str = "wrap_verify") -> None:
        super().__init__(name, layer="speculation")
        self.make = make

    @hookimpl
    def llmopt_wrap_verify(self, verify: Any) -> Any:
        return self.make(verify)


# -- found by name ---------------------------------------------------------------------------------------------------
def test_a_misspelt_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(PluginNotFoundError, match=r"no plugin is called 'pagedkv'. Did you mean 'paged_kv'\?") as error:
        llmopt.build(MODEL, plugins=["pagedkv"])
    assert isinstance(error.value, LookupError)


def test_a_name_that_is_like_no_other_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PluginNotFoundError, match="Known plugins: .*paged_kv"):
        find_plugin("zzz")


def test_a_bare_string_is_refused_with_the_list_that_was_meant() -> None:
    with pytest.raises(PluginError, match=r"Write plugins=\['paged_kv'\]"):
        llmopt.build(MODEL, plugins="paged_kv")


def test_built_in_plugins_have_unique_names_and_are_all_listed() -> None:
    names = [info.name for info in available_plugins()]
    assert len(names) == len(set(names))
    assert {cls.info.name for cls in BUILTIN} <= set(names)  # type: ignore[attr-defined]


def entry_points_of(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    found = EntryPoints(EntryPoint(name, target, "llmopt") for name, target in points.items())
    monkeypatch.setattr(plugin_search, "entry_points", lambda group: found.select(group=group))


class FromElsewhere(Plain):
    def __init__(self, size: int = 1) -> None:
        super().__init__("from_elsewhere")
        self.size = size

    info = PluginInfo(name="from_elsewhere", layer="kernel", promise="exact")


def test_a_plugin_of_another_distribution_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points_of(monkeypatch, from_elsewhere=f"{__name__}:FromElsewhere")
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.attr])
    assert find_plugin("from_elsewhere") is FromElsewhere
    assert "from_elsewhere" in [info.name for info in available_plugins()]
    with llmopt.build(MODEL, plugins=["from_elsewhere"]) as pipe:
        assert [p["name"] for p in pipe.describe().plugins] == ["from_elsewhere"]
    with pytest.raises(PluginNotFoundError, match="Did you mean 'from_elsewhere'"):
        find_plugin("fromelsewhere")


def test_a_broken_entry_point_is_named_with_its_reason_and_the_others_are_listed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    entry_points_of(monkeypatch, lost="no_such_module_anywhere:Plugin", odd="llmopt.layers:STAGES")
    told = "entry point 'lost' .no_such_module_anywhere:Plugin. cannot be loaded: ModuleNotFoundError"
    with pytest.raises(PluginError, match=told):
        find_plugin("lost")
    with pytest.raises(PluginError, match="entry point 'odd' .* is of no use: .* is not a plugin"):
        find_plugin("odd")
    assert "paged_kv" in [info.name for info in available_plugins()]
    assert "'lost'" in caplog.text
    list_plugins(as_json=False)
    printed = capsys.readouterr()
    assert "paged_kv" in printed.out
    assert "'lost'" in printed.err
    assert "ModuleNotFoundError" in printed.err


def test_a_built_in_plugin_cannot_be_taken_over_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points_of(monkeypatch, paged_kv=f"{__name__}:FromElsewhere")
    assert find_plugin("paged_kv") is PagedKv


# -- options ---------------------------------------------------------------------------------------------------------
def test_options_reach_the_plugin() -> None:
    assert make_plugin("paged_kv", {"watermark": 0.25}).watermark == 0.25


def test_an_option_that_the_plugin_does_not_take_is_refused_with_those_it_takes() -> None:
    with pytest.raises(PluginOptionError, match="'paged_kv' has no option 'size'. Its options: watermark"):
        make_plugin("paged_kv", {"size": 1})


def test_a_value_that_the_plugin_refuses_is_reported_with_its_reason() -> None:
    with pytest.raises(PluginOptionError, match="'paged_kv' refuses its options.*0 <= watermark < 1, found 2"):
        make_plugin("paged_kv", {"watermark": 2})


def test_an_option_of_the_pipeline_that_does_not_exist_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'blocksize'. Known options: .*block_size"):
        llmopt.build(MODEL, blocksize=8)


# -- what is no plugin -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_num_requests": "8"}, "max_num_requests as an int, found '8'"),
        ({"block_size": True}, "block_size as an int, found True"),
        ({"pool_bytes": 1e6}, "pool_bytes as an int, found 1000000.0"),
        ({"max_num_draft": None}, "max_num_draft as an int, found None"),
        ({"memory_fraction": "half"}, "memory_fraction as a number, found 'half'"),
        ({"self_test": "no"}, "self_test as True or False, found 'no'"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_with_the_right_one(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        llmopt.build(MODEL, **options)


def test_a_class_instead_of_an_object_is_refused_with_the_missing_brackets() -> None:
    with pytest.raises(PluginError, match=r"holds the class PagedKv. Have you forgotten the `\(\)`\?"):
        llmopt.build(MODEL, plugins=[PagedKv])


def test_an_object_without_a_declaration_is_refused() -> None:
    with pytest.raises(PluginError, match="has no `info = PluginInfo"):
        llmopt.build(MODEL, plugins=[object()])


def test_a_layer_that_does_not_exist_is_refused_with_the_seven() -> None:
    with pytest.raises(PluginError, match="declares layer 'cache'; the layers are application, scheduling"):
        Registry([Plain("odd", layer="cache")])


def test_a_plugin_that_cannot_be_hashed_is_refused_with_the_remedy() -> None:
    @dataclass
    class Comparing:
        info = PluginInfo(name="comparing", layer="memory", promise="exact")

    with pytest.raises(PluginError, match=r"'comparing' cannot be hashed. Write @dataclass\(eq=False\)"):
        Registry([Comparing()])


# -- company ---------------------------------------------------------------------------------------------------------
def test_a_plugin_listed_twice_is_refused() -> None:
    with pytest.raises(PluginConflictError, match="'paged_kv' is listed twice"):
        llmopt.build(MODEL, plugins=["paged_kv", PagedKv()])


class ReplaceSchedule(Plain):
    @hookimpl
    def llmopt_replace_schedule(self) -> Any:
        return lambda queue: None


def test_two_replacements_of_one_stage_are_refused_with_both_names() -> None:
    with pytest.raises(PluginConflictError, match="stage 'schedule' is replaced by both 'first' and 'second'"):
        llmopt.build(MODEL, plugins=[ReplaceSchedule("first"), ReplaceSchedule("second")])


def test_a_missing_requirement_is_named() -> None:
    with pytest.raises(PluginRequirementError, match=r"'above' requires 'below'. Add it to plugins=\[...\]"):
        Registry([Plain("above", requires=("below",))])


@pytest.mark.parametrize("order", [("above", "below"), ("below", "above")])
def test_a_requirement_is_met_wherever_it_is_listed(order: Sequence[str]) -> None:
    made = {"above": Plain("above", requires=("below",)), "below": Plain("below")}
    assert Registry([made[name] for name in order]).names == list(order)


@pytest.mark.parametrize("order", [("one", "other"), ("other", "one")])
def test_company_that_one_of_two_excludes_is_refused_with_both_names(order: Sequence[str]) -> None:
    made = {"one": Plain("one", conflicts=("other",)), "other": Plain("other")}
    with pytest.raises(PluginConflictError, match="'one' and 'other' exclude each other"):
        Registry([made[name] for name in order])


# -- hooks -----------------------------------------------------------------------------------------------------------
class Misspelt(Plain):
    @hookimpl
    def llmopt_wrap_shedule(self, schedule: Any) -> Any:
        return schedule


class WrongArgument(Plain):
    @hookimpl
    def llmopt_wrap_schedule(self, scheduler: Any) -> Any:
        return scheduler


class Unmarked(Plain):
    def llmopt_wrap_schedule(self, schedule: Any) -> Any:
        return schedule


def test_a_misspelt_hook_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(PluginHookError, match="'misspelt'.*llmopt_wrap_shedule may be meant as llmopt_wrap_schedule"):
        llmopt.build(MODEL, plugins=[Misspelt("misspelt")])


def test_an_argument_that_a_hook_does_not_have_is_refused() -> None:
    with pytest.raises(PluginHookError, match=r"(?s)'wrong'.*Argument\(s\) \{'scheduler'\}"):
        llmopt.build(MODEL, plugins=[WrongArgument("wrong")])


def test_a_hook_without_its_mark_is_refused_instead_of_never_being_called() -> None:
    with pytest.raises(PluginHookError, match="'unmarked' has llmopt_wrap_schedule without @llmopt.hookimpl"):
        llmopt.build(MODEL, plugins=[Unmarked("unmarked")])


def test_a_hook_that_raises_is_reported_with_plugin_hook_and_cause() -> None:
    def fail(schedule: Any) -> Any:
        raise OSError("disk full")

    with pytest.raises(PluginHookError, match="'bad' failed in llmopt_wrap_schedule: OSError: disk full") as error:
        llmopt.build(MODEL, plugins=[WrapSchedule(fail, "bad")])
    assert isinstance(error.value.__cause__, OSError)


def test_a_stage_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(PluginHookError, match="'bad' returned 17 for stage 'schedule'; a stage is callable"):
        llmopt.build(MODEL, plugins=[WrapSchedule(lambda schedule: 17, "bad")])


class Configure(Plain):
    def __init__(self, value: Any) -> None:
        super().__init__("configure")
        self.value = value

    @hookimpl
    def llmopt_configure(self, config: Any) -> Any:
        return self.value(config)


class OneHook(Plain):
    """A plugin with one hook, made from a function of the hook's arguments."""

    def __init__(self, hook: str, body: Any) -> None:
        super().__init__("guilty")
        setattr(self, hook, hookimpl(body))


def _raise(*given: Any) -> Any:
    raise ZeroDivisionError("by design")


@pytest.mark.parametrize("stage", ["probe", "place", "shard"])
@pytest.mark.parametrize(
    ("act", "told"),
    [
        (_raise, "plugin 'guilty' failed in stage '{}': ZeroDivisionError: by design"),
        (lambda *given: None, "plugin 'guilty' returned None from stage '{}', which returns a "),
    ],
)
def test_a_stage_that_fails_while_the_pipeline_is_built_is_blamed_on_its_plugin(
    stage: str, act: Any, told: str
) -> None:
    with pytest.raises(PluginHookError, match=told.format(stage)):
        llmopt.build(MODEL, [OneHook(f"llmopt_replace_{stage}", lambda: act)])


@pytest.mark.parametrize(("stage", "lacks"), [("allocate", "free, num_blocks_ever"), ("attend", "plan, write")])
def test_a_stage_without_the_methods_of_its_protocol_is_refused_with_their_names(stage: str, lacks: str) -> None:
    with pytest.raises(PluginHookError, match=f"plugin 'guilty' returned .* for stage '{stage}', which lacks {lacks}"):
        llmopt.build(MODEL, [OneHook(f"llmopt_replace_{stage}", lambda: _raise)])


@pytest.mark.parametrize(
    ("why", "told"), [(_raise, "failed in why_unavailable: ZeroDiv"), (lambda c: True, "returned True from why_unav")]
)
def test_a_broken_answer_about_availability_is_blamed_on_its_plugin(why: Any, told: str) -> None:
    plugin = Plain("guilty")
    plugin.why_unavailable = why  # type: ignore[attr-defined]
    with pytest.raises(PluginHookError, match=f"plugin 'guilty' {told}"):
        llmopt.build(MODEL, [plugin])


def test_plugins_may_be_none_and_one_alone_must_stand_in_a_list() -> None:
    with llmopt.build(MODEL, plugins=None) as pipe:
        assert pipe.registry.plugins == []
    with pytest.raises(PluginError, match="plugins must be a list, found Plain"):
        llmopt.build(MODEL, plugins=Plain("alone"))  # type: ignore[arg-type]


def test_a_configuration_that_is_none_is_blamed_on_its_plugin() -> None:
    with pytest.raises(PluginHookError, match="'configure' returned {} from llmopt_configure"):
        llmopt.build(MODEL, plugins=[Configure(lambda config: {})])


def test_a_bad_configuration_is_blamed_on_its_plugin() -> None:
    from dataclasses import replace

    def spoil(config: Any) -> Any:
        return replace(config, memory=replace(config.memory, block_size=0))

    with pytest.raises(PluginHookError, match="'configure' made a bad configuration: .*block_size >= 1, found 0"):
        llmopt.build(MODEL, plugins=[Configure(spoil)])


# -- availability ----------------------------------------------------------------------------------------------------
def test_a_device_that_is_not_there_is_named_with_the_one_that_is() -> None:
    with pytest.raises(PluginUnavailableError, match="'fast' needs a device of type cuda, the model is on 'cpu'"):
        llmopt.build(MODEL, plugins=[Plain("fast", devices=("cuda",))])


def test_a_model_that_a_plugin_does_not_serve_is_named_with_those_it_serves() -> None:
    with pytest.raises(PluginUnavailableError, match="'narrow' serves mamba, rwkv, the model is 'llama'"):
        llmopt.build(MODEL, plugins=[Plain("narrow", model_types=("mamba", "rwkv"))])


class Picky(Plain):
    def why_unavailable(self, context: Any) -> str | None:
        return f"needs 99 layers, the model has {context.model.config.num_hidden_layers}"


def test_a_plugin_may_give_its_own_reason() -> None:
    with pytest.raises(PluginUnavailableError, match="'picky' needs 99 layers, the model has 2. Remove it"):
        llmopt.build(MODEL, plugins=[Picky("picky")])


class AutoFast(Plain):
    info = PluginInfo(name="auto_fast", layer="kernel", promise="exact", devices=("cuda",), auto=True)

    def __init__(self) -> None: ...


class AutoOnTop(Plain):
    info = PluginInfo(name="auto_on_top", layer="kernel", promise="exact", requires=("auto_fast",), auto=True)

    def __init__(self) -> None: ...


class NotAuto(Plain):
    info = PluginInfo(name="not_auto", layer="kernel", promise="exact")

    def __init__(self) -> None: ...


def test_auto_leaves_out_what_cannot_run_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "builtin_plugins", lambda: (AutoOnTop, AutoFast, PagedKv, NotAuto))
    with caplog.at_level(logging.WARNING, "llmopt"), llmopt.build(MODEL, plugins="auto") as pipe:
        described = pipe.describe()
    assert [p["name"] for p in described.plugins] == ["paged_kv"]
    assert described.left_out == {
        "auto_fast": "needs a device of type cuda, the model is on 'cpu'",
        "auto_on_top": "requires 'auto_fast', which is left out",
    }
    assert "left out  auto_fast: needs a device of type cuda" in str(described)
    assert sorted(record.getMessage() for record in caplog.records) == [
        "plugins=\"auto\" leaves out 'auto_fast': it needs a device of type cuda, the model is on 'cpu'.",
        "plugins=\"auto\" leaves out 'auto_on_top': it requires 'auto_fast', which is left out.",
    ]


def test_auto_with_the_built_in_plugins_builds_and_generates() -> None:
    with llmopt.build(MODEL, plugins="auto") as pipe:
        outputs = pipe.batch(tiny_prompts(2), max_new_tokens=4, progress=False)
    assert all(output.error is None for output in outputs)


# -- errors in a step ------------------------------------------------------------------------------------------------
def raising_for(bad: str, error: Exception | None = None) -> Any:
    error = error or ZeroDivisionError("by design")

    """Wrap a verifier so that it raises whenever this request is in the batch and has two output tokens."""

    def make(verify: Any) -> Any:
        def raise_for_one(batch: Any, *others: Any) -> Any:
            if any(r.request_id == bad and r.num_output_tokens >= 2 for r in batch.requests):
                raise error
            return verify(batch, *others)

        return raise_for_one

    return make


def test_a_stage_that_raises_ends_the_request_that_makes_it_raise_and_no_other() -> None:
    prompts = tiny_prompts(3, min_length=2)
    requests = [{"prompt": p, "request_id": name} for p, name in zip(prompts, ("a", "bad", "c"), strict=True)]
    with llmopt.build(MODEL) as plain:
        wanted = [o.token_ids for o in plain.batch(prompts, max_new_tokens=8, ignore_eos=True, progress=False)]
    with llmopt.build(MODEL, [WrapVerify(raising_for("bad"), "guilty")], block_size=4) as pipe:
        first, bad, last = pipe.batch(requests, max_new_tokens=8, ignore_eos=True, progress=False)
        assert bad.finish_reason == "error"
        assert isinstance(bad.error, StageError)
        assert isinstance(bad.error.__cause__, ZeroDivisionError)
        for part in ("plugin 'guilty'", "stage 'verify'", "request 'bad'", "ZeroDivisionError: by design"):
            assert part in str(bad.error)
        assert [first.token_ids, last.token_ids] == [wanted[0], wanted[2]]
        assert pipe.block_pool.num_used == 0
        pipe.block_pool.check()
        assert pipe.stats()["num_errors"] == 1
        again = pipe.batch(prompts, max_new_tokens=8, ignore_eos=True, progress=False)
        assert [o.token_ids for o in again] == wanted


def test_an_error_in_the_plain_stage_under_a_wrap_is_not_blamed_on_the_wrap() -> None:
    with llmopt.build(MODEL, [WrapVerify(lambda verify: lambda *given: verify(*given), "innocent")]) as pipe:
        pipe.baseline.verify.__class__ = type("Broken", (type(pipe.baseline.verify),), {"__call__": _broken_verify})
        (output,) = pipe.batch([[5, 6]], max_new_tokens=4, progress=False)
    assert "stage 'verify'" in str(output.error)
    assert "the baseline" in str(output.error)
    assert "innocent" not in str(output.error)


@pytest.mark.parametrize(
    ("stage", "found", "wanted"),
    [
        ("schedule", "'soup'", "a Batch or None"),
        ("budget", "'soup'", "a StepBudget"),
        ("propose", "'soup'", "DraftTokens or None"),
        ("constrain", "'soup'", "a LogitsMask or None"),
        ("exchange", "None", "a Batch with DraftTokens or None"),
        ("execute", "None", "a Tensor"),
        ("verify", "None", "AcceptedTokens"),
        ("commit", "None", "a StepOutput"),
        ("detokenize", "None", "a str"),
        ("tokenize", "None", "a list of ids"),
    ],
)
def test_a_stage_that_returns_the_wrong_thing_is_named_with_its_plugin(stage: str, found: str, wanted: str) -> None:
    result = None if found == "None" else "soup"
    plugin = OneHook(f"llmopt_replace_{stage}", lambda: lambda *given: result)
    with llmopt.build(MODEL, [plugin], tokenizer=tiny_tokenizer(), self_test=False) as pipe:
        told = f"plugin 'guilty' returned {found} from stage '{stage}' for request 'r'; it returns {wanted}"
        with pytest.raises(StageError, match=told):
            pipe.submit([5, 6], request_id="r", max_new_tokens=3, ignore_eos=True).result(timeout_s=30.0)
        assert pipe.block_pool.num_used == 0
        assert len(pipe.queue) == 0


def test_a_wrong_result_does_not_hide_what_a_plugin_raised_itself() -> None:
    with llmopt.build(MODEL, [WrapVerify(raising_for("r", TypeError("its own")), "guilty")]) as pipe:
        (output,) = pipe.batch([{"prompt": [5, 6], "request_id": "r"}], max_new_tokens=4, progress=False)
    assert "plugin 'guilty' failed in stage 'verify'" in str(output.error)


def _broken_verify(self: Any, *given: Any) -> Any:
    raise ArithmeticError("plain")


class Method(Plain):
    """Hands out a bound method as its stage."""

    @hookimpl
    def llmopt_wrap_schedule(self, schedule: Any) -> Any:
        return self.fail

    def fail(self, queue: Any) -> Any:
        if any(request.request_id == "x" for request in queue):
            raise LookupError("by design")
        return None


class Deep:
    """A stage object that fails in a function it calls."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, queue: Any) -> Any:
        return helper(self.inner(queue))


def helper(batch: Any) -> Any:
    if batch is not None and "x" in batch.request_ids:
        raise LookupError("by design")
    return batch


@pytest.mark.parametrize("plugin", [Method("method"), WrapSchedule(Deep, "deep")], ids=["bound method", "deep call"])
def test_blame_finds_the_plugin_behind_methods_and_deep_calls(plugin: Any) -> None:
    with llmopt.build(MODEL, [plugin], self_test=False) as pipe:
        (output,) = pipe.batch([{"prompt": [5, 6], "request_id": "x"}], max_new_tokens=4, progress=False)
    assert "stage 'schedule'" in str(output.error)
    assert f"plugin {plugin.info.name!r}" in str(output.error)


GRAMMAR = """
from llmopt import PluginInfo, hookimpl

class Mask:
    def apply(self, logits):
        raise SyntaxError("by design")

class Grammar:
    info = PluginInfo(name="grammar", layer="application", promise="exact")

    @hookimpl
    def llmopt_replace_constrain(self):
        return lambda batch, drafts: Mask()
"""


def test_blame_finds_the_plugin_behind_an_object_that_its_stage_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_up_grammar.py").write_text(GRAMMAR)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("made_up_grammar")
    with llmopt.build(MODEL, [module.Grammar(), "paged_kv"]) as pipe:
        (output,) = pipe.batch([[5, 6]], max_new_tokens=4, progress=False)
    assert "plugin 'grammar'" in str(output.error)
    assert "stage 'verify'" in str(output.error)  # where the mask is applied


@pytest.mark.parametrize("stage", ["tokenize", "encode_media", "admit"])
def test_a_stage_that_raises_on_the_callers_thread_names_its_plugin_and_leaves_nothing_behind(stage: str) -> None:
    def fail(*given: Any) -> Any:
        raise OSError("by design")

    namespace: dict[str, Any] = {"fail": fail}
    exec(f"def hook(self, {stage}): return fail", namespace)
    body = {
        "info": PluginInfo(name="guilty", layer="application", promise="exact"),
        f"llmopt_wrap_{stage}": hookimpl(namespace["hook"]),
    }
    with llmopt.build(MODEL, [type("Guilty", (), body)()]) as pipe:
        with pytest.raises(StageError, match=f"plugin 'guilty' failed in stage '{stage}'.*OSError: by design"):
            pipe.batch([[5, 6]], max_new_tokens=4, progress=False)
        assert len(pipe.queue) == 0
        assert pipe.block_pool.num_used == 0


def test_an_error_of_the_caller_passes_through_every_plugin_as_it_is() -> None:
    with (
        llmopt.build(MODEL, [WrapVerify(lambda verify: verify)]) as pipe,
        pytest.raises(InvalidPromptError, match="token id 512"),
    ):
        pipe.batch([[512]], max_new_tokens=4, progress=False)


def test_a_listed_name_may_carry_options() -> None:
    assert Registry(["paged_kv:watermark=0.25"]).plugins[0].watermark == 0.25
    with pytest.raises(PluginOptionError, match="size"):
        Registry(["paged_kv:size=1"])
