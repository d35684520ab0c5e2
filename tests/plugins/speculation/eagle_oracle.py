"""Targets whose next token a draft head can know, and heads that know it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from llmopt.testing import tiny_model
from llmopt_plugins.speculation.eagle.model import Eagle3Config, Eagle3Head


def forgetful_model(num_layers: int = 1) -> Any:
    """A Llama whose next token depends on the newest one alone: its attention adds nothing."""
    model = tiny_model(num_hidden_layers=num_layers)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        model.lm_head.weight.mul_(4.0)  # it is sure of what it says, as the search for drafts believes
    return model


def write_oracle(folder: Path, model: Any) -> Path:
    """An EAGLE-1 head that is always right about a `forgetful_model` of one layer: it does what the target does.

    The output matrix and the embedding are the target's; the hidden state goes unread.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, (layer,) = model.config, model.model.layers
    size = config.hidden_size
    weights = {f"layers.0.{n}": w for n, w in layer.state_dict().items() if not n.startswith("input_layernorm")}
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    weights["norm.weight"] = model.model.norm.weight.detach()
    facts = {n: getattr(config, n) for n in ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")}
    facts |= {n: getattr(config, n) for n in ("num_attention_heads", "num_key_value_heads")}
    (folder / "config.json").write_text(json.dumps({**facts, "bias": False}))
    save_file({name: w.detach().clone().contiguous() for name, w in weights.items()}, folder / "model.safetensors")
    return folder


def write_pupil(folder: Path, model: Any, texts: list[list[int]], taps: list[int], *, num_steps: int = 150) -> Path:
    """An EAGLE-3 head that has learnt some texts by heart in a few seconds.

    :param taps: entries of ``hidden_states`` that it reads; its config lists them as layers that the states enter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = model.config
    used = {token for text in texts for token in text}
    others = [token for token in range(target.vocab_size) if token not in used]
    known = torch.tensor(sorted([*used, *others[:32]]))
    config = Eagle3Config(
        hidden_size=64, target_hidden_size=64, num_taps=len(taps), num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=96, vocab_size=target.vocab_size, draft_vocab_size=len(known),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=256,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        head = Eagle3Head(config)
        head.set_vocabulary(known)
        _learn(head, model, texts, taps, num_steps)
    facts = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": target.vocab_size, "draft_vocab_size": len(known), "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 256, "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": taps,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts))
    save_file(
        {name: w.detach().clone().contiguous() for name, w in head.state_dict().items()}, folder / "model.safetensors"
    )
    return folder


def _learn(head: Eagle3Head, model: Any, texts: list[list[int]], taps: list[int], num_steps: int) -> None:
    ids = torch.tensor(texts)
    with torch.no_grad():
        # a copy, in which transformers leaves its hooks
        states = copy.deepcopy(model)(ids, output_hidden_states=True).hidden_states
        features = torch.stack([states[i] for i in taps], dim=2)
        embeddings = model.get_input_embeddings()(ids)
    draft_of = torch.full((model.config.vocab_size,), -100)
    draft_of[head.target_ids(torch.arange(head.config.draft_vocab_size))] = torch.arange(head.config.draft_vocab_size)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    length, depth = ids.shape[1], 3
    for _ in range(num_steps):
        loss = torch.zeros(())
        hidden = head.fuse(features)
        first: list[tuple[Tensor, Tensor]] = []
        for step in range(depth):  # at step s, place t holds token t + 1 + s and guesses the one behind
            size = length - 2 - step
            positions = torch.arange(size)[None] + step
            attend = _Attend(first)
            output = head(embeddings[:, 1 + step : 1 + step + size], hidden[:, :size], positions, attend)
            first.append(attend.stored)
            logits = head.logits(output)
            labels = draft_of[ids[:, 2 + step : 2 + step + size]]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            hidden = head.feedback(output)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class _Attend:
    """Attention of one step: all first keys up to a token, and of later steps the keys of the token itself."""

    def __init__(self, before: list[tuple[Tensor, Tensor]]) -> None:
        self.before = before

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.stored = (key, value)
        count = query.shape[1]
        causal, own = torch.ones(count, count, dtype=torch.bool).tril(), torch.eye(count, dtype=torch.bool)
        both = [*self.before, self.stored]
        mask = torch.cat([causal if i == 0 else own for i in range(len(both))], dim=1)
        k, v = (torch.cat([pair[i][:, :count] for pair in both], dim=1).transpose(1, 2) for i in range(2))
        out = F.scaled_dot_product_attention(query.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)
