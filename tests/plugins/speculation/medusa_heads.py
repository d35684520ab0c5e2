"""Medusa heads for tiny models that have learnt some texts."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def write_trained(
    folder: Path,
    model: Any,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    *,
    num_heads: int = 3,
    num_steps: int = 80,
) -> Path:
    """Train heads of one block on what a model says, and write them as the original implementation does.

    Head ``k`` (from 0) learns token ``t + 2 + k`` from the last hidden state of token ``t``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    states, labels = _examples(model, prompts, outputs, num_heads)
    size = states.shape[1]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        weight = torch.zeros(num_heads, size, size, requires_grad=True)
        bias = torch.zeros(num_heads, size, requires_grad=True)
        output = model.lm_head.weight.detach().clone().repeat(num_heads, 1, 1).requires_grad_()
        optimizer = torch.optim.Adam([weight, bias, output], lr=0.02)
        for _ in range(num_steps):
            hidden = states + F.silu(torch.einsum("nh,koh->kno", states, weight) + bias[:, None])
            loss = F.cross_entropy((hidden @ output.transpose(1, 2)).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    tensors: dict[str, Tensor] = {}
    for k in range(num_heads):
        tensors[f"{k}.0.linear.weight"] = weight[k].detach().clone()
        tensors[f"{k}.0.linear.bias"] = bias[k].detach().clone()
        tensors[f"{k}.1.weight"] = output[k].detach().clone()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": num_heads, "medusa_num_layers": 1}))
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder


@torch.no_grad()
def _examples(
    model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], num_heads: int
) -> tuple[Tensor, Tensor]:
    """Hidden states ``[n, h]`` of the outputs, and the tokens ``[num_heads, n]`` that the heads should say."""
    copied = copy.deepcopy(model)  # transformers leaves its hooks in it
    states: list[Tensor] = []
    labels: list[Tensor] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output]])
        hidden = copied(ids, output_hidden_states=True).hidden_states[-1][0]
        places = torch.arange(len(prompt) - 1, ids.shape[1] - 1 - num_heads)
        states.append(hidden[places])
        labels.append(torch.stack([ids[0, places + 2 + k] for k in range(num_heads)]))
    return torch.cat(states), torch.cat(labels, dim=1)
