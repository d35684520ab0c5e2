"""The contract of `model.generate`, served by the engine.

transformers prepares the call (inputs, configuration, processors, criteria, warnings, errors) and hands it to the
engine through its ``custom_generate`` argument. What the engine does not do goes to the model's own loop, for this
call, with the reason noted:

    native      greedy rows, nothing edits logits but a minimum length: independent, each leaves when it is finished
    lockstep    processors, criteria, sampling, streamers, scores: rows choose together, see `llmopt.hf.lockstep`
    fall-back   beams, assisted decoding, attentions, caches of the caller, ...: `why_not`
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationMixin, StoppingCriteriaList
from transformers.generation import StopStringCriteria
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from llmopt.hf.fields import ARGUMENTS, FIELDS
from llmopt.hf.lockstep import is_choosing
from llmopt.hf.prepared_call import PreparedCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

    from llmopt.pipeline import InferencePipeline

logger = logging.getLogger("llmopt")

_FIELDS = [(name, field.falls_back) for name, field in FIELDS.items() if field.falls_back is not None]
_ARGUMENTS = [(name, served.falls_back) for name, served in ARGUMENTS.items() if served.falls_back is not None]

# Arguments of transformers' signature; classes with a `generate` of their own need not know all of them.
_NAMED = set(inspect.signature(GenerationMixin.generate).parameters)


class Generate:
    """`pipe.generate`: same arguments, same results, same errors as ``model.generate``."""

    def __init__(self, pipeline: InferencePipeline) -> None:
        self.pipeline = pipeline
        self.calls: Counter[str] = Counter()  # calls that the engine served, "native" and "lockstep"
        self.fall_backs: Counter[str] = Counter()  # reason -> calls that the model's own loop served
        self._call_numbers = itertools.count()
        self._facts = _model_facts(pipeline.model) if pipeline.why_not is None else {}  # as the engine is built for

    def __call__(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        synced_gpus: bool | None = None,
        assistant_model: PreTrainedModel | None = None,
        streamer: BaseStreamer | None = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        custom_generate: str | Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        model = self.pipeline.model
        kwargs.update(
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            synced_gpus=synced_gpus,
            assistant_model=assistant_model,
            streamer=streamer,
            negative_prompt_ids=negative_prompt_ids,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
            custom_generate=custom_generate,
        )
        reason = self.pipeline.why_not or self._why_not(kwargs)
        if reason is not None:
            self.note(reason)
            return self._own_generate(inputs, kwargs)
        self._take_stop_strings(kwargs)
        if self._setting(kwargs, "cache_implementation") == "static":
            self._set(kwargs, "cache_implementation", "dynamic")  # the pool is allocated ahead anyway

        def engine(
            model: Any,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Any:
            call = PreparedCall(
                self, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer
            )
            return call.run(next(self._call_numbers))

        kwargs["custom_generate"] = engine
        return GenerationMixin.generate(model, inputs, **kwargs)

    def _own_generate(self, inputs: Tensor | None, kwargs: dict[str, Any]) -> Any:
        """Call the model's `generate`: its checkpoint's, its class's, or transformers'."""
        model: Any = self.pipeline.model
        given = {name: value for name, value in kwargs.items() if value is not None or name not in _NAMED}
        own = vars(model).get("generate")
        if own is not None and not isinstance(own, Generate):
            return own(inputs, **given)
        return type(model).generate(model, inputs, **given)

    def __reduce__(self) -> tuple[Any, ...]:
        """An accelerated model can be copied and pickled; the copy has its class's own `generate`."""
        return getattr, (self.pipeline.model, "generate")

    def note(self, reason: str) -> None:
        """Count a fall-back, and warn of each reason once."""
        self.fall_backs[reason] += 1
        if self.fall_backs[reason] == 1:
            logger.warning("generate runs through the model's own loop: %s.", reason)

    def _why_not(self, kwargs: dict[str, Any]) -> str | None:
        for name, falls_back in _ARGUMENTS:
            value = kwargs.get(name)
            if value is not None and falls_back(value):
                return f"{name} is given"
        for name, falls_back in _FIELDS:
            value = self._setting(kwargs, name)
            if value is not None and falls_back(value):
                return f"{name}={value!r} is asked for"
        model = self.pipeline.model
        if model.training:
            return "the model is in training mode"
        own = vars(model).get("prepare_inputs_for_generation")  # PEFT's prompt learning puts its own there
        if own is not None and getattr(own, "__func__", None) is not type(model).prepare_inputs_for_generation:
            return "prepare_inputs_for_generation of the model is replaced, and the engine prepares inputs its own way"
        changed = self.changed_fact()
        if changed is not None:
            return changed
        if torch.is_autocast_enabled(model.device.type):
            return "autocast is on, and the KV pool has the model's own dtype"
        if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
            return "the model's parameters are spread over ranks, which must run in step"
        if is_choosing():
            return "it is called by a processor, criterion or streamer, in the middle of a step"
        return None

    def changed_fact(self) -> str | None:
        """What is another about the model than the engine was built for, as a sentence."""
        for name, fact in _model_facts(self.pipeline.model).items():
            if fact != self._facts[name]:
                return (
                    f"the model's {name} was {self._facts[name]} when the pipeline was built and is {fact} now; "
                    "build again to have the engine run it"
                )
        return None

    def _setting(self, kwargs: dict[str, Any], name: str) -> Any:
        """The value of a generation field in this call: argument, then given configuration, then the model's own."""
        if name in kwargs:
            return kwargs[name]
        given = kwargs["generation_config"]
        value = None if given is None else getattr(given, name, None)
        return getattr(self.pipeline.model.generation_config, name, None) if value is None else value

    def _set(self, kwargs: dict[str, Any], name: str, value: Any) -> None:
        """Change a field of this call alone, where transformers reads it first.

        A given configuration is copied: a field beside it in ``kwargs`` would make transformers warn about the mix.
        """
        given, own = kwargs["generation_config"], self.pipeline.model.generation_config
        if given is None or name in kwargs or (value is None and getattr(own, name, None) is not None):
            kwargs[name] = value
        else:
            kwargs["generation_config"] = given = copy.copy(given)
            setattr(given, name, value)

    def _take_stop_strings(self, kwargs: dict[str, Any]) -> None:
        """Turn stop strings into a criterion: transformers does not pair the tokenizer with a ``custom_generate``.

        Without a tokenizer transformers raises, as it should.
        """
        strings, tokenizer = self._setting(kwargs, "stop_strings"), kwargs.get("tokenizer")
        if strings is None or tokenizer is None:
            return
        criteria = StoppingCriteriaList(kwargs["stopping_criteria"] or [])
        if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # the caller's own goes first
            criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
        kwargs["stopping_criteria"] = criteria
        self._set(kwargs, "stop_strings", None)


def _model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """What pool and limits of the engine are made for, by the names that people know it by."""
    embeddings = model.get_input_embeddings()
    return {
        "dtype": model.dtype,
        "device": model.device,
        "number of embeddings": getattr(embeddings, "num_embeddings", None),
    }
