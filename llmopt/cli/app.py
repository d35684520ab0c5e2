"""The commands and their options. What a command does lies in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="llmopt",
    help="Pluggable LLM-inference optimizations for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # an unexpected error shows a plain traceback that can be copied
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="demo, a model folder, a .gguf file, or a hub id.")]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", "-p", metavar="NAME[:KEY=VALUE,...]", help="A plugin with its options; repeat for more."),
]
Dtype = Annotated[str, typer.Option(help="auto (as in the checkpoint), float32, bfloat16 or float16.")]
DeviceMap = Annotated[str | None, typer.Option(help="auto, cpu, cuda:0, ... as accelerate understands it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from llmopt.version import __version__

        typer.echo(f"llmopt {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Pluggable LLM-inference optimizations for Hugging Face models."""


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    plugins: Plugins = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the best token every time.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the best k; 0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    chat: Annotated[bool | None, typer.Option("--chat/--raw", help="Use the chat template, or not.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt (with --chat).")] = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    as_json: Json = False,
) -> None:
    """Generate text from a prompt; it is printed as it comes."""
    from llmopt.cli.generate import GenerateOptions, run

    options = GenerateOptions(max_new_tokens, temperature, top_p, top_k, seed, chat, system)
    run(model, prompt, plugins or [], options, dtype=dtype, device_map=device_map, as_json=as_json)


@app.command()
def plugins(as_json: Json = False) -> None:
    """List the plugins: layer, promise, what each requires."""
    from llmopt.cli.plugins import run

    run(as_json=as_json)


@app.command()
def describe(
    model: Model,
    plugins: Plugins = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    as_json: Json = False,
) -> None:
    """Build a pipeline and show which plugin stands in which stage, and what fell back."""
    from llmopt.cli.describe import run

    run(model, plugins or [], dtype=dtype, device_map=device_map, as_json=as_json)


@app.command()
def bench(
    model: Model = "demo",
    plugins: Plugins = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            "-w",
            help="decode1, decode8, decode32, prefill1024, decode4096 (all: shapes); chat, chat8, document, prefix, "
            "edit, ragged (all: text); stall; arrivals50, arrivals80, arrivals95 (all: arrivals); separation; host256; "
            "shared, no_hits, turns, crowd, churn, kv_bytes, offload (all: reuse); drafts_edit, drafts_chat, "
            "head1, head8, head32, head_tokens (all: head), wrong_drafts, fixed_k, draft_host (all: drafts); "
            "targets: all that have one; "
            "memory, quality, host. Repeat for more.",
        ),
    ] = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    budget_s: Annotated[
        float, typer.Option("--budget-s", min=1.0, help="About how long all may take; rounds adapt, one is always run.")
    ] = 210.0,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds at most.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and 3 rounds at most.")] = False,
    max_gap: Annotated[
        float, typer.Option(min=0.0, help="Half precision: how far a token may lie below the best, in fp32 logits.")
    ] = 0.5,
    rivals: Annotated[
        str | None, typer.Option("--rivals", metavar="FILE", help="JSON lines of other engines, shown as ratios.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Append JSON lines to a file; - prints them instead.")
    ] = None,
) -> None:
    """Compare model.generate, the plain pipeline and the pipeline with plugins, in one interleaved run."""
    from llmopt.cli.bench import run
    from llmopt.cli.bench_run import BenchOptions

    run(
        model,
        plugins or [],
        workload or [],
        BenchOptions(dtype, device_map, min(rounds, 3) if quick else rounds, budget_s, quick, max_gap),
        rivals_path=Path(rivals) if rivals else None,
        json_path=Path(json_file) if json_file and json_file != "-" else None,
        json_to_stdout=json_file == "-",
    )


@app.command()
def demo(plugins: Plugins = None, as_json: Json = False) -> None:
    """Generate text with a small real model, check it against model.generate, and show both speeds."""
    from llmopt.cli.demo import run

    run(plugins or [], as_json=as_json)


@app.command()
def probe(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, whatever the cache holds.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long measuring may take.")] = 4.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:0.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure what this machine can do: read bandwidth by working set, arithmetic peak by kind; kept in the cache."""
    from llmopt.cli.probe import run

    run(refresh=refresh, seconds=seconds, device=device, as_json=as_json)
