"""The hooks: two for each stage, documented with their signature, called only while a pipeline is built, and obeyed."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import llmopt
from llmopt import PluginInfo, hookimpl, hookspecs
from llmopt import stages as protocols
from llmopt.build_context import BuildContext
from llmopt.config import PipelineConfig
from llmopt.errors import MemoryBudgetError, ModelError, PluginConflictError, PluginHookError
from llmopt.layers import STAGES, layer_of
from llmopt.loaded_model import LoadedModel
from llmopt.pipeline import InferencePipeline
from llmopt.registry import Registry
from llmopt.testing import scripted_model, tiny_model, tiny_tokenizer

ONCE = {
    "llmopt_load": ["source", "load_options"],
    "llmopt_configure": ["config"],
    "llmopt_reserve": ["config", "context"],
    "llmopt_kv_storage": ["config", "context"],
    "llmopt_hidden_states": ["config", "context"],
    "llmopt_finish": ["pipeline"],
}
DOCS = Path(__file__).parents[2] / "docs"
HOOKS = [name for name in vars(hookspecs) if name.startswith("llmopt_")]
TOKENIZER = tiny_tokenizer()
TEXTS = ["Grüße", "世界"]
MODEL = scripted_model(zip(["hi", "hi there"], TEXTS, strict=True), TOKENIZER)


def protocol_of(stage: str) -> Any:
    return getattr(protocols, "".join(part.title() for part in stage.split("_")))


class Forward:
    """A stage that hands every call and every other attribute to the stage inside it, and counts calls."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def plugin(name: str, hook: str, function: Any) -> Any:
    """A plugin with one hook."""
    stage = hook.removeprefix("llmopt_replace_").removeprefix("llmopt_wrap_")
    layer = layer_of(stage) if stage in STAGES else "scheduling"
    body = {"info": PluginInfo(name=name, layer=layer, promise="exact"), hook: staticmethod(hookimpl(function))}
    return type(name, (), body)()


def wrapping(name: str, stage: str, make: Any = Forward) -> Any:
    namespace: dict[str, Any] = {"make": make}
    exec(f"def hook({stage}): return make({stage})", namespace)  # an argument has the name of the stage
    return plugin(name, f"llmopt_wrap_{stage}", namespace["hook"])


# -- what hooks there are --------------------------------------------------------------------------------------------
def test_every_stage_has_a_replacing_and_a_wrapping_hook_and_there_is_nothing_else() -> None:
    wanted = {f"llmopt_{verb}_{stage}" for stage in STAGES for verb in ("replace", "wrap")} | set(ONCE)
    assert set(HOOKS) == wanted


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_documented_protocol(stage: str) -> None:
    protocol = protocol_of(stage)
    assert protocol.__call__.__doc__ or protocol.__doc__


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_the_arguments_of_its_kind_and_says_when_it_runs(hook: str) -> None:
    function = getattr(hookspecs, hook)
    names = list(inspect.signature(function).parameters)
    if hook in ONCE:
        assert names == ONCE[hook]
        assert ":returns:" in function.__doc__
        return
    verb, _, stage = hook.removeprefix("llmopt_").partition("_")
    assert names == [*([stage] if verb == "wrap" else []), "config", "context"]
    assert "Runs " in function.__doc__
    assert ":returns:" in function.__doc__


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_a_section_in_the_docs_with_its_exact_signature(hook: str) -> None:
    page = (DOCS / "hooks.md").read_text()
    section = re.search(rf"^#### {hook}\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert section, f"docs/hooks.md has no section '#### {hook}'; run python docs/make_hooks.py"
    assert f"{hook}{inspect.signature(getattr(hookspecs, hook))}".replace("'", "") in section.group(1)


def test_the_hooks_page_is_what_its_generator_writes() -> None:
    namespace: dict[str, Any] = {"__name__": "make_hooks", "__file__": str(DOCS / "make_hooks.py")}
    exec(compile((DOCS / "make_hooks.py").read_text(), "docs/make_hooks.py", "exec"), namespace)
    assert (DOCS / "hooks.md").read_text() == namespace["page"](), "run python docs/make_hooks.py"


# -- what they do ----------------------------------------------------------------------------------------------------
@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The baseline objects of the pipeline that is being built, for stages that stand on them."""
    seen: dict[str, Any] = {}
    original = Registry.build_stage

    def build_stage(self: Registry, stage: str, baseline: Any, *others: Any) -> Any:
        seen[stage] = baseline
        return original(self, stage, baseline, *others)

    monkeypatch.setattr(Registry, "build_stage", build_stage)
    return seen


def run_text(pipe: InferencePipeline) -> list[str]:
    """Make every stage work: text in, text out, two requests in a batch."""
    return [output.text for output in pipe.batch(["hi", "hi there"], max_new_tokens=8, progress=False)]


@pytest.mark.parametrize("stage", STAGES)
def test_the_pipeline_uses_the_stage_that_a_plugin_put_in_place_of_the_plain_one(
    stage: str, plain: dict[str, Any]
) -> None:
    made: list[Forward] = []

    def replace(context: BuildContext) -> Forward:
        made.append(Forward(plain[stage]))
        return made[0]

    with llmopt.build(MODEL, [plugin("mine", f"llmopt_replace_{stage}", replace)], tokenizer=TOKENIZER) as pipe:
        assert len(made) == 1
        assert getattr(pipe, stage) is made[0]
        assert pipe.registry.chains[stage].owners == ("mine",)
        assert run_text(pipe) == TEXTS
    assert made[0].calls > 0


@pytest.mark.parametrize("stage", STAGES)
def test_wraps_stand_in_the_order_of_the_list_and_the_last_is_outermost(stage: str) -> None:
    inner, outer = wrapping("inner", stage), wrapping("outer", stage)
    for listed in ([inner, outer], [outer, inner]):
        with llmopt.build(MODEL, listed, tokenizer=TOKENIZER) as pipe:
            names = [p.info.name for p in listed]
            assert pipe.registry.chains[stage].owners == ("baseline", *names)
            last, first = getattr(pipe, stage), getattr(pipe, stage).inner
            assert last is pipe.registry.chains[stage].objects[-1]
            assert first.inner is getattr(pipe.baseline, stage)
            assert run_text(pipe) == TEXTS
            assert first.calls == last.calls > 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_replacement_stands_under_every_wrap_wherever_it_is_listed(stage: str, plain: dict[str, Any]) -> None:
    replacing = plugin("replacing", f"llmopt_replace_{stage}", lambda: Forward(plain[stage]))
    with llmopt.build(MODEL, [wrapping("wrapping", stage), replacing], tokenizer=TOKENIZER) as pipe:
        assert pipe.registry.chains[stage].owners == ("replacing", "wrapping")
        assert getattr(pipe, stage).inner is pipe.registry.chains[stage].objects[0]


@pytest.mark.parametrize("stage", STAGES)
def test_two_replacements_of_one_stage_are_an_error_that_names_both(stage: str, plain: dict[str, Any]) -> None:
    both = [plugin(name, f"llmopt_replace_{stage}", lambda: Forward(plain[stage])) for name in ("one", "two")]
    with pytest.raises(PluginConflictError, match=f"'{stage}' is replaced by both 'one' and 'two'"):
        llmopt.build(MODEL, both, tokenizer=TOKENIZER)


@pytest.mark.parametrize("stage", STAGES)
def test_a_hook_that_returns_none_leaves_the_stage_alone(stage: str) -> None:
    shy = [plugin("one", f"llmopt_replace_{stage}", lambda: None), wrapping("two", stage, lambda inner: None)]
    with llmopt.build(MODEL, shy, tokenizer=TOKENIZER) as pipe:
        assert getattr(pipe, stage) is getattr(pipe.baseline, stage)
        assert pipe.registry.chains[stage].owners == ("baseline",)


def test_configurations_are_changed_in_the_order_of_the_list() -> None:
    def doubling(config: PipelineConfig) -> PipelineConfig:
        return config.with_options(max_num_requests=config.scheduling.max_num_requests * 2)

    def three(config: PipelineConfig) -> PipelineConfig:
        return config.with_options(max_num_requests=3)

    first, second = plugin("double", "llmopt_configure", doubling), plugin("three", "llmopt_configure", three)
    with llmopt.build(MODEL, [first, second]) as pipe:
        assert pipe.config.scheduling.max_num_requests == 3
    with llmopt.build(MODEL, [second, first]) as pipe:
        assert pipe.config.scheduling.max_num_requests == 6


# -- when they are called --------------------------------------------------------------------------------------------
def everything() -> Any:
    """One plugin that implements every hook."""
    namespace: dict[str, Any] = {"hookimpl": hookimpl}
    lines = ["class Everything:"]
    for hook in HOOKS:
        names = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
        lines += ["    @hookimpl", f"    def {hook}(self, {names}): self.calls.append({hook!r})"]
    exec("\n".join(lines), namespace)
    made = namespace["Everything"]()
    made.info, made.calls = PluginInfo(name="everything", layer="kernel", promise="exact"), []
    return made


def test_every_hook_is_called_once_while_the_pipeline_is_built_in_the_documented_order() -> None:
    both = everything()
    with llmopt.build(MODEL, [both], tokenizer=TOKENIZER):
        called = list(both.calls)
    ordered = [f"llmopt_{verb}_{stage}" for stage in STAGES for verb in ("replace", "wrap")]
    ordered.insert(ordered.index("llmopt_replace_lookup"), "llmopt_reserve")
    ordered.insert(ordered.index("llmopt_replace_lookup"), "llmopt_kv_storage")
    ordered.insert(ordered.index("llmopt_replace_lookup"), "llmopt_hidden_states")
    assert called == ["llmopt_configure", *ordered, "llmopt_finish"]


def test_the_pool_leaves_the_memory_that_plugins_reserve_to_them() -> None:
    def build(*reserved: Any, **options: Any) -> InferencePipeline:
        probe = plugin("small", "llmopt_wrap_probe", lambda probe: lambda: dataclasses.replace(
            probe(), device_available_bytes=1 << 20))  # fmt: skip
        plugins = [plugin(f"holds{i}", "llmopt_reserve", lambda size=size: size) for i, size in enumerate(reserved)]
        return llmopt.build(tiny_model(), [probe, *plugins], memory_fraction=0.5, block_size=4, **options)

    def num_bytes(pipe: InferencePipeline) -> int:
        with pipe:
            return pipe.describe().pool_bytes

    assert num_bytes(build()) == 512 << 10
    assert num_bytes(build(None, 0)) == 512 << 10
    assert num_bytes(build(256 << 10, 128 << 10)) == (1024 - 256 - 128 << 10) // 2
    assert num_bytes(build("not asked", pool_bytes=64 << 10)) == 64 << 10
    with pytest.raises(MemoryBudgetError, match="beside the 1040384 bytes of plugin 'holds0' and the 8192 bytes of"):
        build(1016 << 10, 8 << 10)
    for wrong in (-1, 0.5, "all"):
        with pytest.raises(PluginHookError, match="from llmopt_reserve; it returns a number of bytes or None"):
            build(wrong)


def test_one_plugin_may_provide_the_memory_of_the_kv_pool() -> None:
    made: list[Any] = []

    def make(shape: Any, dtype: Any, device: Any) -> Any:
        made.append(torch.zeros(shape, dtype=dtype, device=device))
        return made[-1]

    with llmopt.build(tiny_model(), [plugin("mine", "llmopt_kv_storage", lambda: make)]) as pipe:
        layers = list(pipe.kv_cache.layers.values())
        tensors = [tensor for layer in layers for tensor in (layer.key, layer.value)]
        assert [id(t) for t in made] == [id(t) for t in tensors]
        pipe.batch([[5, 6, 7]], max_new_tokens=4, progress=False)
        assert all(tensor.any() for tensor in made)
    both = [plugin(name, "llmopt_kv_storage", lambda: make) for name in ("one", "two")]
    with pytest.raises(PluginConflictError, match="provided by both 'one' and 'two'"):
        llmopt.build(MODEL, both)
    with pytest.raises(PluginHookError, match="from llmopt_kv_storage; it returns a callable"):
        llmopt.build(MODEL, [plugin("wrong", "llmopt_kv_storage", lambda: "memory")])


def test_a_model_given_by_name_is_loaded_by_the_first_plugin_that_wants_to(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    asked: list[tuple[str, dict[str, Any]]] = []

    def shy(source: str, load_options: dict[str, Any]) -> None:
        asked.append((source, load_options))

    plugins = [
        plugin("shy", "llmopt_load", shy),
        plugin("mine", "llmopt_load", lambda: LoadedModel(MODEL, TOKENIZER)),
        plugin("late", "llmopt_load", lambda: pytest.fail("a plugin before it loaded the model")),
    ]
    with llmopt.build(str(tmp_path), plugins, load_options={"dtype": "float32"}) as pipe:
        assert pipe.model is MODEL
        assert pipe.tokenizer is TOKENIZER
    assert asked == [(str(tmp_path), {"dtype": "float32"})]
    with llmopt.build(tmp_path, plugins[:1]) as pipe:
        assert pipe.model.name_or_path == str(tmp_path)
    with llmopt.build(MODEL, plugins[2:]) as pipe:  # loaded already: nobody is asked
        assert pipe.model is MODEL


def test_what_llmopt_load_returns_is_checked_and_its_model_errors_reach_the_user(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(PluginHookError, match="'odd' returned a ScriptedModel from llmopt_load; it returns"):
        llmopt.build(tmp_path, [plugin("odd", "llmopt_load", lambda: MODEL)])

    def torn() -> None:
        raise ModelError("the file is torn")

    with pytest.raises(ModelError, match="the file is torn"):
        llmopt.build(tmp_path, [plugin("torn", "llmopt_load", torn)])


class Counting(torch.nn.Module):
    """Counts forwards of a model, as a pre-hook."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, *_: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("is_replaced", [True, False])
def test_building_runs_no_forward_of_a_model_whose_weights_are_unread_when_execute_is_replaced(
    tmp_path: Path, is_replaced: bool
) -> None:
    model, count = tiny_model(), Counting()
    model.save_pretrained(tmp_path)
    model.register_forward_pre_hook(count)

    class Zeros:
        def __call__(self, batch: Any, drafts: Any) -> torch.Tensor:
            return torch.zeros(len(batch.logits_requests), model.config.vocab_size)

    plugins = [plugin("late", "llmopt_load", lambda: LoadedModel(model, weights_unread=True))]
    if is_replaced:
        plugins.append(plugin("zeros", "llmopt_replace_execute", Zeros))
    with llmopt.build(tmp_path, plugins) as pipe:
        assert (count.calls == 0) is is_replaced
        assert any("compared nothing" in note for note in pipe.describe().notes) is is_replaced
        with llmopt.build(model) as plain:
            assert pipe.capabilities == plain.capabilities  # as a forward with weights finds it


def test_known_layer_shapes_take_the_place_of_the_probe(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    model = tiny_model()
    with llmopt.build(model) as pipe:
        shapes = pipe.capabilities.layer_shapes
    twice = {layer: dataclasses.replace(shape, key_dim=2 * shape.key_dim) for layer, shape in shapes.items()}
    for known, works in ((shapes, True), (twice, False)):
        count = Counting()
        hook = model.register_forward_pre_hook(count)
        load = plugin("known", "llmopt_load", lambda known=known: LoadedModel(model, layer_shapes=known))
        with llmopt.build(tmp_path, [load], self_test=False) as pipe:
            assert count.calls == 0
            assert pipe.capabilities.layer_shapes == known
        with llmopt.build(tmp_path, [load]) as pipe:  # the self-test finds out what is wrong
            assert (pipe.why_not is None) is works
        hook.remove()


def test_no_hook_is_called_after_the_pipeline_is_built() -> None:
    plugins = [everything(), *(wrapping(f"wrap_{stage}", stage) for stage in STAGES)]
    with llmopt.build(MODEL, plugins, tokenizer=TOKENIZER) as pipe:
        called: list[str] = []
        undo = pipe.registry.manager.add_hookcall_monitoring(
            lambda name, methods, arguments: called.append(name), lambda outcome, name, methods, arguments: None
        )
        pipe.registry.manager.hook.llmopt_configure(config=pipe.config)
        assert called == ["llmopt_configure"]  # the monitor sees calls
        called.clear()
        assert run_text(pipe) == TEXTS
        pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=True)
        assert "".join(pipe.stream("hi", max_new_tokens=8)) == TEXTS[0]
        pipe.submit("hi", max_new_tokens=4).result(timeout_s=60)
        pipe.stats()
        pipe.describe()
        undo()
    assert called == []


def test_the_context_fills_up_in_the_order_of_the_stages() -> None:
    known: dict[str, set[str]] = {}
    watched = [
        field.name
        for field in dataclasses.fields(BuildContext)
        if field.name not in ("stages", "baseline", "cost_model")
    ]

    def look(stage: str) -> Any:
        def hook(context: BuildContext) -> None:
            known[stage] = {name for name in watched if getattr(context, name)}
            known[stage] |= {f"stages.{name}" for name in vars(context.stages)}

        return plugin(f"look_{stage}", f"llmopt_replace_{stage}", hook)

    with llmopt.build(MODEL, [look(stage) for stage in STAGES], tokenizer=TOKENIZER):
        pass
    assert known["probe"] == {"model", "tokenizer"}
    assert known["place"] == {"model", "tokenizer", "machine", "stages.probe"}
    assert "capabilities" not in known["shard"]
    assert {"capabilities", "block_pool", "kv_cache", "batch_builder", "max_model_len"} <= known["lookup"]
    for number, stage in enumerate(STAGES):
        assert {f"stages.{name}" for name in STAGES[:number]} <= known[stage]
        assert f"stages.{stage}" not in known[stage]
