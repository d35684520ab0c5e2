"""The drafter: every head looks at the last hidden state, and the best guesses become a tree."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from llmopt_plugins.speculation.drafter import Draft

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch
    from llmopt.request import Request
    from llmopt_plugins.speculation.medusa.checkpoint import Heads


class MedusaDrafter:
    """Drafts from hidden states that the target's last step left behind.

    :param heads: as read.
    :param head_weight: output matrix of the model, for heads that have none, ``[vocab, h]``.
    :param layer: place of the final hidden state in ``batch.hidden``.
    :param top_k: guesses of each head that the tree may use.
    """

    num_kinds = 1
    is_cheap = False
    wants_all_steps = True  # the hidden states of a step serve the next one

    def __init__(
        self,
        heads: Heads,
        head_weight: Tensor,
        head_bias: Tensor | None,
        layer: int,
        top_k: int = 4,
    ) -> None:
        self.has_trees = True  # until it is told otherwise
        self.layer = layer
        dtype, device = head_weight.dtype, head_weight.device
        with torch.inference_mode(False):
            blocks = [[head.blocks[j] for head in heads.heads] for j in range(len(heads.heads[0].blocks))]
            self._weights = [torch.stack([b["weight"] for b in row]).to(device, dtype) for row in blocks]  # [H, h, h]
            self._biases = [
                torch.stack([b.get("bias", b["weight"].new_zeros(b["weight"].shape[0])) for b in row]).to(device, dtype)
                for row in blocks
            ]
            outputs = [head.output for head in heads.heads]
            self._outputs: Tensor | None = None  # [H, rows, h], or [rows, h] for all
            if outputs[0] is None or all(output is outputs[0] for output in outputs):
                shared = head_weight if outputs[0] is None else outputs[0]
                self._shared: Tensor | None = shared.to(device, dtype)
                self._bias = head_bias if outputs[0] is None else None
            else:
                self._shared, self._bias = None, None
                self._outputs = torch.stack([o for o in outputs if o is not None]).to(device, dtype)
            self._token_map = None if heads.token_map is None else heads.token_map.to(device)
        self.num_heads = len(outputs)
        rows = (self._shared if self._shared is not None else outputs[0]).shape[0]  # type: ignore[union-attr]
        self.top_k = min(top_k, rows)
        self._hidden: dict[Request, tuple[int, Tensor]] = {}  # tokens of the request then, [h]
        self._dtype, self._device = dtype, device
        self._estimate_s = self._time_once(head_weight.shape[1])

    def _time_once(self, size: int) -> float:
        states = torch.zeros((1, size), dtype=self._dtype, device=self._device)
        self._guess(states)
        start = time.perf_counter()
        self._guess(states)
        return time.perf_counter() - start

    def logits(self, states: Tensor) -> Tensor:
        """``states [B, h]`` -> ``[H, B, rows]``: head by head."""
        x = states.to(self._dtype).expand(self.num_heads, *states.shape)
        for weight, bias in zip(self._weights, self._biases, strict=True):
            x = x + functional.silu(torch.baddbmm(bias[:, None], x, weight.transpose(1, 2)))
        if self._shared is not None:
            return functional.linear(x, self._shared, self._bias)
        assert self._outputs is not None
        return torch.bmm(x, self._outputs.transpose(1, 2))

    def _guess(self, states: Tensor) -> tuple[list[list[list[float]]], list[list[list[int]]]]:
        """Probabilities and ids ``[B][H][top_k]``, best first."""
        with torch.inference_mode():
            logits = self.logits(states).float()
            best, places = logits.topk(self.top_k, dim=-1)
            chances = (best - logits.logsumexp(dim=-1, keepdim=True)).exp()
            if self._token_map is not None:
                places = self._token_map[places]
            return chances.transpose(0, 1).tolist(), places.transpose(0, 1).tolist()

    def draft(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(requests)
        places = [
            place for place, request in enumerate(requests) if self._hidden.get(request, (-1,))[0] == request.num_tokens
        ]
        if not places:
            return drafts
        chances, tokens = self._guess(torch.stack([self._hidden[requests[place]][1] for place in places]))
        for row, place in enumerate(places):
            if self.has_trees:
                drafts[place] = best_tree(chances[row], tokens[row], limits[place])
            else:
                drafts[place] = Draft([ids[0] for ids in tokens[row]][: limits[place]])
        return drafts

    def draft_s(self, num_rows: int, num_draft: int) -> float:
        return self._estimate_s

    def observe(self, batch: Batch, accepted: AcceptedTokens) -> None:
        hidden = batch.hidden
        if hidden is None:
            return
        ends, counts = batch.cu_seqlens_q.tolist(), batch.num_drafts.tolist()
        row_of = {request: row for row, request in enumerate(batch.requests)}
        kept: list[Request] = []
        places: list[int] = []
        for index, request in enumerate(accepted.requests):
            row = row_of.get(request)
            if row is None or request.is_finished:
                continue
            newest = ends[row + 1] - counts[row] - 1  # the last token before the drafts
            if accepted.paths is None:
                ahead = len(accepted.token_ids[index]) - 1
            else:
                ahead = accepted.paths[index][-1] + 1 if accepted.paths[index] else 0
            kept.append(request)
            places.append(newest + ahead)
        if kept:
            with torch.inference_mode():
                states = hidden[torch.tensor(places, device=hidden.device), self.layer].to(self._device)
            for request, state in zip(kept, states, strict=True):
                self._hidden[request] = request.num_tokens, state

    def forget(self, request: Request) -> None:
        self._hidden.pop(request, None)

    def stats(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads}


def best_tree(chances: list[list[float]], tokens: list[list[int]], size: int) -> Draft:
    """The tree of the most likely paths, if heads are independent of each other.

    :param chances: of the guesses of each head, best first.
    :param tokens: these guesses.
    :param size: nodes at most.
    """
    ids: list[int] = []
    parents: list[int] = []
    # a path's chance times -1, its depth, the rank of its last token, the node before it, the chance of that one
    heap: list[tuple[float, int, int, int, float]] = [(-chances[0][0], 0, 0, -1, 1.0)]
    while heap and len(ids) < size:
        chance, depth, rank, parent, before = heapq.heappop(heap)
        ids.append(tokens[depth][rank])
        parents.append(parent)
        if rank + 1 < len(tokens[depth]):
            heapq.heappush(heap, (-before * chances[depth][rank + 1], depth, rank + 1, parent, before))
        if depth + 1 < len(tokens):
            heapq.heappush(heap, (chance * chances[depth + 1][0], depth + 1, 0, len(ids) - 1, -chance))
    return Draft(ids, parents)
