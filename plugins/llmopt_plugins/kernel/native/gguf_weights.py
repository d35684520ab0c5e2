"""A GGUF file as a source of weights: llama.cpp's names, order of rows and offsets turned into those of transformers.

    file    blk.0.attn_q.weight  (Q4_1)     rows of each head: pairs that are rotated together lie side by side
    model   model.layers.0.self_attn.q_proj.weight      the first half of each head, then the second half

Other architectures than those in ``ARCHITECTURES`` are refused by name. A tensor that the model does not have, or a
weight that the file does not have, is refused as well: nothing is left to chance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llmopt.errors import ModelError
from llmopt_plugins.kernel.native.gguf_rope import ROPE_TENSORS
from llmopt_plugins.kernel.native.packing import MatrixShape, extension

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt_plugins.kernel.native.gguf_file import GgufFile, GgufTensor
    from llmopt_plugins.kernel.native.packing import Format

_FORMS: dict[str, tuple[Format, int, bool]] = {  # the packed form that holds the blocks as they are
    "Q4_0": ("int4_group", 32, False),
    "Q4_1": ("int4_group", 32, True),
    "Q8_0": ("int8_group", 32, False),
    "Q4_K": ("int4_group", 32, True),
    "Q6_K": ("int8_group", 16, False),
}

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "starcoder2", "gemma2", "gemma3")
"""What is read packed, as ``general.architecture`` names it (Mistral's files say "llama")."""

_PAIRS_TOGETHER = ("llama",)  # rows of queries and keys are in another order
_NORMS_PLUS_ONE = ("gemma2", "gemma3")  # norms are stored as the model uses them, one more than its weights


class GgufRows:
    """A quantized tensor of a file.

    :param order: ``[num_outputs]`` int64, the row of the file that is row i of the model; None: the same.
    """

    def __init__(self, file: GgufFile, tensor: GgufTensor, order: np.ndarray | None) -> None:
        self.file, self.tensor, self.order = file, tensor, order
        form, group_size, has_minimum = _FORMS[tensor.type_name]
        self.shape = MatrixShape(form, tensor.shape[0], tensor.shape[1], group_size, has_minimum)

    def addresses(self, rows: np.ndarray) -> np.ndarray:
        """Where rows of the model lie, int64 of the same shape; 0 for -1."""
        stored = rows if self.order is None else self.order[rows]
        start = self.file.address + self.tensor.begin
        return np.where(rows < 0, 0, start + stored * self.tensor.row_bytes)

    def pack(self, panels: np.ndarray, rows: np.ndarray, address: int, num_threads: int) -> None:
        last = int(panels.max(initial=-1)) + 1
        shape = MatrixShape(self.shape.format, last * rows.shape[1], *_inner(self.shape)).native()
        places = np.ascontiguousarray(self.addresses(rows)).reshape(-1)
        extension().pack_gguf_panels(shape, self.tensor.type, panels, places, address, num_threads)


def _inner(shape: MatrixShape) -> tuple[int, int, bool]:
    return shape.num_inputs, shape.group_size, shape.has_minimum


class GgufWeights:
    """The weights of a model, in a file.

    :param model: its parameters may be on the meta device; only names, sizes and the config count.
    :raises ModelError: the architecture is not known here, or file and model do not have the same weights.
    """

    def __init__(self, file: GgufFile, model: PreTrainedModel) -> None:
        self.file = file
        architecture = str(file.metadata.get("general.architecture"))
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"{file.path} has architecture {architecture!r}, which plugin 'native' does not read packed; it reads "
                f"{', '.join(ARCHITECTURES)}.\nBuild without 'native' to dequantize the file."
            )
        self._architecture = architecture
        self._config: Any = model.config
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        tied = _tied_names(model)
        self._tensors = self._match(architecture, shapes, tied)

    def _match(
        self, architecture: str, shapes: dict[str, tuple[int, ...]], tied: dict[str, str]
    ) -> dict[str, GgufTensor]:
        """Name in the model -> tensor of the file."""
        names = _tensor_names(architecture, self._config.num_hidden_layers, list(shapes))
        found = {name: self.file.tensors[names[name]] for name in shapes if names.get(name) in self.file.tensors}
        for name, other in tied.items():  # one of the two is in the file
            if name not in found and other in found:
                found[name] = found[other]
        missing = [name for name in shapes if name not in found]
        used = {tensor.name for tensor in found.values()}
        unused = [name for name in self.file.tensors if name not in used and name not in ROPE_TENSORS]
        if missing or unused:
            told = [f"the file lacks {_some(missing)}"] * bool(missing)
            told += [f"the model has no place for {_some(unused)}"] * bool(unused)
            raise ModelError(f"{self.file.path} does not fit {type(self._config).__name__}: {' and '.join(told)}.")
        for name, shape in shapes.items():
            if found[name].shape != shape:
                raise ModelError(
                    f"{self.file.path}: tensor {found[name].name} has shape {found[name].shape}, and {name} {shape}."
                )
        return found

    @property
    def types(self) -> dict[str, int]:
        """How many tensors of each type the file has."""
        names = [tensor.type_name for tensor in self.file.tensors.values()]
        return {name: names.count(name) for name in sorted(set(names))}

    def type_name(self, name: str) -> str:
        """The type in which a weight is stored."""
        return self._tensors[name].type_name

    def quantized(self, name: str) -> GgufRows | None:
        tensor = self._tensors[name]
        if not tensor.is_quantized or len(tensor.shape) != 2:
            return None
        return GgufRows(self.file, tensor, self._order(tensor))

    def dense(self, name: str) -> Tensor:
        """Plain types as they are, a view of the file where rows are in order; quantized ones in float32."""
        tensor = self._tensors[name]
        order = self._order(tensor)
        if tensor.is_quantized:
            weight = self._dequantized(tensor, order)
        else:
            plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[tensor.type_name]
            weight = torch.from_numpy(self.file.bytes_of(tensor)).view(plain).view(tensor.shape)
            weight = weight if order is None else weight[torch.from_numpy(order)]
        if self._architecture in _NORMS_PLUS_ONE and name.endswith("norm.weight"):
            weight = weight.float() - 1.0
        return weight

    def _dequantized(self, tensor: GgufTensor, order: np.ndarray | None) -> Tensor:
        num_rows = tensor.num_bytes // tensor.row_bytes
        rows = np.arange(num_rows, dtype=np.int64) if order is None else order
        places = self.file.address + tensor.begin + rows * tensor.row_bytes
        out = torch.empty(tensor.shape, dtype=torch.float32)
        threads = torch.get_num_threads()
        extension().dequantize_gguf_rows(tensor.type, places, tensor.shape[-1], out.data_ptr(), threads)
        return out

    def _order(self, tensor: GgufTensor) -> np.ndarray | None:
        """``[num_rows]`` row of the file for each row of the model; None: the same.

        llama.cpp puts the two values of a head side by side that are rotated together: its row ``2 i + j`` of a head is
        row ``i + j * head_dim / 2`` of the model.
        """
        if self._architecture not in _PAIRS_TOGETHER:
            return None
        config = self._config
        for part, num_heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            if f".{part}." in tensor.name:
                rows = np.arange(tensor.shape[0], dtype=np.int64).reshape(num_heads, -1, 2)
                return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
        return None


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Weights that share memory: name -> the other one, both ways."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            tied[name], tied[other] = other, name
    return tied


def _tensor_names(architecture: str, num_layers: int, names: list[str]) -> dict[str, str]:
    """Name in the model -> name in a GGUF file, by the table of the gguf package."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(arch, num_layers)
    found = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    return {name: other for name, other in found.items() if other is not None}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
