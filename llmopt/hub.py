"""From what a user calls a model to the loaded thing.

demo, demo:1.5b   weights from Python packages, kept as ordinary folders in the user's cache
demo.gguf         the same as the .gguf file that the package carries (demo:1.5b.gguf)
a folder          config.json and weights, or nothing but one .gguf file
a .gguf file      dequantized while it loads
org/name          a hub id, left to transformers
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmopt.demo_models import DEMO_MODELS, demo_folder, demo_gguf
from llmopt.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load", "load_tokenizer", "read_gguf_config", "resolve", "torch_dtype"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_STANDARD_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def resolve(name: str | os.PathLike[str]) -> str:
    """What ``load`` will read: the path of a folder or of a .gguf file, or a hub id as it was given.

    A demo model is fetched when the cache does not have it yet. The hub is not asked.

    :raises ModelError: it looks like a path and nothing is there, or the folder holds no model.
    """
    text = os.fspath(name)
    key = text.removesuffix(".gguf")
    path = Path(text).expanduser()
    if key in DEMO_MODELS or text.startswith("demo:"):
        if key == text:
            return str(demo_folder(text))
        if not path.is_file():  # a file of one's own may be called demo.gguf
            return str(demo_gguf(key))
    if path.is_file():
        if path.suffix == ".gguf":
            return str(path)
        raise ModelError(f"{text} is a file and not a .gguf file.\nPass the folder that holds config.json instead.")
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path)
        return str(_only_gguf(path))
    if _HUB_ID.fullmatch(text):
        return text
    raise ModelError(
        f"no model at {text}: there is no such file or folder, and it is not a hub id (org/name).\n"
        f"Pass a folder with config.json and weights, a .gguf file, a hub id, or one of: {', '.join(DEMO_MODELS)}."
    )


def load(
    name: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device_map: str | dict[str, Any] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    **model_options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model for inference together with its tokenizer.

    :param name: see ``resolve``.
    :param dtype: "auto" keeps the checkpoint's; else a torch.dtype or its name ("float32", "bfloat16").
    :param device_map: "auto", a device, or module -> device, as accelerate understands it; None: the CPU.
    :param max_memory: device -> bytes or "10GiB", the limit that ``device_map="auto"`` plans with.
    :param offload_folder: where weights go that fit in no memory.
    :param model_options: anything else ``from_pretrained`` takes (``revision``, ``trust_remote_code``, ...).
    :returns: the model in eval mode, and its tokenizer set to pad on the left; None when the folder has no tokenizer.
    :raises ModelError: nothing there, an unknown architecture, damaged weights, or an unreachable hub.
    """
    source = resolve(name)
    if source.endswith(".gguf") and Path(source).is_file():
        return _load_gguf(Path(source), dtype, device_map, max_memory, model_options)
    shared: dict[str, Any] = {
        key: model_options[key] for key in ("revision", "trust_remote_code", "token") if key in model_options
    }
    config = _read_config(source, shared)
    options = dict(model_options)
    if device_map is not None:
        options |= {"device_map": device_map, "max_memory": max_memory}
        if offload_folder is not None:
            options["offload_folder"] = os.fspath(offload_folder)
    elif max_memory is not None:
        options |= {"device_map": "auto", "max_memory": max_memory}
    with tempfile.TemporaryDirectory(prefix="llmopt-links-") as links:
        weights = _standard_names(Path(source), Path(links)) if Path(source).is_dir() else source
        model = _guarded(
            source,
            lambda: _auto_class(config).from_pretrained(weights, config=config, dtype=torch_dtype(dtype), **options),
        )
    model.name_or_path = source  # not the folder of links
    model.eval()
    return model, load_tokenizer(source, **shared)


def load_tokenizer(name: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model, set to pad on the left; None when a local folder has no tokenizer files."""
    from transformers import AutoTokenizer

    source = resolve(name)
    path = Path(source)
    if path.is_file():
        tokenizer = _guarded(source, lambda: AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **options))
    elif path.is_dir() and not any((path / file).is_file() for file in _TOKENIZER_FILES):
        return None
    else:
        tokenizer = _guarded(source, lambda: AutoTokenizer.from_pretrained(source, **options))
    tokenizer.padding_side = "left"  # a decoder continues from the last column
    return tokenizer


def read_gguf_config(file: Path) -> PreTrainedConfig:
    """The config of the model in a .gguf file.

    :raises ModelError: an architecture that transformers cannot read from such a file.
    """
    from transformers import AutoConfig

    config: PreTrainedConfig = _guarded(str(file), lambda: AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    return config


def _only_gguf(folder: Path) -> Path:
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise ModelError(f"{folder} holds no config.json but several .gguf files: {names}.\nPass one of them.")
    files = sorted(file.name for file in folder.iterdir())
    found = ", ".join(files[:8]) + (", ..." if len(files) > 8 else "") if files else "nothing"
    raise ModelError(
        f"{folder} is not a model folder: it has neither config.json nor a .gguf file. It holds: {found}.\n"
        "Pass the folder that save_pretrained wrote."
    )


def torch_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A dtype by its name; "auto" stays what it is.

    :raises ModelError: no dtype has this name.
    """
    import torch

    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    found = getattr(torch, short.get(dtype, dtype), None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"dtype {dtype!r} is not known.\nUse auto, float32, bfloat16 or float16.")
    return found


def _read_config(source: str, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    config_file = Path(source) / "config.json"
    if config_file.is_file():
        try:
            model_type = json.loads(config_file.read_text(encoding="utf-8")).get("model_type")
        except (json.JSONDecodeError, AttributeError) as error:
            raise ModelError(f"{config_file} is not valid JSON: {error}.\nWrite the folder again.") from error
        if model_type is None:
            raise ModelError(f"{config_file} names no model_type.\nPass the folder that save_pretrained wrote.")
    return _guarded(source, lambda: AutoConfig.from_pretrained(source, **options))


def _auto_class(config: Any) -> Any:
    """The auto class whose models the config names: causal, image-text or sequence to sequence."""
    import transformers
    from transformers.models.auto import modeling_auto as tables

    named = (getattr(config, "architectures", None) or [None])[0]
    kind = config.model_type
    causal = tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    images = tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    seq2seq = tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if kind in images and (images[kind] == named or kind not in causal):
        return transformers.AutoModelForImageTextToText
    if kind in seq2seq and (seq2seq[kind] == named or kind not in causal):
        return transformers.AutoModelForSeq2SeqLM
    if kind in causal or "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return transformers.AutoModelForCausalLM
    raise ModelError(
        f"a model of type {kind!r} ({named or 'no architecture named'}) does not generate text.\n"
        "Pass a causal language model, an image-text model or a sequence-to-sequence model."
    )


def _standard_names(folder: Path, links: Path) -> Path:
    """The folder itself, or, when its weight files carry other names, a folder of links under the usual names.

    transformers only finds ``model.safetensors`` or its index; a checkpoint under any other name is as good.
    """
    if any((folder / name).is_file() for name in _STANDARD_WEIGHTS):
        return folder
    indexes, shards = sorted(folder.glob("*.safetensors.index.json")), sorted(folder.glob("*.safetensors"))
    if not shards:
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:8])
        raise ModelError(
            f"{folder} has config.json but no weights (*.safetensors or pytorch_model.bin). It holds: {found}."
        )
    for file in folder.iterdir():
        if file.is_file():
            (links / file.name).symlink_to(file.resolve())
    if len(indexes) == 1:
        (links / "model.safetensors.index.json").symlink_to(indexes[0].resolve())
    elif len(shards) == 1:
        (links / "model.safetensors").symlink_to(shards[0].resolve())
    else:
        (links / "model.safetensors.index.json").write_text(json.dumps(_index_of(shards)), encoding="utf-8")
    return links


def _index_of(shards: list[Path]) -> dict[str, Any]:
    from safetensors import safe_open

    weight_map: dict[str, str] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - a safetensors file is no dict
                if key in weight_map:
                    raise ModelError(
                        f"{shard.parent} holds tensor {key} in both {weight_map[key]} and {shard.name}, and no index.\n"
                        "Keep one variant of the weights in the folder."
                    )
                weight_map[key] = shard.name
    return {"metadata": {"total_size": sum(shard.stat().st_size for shard in shards)}, "weight_map": weight_map}


def _load_gguf(
    file: Path,
    dtype: str | torch.dtype,
    device_map: str | dict[str, Any] | None,
    max_memory: dict[int | str, int | str] | None,
    model_options: dict[str, Any],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    # "auto" would give float16, which few CPUs compute with; the quantized weights fit in bfloat16 as well
    chosen = torch.bfloat16 if dtype == "auto" else torch_dtype(dtype)
    options = dict(model_options)
    if device_map is not None or max_memory is not None:
        options |= {"device_map": device_map or "auto", "max_memory": max_memory}
    quantization = GgufConfig(dequantize=True)
    model = _guarded(
        str(file),
        lambda: AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=chosen, quantization_config=quantization, **options
        ),
    )
    model.eval()
    return model, load_tokenizer(file)


def _guarded(source: str, call: Any) -> Any:
    """Run a transformers call and turn what it raises about the model into one ModelError."""
    try:
        return call()
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(_explain(source, error)) from error
    except Exception as error:
        if type(error).__module__.startswith("safetensors"):
            raise ModelError(f"the weights in {source} are damaged: {error}.\nWrite or download them again.") from error
        raise


def _explain(source: str, error: Exception) -> str:
    reason = str(error).strip()
    first = reason.splitlines()[0] if reason else type(error).__name__
    if "does not recognize this architecture" in reason or "Unrecognized model" in reason:
        import transformers

        return (
            f"{source} has an architecture that transformers {transformers.__version__} does not know: {first}\n"
            "Upgrade transformers, or pass trust_remote_code=True when the model brings its own code and you trust it."
        )
    if Path(source).exists():
        return f"{source} could not be loaded: {first}\nCheck that its files are complete and belong together."
    return (
        f"{source!r} is neither a file nor a folder here, and as a hub id it could not be loaded: {first}\n"
        "Check the spelling and the network, or pass a local folder; "
        f"without any hub there are: {', '.join(DEMO_MODELS)}."
    )
