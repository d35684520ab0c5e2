"""Quality: sums that can be computed by hand, and logits of every position through a pipeline's own executor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import llmopt
from llmopt.bench.comparison import contenders_for
from llmopt.bench.quality import Quality, measure_quality, pipeline_logits, plain_logits, text_ids, windows
from llmopt.errors import RequestError
from llmopt.testing import tiny_model, tiny_tokenizer

MODEL = tiny_model()
IDS = torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def test_divergence_and_perplexity_are_those_of_two_coins() -> None:
    wanted, found = torch.tensor([[0.5, 0.5]] * 3).log(), torch.tensor([[0.25, 0.75]] * 3).log()
    quality = Quality()
    quality.add(wanted, found, [0, 1, 0])
    assert quality.mean_kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert quality.reference_perplexity == pytest.approx(2.0)
    assert quality.perplexity == pytest.approx((1 / 0.75 / 0.25) ** 0.5)
    assert (quality.num_positions, quality.num_followed) == (3, 2)


def test_a_shift_of_all_logits_changes_nothing() -> None:
    logits = torch.randn(300, 50)
    quality = Quality()
    quality.add(logits, logits + 3.0, list(range(50)) * 6)
    assert quality.mean_kl == pytest.approx(0.0, abs=1e-6)
    assert quality.perplexity_shift == pytest.approx(0.0, abs=1e-6)
    assert quality.same_best == 1.0


def test_windows_are_added_up_position_by_position() -> None:
    logits, other = torch.randn(200, 20), torch.randn(200, 20)
    ids = torch.randint(0, 20, (200,)).tolist()
    whole, parts = Quality(), Quality()
    whole.add(logits, other, ids)
    for rows in (slice(0, 150), slice(150, 200)):
        parts.add(logits[rows], other[rows], ids[rows])
    assert parts.mean_kl == pytest.approx(whole.mean_kl, rel=1e-5)
    assert parts.num_followed == whole.num_followed - 1


def test_logits_of_another_text_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 5\) and \(3, 5\) logits for 4 ids"):
        Quality().add(torch.zeros(3, 5), torch.zeros(3, 5), [1, 2, 3, 4])


@pytest.mark.parametrize("plugins", [[], ["paged_kv"]])
@pytest.mark.parametrize("chunk", [7, 40, 256])
def test_a_pipeline_gives_the_models_logits_at_every_position(plugins: list[str], chunk: int) -> None:
    with llmopt.build(MODEL, plugins) as pipe:
        found = pipeline_logits(pipe, IDS, chunk)
        assert pipe.block_pool.num_used == 0
        again = pipeline_logits(pipe, IDS, chunk)
        output = pipe.batch([IDS], max_new_tokens=2, progress=False)  # the pipeline works as before
    assert found.shape == (40, MODEL.config.vocab_size)
    torch.testing.assert_close(found, plain_logits(MODEL, IDS), rtol=1e-3, atol=1e-4)
    assert torch.equal(found, again)
    assert output[0].token_ids[0] == int(found[-1].argmax())


def test_a_model_with_recurrent_states_takes_its_text_whole() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2, state_size=8, expand=1)
    model = MambaForCausalLM(config).eval()
    with llmopt.build(model) as pipe:
        assert pipe.why_not is None
        found = pipeline_logits(pipe, IDS, chunk=7)
    torch.testing.assert_close(found, plain_logits(model, IDS), rtol=1e-3, atol=1e-4)


def test_more_ids_than_the_pool_holds_are_refused_and_nothing_is_kept() -> None:
    with llmopt.build(MODEL, max_model_len=32, block_size=8) as pipe:
        pool = pipe.block_pool
        with pytest.raises(RequestError, match=r"need \d+ KV blocks"):
            pipeline_logits(pipe, [5] * (pool.num_blocks * pool.block_size + 1))
        assert pool.num_used == 0


def test_the_models_own_copy_has_no_distance_and_half_precision_has_some() -> None:
    half = tiny_model(dtype=torch.bfloat16)
    reference = tiny_model()
    seen: list[str] = []
    with contenders_for(half, None, {}, max_model_len=64) as contenders:
        figures = measure_quality(reference, half, contenders, IDS, window=16, on_progress=seen.append)
    assert seen == ["window 1", "window 2", "window 3"]
    assert all(one.num_positions == 40 for one in figures)
    assert all(0 < one.mean_kl < 0.05 for one in figures)
    with contenders_for(reference, None, {}, max_model_len=64) as contenders:
        exact = measure_quality(reference, reference, contenders, IDS, window=16)
    assert all(one.mean_kl < 1e-5 for one in exact)


def test_without_the_engine_the_models_own_forward_is_compared() -> None:
    with contenders_for(MODEL, None, {}, max_model_len=64) as contenders:
        contenders[1].pipe.why_not = "this test says so"  # type: ignore[attr-defined]
        figures = measure_quality(MODEL, MODEL, contenders, IDS)
    assert figures[1].mean_kl == pytest.approx(0.0, abs=1e-6)


def test_windows_leave_out_an_end_that_is_too_short() -> None:
    assert list(windows([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4]]
    assert list(windows([1, 2, 3, 4, 5], 3)) == [[1, 2, 3], [4, 5]]


def test_the_text_ships_with_the_package_and_is_long_and_varied() -> None:
    tokenizer: Any = tiny_tokenizer()
    ids = text_ids(tokenizer)
    assert len(ids) > 2000
    assert text_ids(tokenizer, 100) == ids[:100]
