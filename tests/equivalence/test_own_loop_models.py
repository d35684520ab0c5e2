"""Models that the engine cannot run go through their own `generate`, and say why."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from llmopt import build
from tests.equivalence.own_loop_configs import OWN_LOOP_CONFIGS, tiny_own_loop_model
from tests.equivalence.packed_configs import tiny_packed_model, vary
from tests.equivalence.test_packed_models import IDS, MASK, generate, sample


@pytest.mark.parametrize("name", OWN_LOOP_CONFIGS)
def test_a_model_the_engine_cannot_run_gives_its_own_tokens_with_one_warning_and_a_reason(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_own_loop_model(name)
    caplog.set_level(logging.WARNING, logger="llmopt")
    with build(model, max_tokens_per_step=5, block_size=4) as pipe:
        assert torch.equal(generate(pipe), generate(model))
        options = {"temperature": 0.9, "top_p": 0.8}
        assert torch.equal(sample(pipe, 3, options), sample(model, 3, options))
        assert pipe.why_not is not None
        assert OWN_LOOP_CONFIGS[name].reason in pipe.why_not
        assert pipe.why_not in str(pipe.describe())
        assert pipe.generate.fall_backs == {pipe.why_not: 2}
    warnings = [r for r in caplog.records if r.name == "llmopt" and r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert OWN_LOOP_CONFIGS[name].reason in warnings[0].getMessage()


def test_a_class_with_a_generate_of_its_own_is_called_through_it() -> None:
    config = WhisperConfig(
        vocab_size=96,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=20,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = vary(WhisperForConditionalGeneration(config))
    sound = torch.randn(2, 8, 40)
    own: list[Any] = []
    whisper_generate = WhisperForConditionalGeneration.generate

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        own.append(kwargs)
        return whisper_generate(self, *args, **kwargs)

    wanted = model.generate(sound, max_new_tokens=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WhisperForConditionalGeneration, "generate", spy)
        pipe = build(model)
        assert torch.equal(pipe.generate(sound, max_new_tokens=8), wanted)
    assert len(own) == 1
    assert pipe.why_not is not None


def test_a_generate_that_the_checkpoint_brings_is_called() -> None:
    model: Any = tiny_packed_model("llama")
    model.generate = lambda inputs, **kwargs: (inputs, kwargs)  # transformers puts it on the object
    pipe = build(model)
    assert pipe.why_not == "the checkpoint brings its own generate"
    inputs, kwargs = pipe.generate(IDS, attention_mask=MASK, top_k=None)
    assert inputs is IDS
    assert set(kwargs) == {"attention_mask", "top_k"}
