"""``llmopt train-drafter`` and ``llmopt tune-spec``: their options. What they do is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="demo, a model folder, a .gguf file, or a hub id.")]
Dtype = Annotated[str, typer.Option(help="auto (as in the checkpoint), float32, bfloat16 or float16.")]
DeviceMap = Annotated[str | None, typer.Option(help="auto, cpu, cuda:0, ... as accelerate understands it.")]
Prompts = Annotated[
    str, typer.Option(help="builtin, or a file: a question per line; .jsonl with texts or chat messages.")
]


def train_drafter(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the finished drafter.")] = Path("drafter"),
    prompts: Prompts = "builtin",
    budget_minutes: Annotated[float, typer.Option(min=0.1, help="For answers and training together.")] = 60.0,
    algo: Annotated[str, typer.Option(help="eagle3 or medusa.")] = "eagle3",
    work_folder: Annotated[
        Path | None,
        typer.Option(help="Answers, features and checkpoints; a later run goes on there. Default: OUT.work"),
    ] = None,
    draft_vocab_size: Annotated[int, typer.Option(min=16, help="Tokens that the drafter can say.")] = 8192,
    depth: Annotated[int, typer.Option(min=1, max=8, help="Levels of the training-time test; heads of Medusa.")] = 3,
    max_prompts: Annotated[int, typer.Option(min=8, help="Prompts at most.")] = 4000,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer at most.")] = 256,
    max_epochs: Annotated[int, typer.Option(min=1, help="Passes over the answers at most.")] = 12,
    executor: Annotated[str, typer.Option(help="Plugins that run the model; '' for none.")] = "native",
    seed: Annotated[int, typer.Option(help="Of prompts, answers and weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Train even where it cannot pay on this machine.")] = False,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
) -> None:
    """Train a drafter on the model's own answers: break-even, answers, training, judgement, export."""
    from llmopt.errors import ConfigError
    from llmopt_plugins.speculation.training.run_training import run
    from llmopt_plugins.speculation.training.session import Settings

    if algo not in ("eagle3", "medusa"):
        raise ConfigError(f"--algo is eagle3 or medusa, found {algo!r}.")
    settings = Settings(
        model=model,
        prompts=prompts,
        algorithm="eagle3" if algo == "eagle3" else "medusa",
        budget_minutes=budget_minutes,
        draft_vocab_size=draft_vocab_size,
        depth=depth,
        max_prompts=max_prompts,
        max_new_tokens=max_new_tokens,
        max_epochs=max_epochs,
        executor=executor,
        seed=seed,
    )
    run(
        settings, out, work_folder or out.with_name(out.name + ".work"), force=force, dtype=dtype, device_map=device_map
    )


def tune_spec(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the setting is written.")] = Path("speculation.json"),
    prompts: Prompts = "builtin",
    candidates: Annotated[
        list[str] | None,
        typer.Option("--candidate", "-c", metavar="PLUGIN[:OPTIONS]", help="A drafter to try; repeat. Default: all."),
    ] = None,
    plugins: Annotated[
        list[str] | None, typer.Option("--plugin", "-p", metavar="NAME[:OPTIONS]", help="Beside every drafter.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure with.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 96,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often all are measured, in turns.")] = 2,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
) -> None:
    """Measure drafters on your prompts and write the setting that is fastest, "off" included."""
    from llmopt_plugins.speculation.training.tune import TuneOptions, run

    options = TuneOptions(num_prompts, max_new_tokens, batch_size, rounds)
    run(model, prompts, candidates, plugins or ["native"], options, out, dtype=dtype, device_map=device_map)
