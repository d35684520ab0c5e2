"""fused_ops: modules are recognised by what they compute, the tokens stay, and the model is as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import llmopt
from llmopt import native
from llmopt.errors import PluginUnavailableError
from llmopt.hf import fusable
from llmopt.ops.fused import FusedOps as Ops
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins.kernel.fused_ops import FusedOps
from tests.equivalence.packed_configs import tiny_packed_model

pytestmark = [pytest.mark.native, pytest.mark.skipif(native.core() is None, reason=str(native.why_not()))]

PROMPTS = tiny_prompts(4, min_length=1, max_length=20)
MODEL = tiny_model()


def counts(pipe: Any) -> dict[str, int]:
    found: dict[str, int] = pipe.stats()["execute.fused_ops"]
    return found


# -- recognition -----------------------------------------------------------------------------------------------------
class Norm(nn.Module):
    """A root mean square norm of nobody's family."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32) + 0.5)
        self.tiny = 1e-6
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.tiny) * self.scale


def norms(module: nn.Module) -> int:
    return len(dict(fusable.find_norms(module, Ops(), torch.float32)))


def test_a_norm_is_recognised_by_what_it_computes() -> None:
    assert norms(Norm()) == 1
    assert norms(nn.RMSNorm(32, eps=1e-5)) == 1


def test_what_computes_something_else_is_left_alone() -> None:
    assert norms(Norm(scale=1.001)) == 0
    assert norms(nn.LayerNorm(32, bias=False)) == 0
    assert norms(nn.Linear(32, 32, bias=False)) == 0


def test_the_epsilon_counts() -> None:
    module = Norm()
    module.eps = 1e-5  # type: ignore[assignment]  # two candidates; the right one is found
    ((_, forward),) = fusable.find_norms(module, Ops(), torch.float32)
    x = torch.full((1, 32), 1e-3)
    torch.testing.assert_close(forward(x), module(x))


@pytest.mark.parametrize(
    ("model_type", "wanted"),
    [
        ("qwen3", (13, 3, 3)),  # norms of queries and keys
        ("gemma2", (13, 3, 3)),  # 1 + weight, gelu, soft-caps
        ("phi3", (7, 3, 3)),  # gate and up in one matrix
        ("olmo2", (13, 3, 3)),
        ("cohere", (0, 3, 3)),  # interleaved rotation, layer norms
        ("granite", (7, 3, 3)),
        ("gpt2", (0, 0, 0)),
    ],
)
def test_families_give_their_tokens_with_what_was_found_in_them(model_type: str, wanted: tuple[int, int, int]) -> None:
    model = tiny_packed_model(model_type)
    with llmopt.build(model, [FusedOps()]) as pipe:
        assert tuple(counts(pipe)[f"num_{kind}"] for kind in ("norms", "rotations", "gated_mlps")) == wanted
        assert_same_tokens(pipe, model, [[5, 9, 33, 7, 21, 60, 11], [17, 3, 44], [70]])


def test_half_precision_rounds_where_the_model_rounds() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    with llmopt.build(model) as plain, llmopt.build(model, [FusedOps(max_linear_rows=0)]) as pipe:
        assert counts(pipe)["num_norms"] == 5
        wanted, found = (
            [o.token_ids for o in p.batch(PROMPTS, max_new_tokens=16, ignore_eos=True, progress=False)]
            for p in (plain, pipe)
        )
    same = sum(a == b for w, f in zip(wanted, found, strict=True) for a, b in zip(w, f, strict=True))
    assert same > 0.9 * 16 * len(PROMPTS)


# -- in a pipeline ---------------------------------------------------------------------------------------------------
def test_the_model_is_as_it_was_while_no_step_runs() -> None:
    before = {name: dict(vars(module)) for name, module in MODEL.named_modules()}
    with llmopt.build(MODEL, ["fused_ops"]) as pipe:
        pipe.batch(PROMPTS, max_new_tokens=4, progress=False)
        assert {name: dict(vars(module)) for name, module in MODEL.named_modules()} == before


def test_another_thread_may_use_the_model_meanwhile() -> None:
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        wanted = MODEL(ids).logits
    done, differences = threading.Event(), []

    def use() -> None:
        with torch.no_grad():
            while not done.is_set():
                differences.append((MODEL(ids).logits - wanted).abs().max().item())

    thread = threading.Thread(target=use)
    with llmopt.build(MODEL, ["fused_ops"]) as pipe:
        thread.start()
        pipe.batch(PROMPTS, max_new_tokens=24, ignore_eos=True, progress=False)
        done.set()
        thread.join()
    assert differences
    assert max(differences) == 0


def test_hooks_of_modules_run_in_the_engine() -> None:
    model, calls = tiny_model(), []
    model.model.norm.register_forward_hook(lambda *_: calls.append(1))
    with llmopt.build(model, ["fused_ops"]) as pipe:
        calls.clear()
        pipe.batch(PROMPTS[:1], max_new_tokens=3, ignore_eos=True, progress=False)
    assert len(calls) == 3


def test_a_module_with_a_forward_of_its_own_keeps_it() -> None:
    model = tiny_model()
    own = model.model.norm.forward
    model.model.norm.forward = lambda x: own(x)
    with llmopt.build(model, ["fused_ops"]) as pipe:
        assert counts(pipe)["num_norms"] == 4
        assert_same_tokens(pipe, model, PROMPTS)


def test_weights_that_are_exchanged_count_at_once() -> None:
    model = tiny_model()
    with llmopt.build(model, ["fused_ops"]) as pipe:
        with torch.no_grad():
            model.model.norm.weight.mul_(0.5)
            model.model.layers[0].mlp.up_proj.weight = nn.Parameter(model.model.layers[1].mlp.up_proj.weight.clone())
        assert_same_tokens(pipe, model, PROMPTS)


def test_with_paged_blocks_the_tokens_are_the_same() -> None:
    with llmopt.build(MODEL, ["paged_kv", "fused_ops"], max_model_len=64, block_size=4) as pipe:
        assert_same_tokens(pipe, MODEL, PROMPTS)


def test_its_option_is_checked_and_zero_leaves_linear_modules_alone() -> None:
    with llmopt.build(MODEL, [FusedOps(max_linear_rows=0)]) as pipe:
        assert "num_linears" not in counts(pipe)
        assert "norms" in pipe.describe().details["fused_ops"]
    with pytest.raises(ValueError, match="max_linear_rows"):
        FusedOps(max_linear_rows=-1)


def test_a_dtype_that_is_not_served_is_refused() -> None:
    with pytest.raises(PluginUnavailableError, match=r"fused ops serve .* and the model is torch.float16"):
        llmopt.build(tiny_model(dtype=torch.float16), ["fused_ops"])
