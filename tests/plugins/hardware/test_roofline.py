"""roofline: figures for the steps of the user, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import llmopt
from llmopt.batch import BestTokens
from llmopt.errors import PluginOptionError
from llmopt.machine_limits import machine_limits
from llmopt.plugin_search import make_plugin
from llmopt.roofline import ModelCost, Tally
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins.hardware.roofline import Roofline, RooflineExecute

MODEL = tiny_model()


class Inner:
    """A stage of an executor with packed weights."""

    weight_bytes = 1000
    weight_dtype = "int8"
    accepts = "anything"

    def __init__(self) -> None:
        self.result = BestTokens([1], [0.5])

    def __call__(self, batch: Any, drafts: Any) -> BestTokens:
        return self.result


def test_tokens_are_the_models_own() -> None:
    with llmopt.build(MODEL, ["roofline"]) as pipe:
        assert_same_tokens(pipe, MODEL, tiny_prompts(3, max_length=12))


def test_the_steps_of_the_user_are_counted_and_those_of_the_self_test_are_not() -> None:
    with llmopt.build(MODEL, ["roofline"]) as pipe:
        assert pipe.stats()["execute.roofline"] == {}
        assert "no step has run yet" in str(pipe.describe())
        pipe.batch(tiny_prompts(2, min_length=4, max_length=4), max_new_tokens=5, ignore_eos=True, progress=False)
        figures = pipe.stats()["execute.roofline"]
        assert figures["prefill"]["num_steps"] == 1
        assert figures["prefill"]["num_tokens"] == 8
        assert figures["decode"]["num_steps"] == 4
        assert figures["decode"]["num_tokens"] == 8
        for kind in ("prefill", "decode"):
            assert figures[kind]["ms_per_step"] > 0
            assert figures[kind]["fraction_of_limit"] > 0
        assert figures["prefill"]["gflop_per_step"] > figures["decode"]["gflop_per_step"]
        assert "decode: 4 steps" in str(pipe.describe())


def test_bytes_of_a_decode_are_the_weights_and_the_keys_so_far() -> None:
    with llmopt.build(MODEL, ["roofline"]) as pipe:
        pipe.batch([[5, 6, 7]], max_new_tokens=2, ignore_eos=True, progress=False)
        found = pipe.stats()["execute.roofline"]["decode"]["mb_per_step"] * 1e6
        per_token = sum(shape.bytes_per_token for shape in pipe.kv_cache.shapes.values())
    table = MODEL.get_input_embeddings().weight
    tied = MODEL.get_output_embeddings().weight is table
    weights = sum(p.numel() * 4 for p in MODEL.parameters()) - (0 if tied else table.numel() * 4)
    assert found == pytest.approx(weights + table.shape[1] * 4 + 4 * per_token)


def test_packed_weights_of_another_executor_are_counted_as_they_are() -> None:
    class Context:
        model = MODEL
        kv_cache: Any = None
        capabilities: Any = None

    with llmopt.build(MODEL) as pipe:
        context = Context()
        context.kv_cache, context.capabilities = pipe.kv_cache, pipe.capabilities
        stage = Roofline().llmopt_wrap_execute(Inner(), pipe.config, context)  # type: ignore[arg-type]
    assert isinstance(stage, RooflineExecute)
    assert stage.tally.cost.weight_bytes == pytest.approx(1000)
    assert stage.tally.cost.dtype == "int8"


@pytest.mark.native
def test_the_native_decoder_counts_its_own_packed_weights() -> None:
    with llmopt.build(MODEL, ["native", "roofline"]) as pipe:
        packed = pipe.registry.chains["execute"].objects[0]
        shapes = {name: shape for name, (shape, _) in packed.packed.matrices.items()}
        assert packed.weight_bytes == sum(s.num_bytes for name, s in shapes.items() if name != "embedding")
        assert packed.weight_dtype == "float32"
        assert pipe.execute.tally.cost.weight_bytes == pytest.approx(packed.weight_bytes)  # type: ignore[attr-defined]
        pipe.batch([[5, 6, 7]], max_new_tokens=3, ignore_eos=True, progress=False)
        assert pipe.stats()["execute.roofline"]["decode"]["num_steps"] == 2
    assert packed.weight_bytes is None


def test_it_hands_on_what_the_inner_stage_returns_and_offers() -> None:
    inner = Inner()
    stage = RooflineExecute(inner, Tally(ModelCost("float32", 1, 1, 1, 1, 1), machine_limits()))
    batch = torch.nn.Module()
    batch.seq_lens, batch.num_scheduled, batch.num_drafts = (torch.tensor([v]).numpy() for v in (3, 1, 0))  # type: ignore[assignment]
    batch.logits_indices, batch.num_tokens = torch.tensor([0]).numpy(), 1  # type: ignore[assignment]
    assert stage(batch, None) is inner.result  # type: ignore[arg-type, comparison-overlap]
    assert stage.accepts_best
    assert stage.accepts == "anything"
    with pytest.raises(AttributeError):
        _ = stage.missing


@pytest.mark.parametrize("options", [{"seconds": 0}, {"seconds": "long"}, {"refresh": 1}, {"speed": 1}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PluginOptionError):
        make_plugin("roofline", options)
