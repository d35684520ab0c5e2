"""``llmopt demo``: a real model speaks, its tokens are checked, two speeds are shown."""

from __future__ import annotations

from llmopt.cli.output import load_model, print_json

_QUESTION = "Why does the sea look blue? Answer in three sentences."
_NUM_TOKENS = 48
_ROUNDS = 3


def run(*, as_json: bool) -> None:
    """Stream an answer of the demo model, compare with ``model.generate`` in float32, time both.

    Exit status 1 when the tokens differ.
    """
    import llmopt
    from llmopt.bench.comparison import contenders_for
    from llmopt.bench.workloads import BenchRequest
    from llmopt.cli.bench import compare_with_progress

    model, tokenizer = load_model("demo", dtype="float32", device_map=None)
    assert tokenizer is not None  # the demo folder has one

    pieces: list[str] = []
    messages = [{"role": "user", "content": _QUESTION}]
    pipe = llmopt.build(model, tokenizer=tokenizer, memory_fraction=0.1)
    try:
        if not as_json:
            print(f"> {_QUESTION}\n")
        for piece in pipe.stream(messages, max_new_tokens=_NUM_TOKENS):
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
    finally:
        pipe.close()

    def batch(number: int) -> list[BenchRequest]:
        text = _QUESTION if number > 2 * _ROUNDS else f"{_QUESTION} ({number})"
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )
        return [BenchRequest(list(encoded["input_ids"]), _NUM_TOKENS)]

    with contenders_for(model, tokenizer, {}, max_model_len=1024) as contenders:
        result = compare_with_progress(contenders, "demo", batch, dtype="float32", rounds=_ROUNDS)
    theirs, ours = (timing.tokens_per_s.median for timing in result.timings)
    same = result.passed
    if as_json:
        print_json(
            {
                "text": "".join(pieces),
                "tokens_identical": same,
                "dtype": "float32",
                "hf_generate_tokens_per_s": theirs,
                "llmopt_tokens_per_s": ours,
            }
        )
    else:
        equal = "equal model.generate's" if same else "DIFFER from model.generate's"
        print(f"\n\n{_NUM_TOKENS} tokens in float32 {equal} ({result.verdicts[1]}).")
        print(f"HF generate {theirs:6.1f} tokens/s\nllmopt      {ours:6.1f} tokens/s   ({ours / theirs:.2f}x)")
    if not same:
        raise SystemExit(1)
