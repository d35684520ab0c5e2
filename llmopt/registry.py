"""The plugins of a pipeline: checked, ordered, and their hooks called, one plugin at a time."""

from __future__ import annotations

import difflib
import inspect
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from llmopt import hookspecs, layers
from llmopt.errors import (
    ConfigError,
    LlmoptError,
    ModelError,
    PluginConflictError,
    PluginError,
    PluginHookError,
    PluginRequirementError,
    PluginUnavailableError,
)
from llmopt.loaded_model import LoadedModel
from llmopt.plugin_info import PluginInfo, info_of
from llmopt.plugin_options import expand_plugins, parse_plugin
from llmopt.plugin_search import PROJECT, builtin_plugins, make_plugin

if TYPE_CHECKING:
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.kv_cache import KVStorage
    from llmopt.pipeline import InferencePipeline

logger = logging.getLogger("llmopt")

_METHODS = {"allocate": ("free", "num_blocks_ever"), "attend": ("plan", "write")}  # beside `__call__`


@dataclass(frozen=True, slots=True)
class StageChain:
    """Who stands in one stage, innermost first."""

    stage: str
    owners: tuple[str, ...]  # "baseline" or the replacing plugin, then the wrapping ones
    objects: tuple[Any, ...]  # the callables, in the same order

    @property
    def plugins(self) -> list[str]:
        """The plugins in this stage, innermost first."""
        return [owner for owner in self.owners if owner != "baseline"]


class Registry:
    """The plugins of one pipeline, in the user's order.

    :param plugins: names, plugin objects, or ``"auto"``; None is none.
    """

    def __init__(self, plugins: Sequence[Any] | str | None = ()) -> None:
        plugins = () if plugins is None else plugins
        self.auto = isinstance(plugins, str) and plugins == "auto"
        self.left_out: dict[str, str] = {}  # plugins that "auto" could not use, and why
        self.chains: dict[str, StageChain] = {}
        self.hidden_owners: list[str] = []  # plugins that asked for hidden states
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self.plugins: list[Any] = []
        if isinstance(plugins, str) and not self.auto:
            raise PluginError(f'plugins must be a list or "auto", found {plugins!r}. Write plugins=[{plugins!r}].')
        if not isinstance(plugins, (str, Iterable)):
            raise PluginError(f"plugins must be a list, found {type(plugins).__name__}. Write plugins=[...].")
        listed: Iterable[Any] = () if self.auto else expand_plugins(plugins)
        if self.auto:
            listed = [cls() for cls in builtin_plugins() if info_of(cls).auto]
        for plugin in listed:
            self._register(_made(plugin) if isinstance(plugin, str) else plugin)
        self._check_company()

    @property
    def names(self) -> list[str]:
        """Names of the plugins, in order."""
        return [info_of(p).name for p in self.plugins]

    def _register(self, plugin: Any) -> None:
        if inspect.isclass(plugin):
            raise PluginError(f"plugins=[...] holds the class {plugin.__name__}. Have you forgotten the `()`?")
        info = info_of(plugin)
        if info.name in self.names:
            raise PluginConflictError(f"plugin {info.name!r} is listed twice. Keep one of them in plugins=[...].")
        self._check_form(plugin, info)
        try:
            self.manager.register(plugin, info.name)
            self.manager.check_pending()
        except pluggy.PluginValidationError as error:
            known = [name for name in dir(hookspecs) if name.startswith("llmopt_")]
            mine = [name for name in dir(plugin) if name.startswith("llmopt_") and name not in known]
            near = {name: difflib.get_close_matches(name, known, n=1) for name in mine}
            hint = "".join(f" {a} may be meant as {b[0]}." for a, b in near.items() if b)
            raise PluginHookError(f"plugin {info.name!r} has a hook that does not exist or takes unknown arguments: "
                                  f"{error}.{hint}") from error  # fmt: skip
        self.plugins.append(plugin)

    def _check_form(self, plugin: Any, info: PluginInfo) -> None:
        """Refuse what pluggy would pass over in silence or stumble over later."""
        if not getattr(type(plugin), "__hash__", None):
            raise PluginError(f"plugin {info.name!r} cannot be hashed. Write @dataclass(eq=False) above its class.")
        unmarked = [
            name
            for name in dir(hookspecs)
            if name.startswith("llmopt_")
            and hasattr(plugin, name)
            and self.manager.parse_hookimpl_opts(plugin, name) is None
        ]
        if unmarked:
            raise PluginHookError(
                f"plugin {info.name!r} has {', '.join(unmarked)} without @llmopt.hookimpl, so nobody would call it. "
                "Have you forgotten to mark it?"
            )

    def _check_company(self) -> None:
        names = set(self.names)
        for info in map(info_of, self.plugins):
            missing = [name for name in info.requires if name not in names]
            if missing:
                raise PluginRequirementError(
                    f"plugin {info.name!r} requires {', '.join(map(repr, missing))}. Add it to plugins=[...]."
                )
            for other in info.conflicts:
                if other in names:
                    raise PluginConflictError(
                        f"plugins {info.name!r} and {other!r} exclude each other. Keep one of them in plugins=[...]."
                    )

    def check_available(self, context: BuildContext) -> None:
        """Refuse plugins that this device or model cannot run; with ``"auto"``, leave them out.

        A plugin may have ``why_unavailable(context) -> str | None`` beside what its info declares. Only model and
        tokenizer are in the context: this is asked before anything is configured or built.

        :raises PluginUnavailableError: says what the plugin needs and what was found.
        """
        device = context.model.device.type
        model_type = context.model.config.model_type
        for plugin in list(self.plugins):
            info = info_of(plugin)
            if info.name in self.left_out:
                continue  # it required one that was left out before
            reason: str | None = None
            if info.devices and device not in info.devices:
                reason = f"needs a device of type {' or '.join(info.devices)}, the model is on {device!r}"
            elif info.model_types and model_type not in info.model_types:
                reason = f"serves {', '.join(info.model_types)}, the model is {model_type!r}"
            elif hasattr(plugin, "why_unavailable"):
                reason = self._reason(plugin, context)
            if reason is None:
                continue
            if not self.auto:
                raise PluginUnavailableError(
                    f'plugin {info.name!r} {reason}. Remove it, or use plugins="auto" to skip what cannot run here.'
                )
            self._leave_out(plugin, reason)

    def _reason(self, plugin: Any, context: BuildContext) -> str | None:
        try:
            reason = plugin.why_unavailable(context)
        except LlmoptError:
            raise
        except Exception as error:
            raise PluginHookError(
                f"plugin {info_of(plugin).name!r} failed in why_unavailable: {type(error).__name__}: {error}"
            ) from error
        if reason is not None and not isinstance(reason, str):
            raise PluginHookError(
                f"plugin {info_of(plugin).name!r} returned {reason!r} from why_unavailable; it returns a text or None."
            )
        return reason

    def refuse_without_engine(self, why_not: str) -> None:
        """Refuse plugins that would do nothing because the model runs through its own `generate`.

        :raises PluginUnavailableError: names them and the reason; with ``"auto"`` they are left out.
        """
        engine = [s for s in layers.STAGES if s not in ("probe", "place", "shard")]
        hooks = [f"llmopt_{verb}_{stage}" for stage in engine for verb in ("replace", "wrap")]
        idle = [p for p in self.plugins if any(hasattr(p, hook) for hook in hooks)]
        if idle and not self.auto:
            names = ", ".join(repr(info_of(p).name) for p in idle)
            raise PluginUnavailableError(
                f"plugins {names} would do nothing: the engine cannot run this model, because {why_not}. Build without "
                "them; `generate` then goes through the model's own loop."
            )
        for plugin in idle:
            if info_of(plugin).name not in self.left_out:
                self._leave_out(plugin, f"would do nothing: the engine cannot run this model, because {why_not}")

    def _leave_out(self, plugin: Any, reason: str) -> None:
        """Drop a plugin that "auto" chose, and those that require it."""
        name = info_of(plugin).name
        self.left_out[name] = reason
        logger.warning('plugins="auto" leaves out %r: it %s.', name, reason)
        self.plugins.remove(plugin)
        self.manager.unregister(plugin)
        for other in list(self.plugins):
            if name in info_of(other).requires:
                self._leave_out(other, f"requires {name!r}, which is left out")

    def load(self, source: str, load_options: dict[str, Any]) -> LoadedModel | None:
        """Let the plugins load the model; None when none of them wants to.

        With ``"auto"``, a plugin that cannot load this model is left out.

        :raises PluginHookError: a plugin returned something else.
        """
        for plugin in list(self.plugins):
            try:
                loaded = self._call(plugin, "llmopt_load", source=source, load_options=dict(load_options))
            except ModelError as error:
                if not self.auto:
                    raise
                self._leave_out(plugin, f"cannot load this model: {error}")
                continue
            if loaded is None:
                continue
            if not isinstance(loaded, LoadedModel):
                raise PluginHookError(
                    f"plugin {info_of(plugin).name!r} returned a {type(loaded).__name__} from llmopt_load; it returns "
                    "a LoadedModel or None."
                )
            return loaded
        return None

    def finish(self, pipeline: InferencePipeline) -> None:
        """Tell every plugin that the pipeline is complete."""
        for plugin in self.plugins:
            self._call(plugin, "llmopt_finish", pipeline=pipeline)

    def configure(self, config: PipelineConfig) -> PipelineConfig:
        """Let each plugin change the configuration.

        :raises PluginHookError: a plugin returned something else, or values out of range.
        """
        config.check()
        for plugin in self.plugins:
            changed = self._call(plugin, "llmopt_configure", config=config)
            if changed is None:
                continue
            name = info_of(plugin).name
            if not isinstance(changed, type(config)):
                raise PluginHookError(
                    f"plugin {name!r} returned {changed!r} from llmopt_configure; it returns a PipelineConfig or None."
                )
            try:
                changed.check()
            except ConfigError as error:
                raise PluginHookError(f"plugin {name!r} made a bad configuration: {error}") from error
            config = changed
        return config

    def reserved_bytes(self, config: PipelineConfig, context: BuildContext) -> dict[str, int]:
        """Memory that stages of plugins will hold, by plugin.

        :raises PluginHookError: a plugin returned something else.
        """
        reserved: dict[str, int] = {}
        for plugin in self.plugins:
            num_bytes = self._call(plugin, "llmopt_reserve", config=config, context=context)
            if num_bytes is None:
                continue
            if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or num_bytes < 0:
                raise PluginHookError(
                    f"plugin {info_of(plugin).name!r} returned {num_bytes!r} from llmopt_reserve; it returns a number "
                    "of bytes or None."
                )
            reserved[info_of(plugin).name] = num_bytes
        return reserved

    def kv_storage(self, config: PipelineConfig, context: BuildContext) -> KVStorage | None:
        """Who makes the tensors of the KV pool; None: the pool itself.

        :raises PluginConflictError: two plugins want to; names both.
        """
        found: dict[str, KVStorage] = {}
        for plugin in self.plugins:
            storage = self._call(plugin, "llmopt_kv_storage", config=config, context=context)
            if storage is None:
                continue
            if not callable(storage):
                raise PluginHookError(
                    f"plugin {info_of(plugin).name!r} returned {storage!r} from llmopt_kv_storage; it returns a "
                    "callable that makes tensors, or None."
                )
            found[info_of(plugin).name] = storage
        if len(found) > 1:
            raise PluginConflictError(
                f"the memory of the KV pool is provided by both {' and '.join(map(repr, found))}. Keep one of them in "
                "plugins=[...]."
            )
        return next(iter(found.values()), None)

    def hidden_layers(self, config: PipelineConfig, context: BuildContext, num_layers: int) -> tuple[int, ...]:
        """Where plugins want the residual stream, merged and ascending; remembers who asked in ``hidden_owners``.

        :raises PluginHookError: a plugin returned something else than numbers of layers of the model.
        """
        merged: set[int] = set()
        for plugin in self.plugins:
            wanted = self._call(plugin, "llmopt_hidden_states", config=config, context=context)
            if wanted is None:
                continue
            name = info_of(plugin).name
            places = list(wanted) if isinstance(wanted, Iterable) else [wanted]
            if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= num_layers for i in places):
                raise PluginHookError(
                    f"plugin {name!r} returned {wanted!r} from llmopt_hidden_states; it returns numbers of layers from "
                    f"0 to {num_layers} (the output of the final norm), or None."
                )
            if places:
                self.hidden_owners.append(name)
                merged.update(places)
        return tuple(sorted(merged))

    def build_stage(self, stage: str, baseline: Any, config: PipelineConfig, context: BuildContext) -> Any:
        """Fold the plugins of one stage over its baseline and return the outermost callable.

        :raises PluginConflictError: when two plugins replace the stage; names both.
        """
        owners, objects = ["baseline"], [baseline]
        for plugin in self.plugins:
            found = self._call(plugin, f"llmopt_replace_{stage}", config=config, context=context)
            if found is None:
                continue
            if owners != ["baseline"]:
                raise PluginConflictError(
                    f"stage {stage!r} is replaced by both {owners[0]!r} and {info_of(plugin).name!r}. "
                    "Keep one of them in plugins=[...]."
                )
            owners, objects = [info_of(plugin).name], [found]
        for plugin in self.plugins:
            arguments = {stage: objects[-1], "config": config, "context": context}
            found = self._call(plugin, f"llmopt_wrap_{stage}", **arguments)
            if found is not None:
                owners.append(info_of(plugin).name)
                objects.append(found)
        for owner, made in zip(owners, objects, strict=True):
            if not callable(made):
                raise PluginHookError(f"plugin {owner!r} returned {made!r} for stage {stage!r}; a stage is callable.")
            missing = [name for name in _METHODS.get(stage, ()) if not callable(getattr(made, name, None))]
            if missing:
                raise PluginHookError(
                    f"plugin {owner!r} returned {made!r} for stage {stage!r}, which lacks {', '.join(missing)}. "
                    f"See the protocol in llmopt.stages; a wrapping stage forwards what it does not change."
                )
        self.chains[stage] = StageChain(stage, tuple(owners), tuple(objects))
        setattr(context.stages, stage, objects[-1])
        return objects[-1]

    def run_stage(self, stage: str, wanted: type, *arguments: Any) -> Any:
        """Call a stage that runs once, while the pipeline is built.

        :param wanted: what it returns.
        :raises PluginHookError: it raised, or returned something else; names its plugins.
        """
        chain = self.chains[stage]
        who = f"plugin {' and '.join(map(repr, chain.plugins))}"
        try:
            result = chain.objects[-1](*arguments)
        except LlmoptError:
            raise
        except Exception as error:
            _, plugin = self.blame(error)
            if not chain.plugins:
                raise
            who = who if plugin == "baseline" else f"plugin {plugin!r}"
            raise PluginHookError(f"{who} failed in stage {stage!r}: {type(error).__name__}: {error}") from error
        if chain.plugins and not isinstance(result, wanted):
            raise PluginHookError(f"{who} returned {result!r} from stage {stage!r}, which returns a {wanted.__name__}.")
        return result

    def _call(self, plugin: Any, hook: str, **arguments: Any) -> Any:
        """Call one hook of one plugin, so that an error always has a name."""
        if not hasattr(plugin, hook):
            return None
        others = [p for p in self.plugins if p is not plugin]
        caller = self.manager.subset_hook_caller(hook, remove_plugins=others)
        try:
            results = caller(**arguments)
        except LlmoptError:
            raise  # on purpose; it says enough
        except Exception as error:
            raise PluginHookError(
                f"plugin {info_of(plugin).name!r} failed in {hook}: {type(error).__name__}: {error}"
            ) from error
        return results[0] if results else None

    def close_stages(self) -> None:
        """Call ``close()`` of every stage object that has one."""
        for chain in self.chains.values():
            for made in chain.objects:
                stop = getattr(made, "close", None)
                if stop is not None:
                    stop()

    def blame(self, error: BaseException) -> tuple[str | None, str]:
        """Find the stage and the plugin in which an exception was raised: ``(stage or None, plugin or "baseline")``.

        Walks the traceback: the first frame of a stage object names the stage, the innermost one the plugin. A frame
        from the file of a plugin counts as well, for objects that its stages hand out, such as a `LogitsMask`.
        """
        owner_of: dict[int, tuple[str, str]] = {}
        for chain in self.chains.values():
            for owner, made in zip(chain.owners, chain.objects, strict=True):
                owner_of[id(made)] = (chain.stage, owner)
                if code := getattr(made, "__code__", None):
                    owner_of[id(code)] = (chain.stage, owner)
        files = self._files()
        stage, plugin = None, "baseline"
        trace = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            found = owner_of.get(id(frame.f_code)) or owner_of.get(id(frame.f_locals.get("self")))
            if found is not None:
                stage, plugin = stage or found[0], found[1]
            elif frame.f_code.co_filename in files:
                plugin = files[frame.f_code.co_filename]
            trace = trace.tb_next
        return stage, plugin

    def _files(self) -> dict[str, str]:
        """Source file -> plugin, for files that hold one plugin of this pipeline."""
        names: dict[str, list[str]] = {}
        for plugin in self.plugins:
            file = getattr(sys.modules.get(type(plugin).__module__), "__file__", None)
            if file is not None:
                names.setdefault(file, []).append(info_of(plugin).name)
        return {file: owners[0] for file, owners in names.items() if len(owners) == 1}


def _made(text: str) -> Any:
    """A plugin from ``name`` or ``name:key=value,key=value``."""
    if ":" not in text:
        return make_plugin(text)
    spec = parse_plugin(text)
    return make_plugin(spec.name, spec.options)
