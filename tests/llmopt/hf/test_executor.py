"""The forward over the block pool: its logits are those of the model's plain forward, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import llmopt
from llmopt.pipeline import InferencePipeline
from llmopt.testing import tiny_model, tiny_prompts
from tests.llmopt.helpers import Drafts, alone, build_tiny, request, wrap


class Recorder:
    """Keeps the logits of every request, in the order of its rows."""

    def __init__(self) -> None:
        self.logits: dict[str, list[Tensor]] = {}
        self.plugin = wrap("execute", self.change)

    def change(self, inner: Any) -> Any:
        def execute(batch: Any, drafts: Any) -> Tensor:
            logits: Tensor = inner(batch, drafts)
            for made, row in zip(batch.logits_requests, logits, strict=True):
                self.logits.setdefault(made.request_id, []).append(row.clone())
            return logits

        return execute


def logits_of(pipe: InferencePipeline, recorder: Recorder, prompts: list[list[int]], new: int = 4) -> list[Tensor]:
    """``[new, vocab]`` per prompt; they run together."""
    recorder.logits.clear()
    pipe.run([request(p, str(i), max_new_tokens=new) for i, p in enumerate(prompts)])
    return [torch.stack(recorder.logits[str(i)]) for i in range(len(prompts))]


def plain_logits(model: Any, ids: list[int], count: int) -> Tensor:
    """The last ``count`` rows of one forward over all ids."""
    with torch.no_grad():
        out: Tensor = model(torch.tensor([ids])).logits[0, -count:].float()
    return out


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mistral"])
def test_a_batch_of_unequal_prompts_gives_each_the_logits_of_a_forward_alone(kind: str) -> None:
    model, recorder = tiny_model(kind), Recorder()
    prompts = tiny_prompts(3, min_length=3, max_length=17)
    with llmopt.build(model, [recorder.plugin], block_size=4) as pipe:
        for prompt, logits in zip(prompts, logits_of(pipe, recorder, prompts), strict=True):
            ids = prompt + logits.argmax(-1).tolist()
            assert torch.allclose(logits, plain_logits(model, ids[:-1], 4), atol=1e-4)


def test_the_content_of_the_neighbours_does_not_change_a_bit_of_a_row() -> None:
    recorder = Recorder()
    mine = tiny_prompts(1, min_length=9, max_length=9, seed=1)[0]
    with build_tiny(plugins=[recorder.plugin], block_size=4) as pipe:
        found = []
        for seed in range(3):
            before, after = tiny_prompts(2, min_length=6, max_length=6, seed=10 + seed)
            found.append(logits_of(pipe, recorder, [before, mine, after])[1])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_number_of_neighbours_changes_a_row_by_rounding_only() -> None:
    recorder = Recorder()
    prompts = tiny_prompts(8, min_length=2, max_length=20)
    with build_tiny(plugins=[recorder.plugin], block_size=4) as pipe:
        together = logits_of(pipe, recorder, prompts, new=8)
        for prompt, logits in zip(prompts, together, strict=True):
            (single,) = logits_of(pipe, recorder, [prompt], new=8)
            assert (logits - single).abs().max() < 1e-4
            assert torch.equal(logits.argmax(-1), single.argmax(-1))


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize(
    ("kind", "changes"), [("llama", {}), ("mistral", {"sliding_window": 8}), ("gemma2", {"sliding_window": 8})]
)
def test_the_size_of_chunks_changes_logits_by_rounding_only(chunk: int, kind: str, changes: dict[str, Any]) -> None:
    model, recorder = tiny_model(kind, **changes), Recorder()
    (prompt,) = tiny_prompts(1, min_length=64, max_length=64)
    with llmopt.build(model, [recorder.plugin], block_size=4, max_tokens_per_step=chunk) as pipe:
        (logits,) = logits_of(pipe, recorder, [prompt])
    ids = prompt + logits.argmax(-1).tolist()
    assert torch.allclose(logits, plain_logits(model, ids[:-1], 4), atol=2e-5, rtol=1e-5)


def test_rows_with_drafts_have_the_logits_of_the_drafted_sequence() -> None:
    model, recorder = tiny_model(), Recorder()
    guesses = [77, 78, 79]
    with llmopt.build(model, [recorder.plugin, Drafts(lambda r: guesses, 3)], block_size=4) as pipe:
        (logits,) = logits_of(pipe, recorder, [[5, 6, 7, 8, 9]], new=5)
    wanted = plain_logits(model, [5, 6, 7, 8, 9, *guesses], 4)
    assert torch.allclose(logits[:4], wanted, atol=1e-4)


@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager")])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_left_padding_leaves_real_positions_finite_and_as_without_it(
    kind: str, dtype: torch.dtype, tolerance: float, attention: str
) -> None:
    model = tiny_model(kind, dtype=dtype)
    model.set_attn_implementation(attention)
    long, short = tiny_prompts(2, min_length=4, max_length=9)[::-1]
    long, short = max(long, short, key=len), min(long, short, key=len)
    ids = torch.tensor([long, [0] * (len(long) - len(short)) + short])
    mask = torch.tensor([[1] * len(long), [0] * (len(long) - len(short)) + [1] * len(short)])
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with llmopt.build(model, block_size=4) as pipe:
        padded = pipe.generate(ids, attention_mask=mask, **options).logits[0][1]
        single = pipe.generate(torch.tensor([short]), **options).logits[0][0]
    assert pipe.generate.fall_backs == {}
    assert torch.isfinite(padded).all()
    size = single.norm()
    assert (padded - single).norm() / size < tolerance
    assert (padded - plain_logits(model, short, 1)[0]).norm() / size < tolerance
    assert model.config._attn_implementation == attention


# -- sliding windows ------------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", [1, 6, 64])
@pytest.mark.parametrize("decode", [False, True])
def test_a_sliding_window_shows_exactly_its_last_positions(chunk: int, decode: bool) -> None:
    """Window 8: the last token sees distances 0 to 7, itself included."""
    model, recorder = tiny_model("mistral", sliding_window=8, num_hidden_layers=1), Recorder()
    (prompt,) = tiny_prompts(1, min_length=20, max_length=20)
    row = 1 if decode else 0  # the first decode, or the end of the prefill
    with llmopt.build(model, [recorder.plugin], block_size=4, max_tokens_per_step=chunk) as pipe:
        last = [prompt, *[[*prompt[: 19 - d], (prompt[19 - d] + 1) % 512, *prompt[20 - d :]] for d in range(20)]]
        if decode:
            # the same token follows in all runs, so that only the changed position differs
            runs = []
            for ids in last:
                made = request(ids, max_new_tokens=2, logit_bias={9: 1000.0})
                recorder.logits.clear()
                pipe.run([made])
                assert made.output_ids == [9, 9]
                runs.append(recorder.logits["r"][row])
        else:
            runs = [logits_of(pipe, recorder, [ids], new=1)[0][0] for ids in last]
    visible = [not torch.allclose(runs[0], run, atol=1e-5) for run in runs[1:]]
    seen = 7 if decode else 8  # in the decode, the distances are one larger
    assert visible == [True] * seen + [False] * (20 - seen)


# -- experts --------------------------------------------------------------------------------------
@pytest.mark.parametrize("normalized", [False, True])
def test_router_weights_are_normalised_as_the_model_says(normalized: bool) -> None:
    sizes: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = tiny_model("qwen2_moe", norm_topk_prob=normalized, shared_expert_intermediate_size=32, **sizes)
    recorder = Recorder()
    with llmopt.build(model, [recorder.plugin], block_size=4) as pipe:
        assert pipe.why_not is None
        (logits,) = logits_of(pipe, recorder, [[5, 6, 7, 8]])
    ids = [5, 6, 7, 8, *logits.argmax(-1).tolist()]
    assert torch.allclose(logits, plain_logits(model, ids[:-1], 4), atol=1e-4)


def test_mixtral_equals_its_own_generate() -> None:
    model = tiny_model("mixtral", num_local_experts=8)
    with llmopt.build(model, block_size=4) as pipe:
        for prompt in tiny_prompts(3):
            got = alone(pipe, prompt, max_new_tokens=10, ignore_eos=True)
            wanted = model.generate(torch.tensor([prompt]), max_new_tokens=10, eos_token_id=-1, do_sample=False)
            assert got == wanted[0, len(prompt) :].tolist()
