"""Does a pipeline give the tokens, or the distribution of tokens, that the model's own `generate` gives?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.pipeline import InferencePipeline

_FILL_ID = 0  # for left pads when the model names no pad id; they are masked


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int = _FILL_ID) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask ``[B, longest prompt]``, prompts at the right end."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


@torch.no_grad()
def assert_same_tokens(
    pipeline: InferencePipeline,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    wanted: Tensor | None = None,
    **generate_options: Any,
) -> None:
    """Assert that ``pipeline.generate`` returns exactly what ``model.generate`` returns, in one left-padded batch.

    Both start from the same random state, so sampling can be compared as well. Greedy with 24 new tokens unless the
    options say otherwise.

    :param model: in float32 or wider; half precision breaks ties by rounding, where equality means nothing.
    :param wanted: what `reference_tokens` gave for the same arguments, when they are compared more than once.
    :param generate_options: for both, for example ``max_new_tokens=40, do_sample=True, top_k=20``.
    :raises AssertionError: names the first row and token that differ, or the reason for which the pipeline fell back
        to the model's own loop, in which case nothing would have been compared.
    """
    if model.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"tokens are compared in float32, the model is {model.dtype}. Convert it with model.float().")
    if wanted is None:
        wanted = reference_tokens(model, prompts, seed=seed, **generate_options)
    before = Counter(pipeline.generate.fall_backs)
    got = _generate(pipeline.generate, model, prompts, seed, generate_options)
    fell_back = Counter(pipeline.generate.fall_backs) - before
    if fell_back:
        raise AssertionError(f"the pipeline fell back to the model's own loop: {', '.join(fell_back)}")
    start = max(map(len, prompts))
    for row, (want, found) in enumerate(zip(wanted.tolist(), got.tolist(), strict=True)):
        if want == found:
            continue
        pairs = enumerate(zip(want, found, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(want), len(found)))
        raise AssertionError(
            f"row {row} differs from new token {place - start} on: model.generate gives {want[start:]}, the pipeline "
            f"{found[start:]} (prompt {list(prompts[row])}, options {_options(generate_options)})"
        )


def reference_tokens(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, seed: int = 0, **generate_options: Any
) -> Tensor:
    """What ``model.generate`` returns for the arguments of `assert_same_tokens`, ``[B, length]``."""
    return _generate(model.generate, model, prompts, seed, generate_options)


@torch.no_grad()
def _generate(
    generate: Callable[..., Any],
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    seed: int,
    generate_options: dict[str, Any],
) -> Tensor:
    options = _options(generate_options)
    pad_id = options.get("pad_token_id", model.generation_config.pad_token_id)
    ids, mask = left_padded(prompts, _FILL_ID if pad_id is None else pad_id)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        result: Tensor = generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), **options)
    return result


def _options(given: dict[str, Any]) -> dict[str, Any]:
    return {"max_new_tokens": 24, "do_sample": False, **given}


def assert_same_distribution(
    pipeline: InferencePipeline,
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    num_samples: int = 2000,
    num_tokens: int = 2,
    temperature: float = 1.0,
    top_k: int = 4,
    seed: int = 0,
) -> float:
    """Assert that sampled continuations occur as often as the model's probabilities say.

    Samples ``num_samples`` continuations, each request with its own seed, and compares the counts of whole
    continuations with their exact probabilities by Pearson's chi-squared test. Seeds are fixed, so the outcome repeats.

    :returns: how far the statistic lies above its expectation, in standard deviations of the normal approximation of
        Wilson and Hilferty; beyond 4 the assertion fails (a right sampler does this once in 30,000 seeds).
    :raises AssertionError: the counts do not fit, or a token was sampled that has probability 0.
    """
    expected = _probabilities(model, list(prompt), num_tokens, temperature, top_k)
    outputs = pipeline.batch(
        [{"prompt": list(prompt), "seed": seed * num_samples + number} for number in range(num_samples)],
        progress=False,
        max_new_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        ignore_eos=True,
    )
    counts = Counter(tuple(output.token_ids) for output in outputs)
    for tokens in counts:
        if tokens not in expected:
            raise AssertionError(f"the pipeline sampled {list(tokens)}, which has probability 0 after {list(prompt)}")
    rest_count, rest_expected, statistic, bins = 0, 0.0, 0.0, 0
    for tokens, probability in expected.items():
        wanted = probability * num_samples
        if wanted < 5:  # the test holds for bins with a few samples each; the others share one
            rest_count, rest_expected = rest_count + counts[tokens], rest_expected + wanted
            continue
        statistic += (counts[tokens] - wanted) ** 2 / wanted
        bins += 1
    if rest_expected > 0:
        statistic += (rest_count - rest_expected) ** 2 / max(rest_expected, 1.0)
        bins += 1
    free = max(1, bins - 1)
    spread = 2 / (9 * free)
    deviation: float = ((statistic / free) ** (1 / 3) - (1 - spread)) / spread**0.5
    if deviation > 4:
        most = sorted(expected, key=lambda t: -abs(counts[t] - expected[t] * num_samples))[:3]
        shown = ", ".join(f"{list(t)}: {counts[t]} instead of {expected[t] * num_samples:.0f}" for t in most)
        raise AssertionError(
            f"{num_samples} samples do not fit the model's distribution (chi-squared {statistic:.0f} with {free} "
            f"degrees of freedom, {deviation:.1f} standard deviations): {shown}"
        )
    return deviation


@torch.no_grad()
def _probabilities(
    model: PreTrainedModel, prompt: list[int], num_tokens: int, temperature: float, top_k: int
) -> dict[tuple[int, ...], float]:
    """Exact probabilities of all continuations of ``num_tokens`` tokens under temperature and top-k."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        ids = torch.tensor([prompt + list(tokens) for tokens in known], device=model.device)
        logits = model(ids).logits[:, -1].double() / temperature
        best, where = logits.topk(top_k, dim=-1)
        probs = best.softmax(dim=-1).tolist()
        known = {
            (*tokens, token): so_far * probability
            for (tokens, so_far), row, places in zip(known.items(), probs, where.tolist(), strict=True)
            for token, probability in zip(places, row, strict=True)
        }
    return known
