"""A fresh head for a target: the shapes and the first weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmopt.errors import UnsupportedModelError
from llmopt.hf.capabilities import text_config
from llmopt_plugins.speculation.eagle.model import Eagle3Config, Eagle3Head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TWICE_AS_WIDE = {f"self_attn.{name}_proj.weight" for name in "qkv"}


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs EAGLE-3 reads unless a checkpoint says otherwise."""
    return 2, num_layers // 2, num_layers - 3


def choose_vocabulary(counts: Tensor, size: int, always: list[int]) -> tuple[Tensor, float]:
    """The tokens that a head can say, and what share of the counted text they are.

    :param counts: ``[vocab_size]`` how often each token was seen.
    :param always: ids that are taken whatever their count, such as those that end an answer.
    :returns: ids ascending ``[size]``, and the share.
    """
    order = counts.clone()
    order[always] = counts.max() + 1
    chosen = order.argsort(descending=True, stable=True)[:size].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum().clamp_min(1))


def new_head(model: PreTrainedModel, vocabulary: Tensor, *, num_taps: int = 3, seed: int = 0) -> Eagle3Head:
    """A float32 head that begins as the target's last layer, reading the last tap, under the target's norm and head.

    The rows of the target's head are copied and do not learn: with little text they would only lose what they know. The
    layer's weights are a start and no more, since it has another task than the layer it comes from.

    :param vocabulary: ids ascending ``[draft_vocab_size]``, from `choose_vocabulary`.
    :raises UnsupportedModelError: the target is not built of Llama-like layers.
    """
    config: Any = text_config(model)
    head = Eagle3Head(head_config(config, len(vocabulary), num_taps))
    decoder: Any = model.get_decoder()
    torch.manual_seed(seed)
    size = config.hidden_size
    try:
        layer, weights = decoder.layers[-1], head.midlayer.state_dict()
        with torch.no_grad():
            for name, value in layer.state_dict().items():
                value = value.float()
                if name in _TWICE_AS_WIDE:
                    torch.nn.init.normal_(weights[name][:, :size], std=0.02)
                    weights[name][:, size:] = value
                    continue
                weights["hidden_norm.weight" if name == "input_layernorm.weight" else name].copy_(value)
            torch.nn.init.normal_(head.fc.weight, std=0.01)
            head.fc.weight[:, -size:] += torch.eye(size)
            head.norm.weight.copy_(decoder.norm.weight)
            rows: Any = model.get_output_embeddings()
            head.lm_head.weight.copy_(rows.weight[vocabulary])
    except (AttributeError, KeyError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not built of layers like Llama's, so a head cannot begin as one: {error}"
        ) from error
    head.lm_head.weight.requires_grad_(False)
    head.set_vocabulary(vocabulary)
    return head


def head_config(config: Any, draft_vocab_size: int, num_taps: int) -> Eagle3Config:
    """A head as wide as its target.

    :param config: the text configuration of the target.
    """
    heads = config.num_attention_heads
    return Eagle3Config(
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        num_taps=num_taps,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        hidden_act=config.hidden_act,
        attention_bias=bool(getattr(config, "attention_bias", False)),
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
    )
