"""One call that holds a plugin to what every plugin must keep to."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from llmopt import stages as protocols
from llmopt.builder import build
from llmopt.errors import PluginConflictError, PluginUnavailableError, RequestAbortedError, StageError
from llmopt.hookspecs import hookimpl
from llmopt.plugin_info import PluginInfo, info_of
from llmopt.plugin_search import builtin_plugins, find_plugin
from llmopt.request import Request, SamplingParams
from llmopt.testing.blame import raise_on_entry
from llmopt.testing.identity import assert_same_distribution, assert_same_tokens, reference_tokens
from llmopt.testing.leftovers import assert_whole, drain, run_alone
from llmopt.testing.report import CheckResult, PluginReport
from llmopt.testing.snapshot import Snapshot
from llmopt.testing.tiny import tiny_model, tiny_prompts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from llmopt.batch import Batch
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Commit

PluginFactory = Callable[[], Any]

# Small, so that sharing, pre-emption and eviction happen in the checks.
_SIZES: dict[str, Any] = {"block_size": 8, "max_model_len": 96}
_NUM_BLOCKS = 36  # three requests of full length
_NUM_BLOCKS_OF_ONE = 12  # one: a single lost block is noticed


def check_plugin(
    plugin_factory: PluginFactory,
    model: PreTrainedModel | None = None,
    company: Sequence[str | PluginFactory] | None = None,
    *,
    max_new_tokens: int = 24,
) -> PluginReport:
    """Hold a plugin to the rules, and report.

    declaration  name, layer and promise are valid, a lossy plugin states its loss
    hooks        called while the pipeline is built and never in a step
    output       the promise is kept: greedy and sampled tokens, or the distribution, or the stated loss
    company      the same beside every other plugin, listed before and after it
    blame        an exception inside its stages names it
    isolation    a failed step ends the request that made it fail and no other
    blocks       aborted, finished and failed requests leave no KV block behind
    model        weights, configuration, `generate` and logits are bit-equal afterwards
    overhead     time per step is measured and reported, not judged

    :param plugin_factory: makes a fresh plugin for each pipeline, for example the class.
    :param model: float32 causal LM with at least 96 positions, if the plugin needs a special one.
    :param company: names and factories to build it together with; None: every built-in plugin that is not slow to
        build (``PluginInfo.in_company``).
    :param max_new_tokens: length of the compared outputs, at most 48.
    :returns: the report, when everything passed.
    :raises AssertionError: something failed; the message is the report.
    :raises PluginUnavailableError: the plugin cannot run on this machine or model.
    """
    checker = _Checker(plugin_factory, model or tiny_model(), company, max_new_tokens)
    report = checker.run()
    if not report.passed:
        raise AssertionError(str(report))
    return report


class _Failing:
    """A plugin whose stage fails for one request; stands beside the plugin under test."""

    info = PluginInfo(name="llmopt_testing_failing", layer="scheduling", promise="exact")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id

    @hookimpl
    def llmopt_wrap_commit(self, commit: Commit, config: PipelineConfig, context: BuildContext) -> Commit:
        def fail_for_one(batch: Batch, accepted: Any) -> Any:
            for request in batch.requests:
                if request.request_id == self.request_id and request.num_output_tokens >= 3:
                    raise RuntimeError("failure on purpose")
            return commit(batch, accepted)

        return fail_for_one


class _Checker:
    def __init__(
        self,
        factory: PluginFactory,
        model: PreTrainedModel,
        company: Sequence[str | PluginFactory] | None,
        max_new_tokens: int,
    ) -> None:
        self.factory = factory
        self.model = model
        self.max_new_tokens = min(max_new_tokens, 48)
        self.info = info_of(factory())
        self.required = _required(self.info)
        if company is None:
            infos = [(cls, info_of(cls)) for cls in builtin_plugins()]
            company = [cls for cls, info in infos if info.in_company and info.name != self.info.name]
        self.company = [find_plugin(c) if isinstance(c, str) else c for c in company]
        self.report = PluginReport(self.info.name, self.info.promise)
        repeated = tiny_prompts(1, seed=9, min_length=6, max_length=6)[0] * 3  # drafters find something in it
        self._known: dict[str, Tensor] = {}  # options -> what the model generates with them
        self._samples: list[list[int]] | None = None
        self.prompts = [*tiny_prompts(4, min_length=1, max_length=30), repeated]

    def run(self) -> PluginReport:
        before = Snapshot(self.model, self.prompts[-1])
        self._pipeline().close()  # a plugin that cannot run here raises now, and not inside a check
        checks: tuple[tuple[str, Callable[[], str]], ...] = (
            ("declaration", self._declaration),
            ("hooks", self._hooks),
            ("output", lambda: self._output([])),
            ("company", self._company),
            ("blame", self._blame),
            ("isolation", self._isolation),
            ("blocks", self._blocks),
            ("model", lambda: before.compare(self.model, self.prompts[-1])),
            ("overhead", self._overhead),
        )
        for name, check in checks:
            try:
                result = CheckResult(name, True, check())
            except Exception as error:
                shown = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
                result = CheckResult(name, False, shown)
            self.report.checks.append(result)
        return self.report

    # -- pipelines ----------------------------------------------------------------------------------------------------
    def _pipeline(
        self,
        before: Sequence[Any] = (),
        after: Sequence[Any] = (),
        *,
        plain: bool = False,
        num_blocks: int = _NUM_BLOCKS,
    ) -> InferencePipeline:
        mine = [] if plain else [*(find_plugin(name)() for name in self.required), self.factory()]
        pipeline = build(self.model, [*before, *mine, *after], pool_bytes=self._pool_bytes(num_blocks), **_SIZES)
        if pipeline.why_not is not None:
            pipeline.close()
            raise AssertionError(f"the engine does not run the model: {pipeline.why_not}")
        return pipeline

    def _pool_bytes(self, num_blocks: int) -> int:
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * heads * dim * config.num_hidden_layers * self.model.dtype.itemsize
        return int(num_blocks * _SIZES["block_size"] * per_token)

    # -- checks -------------------------------------------------------------------------------------------------------
    def _declaration(self) -> str:
        info = self.info
        assert info.name.isidentifier(), (
            f"the name {info.name!r} is no identifier; users type it in --plugin name:key=1"
        )
        assert info.promise in ("exact", "distribution", "lossy"), f"{info.promise!r} is no promise"
        assert info.promise != "lossy" or info.loss, "a lossy plugin states its measured loss in PluginInfo.loss"
        assert info.summary, "PluginInfo.summary is empty; `llmopt plugins` shows it"
        fresh = self.factory()
        assert fresh is not self.factory(), "the factory returns the same object twice; a pipeline needs its own"
        return f"layer {info.layer}" + (f", requires {', '.join(self.required)}" if self.required else "")

    def _hooks(self) -> str:
        called: list[str] = []
        pipeline = self._pipeline()
        manager = pipeline.registry.manager
        undo = manager.add_hookcall_monitoring(
            lambda name, methods, arguments: called.append(name), lambda outcome, name, methods, arguments: None
        )
        try:
            pipeline.batch(self.prompts, progress=False, max_new_tokens=8)
        finally:
            undo()
            pipeline.close()
        assert not called, f"hooks are called in the step: {', '.join(sorted(set(called)))}"
        mine = [h for h in dir(self.factory()) if h.startswith("llmopt_")]
        chains = pipeline.registry.chains
        self.report.hooks_called = mine
        self.report.stages = {s: list(c.owners) for s, c in chains.items() if self.info.name in c.owners}
        where = ", ".join(self.report.stages) or "no stage"
        return f"{len(mine)} implemented, none called in steps; stands in {where}"

    def _output(self, beside: Sequence[Any], *, is_after: bool = True) -> str:
        pipeline = self._pipeline(() if is_after else beside, beside if is_after else ())
        try:
            if self.info.promise == "lossy" or any(info_of(p).promise == "lossy" for p in beside):
                return self._loss(pipeline)
            return self._same(pipeline)
        finally:
            pipeline.close()

    def _same(self, pipeline: InferencePipeline) -> str:
        greedy = {"max_new_tokens": self.max_new_tokens}
        for options in (
            greedy,
            greedy,
            {**greedy, "do_sample": True, "top_k": 20},
        ):  # what was kept must still be right
            assert_same_tokens(pipeline, self.model, self.prompts, wanted=self._reference(options), **options)
        if self.info.promise == "distribution":
            deviation = assert_same_distribution(pipeline, self.model, self.prompts[-1])
            return f"greedy tokens equal model.generate's; samples fit the distribution ({deviation:+.1f} sigma)"
        wanted, got = self._plainly_sampled(), self._sampled(pipeline)
        assert wanted == got, f"seeded samples differ: {got} instead of {wanted}"
        return f"greedy and sampled tokens of {len(self.prompts)} prompts equal model.generate's"

    def _reference(self, options: dict[str, Any]) -> Tensor:
        """What the model itself generates, computed once."""
        key = str(options)
        if key not in self._known:
            self._known[key] = reference_tokens(self.model, self.prompts, **options)
        return self._known[key]

    def _plainly_sampled(self) -> list[list[int]]:
        """Samples of a pipeline without the plugin, taken once."""
        if self._samples is None:
            with self._pipeline(plain=True) as plain:
                self._samples = self._sampled(plain)
        return self._samples

    def _sampled(self, pipeline: InferencePipeline) -> list[list[int]]:
        """Independent requests with seeds: their tokens depend on seed and position only."""
        requests = [{"prompt": prompt, "seed": number} for number, prompt in enumerate(self.prompts)]
        outputs = pipeline.batch(
            requests, progress=False, temperature=1.0, top_k=20, max_new_tokens=self.max_new_tokens, n=2
        )
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [output.token_ids for output in outputs]

    def _loss(self, pipeline: InferencePipeline) -> str:
        """Share of tokens that agree with the model's, up to the first that differs."""
        agreed = total = 0
        outputs = pipeline.batch(self.prompts, progress=False, max_new_tokens=self.max_new_tokens, ignore_eos=True)
        for prompt, output in zip(self.prompts, outputs, strict=True):
            if output.error is not None:
                raise output.error
            ids = torch.tensor([prompt], device=self.model.device)
            config = copy.deepcopy(self.model.generation_config)
            config.eos_token_id = None
            wanted = self.model.generate(
                ids, generation_config=config, max_new_tokens=self.max_new_tokens, do_sample=False
            )[0, len(prompt) :].tolist()
            assert len(output.token_ids) == len(wanted), f"{len(output.token_ids)} tokens came instead of {len(wanted)}"
            pairs = list(zip(wanted, output.token_ids, strict=True))
            agreed += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            total += len(pairs)
        return f"{agreed} of {total} greedy tokens agree up to the first difference; stated loss: {self.info.loss}"

    def _company(self) -> str:
        met, apart = [], []
        for make in self.company:
            other = info_of(make())
            name = other.name
            if name == self.info.name or name in self.required:
                continue
            for is_after in (True, False):
                try:
                    beside = [*(find_plugin(n)() for n in _required(other) if n != self.info.name), make()]
                    beside = [p for p in beside if info_of(p).name not in self.required]
                    self._output(beside, is_after=is_after)
                except (PluginConflictError, PluginUnavailableError) as error:
                    apart.append(f"{name} ({error})")
                    break
                except Exception as error:
                    place = "after" if is_after else "before"
                    raise AssertionError(f"with {name!r} listed {place} it: {type(error).__name__}: {error}") from error
            else:
                met.append(name)
        told = f"same output beside {', '.join(met)}, listed before and after" if met else "no other plugin to meet"
        return told + (f"; cannot be combined with {'; '.join(apart)}" if apart else "")

    def _blame(self) -> str:
        pipeline = self._pipeline()
        try:
            checked = []
            for chain in pipeline.registry.chains.values():
                for owner, made in zip(chain.owners, chain.objects, strict=True):
                    if owner != self.info.name:
                        continue
                    error = raise_on_entry(made, _num_arguments(chain.stage))
                    blamed = pipeline.registry.blame(error)
                    assert blamed == (chain.stage, owner), (
                        f"an exception in its stage {chain.stage!r} is blamed on {blamed}. Return a function, or an "
                        "object of a class with __call__; not a partial or a builtin."
                    )
                    checked.append(chain.stage)
        finally:
            pipeline.close()
        return f"an exception in {', '.join(checked)} names it" if checked else "stands in no stage"

    def _isolation(self) -> str:
        pipeline = self._pipeline(after=[_Failing("bad")], num_blocks=_NUM_BLOCKS_OF_ONE)
        try:
            options = SamplingParams(max_new_tokens=12, ignore_eos=True)
            prompts = tiny_prompts(3, seed=3, min_length=4, max_length=12)  # all three fit the pool at once
            requests = [
                Request(name, prompt, options, max_len=len(prompt) + 12, wants_text=False)
                for name, prompt in zip(("first", "bad", "last"), prompts, strict=True)
            ]
            wanted = run_alone(self._pipeline(plain=True), requests)
            for request in requests:
                pipeline.add(request)
            drain(pipeline)
            first, bad, last = requests
            assert isinstance(bad.error, StageError), f"the failing request ended with {bad.error!r}, not a StageError"
            assert _Failing.info.name in str(bad.error), f"the wrong plugin is blamed: {bad.error}"
            for request in (first, last):
                assert request.error is None, f"a neighbour of the failing request failed too: {request.error!r}"
                if self.info.promise != "lossy":
                    same = request.output_ids == wanted[request.request_id]
                    assert same, f"a neighbour's tokens changed: {request.output_ids}, not {wanted[request.request_id]}"
            assert_whole(pipeline)
        finally:
            pipeline.close()
        return "one request failed in a step of three, the others finished with their tokens"

    def _blocks(self) -> str:
        pipeline = self._pipeline(num_blocks=_NUM_BLOCKS_OF_ONE)
        try:
            count = 0
            for age in range(12):  # requests of every age are aborted, until leaks would have emptied the pool
                requests = [
                    Request(f"{age}-{number}", prompt, SamplingParams(ignore_eos=True, max_new_tokens=8),
                            max_len=len(prompt) + 8, wants_text=False)
                    for number, prompt in enumerate(self.prompts)
                ]  # fmt: skip
                for request in requests:
                    pipeline.add(request)
                for _ in range(age):
                    pipeline.advance()
                for request in requests:
                    pipeline.abort(request)
                    assert not request.block_table, f"request {request.request_id} holds blocks after its abort"
                    is_failed = request.error is not None and not isinstance(request.error, RequestAbortedError)
                    assert not is_failed, f"request {request.request_id} failed: {request.error!r}"
                count += len(requests)
            assert_whole(pipeline)
        finally:
            pipeline.close()
        return f"{count} requests aborted at 12 ages; afterwards one request can have the whole pool"

    def _overhead(self) -> str:
        """Decode steps of one request, with and without the plugin in turns, so that drift hits both."""
        plain, mine = self._pipeline(plain=True), self._pipeline()
        samples: dict[str, list[float]] = {"plain": [], "mine": []}
        try:
            for round_number in range(7):
                for name, pipeline in (("plain", plain), ("mine", mine)):
                    prompt = tiny_prompts(1, seed=100 + round_number, min_length=16, max_length=16)[0]
                    request = Request("timed", prompt, SamplingParams(ignore_eos=True, max_new_tokens=48),
                                      max_len=64, wants_text=False)  # fmt: skip
                    start, steps = time.perf_counter(), pipeline.stats()["num_steps"]
                    pipeline.run([request])
                    seconds = time.perf_counter() - start
                    if round_number:  # the first one warms up
                        samples[name].append(seconds / (pipeline.stats()["num_steps"] - steps) * 1e6)
        finally:
            plain.close()
            mine.close()
        self.report.step_us = statistics.median(samples["plain"])
        self.report.overhead_us = statistics.median(samples["mine"]) - self.report.step_us
        return f"{self.report.overhead_us:+.0f} us on a step of {self.report.step_us:.0f} us"


def _required(info: PluginInfo) -> list[str]:
    """Names of the plugins that a plugin requires, and that those require, in an order that works."""
    names: list[str] = []
    for name in info.requires:
        names += [n for n in (*_required(info_of(find_plugin(name))), name) if n not in names]
    return names


def _num_arguments(stage: str) -> int:
    """Positional arguments that a stage is called with."""
    protocol = getattr(protocols, "".join(part.title() for part in stage.split("_")))
    code = protocol.__call__.__code__
    return int(code.co_argcount) - 1
