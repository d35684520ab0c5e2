"""One call of `generate` after transformers has prepared it: from prompts to requests, and from requests to results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.generation import logits_process as builtin_processors

from llmopt.errors import PipelineClosedError, RequestAbortedError
from llmopt.hf.capabilities import text_config
from llmopt.hf.lockstep import LockstepGroup, LockstepOptions
from llmopt.hf.padded import PROMPT_INPUTS, PaddedCall, PaddedPrompt, is_given
from llmopt.request import Request, SamplingParams

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    from llmopt.hf.generate import Generate
    from llmopt.hf.rows import RowStates

_ID_DTYPES = (torch.int64, torch.int32)  # the model's own forward raises for others
_ENGINE_INPUTS = {"attention_mask", "position_ids", "cache", "logits_to_keep", "use_cache", "cache_position"}


class PreparedCall:
    """What transformers prepared, and its way through the engine or back to the model's own loop."""

    def __init__(
        self,
        generate: Generate,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        streamer: Any,
    ) -> None:
        self.generate = generate
        self.pipeline = generate.pipeline
        self.input_ids = input_ids
        self.processors = processors
        self.criteria = criteria
        self.config = config
        self.model_kwargs = model_kwargs
        self.streamer = streamer
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.width = input_ids.shape[1]
        embeddings = model_kwargs.get("inputs_embeds")
        self.prompt_width = self.width if embeddings is None else embeddings.shape[1]
        self.is_padded = False  # the prompt is more than ids, see `llmopt.hf.padded`
        pad = config._pad_token_tensor
        self.pad_token_id = None if pad is None else int(pad)
        max_len = min(
            [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)], default=self.pipeline.max_model_len
        )
        self.num_new = max(1, max_len - self.width)  # criteria are asked after a token, so there is always one

    def run(self, number: int) -> Any:
        prompts = self._prompts() if self.input_ids.dtype in _ID_DTYPES else f"input_ids are {self.input_ids.dtype}"
        reason = prompts if isinstance(prompts, str) else self._why_not(prompts)
        if reason is None and self.is_padded:
            reason = self._why_not_padded()
        if reason is not None or isinstance(prompts, str):
            self.generate.note(str(reason))
            return self._own_loop()
        requests = self._requests(prompts, number)
        group = self._group(requests)
        reason = None if group is None else self._too_large(requests)
        if reason is not None:
            self.generate.note(reason)
            return self._own_loop()
        if self.is_padded:
            self._make_padded(requests)
        for request in requests:
            request.lockstep = group
            request.keep_blocks = group is not None and bool(self.config.return_dict_in_generate)
        try:
            reason = self._run(requests)
            if reason is not None:
                self.generate.note(reason)
                return self._own_loop()
            self.generate.calls["native" if group is None else "lockstep"] += 1
            if group is None:
                return self._sequences(requests)
            if self.streamer is not None:
                self.streamer.end()
            if not self.config.return_dict_in_generate:
                return group.input_ids
            return GenerateDecoderOnlyOutput(
                sequences=group.input_ids,
                scores=tuple(group.result.scores) if self.config.output_scores else None,
                logits=tuple(group.result.logits) if self.config.output_logits else None,
                cache=self._cache(requests, self.prompt_width + group.input_ids.shape[1] - self.width - 1),
            )
        finally:
            self.pipeline.release(requests)

    def _run(self, requests: list[Request]) -> str | None:
        """Run the requests. A padded prefill that fails is left to transformers, which raises its own errors."""
        try:
            self.pipeline.run(requests)
        except (RequestAbortedError, PipelineClosedError):
            raise
        except Exception as error:
            if not self.is_padded or any(request.num_output_tokens for request in requests):
                raise
            return f"its padded prefill fails ({error})"
        return None

    def _make_padded(self, requests: list[Request]) -> None:
        """Give the requests the inputs of the call, to be computed by one forward."""
        kept = {name: value for name, value in self.model_kwargs.items() if name != "cache"}
        lengths = [request.num_prompt_tokens for request in requests]
        call = PaddedCall(self.input_ids, kept, lengths, self.prompt_width, self._has_token_types())
        for row, request in enumerate(requests):
            request.companions, request.media = call, PaddedPrompt(call, row)

    def _has_token_types(self) -> bool:
        """Whether token types are embedded with the tokens; models with media only make masks of prompts from them."""
        config = self.pipeline.model.config
        return config.get_text_config() is config and self.model_kwargs.get("token_type_ids") is not None

    def _own_loop(self) -> Any:
        """The loop that transformers would have entered with this preparation."""
        return self.pipeline.model._sample(
            self.input_ids,
            logits_processor=self.processors,
            stopping_criteria=self.criteria,
            generation_config=self.config,
            synced_gpus=False,
            streamer=self.streamer,
            **self.model_kwargs,
        )

    def _prompts(self) -> list[list[int]] | str:
        """The rows without their left pads, or the reason why they have none."""
        ids = self.input_ids
        if ids.shape[0] == 0:
            return "the batch is empty"
        if self.prompt_width == 0:
            return "the prompt is empty"
        mask = self.model_kwargs.get("attention_mask")
        rows: list[list[int]] = ids.tolist()
        if self.width != self.prompt_width:  # embeddings without ids
            rows = [[0] * self.prompt_width for _ in rows]
        if mask is None:
            return rows
        expected = [ids.shape[0], self.prompt_width]
        if list(mask.shape) != expected:
            if mask.dim() == 2 and mask.shape[0] == expected[0] and mask.shape[1] > expected[1]:
                return "the attention mask is longer than the prompt"
            return f"the attention mask has shape {list(mask.shape)}, and {expected} goes with the prompt"
        mask = mask.long()
        lengths = mask.sum(dim=-1)
        starts = self.prompt_width - lengths
        if not bool((mask == (torch.arange(self.prompt_width, device=mask.device) >= starts[:, None])).all()):
            return "the attention mask has holes or right padding"
        if not bool((lengths > 0).all()):
            return "a row is padding only"
        return [row[start:] for row, start in zip(rows, starts.tolist(), strict=True)]

    def _why_not(self, prompts: list[list[int]]) -> str | None:
        for name, value in self.model_kwargs.items():
            if is_given(value) and name not in _ENGINE_INPUTS:
                if name not in PROMPT_INPUTS:
                    return f"the model input {name!r} is given"
                self.is_padded = True
        keep = self.model_kwargs.get("logits_to_keep")
        if keep is not None and not (isinstance(keep, int) and keep == 1):
            return "logits_to_keep is given"
        positions = self.model_kwargs.get("position_ids")
        if positions is not None:
            if positions.dim() not in (2, 3) or positions.shape[-1] != self.prompt_width:
                return "position_ids do not follow the prompt"
            starts = torch.tensor([self.prompt_width - len(p) for p in prompts], device=positions.device)
            expected = torch.arange(self.prompt_width, device=positions.device) - starts[:, None]
            if not bool(((positions == expected) | (expected < 0)).all()):
                self.is_padded = True  # not 0, 1, 2, ...
        longest = max(map(len, prompts)) + self.num_new
        if longest > self.pipeline.max_model_len:
            return f"prompt and new tokens are longer than the engine's limit of {self.pipeline.max_model_len}"
        if self.pipeline.capabilities.has_states and self.config.return_dict_in_generate:
            states = self._states()
            if states is None or not states.are_in_cache:
                return "a cache is to be returned, and the model keeps recurrent states elsewhere"
        return None

    def _why_not_padded(self) -> str | None:
        """Whether more than ids can reach the forward."""
        chains, plain = self.pipeline.registry.chains, self.pipeline.baseline
        execute = chains["execute"].objects[0]
        if execute is not plain.execute and not getattr(execute, "takes_media", False):
            return "the prompt is more than ids, and the plugin that runs the model takes ids only"
        if len(chains["exchange"].objects) > 1 or chains["exchange"].objects[0] is not plain.exchange:
            return "the prompt is more than ids, and only ids are sent to the other ranks"
        return None

    def _states(self) -> RowStates | None:
        """Where the recurrent states are; None without any, or when a plugin runs the model."""
        plain = self.pipeline.baseline.execute
        found: RowStates | None = plain.states if self.pipeline.registry.chains["execute"].objects[0] is plain else None
        return found

    def _too_large(self, requests: list[Request]) -> str | None:
        """Rows in lockstep must run at the same time."""
        needed = sum(self.pipeline.allocate.num_blocks_ever(r) for r in requests)
        if needed > self.pipeline.block_pool.num_blocks:
            return f"rows that advance together need more than the pool's {self.pipeline.block_pool.num_blocks} blocks"
        limit = self.pipeline.max_num_requests
        if len(requests) > limit:
            return f"more rows must advance together than max_num_requests={limit}"
        return None

    def _requests(self, prompts: list[list[int]], number: int) -> list[Request]:
        copies = self.config.num_return_sequences or 1
        eos = frozenset(i for c in self.criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.tolist())
        sampling = SamplingParams(max_new_tokens=self.num_new, min_new_tokens=min(self._min_new() or 0, self.num_new))
        requests: list[Request] = []
        vocab_size = self.pipeline.capabilities.vocab_size
        for row, prompt in enumerate(prompts):
            parent = requests[row - row % copies] if row % copies and not self.is_padded else None
            if self.is_padded:  # ids of media can be outside the vocabulary
                prompt = [i if 0 <= i < vocab_size else 0 for i in prompt]
            requests.append(
                Request(
                    request_id=f"generate-{number}-{row}",
                    prompt_ids=prompt,
                    sampling=sampling,
                    max_len=len(prompt) + self.num_new,
                    eos_token_ids=eos,
                    parent=parent,
                    wants_text=False,
                )
            )
        return requests

    def _min_new(self) -> int | None:
        """New tokens before an end token may come; None when a processor does anything else."""
        minimum = 0
        eos = {i for c in self.criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.tolist()}
        for processor in self.processors:
            if type(processor) is builtin_processors.MinLengthLogitsProcessor:
                length = processor.min_length  # of a row with its left pads
            elif type(processor) is builtin_processors.MinNewTokensLengthLogitsProcessor:
                length = processor.prompt_length_to_skip + processor.min_new_tokens
            else:
                return None
            if set(processor.eos_token_id.tolist()) != eos:
                return None
            minimum = max(minimum, length - self.width)
        return minimum

    def _group(self, requests: list[Request]) -> LockstepGroup | None:
        """The group that chooses the tokens; None when greedy rows can go on their own."""
        simple = {MaxLengthCriteria, EosTokenCriteria}
        if (
            self._min_new() is not None
            and not self.config.do_sample
            and self.streamer is None
            and not self.config.return_dict_in_generate
            and all(type(c) in simple for c in self.criteria)
        ):
            return None
        is_custom = any(type(p).__module__ != builtin_processors.__name__ for p in self.processors)
        return LockstepGroup(
            self.input_ids,
            requests,
            LockstepOptions(
                processors=self.processors,
                criteria=self.criteria,
                config=self.config,
                has_eos=self.has_eos,
                pad_token_id=self.pad_token_id,
                keep_stepping=is_custom or not self.has_eos or bool(self.config.return_dict_in_generate),
                streamer=self.streamer,
            ),
        )

    def _sequences(self, requests: list[Request]) -> Tensor:
        """Prompts and outputs ``[B, L + T]``, T the longest output; finished rows are filled with the pad id."""
        outputs = [r.output_ids for r in requests]
        longest = max(map(len, outputs))
        pad = self.pad_token_id if self.pad_token_id is not None else 0
        new = torch.tensor([o + [pad] * (longest - len(o)) for o in outputs], dtype=torch.long)
        return torch.cat([self.input_ids, new.to(self.input_ids.device)], dim=-1)

    def _cache(self, requests: list[Request], length: int) -> DynamicCache:
        """The KV of all rows as transformers would return it: ``length`` positions, left-padded, no last token."""
        kv = self.pipeline.kv_cache
        cache = DynamicCache(config=text_config(self.pipeline.model))
        for index in sorted(kv.layers):
            keys, values = [], []
            for request in requests:
                key, value = kv.gather(index, request.block_table, request.num_tokens - 1)
                pad = (0, 0, length - key.shape[1], 0)
                keys.append(torch.nn.functional.pad(key, pad))
                values.append(torch.nn.functional.pad(value, pad))
            cache.update(torch.stack(keys), torch.stack(values), index)
        if (states := self._states()) is not None:
            states.fill(cache, [request.slot for request in requests])
        return cache
