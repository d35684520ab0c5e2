"""The saved packed form of a pipeline's model: looked for, used when it fits, written when that was asked for."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmopt.errors import ModelError
from llmopt_plugins.kernel.native import packed_file
from llmopt_plugins.kernel.native.packed_file import PackedFileError, identity_of

if TYPE_CHECKING:
    from llmopt.config import KernelConfig
    from llmopt_plugins.kernel.native.decoder_plan import DecoderPlan
    from llmopt_plugins.kernel.native.packing import PackedWeights

logger = logging.getLogger("llmopt")


def options_of(dtype: Any, kernel: KernelConfig, *, is_gguf: bool) -> str:
    """How a model is packed, in words: everything that decides about the forms of its matrices."""
    words = [str(dtype).removeprefix("torch.")] + ["gguf"] * is_gguf
    if kernel.weight_bits is not None:
        words.append(f"int{kernel.weight_bits}")
        words += [f"head{kernel.head_bits}"] * (kernel.head_bits is not None)
        words.append(f"g{kernel.weight_group_size}")
        if 4 in (kernel.weight_bits, kernel.head_bits):
            words.append({None: "auto", True: "minimum", False: "symmetric"}[kernel.weight_minimum])
    return "-".join(words)


def has_candidate(source: str, save: bool | str) -> bool:
    """Whether there is a saved packed form for a model, whatever it may be worth."""
    if isinstance(save, str):
        return Path(save).is_file()
    return any(packed_file.candidates(source))


class PackedStore:
    """Finds and keeps the packed form of one model.

    :param source: the model's folder or .gguf file.
    :param save: True: keep what was packed, beside the model or in the user's cache; a path: use that file or make it.
    """

    def __init__(self, source: str, config: Any, options: str, save: bool | str) -> None:
        self.source, self.save = source, save
        self.identity = identity_of(source, config, options)
        self.notes: list[str] = []  # for `describe`
        self._is_current = False  # the file holds what is used

    def load(self, plan: DecoderPlan, num_threads: int) -> PackedWeights | None:
        """The saved form when there is one that fits.

        :raises ModelError: the file was asked for by its path and does not fit.
        """
        for path in self._places():
            if not path.is_file():
                continue
            start = time.perf_counter()
            try:
                packed = packed_file.load(
                    path,
                    self.identity,
                    {name: (matrix.num_outputs, matrix.num_inputs) for name, matrix in plan.matrices.items()},
                    {name: vector.count for name, vector in plan.vectors.items()},
                    num_threads,
                )
            except PackedFileError as error:
                if isinstance(self.save, str):
                    raise ModelError(
                        f"{path} cannot be used for {self.source}: it {error}.\nRemove it, and it is written again, or "
                        "pass another path."
                    ) from error
                self.notes.append(f"the saved packed form {path} is not used: it {error}")
                continue
            took = time.perf_counter() - start
            self.notes.append(f"packed weights were read from {path} in {took:.2f} s")
            self._is_current = True
            return packed
        return None

    def keep(self, packed: PackedWeights) -> None:
        """Write the packed form, if that was asked for and it is not there."""
        if self.save is False or self._is_current:
            return
        path = Path(self.save) if isinstance(self.save, str) else packed_file.place_to_save(self.source, self.identity)
        try:
            packed_file.save(path, packed, self.identity)
        except OSError as error:
            logger.warning("native: the packed weights could not be saved to %s: %s", path, error)
            self.notes.append(f"the packed weights could not be saved to {path}: {error}")
        else:
            self.notes.append(f"the packed weights were saved to {path}")

    def _places(self) -> list[Path]:
        if isinstance(self.save, str):
            return [Path(self.save)]
        return packed_file.places(self.source, self.identity)
