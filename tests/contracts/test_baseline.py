"""With no plugin the pipeline holds the plain stages themselves, and nothing around them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import llmopt
from llmopt import baseline
from llmopt.layers import LAYERS, STAGES
from llmopt.pipeline import InferencePipeline
from llmopt.testing import tiny_model


@pytest.fixture(scope="module")
def pipe() -> Iterator[InferencePipeline]:
    with llmopt.build(tiny_model()) as built:
        yield built


@pytest.mark.parametrize("stage", STAGES)
def test_without_plugins_a_stage_is_the_baseline_object_itself(pipe: InferencePipeline, stage: str) -> None:
    plain = getattr(pipe.baseline, stage)
    assert getattr(pipe, stage) is plain
    assert type(plain).__module__.startswith(("llmopt.baseline.", "llmopt.hf.executor"))
    assert pipe.registry.chains[stage].owners == ("baseline",)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_plain_implementation_of_its_name(stage: str) -> None:
    name = "Baseline" + "".join(part.title() for part in stage.split("_"))
    assert name in baseline.__all__
    assert hasattr(baseline, name)


def test_every_stage_belongs_to_exactly_one_layer() -> None:
    listed = [stage for stages in LAYERS.values() for stage in stages]
    assert sorted(listed) == sorted(STAGES)
    assert list(LAYERS) == ["application", "scheduling", "speculation", "parallelism", "kernel", "memory", "hardware"]


def test_a_plugin_changes_only_the_stages_it_stands_in(pipe: InferencePipeline) -> None:
    with llmopt.build(pipe.model, plugins=["paged_kv"]) as changed:
        wrapped = [stage for stage in STAGES if getattr(changed, stage) is not getattr(changed.baseline, stage)]
    assert wrapped == ["allocate"]
