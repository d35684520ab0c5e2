"""The residual stream that plugins ask for: whole, for every token, on every executor, and nothing when nobody asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import llmopt
from llmopt import PluginInfo, hookimpl
from llmopt.batch import Batch
from llmopt.errors import PluginHookError, PluginUnavailableError
from llmopt.pipeline import InferencePipeline
from llmopt.testing import tiny_model, tiny_prompts

from .helpers import Drafts, request


class Watcher:
    """Asks for layers and keeps what it is shown: hidden states by position, for each request."""

    def __init__(self, layers: Any, name: str = "watcher") -> None:
        self.info = PluginInfo(name=name, layer="speculation", promise="exact")
        self.layers = layers
        self.shown: dict[str, dict[int, Tensor]] = {}
        self.num_batches = self.num_without = 0
        self.is_off = False

    @hookimpl
    def llmopt_hidden_states(self) -> Any:
        return self.layers

    @hookimpl
    def llmopt_wrap_propose(self, propose: Any) -> Any:
        def look(batch: Batch) -> Any:
            batch.wants_hidden = batch.wants_hidden and not self.is_off
            return propose(batch)

        return look

    @hookimpl
    def llmopt_wrap_verify(self, verify: Any) -> Any:
        def look(batch: Batch, *rest: Any) -> Any:
            self.num_batches += 1
            if batch.hidden is None:
                self.num_without += 1
            else:
                for row, id_ in enumerate(batch.request_ids):
                    for token in range(batch.cu_seqlens_q[row], batch.cu_seqlens_q[row + 1]):
                        place = int(batch.positions[token])
                        self.shown.setdefault(id_, {})[place] = batch.hidden[token].float().clone()
            return verify(batch, *rest)

        return look


def expected(model: Any, ids: list[int], layers: list[int]) -> Tensor:
    """What transformers collects: ``[T, layers, hidden]``."""
    with torch.no_grad():
        states = model(torch.tensor([list(map(int, ids))]), output_hidden_states=True).hidden_states
    return torch.stack([states[i][0] for i in layers], dim=1)


def run(pipe: InferencePipeline, lengths: tuple[int, ...] = (9, 4, 1)) -> list[Any]:
    requests = [
        request(tiny_prompts(1, seed=n, min_length=n, max_length=n)[0], f"r{n}", max_new_tokens=6) for n in lengths
    ]
    pipe.run(requests)
    return requests


def check(watcher: Watcher, kind: str, requests: list[Any], layers: list[int]) -> None:
    model = tiny_model(kind)  # another one, in which transformers leaves its hooks
    for done in requests:
        states = expected(model, done.token_ids, layers)
        shown = watcher.shown[done.request_id]
        assert len(shown) >= len(done.token_ids) - 1
        for place in range(len(done.token_ids) - 1):
            torch.testing.assert_close(shown[place], states[place], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral", "opt", "gpt_neox"])
def test_the_models_own_forward_shows_what_transformers_collects(kind: str) -> None:
    watcher = Watcher([0, 1, 2])
    with llmopt.build(tiny_model(kind), [watcher], max_tokens_per_step=8) as pipe:
        check(watcher, kind, run(pipe), [0, 1, 2])


@pytest.mark.native
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral"])
def test_the_native_decoder_shows_the_same(kind: str) -> None:
    watcher = Watcher([1, 2])
    with llmopt.build(tiny_model(kind), [watcher, "native"], max_tokens_per_step=8) as pipe:
        check(watcher, kind, run(pipe), [1, 2])
        assert pipe.stats()["execute.native"]["num_fallback_rows"] == 0


def test_what_several_plugins_ask_for_is_merged_in_ascending_order() -> None:
    first, second = Watcher([2, 0], "one"), Watcher((0, 1), "two")
    with llmopt.build(tiny_model(), [first, second]) as pipe:
        check(first, "llama", run(pipe), [0, 1, 2])


def test_draft_tokens_have_hidden_states_too() -> None:
    watcher, drafts = Watcher([1]), Drafts(lambda r: [7, 8, 9], 3)
    with llmopt.build(tiny_model(), [watcher, drafts]) as pipe:
        check(watcher, "llama", run(pipe), [1])
        assert drafts.num_proposed > 0


@pytest.mark.parametrize("executor", [[], pytest.param(["native"], marks=pytest.mark.native)])
def test_a_step_that_propose_switched_off_computes_none_and_the_next_begins_switched_on(executor: list[str]) -> None:
    watcher = Watcher([1])
    with llmopt.build(tiny_model(), [watcher, *executor]) as pipe:
        watcher.is_off = True
        run(pipe)
        assert watcher.num_without == watcher.num_batches > 0
        watcher.is_off = False
        watcher.num_batches = watcher.num_without = 0
        watcher.shown.clear()
        check(watcher, "llama", run(pipe), [1])
        assert watcher.num_without == 0


def test_without_a_plugin_that_asks_there_are_none_and_the_model_has_no_hooks() -> None:
    watcher, model = Watcher(None), tiny_model()
    with llmopt.build(model, [watcher]) as pipe:
        run(pipe)
        assert not pipe.batch_builder.wants_hidden
    assert watcher.num_without == watcher.num_batches
    watcher = Watcher([0, 2])
    with llmopt.build(model, [watcher]) as pipe:
        run(pipe)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_rows_that_the_native_decoder_leaves_to_the_plain_one_are_put_in_their_places() -> None:
    pytest.importorskip("llmopt._core")
    watcher, model = Watcher([1, 2]), tiny_model()
    with llmopt.build(model, [watcher, "native"]) as pipe:
        embeddings = model.get_input_embeddings()(torch.tensor([[5, 6, 7], [8, 9, 10]]))
        out = pipe.generate(inputs_embeds=embeddings, max_new_tokens=4, do_sample=False)
        found = list(watcher.shown.values())
        assert len(found) == 2
        assert pipe.stats()["execute.native"]["num_fallback_rows"] > 0
    for shown, prompt, made in zip(found, ([5, 6, 7], [8, 9, 10]), out.tolist(), strict=True):
        states = expected(tiny_model(), [*prompt, *made[-4:]], [1, 2])
        for place in range(6):
            torch.testing.assert_close(shown[place], states[place], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layers", [[3], [-1], [True], "x", [1.0]])
def test_layers_that_the_model_does_not_have_are_refused_with_the_plugins_name(layers: Any) -> None:
    with pytest.raises(PluginHookError, match=r"'watcher' returned .* from 0 to 2"):
        llmopt.build(tiny_model(), [Watcher(layers)])


def test_an_executor_without_hidden_states_is_refused_together_with_the_plugin_that_wants_them() -> None:
    class Blind:
        info = PluginInfo(name="blind", layer="kernel", promise="exact")

        @hookimpl
        def llmopt_replace_execute(self, context: Any) -> Any:
            plain = context.baseline.execute
            return lambda batch, drafts: plain(batch, drafts)

    with pytest.raises(PluginUnavailableError, match="'watcher' needs hidden states .* executor of plugin 'blind'"):
        llmopt.build(tiny_model(), [Watcher([1]), Blind()])
    llmopt.build(tiny_model(), [Watcher(None), Blind()]).close()


def test_a_batch_tells_other_ranks_whether_it_wants_hidden_states() -> None:
    watcher = Watcher([1])
    with llmopt.build(tiny_model(), [watcher]) as pipe:
        waiting = request([5, 6, 7])
        pipe.add(waiting)
        batch = pipe.schedule(pipe.queue)
        assert batch is not None
        assert Batch.from_bytes(batch.to_bytes()).wants_hidden
