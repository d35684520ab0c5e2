"""Every drafter in batches where some rows draft, some decode plainly and some are pieces of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import llmopt
from llmopt.batch import Batch
from llmopt.request import Request
from llmopt.testing import Guess, ScriptedDrafter, tiny_prompts
from llmopt.testing.drafters import trees
from llmopt_plugins.speculation.draft_model import DraftModel
from llmopt_plugins.speculation.eagle import Eagle
from llmopt_plugins.speculation.medusa import Medusa
from llmopt_plugins.speculation.ngram import Ngram
from tests.llmopt.helpers import assert_idle, request, wrap

from .eagle_oracle import forgetful_model, write_oracle
from .medusa_heads import write_trained

EXECUTORS = [pytest.param([], id="torch"), pytest.param(["native"], id="native", marks=pytest.mark.native)]
LENGTHS = (40, 3, 57, 1, 26, 12)  # the second, fourth and sixth draft
NUM_NEW = 24


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def target() -> Any:
    return forgetful_model()


@pytest.fixture(scope="module")
def prompts(target: Any) -> list[list[int]]:
    """Those that draft go back to a token that they hold already, and the model, which forgets, goes on as there."""
    found = [tiny_prompts(1, seed=n, min_length=n, max_length=n)[0] for n in LENGTHS]
    said = generated(target, found, 9)
    return [[*p, *said[n], p[-1]] if n % 2 else p for n, p in enumerate(found)]


@pytest.fixture(scope="module")
def wanted(target: Any, prompts: list[list[int]]) -> list[list[int]]:
    return generated(target, prompts, NUM_NEW)


def generated(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    found = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        found.append(ids[0, len(prompt) :].tolist())
    return found


@pytest.fixture(scope="module")
def makers(
    target: Any, prompts: list[list[int]], wanted: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Callable[[int], Any]]:
    """Drafters of a fixed number of drafts, by name."""
    answers = {tuple(prompt): ids for prompt, ids in zip(prompts, wanted, strict=True)}
    oracle = write_oracle(tmp_path_factory.mktemp("eagle"), target)
    trained = write_trained(tmp_path_factory.mktemp("medusa"), target, prompts, wanted, num_steps=40)
    planter = trees(answers, target.config.vocab_size, 0.8)

    def of_some(made: Request, room: int) -> Guess:
        return planter(made, room) if may_draft(made) else Guess(())

    return {
        "ngram": lambda count: Ngram(count, min_match=1),
        "draft_model": lambda count: DraftModel(target, num_draft=8, fixed=count),
        "eagle": lambda count: Eagle(oracle, fixed=count),
        "medusa": lambda count: Medusa(trained, 8, count),
        "adversary": lambda count: ScriptedDrafter(of_some, count),
    }


def may_draft(made: Request) -> bool:
    return int(made.request_id[1:]) % 2 == 1


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle", "medusa", "adversary"])
def test_rows_that_draft_decode_and_read_their_prompt_in_one_forward_say_what_generate_says(
    drafter: str,
    executor: list[str],
    target: Any,
    prompts: list[list[int]],
    wanted: list[list[int]],
    makers: dict[str, Callable[[int], Any]],
) -> None:
    for num_draft in (1, 3, 8):
        seen: set[str] = set()

        def watch(execute: Any, seen: set[str] = seen) -> Any:
            def look(batch: Batch, drafts: Any) -> Any:
                pairs = zip(batch.num_scheduled.tolist(), batch.num_drafts.tolist(), strict=True)
                kinds = {"drafts" if drafts else "decode" if new == 1 else "chunk" for new, drafts in pairs}
                seen.update(kinds if len(kinds) < 3 else {"all"})
                return execute(batch, drafts)

            look.takes_trees = True  # type: ignore[attr-defined]
            return look

        plugins = [
            *executor,
            "chunked_prefill",
            "paged_kv",
            makers[drafter](num_draft),
            wrap("execute", watch, "watch"),
        ]
        with llmopt.build(target, plugins, block_size=4, max_tokens_per_step=24, self_test=False) as pipe:
            for stage in pipe.registry.chains["propose"].objects:
                if hasattr(stage, "goodput"):  # as if drafts of the other rows did not pay
                    stage.goodput.plan = lambda rows, most=num_draft: [
                        min(row.room, most) if may_draft(row.request) else 0 for row in rows
                    ]
            rows = [
                request(prompt, f"r{number}", max_new_tokens=NUM_NEW, ignore_eos=True)
                for number, prompt in enumerate(prompts)
            ]
            for row in rows:  # they come while others are under way
                pipe.add(row)
                pipe.advance()
                pipe.advance()
            while not all(row.is_finished for row in rows):
                pipe.advance()
            assert [row.output_ids for row in rows] == wanted, num_draft
            assert "all" in seen, seen
            assert pipe.stats()["num_new_tokens"] == len(rows) * NUM_NEW
            assert_idle(pipe)
