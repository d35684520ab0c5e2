"""Writes docs/compatibility.md: ``python docs/make_compatibility.py``.

The models come from the configs that the tests in tests/equivalence run; how each is run comes from a pipeline that is
built around it; the fields of `generate` come from `llmopt.hf.fields`. A test compares the page with what this writes,
so the page is right whenever the tests pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmopt import build
from llmopt.hf.capabilities import Capabilities
from llmopt.hf.fields import ARGUMENTS, FIELDS, Served

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the configs are part of the tests

from tests.equivalence.hybrid_configs import HYBRID_CONFIGS  # noqa: E402
from tests.equivalence.own_loop_configs import OWN_LOOP_CONFIGS, tiny_own_loop_model  # noqa: E402
from tests.equivalence.packed_configs import PACKED_CONFIGS, tiny_packed_model  # noqa: E402

_LAYERS = {"dummy": "without keys of their own"}  # what transformers' names for layers do not say

PAGE = ROOT / "docs" / "compatibility.md"

_INTRO = """\
# Compatibility

Written by `python docs/make_compatibility.py` with transformers {version}. Change the configs in `tests/equivalence` or
the tables in `llmopt/hf/fields.py`, then run it again.

`pipe.generate` takes every argument of `model.generate` and returns the same tokens. What differs from model to model,
and from call to call, is who computes them:

- **packed**: the engine, with all requests of a step one after the other in one row. Long prompts are computed in
  chunks, together with the decodes of others; prompts of one `generate` call are shared.
- **rows**: the engine, with one row per request, for models with recurrent states. A prompt is computed in one piece.
- **own loop**: transformers' own `generate`. Nothing is gained, nothing is lost. `pipe.describe()` and one warning say
  why; `stream`, `batch` and `submit` refuse such a model.

Every type below is tested in float32 on a small model with random weights: same tokens as `model.generate`, greedy and
sampled from a seed, in a left-padded batch. Types that are not listed are looked at in the same way when a pipeline is
built: the model's class and config, its masks, the arguments of its attention, and its logits on two short prompts
decide whether the engine runs it.
"""

_FIELDS_INTRO = """\
## Fields of `generate`

- **native**: rows are independent. Each leaves when it is finished, and others take its place.
- **lockstep**: the rows of the call choose their tokens together, because something looks at all of them: a
  processor, a criterion, a streamer, torch's random generator. The forward is the engine's all the same.
- **falls back**: the call goes through the model's own loop, with one warning for each reason.
- **no effect**: nothing to do here.

A call with only native fields runs natively. One lockstep field puts the call in lockstep, one that falls back lets it
fall back. A call also falls back when prompt and new tokens exceed the engine's `max_model_len`, when rows that must
advance together do not fit the KV pool, in training mode, and under autocast.
"""


def page() -> str:
    """The whole page."""
    packed = {name: _facts(tiny_packed_model(name)) for name in PACKED_CONFIGS}
    rows = {name: _facts(_hybrid_model(name)) for name in HYBRID_CONFIGS}
    own = {name: _facts(tiny_own_loop_model(name)) for name in OWN_LOOP_CONFIGS}
    num_engine = sum(found.why_not is None for found in [*packed.values(), *rows.values()])
    return "\n".join(
        [
            _INTRO.format(version=transformers.__version__),
            f"## Models\n\n{num_engine} types run in the engine, {len(packed)} of them packed.\n",
            "### Packed\n",
            _table(("model type", "layers", "keys and values"), map(_engine_row, sorted(packed.items()))),
            "### Rows\n",
            _table(("model type", "layers", "keys and values"), map(_engine_row, sorted(rows.items()))),
            "### Own loop\n",
            _table(("model type", "reason"), (_own_row(name, found) for name, found in sorted(own.items()))),
            _FIELDS_INTRO,
            _table(("field of the configuration", "served", ""), _served(FIELDS)),
            _table(("argument", "served", ""), _served(ARGUMENTS)),
        ]
    )


def _facts(model: PreTrainedModel) -> Capabilities:
    with build(model, pool_bytes=1 << 24) as pipe:
        return pipe.capabilities


def _hybrid_model(name: str) -> PreTrainedModel:
    torch.manual_seed(1)
    config = AutoConfig.for_model(name, **HYBRID_CONFIGS[name])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model


def _engine_row(item: tuple[str, Capabilities]) -> tuple[str, ...]:
    name, found = item
    if found.why_not is not None:
        return f"`{name}`", "", f"own loop: {found.why_not}"
    kinds = {_LAYERS.get(kind, kind.removesuffix("_attention").replace("_", " ")) for kind in found.layer_types}
    layers = ", ".join(sorted(kinds))
    how = "whole history gathered in each step" if found.gather else "read in the blocks"
    return f"`{name}`", layers, how if found.layer_shapes else "none"


def _own_row(name: str, found: Capabilities) -> tuple[str, str]:
    case = OWN_LOOP_CONFIGS[name]
    which = f"`{case.model_type or name}`" + (f" {case.note}" if case.note else "")
    return which, found.why_not or "runs in the engine"


def _served(table: Mapping[str, Served]) -> Iterable[tuple[str, ...]]:
    return [(f"`{name}`", served.way, served.note) for name, served in table.items()]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines: list[Any] = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    PAGE.write_text(page())
