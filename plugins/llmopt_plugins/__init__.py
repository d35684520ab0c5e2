"""The plugins that come with llmopt, one file each, grouped by layer."""

from llmopt_plugins.hardware.device_tuning import DeviceTuning
from llmopt_plugins.hardware.numa_binding import NumaBinding
from llmopt_plugins.hardware.roofline import Roofline
from llmopt_plugins.kernel.autotune import Autotune
from llmopt_plugins.kernel.fused_ops import FusedOps
from llmopt_plugins.kernel.native import Native
from llmopt_plugins.kernel.torch_compile import TorchCompile
from llmopt_plugins.kernel.weight_quant import WeightQuant
from llmopt_plugins.memory.kv_offload import KvOffload
from llmopt_plugins.memory.kv_quant import KvQuant
from llmopt_plugins.memory.paged_kv import PagedKv
from llmopt_plugins.memory.prefix_cache import PrefixCache
from llmopt_plugins.scheduling.batch_window import BatchWindow
from llmopt_plugins.scheduling.chunked_prefill import ChunkedPrefill
from llmopt_plugins.scheduling.pd_separation import PdSeparation
from llmopt_plugins.scheduling.request_order import RequestOrder
from llmopt_plugins.speculation.draft_model import DraftModel
from llmopt_plugins.speculation.eagle import Eagle
from llmopt_plugins.speculation.medusa import Medusa
from llmopt_plugins.speculation.ngram import Ngram

BUILTIN: tuple[type, ...] = (
    RequestOrder,
    ChunkedPrefill,
    BatchWindow,
    PdSeparation,
    Eagle,
    Ngram,
    DraftModel,
    Medusa,
    Native,
    WeightQuant,
    FusedOps,
    TorchCompile,
    Autotune,
    PagedKv,
    KvQuant,
    PrefixCache,
    KvOffload,
    NumaBinding,
    DeviceTuning,
    Roofline,
)
"""Every built-in plugin, top-down by layer. `plugins="auto"` keeps this order."""
