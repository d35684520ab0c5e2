"""Let a model's own `generate` go through a pipeline, and give it back unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmopt.builder import build, unwrap
from llmopt.errors import ModelError

if TYPE_CHECKING:
    from types import TracebackType

    from transformers import PreTrainedModel

    from llmopt.pipeline import InferencePipeline


class Acceleration:
    """The change that `accelerate` made to a model; undone by `restore` or at the end of a ``with`` block."""

    def __init__(self, model: PreTrainedModel, pipeline: InferencePipeline) -> None:
        self.model = model
        self.pipeline = pipeline
        model.generate = pipeline.generate  # an attribute of this object; its class is not touched
        self._is_active = True

    def restore(self) -> None:
        """Give the model its own `generate` back and close the pipeline. Harmless the second time."""
        if not self._is_active:
            return
        self._is_active = False
        if vars(self.model).get("generate") is self.pipeline.generate:
            del self.model.generate
        self.pipeline.close()

    def __enter__(self) -> InferencePipeline:
        return self.pipeline

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def accelerate(model: PreTrainedModel, plugins: Sequence[Any] | str = (), **options: Any) -> Acceleration:
    """Make ``model.generate`` go through a pipeline, so that code which calls it gains without a change.

    Use it as a function, and call ``restore()`` on the result, or as a context manager::

        with llmopt.accelerate(model, plugins=["paged_kv"]) as pipe:
            transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)("Hello")

    Afterwards logits, config and `generate` of the model are what they were, bit for bit.

    :param plugins: as in `llmopt.build`, and so are the options.
    :raises ModelError: the model is accelerated already, is no loaded model, or is wrapped by prompt learning of PEFT.
    """
    if isinstance(model, str):
        raise ModelError("accelerate changes a loaded model. Load it first, or use llmopt.build with its name.")
    inner: Any = unwrap(model)
    own = vars(inner).get("generate")
    if own is not None and getattr(own, "__func__", None) is type(inner).generate:
        del inner.generate  # a copy of an accelerated model holds its class's own
    elif own is not None:
        raise ModelError("this model has a `generate` of its own already. Restore it before accelerating it again.")
    return Acceleration(inner, build(inner, plugins, **options))
