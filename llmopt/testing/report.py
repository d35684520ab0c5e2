"""What a conformance check saw."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    passed: bool
    detail: str  # what was seen; for a failure, what was wrong


@dataclass(slots=True)
class PluginReport:
    """What `check_plugin` saw. ``str()`` gives a page of text."""

    plugin: str
    promise: str
    checks: list[CheckResult] = field(default_factory=list)
    step_us: float = 0.0  # a decode step of one request on the model, without the plugin
    overhead_us: float = 0.0  # what the plugin adds to it; below 0 when steps became faster
    hooks_called: list[str] = field(default_factory=list)  # while the pipeline was built
    stages: dict[str, list[str]] = field(default_factory=dict)  # stage -> owners, where the plugin stands

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        lines = [f"plugin {self.plugin!r}, promise {self.promise}"]
        lines += [f"  {'ok    ' if c.passed else 'FAILED'} {c.name}: {c.detail}" for c in self.checks]
        lines.append(
            f"  step {self.step_us:.0f} us without the plugin, {self.overhead_us:+.0f} us with it (measured only)"
        )
        return "\n".join(lines)
