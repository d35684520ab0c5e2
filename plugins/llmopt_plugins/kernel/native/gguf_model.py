"""A Hugging Face model for a GGUF file, without its dense weights."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llmopt.demo_models import cache_folder
from llmopt.errors import ModelError
from llmopt.hub import load_tokenizer, read_gguf_config, torch_dtype
from llmopt.loaded_model import LoadedModel
from llmopt_plugins.kernel.native.gguf_file import GgufFile
from llmopt_plugins.kernel.native.gguf_rope import read_rope
from llmopt_plugins.kernel.native.gguf_weights import GgufWeights
from llmopt_plugins.kernel.native.late_weights import LateWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("llmopt")

_OPTIONS = ("dtype", "attn_implementation", "device_map")


def load_gguf(path: Path, load_options: dict[str, Any], *, keep: bool = False) -> tuple[LoadedModel, GgufWeights]:
    """The model with its parameters reserved but unread, its tokenizer, and the file as a source of weights.

    :param load_options: as for `llmopt.load`; ``dtype`` is that of the model's own forward and of KV, by default
        bfloat16.
    :param keep: keep config and tokenizer in the user's cache: to get them out of the file takes seconds.
    :raises ModelError: the file is damaged, of an unknown architecture, or an option has no meaning here.
    """
    odd = [name for name in load_options if name not in _OPTIONS]
    device = load_options.get("device_map")
    if odd or device not in (None, "cpu"):
        told = f"load_options {', '.join(odd)}" if odd else f"device_map={device!r}"
        raise ModelError(
            f"{path} stays packed on the CPU with plugin 'native', which has no use for {told}.\n"
            "Leave it out, or build without 'native'."
        )
    file = GgufFile(path)
    dtype = torch_dtype(load_options.get("dtype", "auto"))
    config, tokenizer = _config_and_tokenizer(path, keep)
    config._name_or_path = str(path)
    read_rope(file, config)
    model = _empty_model(config, torch.bfloat16 if dtype == "auto" else dtype, load_options.get("attn_implementation"))
    model.name_or_path = str(path)
    weights = GgufWeights(file, model)
    LateWeights(model, weights, path.name)
    return LoadedModel(model, tokenizer, weights_unread=True), weights


def _config_and_tokenizer(path: Path, keep: bool) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """Out of the file, or as they were kept for exactly this file and version of transformers."""
    import transformers

    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {transformers.__version__}"
    kept = cache_folder() / "gguf" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if kept.is_dir():  # renamed when it was complete
        return transformers.AutoConfig.from_pretrained(kept), load_tokenizer(kept)
    config, tokenizer = read_gguf_config(path), load_tokenizer(path)
    if keep and tokenizer is not None:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent) as partial:
                config.save_pretrained(Path(partial) / "made")
                tokenizer.save_pretrained(Path(partial) / "made")
                (Path(partial) / "made").rename(kept)
        except OSError as error:
            logger.warning("native: config and tokenizer of %s could not be kept: %s", path, error)
    return config, tokenizer


def _empty_model(config: Any, dtype: Any, attention: str | None) -> PreTrainedModel:
    """Parameters on the meta device, buffers real."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    options = {} if attention is None else {"attn_implementation": attention}
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    model.tie_weights()
    return model.eval()
