"""lm-evaluation-harness, unchanged, on an accelerated model. `make test` installs it: the extra ``eval``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import llmopt
from tests.llmopt.hf.tiny import tiny_llama, tiny_tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install .[eval]")

DOCUMENTS = [
    {"question": "the thing is on", "answer": "a"},
    {"question": "then", "answer": "the"},
    {"question": "an answer in the other", "answer": "x"},
]


def _harness(model: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=2, max_length=200)


def _requests(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_answers_and_likelihoods_are_the_same(sampled: bool) -> None:
    model = tiny_llama()
    harness = _harness(model)
    options = {"until": ["q"], "max_gen_toks": 12, "do_sample": sampled, "temperature": 0.8 if sampled else 0.0}
    prompts = [(document["question"], dict(options)) for document in DOCUMENTS]
    pairs = [(document["question"], " " + document["answer"]) for document in DOCUMENTS]

    def run() -> tuple[list[str], list[tuple[float, bool]]]:
        torch.manual_seed(0)
        answers = harness.generate_until(_requests("generate_until", prompts), disable_tqdm=True)
        return answers, harness.loglikelihood(_requests("loglikelihood", pairs), disable_tqdm=True)

    expected = run()
    with llmopt.accelerate(model) as pipe:
        assert run() == expected
        assert pipe.stats()["fall_backs"] == {}
        assert pipe.stats()["generate_calls"] == {"lockstep": 2}
    assert len(set(expected[0])) == 3


@pytest.mark.filterwarnings("ignore")
def test_a_task_of_local_data_has_the_same_results(tmp_path: Path) -> None:
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    model = tiny_llama()
    harness = _harness(model)

    def run() -> tuple[Any, Any]:
        found = lm_eval.simple_evaluate(model=harness, tasks=[task], log_samples=True, bootstrap_iters=0)
        return found["results"], [sample["resps"] for sample in found["samples"]["local"]]

    expected = run()
    with llmopt.accelerate(model) as pipe:
        assert run() == expected
        assert pipe.stats()["fall_backs"] == {}
        assert sum(pipe.stats()["generate_calls"].values()) == 2
