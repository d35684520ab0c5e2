"""What a pipeline is made of, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from llmopt.layers import LAYERS
from llmopt.plugin_info import info_of

if TYPE_CHECKING:
    from llmopt.pipeline import InferencePipeline


@dataclass(slots=True)
class Description:
    """A snapshot of a pipeline. ``str()`` gives a page of text, `to_dict` plain data."""

    model: str  # class and type of the model
    dtype: str
    device: str
    engine: str  # how the engine runs the model, or why it does not
    runs_natively: bool  # False: `generate` goes through the model's own loop
    attention: str  # native, or why the reference
    max_model_len: int
    block_size: int
    num_blocks: int
    pool_bytes: int
    plugins: list[dict[str, str]] = field(default_factory=list)  # name, layer, promise
    details: dict[str, str] = field(default_factory=dict)  # plugin -> what its stages say of themselves
    left_out: dict[str, str] = field(default_factory=dict)  # what plugins="auto" could not use, and why
    stages: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # layer -> stage -> owners, innermost first
    fall_backs: dict[str, int] = field(default_factory=dict)  # reason -> calls of generate
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.dtype} on {self.device}", f"engine      {self.engine}"]
        if self.runs_natively:
            lines.append(f"attention   {self.attention}")
            lines.append(
                f"KV pool     {self.num_blocks} blocks of {self.block_size} tokens, at most "
                f"{self.pool_bytes / 2**20:.0f} MiB; sequences up to {self.max_model_len} tokens"
            )
        shown = ", ".join(f"{p['name']} ({p['promise']})" for p in self.plugins)
        lines.append(f"plugins     {shown or 'none'}")
        lines += [f"  {name}: {told}" for name, told in self.details.items()]
        lines += [f"  left out  {name}: {reason}" for name, reason in self.left_out.items()]
        for layer, stages in self.stages.items():
            for number, (stage, owners) in enumerate(stages.items()):
                lines.append(f"{layer if number == 0 else '':<12}{stage:<13}{' <- '.join(reversed(owners))}")
        lines += [f"fell back   {count} x generate: {reason}" for reason, count in self.fall_backs.items()]
        lines += [f"note        {note}" for note in self.notes]
        return "\n".join(lines)


def describe(pipeline: InferencePipeline) -> Description:
    """Take the snapshot."""
    model, runs = pipeline.model, pipeline.why_not is None
    capabilities = pipeline.capabilities
    chains = pipeline.registry.chains
    engine = f"not used, generate runs through the model's own loop: {pipeline.why_not}"
    if runs:
        kind = (
            "one packed row per step" if capabilities.layout == "packed" else "one row per request (recurrent states)"
        )
        engine = f"{capabilities.layout} layout, {kind}" + (", whole history per step" if capabilities.gather else "")
    return Description(
        model=f"{type(model).__name__} ({model.config.model_type})",
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        engine=engine,
        runs_natively=runs,
        attention=_attention(chains["attend"].objects[0], pipeline) if runs else "",
        max_model_len=pipeline.max_model_len,
        block_size=pipeline.block_pool.block_size if runs else 0,
        num_blocks=pipeline.block_pool.num_blocks if runs else 0,
        pool_bytes=_pool_bytes(pipeline) if runs else 0,
        plugins=[
            {"name": i.name, "layer": i.layer, "promise": i.promise} for i in map(info_of, pipeline.registry.plugins)
        ],
        details=_details(pipeline),
        left_out=dict(pipeline.registry.left_out),
        stages={
            layer: {stage: list(chains[stage].owners) for stage in stages if stage in chains}
            for layer, stages in LAYERS.items()
        },
        fall_backs=dict(pipeline.generate.fall_backs),
        notes=[*pipeline.notes, *_order_of_drafters(pipeline)],
    )


def _attention(attend: Any, pipeline: InferencePipeline) -> str:
    reason = getattr(attend, "why_reference", None)
    told = f"torch reference, because {reason}" if reason else "native"
    is_quantized = any(shape.is_quantized for shape in pipeline.kv_cache.shapes.values())
    return f"{told}; keys and values in 8 bits" if is_quantized else told


def _details(pipeline: InferencePipeline) -> dict[str, str]:
    """What the plugins' stages say of themselves; one line each."""
    told: dict[str, list[str]] = {}
    for chain in pipeline.registry.chains.values():
        for owner, made in zip(chain.owners, chain.objects, strict=True):
            line = getattr(made, "describe", None)
            if line is not None and owner != "baseline":
                told.setdefault(owner, []).append(line())
    return {owner: "; ".join(lines) for owner, lines in told.items()}


def _order_of_drafters(pipeline: InferencePipeline) -> list[str]:
    """One note where several plugins stand in `propose`."""
    chain = pipeline.registry.chains.get("propose")
    if chain is None or len(chain.plugins) < 2:
        return []
    first, *others = reversed(chain.plugins)
    told = ", then ".join(others)
    return [f"drafts come from {first} first, then {told}: the plugin listed last is asked first"]


def _pool_bytes(pipeline: InferencePipeline) -> int:
    pool = pipeline.block_pool
    return pool.num_blocks * pool.block_size * sum(s.bytes_per_token for s in pipeline.kv_cache.shapes.values())
