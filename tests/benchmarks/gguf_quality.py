#!/usr/bin/env python3
"""Quality of GGUF files under llama.cpp: the figures of ``llmopt bench -w quality`` for another engine.

    python tests/benchmarks/gguf_quality.py MODEL FILE.gguf [FILE.gguf ...] [--python INTERPRETER] [--json FILE]

MODEL is the Hugging Face model (a folder or ``demo``): its tokenizer gives the ids, its float32 form is the reference.
llama.cpp runs through the Python package ``llama-cpp-python``, in a process of its own, so it may be installed in
another environment: ``--python`` names that environment's interpreter, which needs nothing else beside numpy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def llama_logits(path: str, pieces: Sequence[Sequence[int]], folder: Path, num_threads: int) -> None:
    """Runs where llama_cpp is installed: write ``[T, vocab]`` float32 logits of every piece to ``folder``."""
    import ctypes

    import llama_cpp.llama_cpp as c
    import numpy as np

    c.llama_backend_init()
    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    if not model:
        raise SystemExit(f"{path} cannot be loaded by llama.cpp.")
    vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    longest = max(map(len, pieces))
    params = c.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = longest
    params.n_threads = params.n_threads_batch = num_threads
    batch = c.llama_batch_init(longest, 0, 1)
    for number, piece in enumerate(pieces):
        context = c.llama_init_from_model(model, params)  # a new one: nothing of the window before is left
        batch.n_tokens = len(piece)
        for place, token in enumerate(piece):
            batch.token[place], batch.pos[place], batch.n_seq_id[place], batch.logits[place] = token, place, 1, 1
            batch.seq_id[place][0] = 0
        if c.llama_decode(context, batch) != 0:
            raise SystemExit(f"llama.cpp cannot compute {len(piece)} tokens with {path}.")
        address = ctypes.cast(c.llama_get_logits(context), ctypes.c_void_p).value
        assert address is not None
        raw = (ctypes.c_float * (len(piece) * vocab_size)).from_address(address)
        np.save(folder / f"{number}.npy", np.frombuffer(raw, np.float32).reshape(len(piece), vocab_size))
        c.llama_free(context)
    c.llama_model_free(model)


def compare(model_name: str, files: Sequence[str], python: str, max_tokens: int | None) -> list[dict[str, Any]]:
    """One record per file, with the same keys as the lines of ``llmopt bench -w quality``."""
    import numpy as np
    import torch

    from llmopt.bench.quality import Quality, plain_logits, text_ids, windows
    from llmopt.hub import load

    model, tokenizer = load(model_name, dtype="float32")
    if tokenizer is None:
        raise SystemExit(f"{model_name} has no tokenizer.")
    pieces = list(windows(text_ids(tokenizer, max_tokens)))
    records = []
    for file in files:
        quality = Quality()
        with tempfile.TemporaryDirectory() as folder:
            wish = {"path": file, "pieces": pieces, "folder": folder, "num_threads": torch.get_num_threads()}
            subprocess.run([python, __file__, "--worker"], input=json.dumps(wish), text=True, check=True)
            for number, piece in enumerate(pieces):
                logits = torch.from_numpy(np.load(Path(folder) / f"{number}.npy"))
                expected = plain_logits(model, piece)
                quality.add(expected, logits[:, : expected.shape[1]], piece)
        records.append(
            {
                "workload": "quality",
                "engine": "llamacpp",
                "contender": Path(file).stem,
                "model": model_name,
                "num_positions": quality.num_positions,
                "mean_kl": quality.mean_kl,
                "same_best": quality.same_best,
                "perplexity": quality.perplexity,
                "reference_perplexity": quality.reference_perplexity,
                "perplexity_shift": quality.perplexity_shift,
            }
        )
    return records


def main() -> None:
    """The command line."""
    if sys.argv[1:] == ["--worker"]:
        wish = json.load(sys.stdin)
        llama_logits(wish["path"], wish["pieces"], Path(wish["folder"]), wish["num_threads"])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", metavar="FILE.gguf")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with llama-cpp-python")
    parser.add_argument("--max-tokens", type=int, default=None, help="only the beginning of the text")
    parser.add_argument("--json", metavar="FILE", default=None, help="append the records to a file")
    arguments = parser.parse_args()
    if arguments.python == sys.executable and importlib.util.find_spec("llama_cpp") is None:
        parser.error("llama-cpp-python is not installed here; name an interpreter that has it with --python.")
    for record in compare(arguments.model, arguments.files, arguments.python, arguments.max_tokens):
        line = json.dumps(record)
        print(line, flush=True)
        if arguments.json:
            with Path(arguments.json).open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
