"""Writes docs/hooks.md from the hook specifications and the stage protocols: ``python docs/make_hooks.py``.

A test compares the page with what this writes, so the page is right whenever the tests pass.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

from llmopt import hookspecs, layers, stages
from llmopt.build_context import BuildContext
from llmopt.loaded_model import LoadedModel

_INTRO = """\
# Hooks

Written by `python docs/make_hooks.py` from `llmopt/hookspecs.py` and `llmopt/stages.py`. Change those, then run it
again.

A hook is a method of a plugin, marked with `@llmopt.hookimpl`. Hooks are called while `llmopt.build` runs, one plugin
at a time, in the order in which the user listed the plugins. They are never called in a step.

- `llmopt_load` may load the model in place of `llmopt.load`, when the user gave it by name.
- `llmopt_configure` may change the configuration before anything is built.
- `llmopt_replace_<stage>` returns a stage that takes the place of the plain one. At most one plugin may replace a
  stage.
- `llmopt_wrap_<stage>` gets the stage as the plugins before it left it, and returns one of the same protocol. Any
  number of plugins may wrap a stage; the one listed last is outermost. Replacements come first, wherever they are
  listed.
- `llmopt_reserve` says how much memory the plugin's stages will hold, before the KV pool is sized.
- `llmopt_kv_storage` may provide the memory of the KV pool. At most one plugin does.
- `llmopt_hidden_states` asks for the residual stream at some layers. What all plugins want is merged.
- `llmopt_finish` sees the finished pipeline.

A hook may return None to leave things alone. It may leave out arguments that it does not use. A misspelt hook, an
unknown argument or a missing `@hookimpl` is an error when the plugin is registered.

`config` is the whole `PipelineConfig`, read-only. `context` is a `BuildContext`. It fills up while stages are built, in
this order:

{order}.

```text
{context}
```

A stage is a callable. It may also have `stats() -> dict`, which `pipe.stats()` shows under `<stage>.<plugin>`,
`describe() -> str`, a line for `pipe.describe()`, and `close()`, which `pipe.close()` calls once. Return a function, or
an object of a class with `__call__`: an exception inside is then blamed on the plugin by name. A `functools.partial` or
a builtin cannot be blamed.
"""


def page() -> str:
    """The whole page."""
    context = _dataclass_fields(BuildContext)
    parts = [_INTRO.format(order=textwrap.fill(", ".join(layers.STAGES), 118), context=context)]
    parts.append("## Loading\n\n" + _hook("llmopt_load") + "\n" + _loaded_model())
    parts.append("## Configuration\n\n" + _hook("llmopt_configure"))
    for number, (layer, names) in enumerate(layers.LAYERS.items(), start=1):
        parts.append(f"## {number} {layer}\n")
        for stage in names:
            parts.append(f"### {stage}\n\n{_protocol(stage)}")
            parts += [_hook(f"llmopt_{verb}_{stage}") for verb in ("replace", "wrap")]
    parts.append("## Memory\n\n" + _hook("llmopt_reserve") + "\n" + _hook("llmopt_kv_storage"))
    parts.append("## Hidden states\n\n" + _hook("llmopt_hidden_states"))
    parts.append("## Finish\n\n" + _hook("llmopt_finish"))
    return "\n".join(parts)


def signature(function: Any) -> str:
    """A signature as it stands in the source: no quotes around annotations, no ``self``."""
    return str(inspect.signature(function)).replace("'", "").replace("(self, ", "(").replace("(self)", "()")


def _hook(name: str) -> str:
    function = getattr(hookspecs, name)
    return f"#### {name}\n\n```text\n{name}{signature(function)}\n```\n\n{_text(function.__doc__)}\n"


def _protocol(stage: str) -> str:
    name = "".join(part.title() for part in stage.split("_"))
    protocol: Any = getattr(stages, name)
    text = _text(protocol.__call__.__doc__)
    if protocol.__doc__ and not protocol.__doc__.startswith("Base class for protocol"):
        text = f"{_text(protocol.__doc__)}\n\n{text}"
    methods = [
        f"`{name}.{other}{signature(member)}`: {_text(member.__doc__)}"
        for other, member in vars(protocol).items()
        if inspect.isfunction(member) and not other.startswith("_")
    ]
    lines = [f"```text\n{name}.__call__{signature(protocol.__call__)}\n```", text, *methods]
    return "\n\n".join(lines) + "\n"


def _text(docstring: str | None) -> str:
    """A docstring as Markdown: reST literals become code, fields become a list."""
    lines = []
    for line in inspect.cleandoc(docstring or "").replace("``", "`").splitlines():
        if line.startswith(":"):
            field, _, rest = line[1:].partition(":")
            line = f"- **{field.removeprefix('param ')}**:{rest}"
            if lines and lines[-1] and not lines[-1].startswith("- "):
                lines.append("")
        elif line.startswith("    "):
            line = line[2:]  # a list item goes on
        lines.append(line)
    return "\n".join(lines)


def _loaded_model() -> str:
    return f"A `LoadedModel` (`llmopt.loaded_model`) has:\n\n```text\n{_dataclass_fields(LoadedModel)}\n```\n"


def _dataclass_fields(cls: type) -> str:
    """The fields of a dataclass, with their comments, as they stand in the source."""
    source = inspect.getsource(cls).splitlines()
    return "\n".join(line.strip() for line in source if ": " in line and not line.lstrip().startswith(('"""', "class")))


if __name__ == "__main__":
    Path(__file__).with_name("hooks.md").write_text(page())
