"""Tools for plugin authors: models without downloads, token identity, and a conformance check.

    tiny_model(kind, seed)                 a random model that runs in milliseconds and does not repeat itself
    tiny_tokenizer()                       one token per byte, with a chat template
    scripted_model(scripts)                a model that says what it is told, for tests on text
    assert_same_tokens(pipeline, model, prompts)
    assert_same_distribution(pipeline, model, prompt)
    check_plugin(MyPlugin)                 everything a plugin must keep to, in one call
    adversaries(answers, vocab_size)       drafters that must not change a token: right, wrong, random, trees, ...

Nothing here needs a network, a GPU or the compiled core. pytest is not imported.
"""

from llmopt.testing.conformance import check_plugin
from llmopt.testing.drafters import Guess, ScriptedDrafter, adversaries, draft_tokens
from llmopt.testing.identity import assert_same_distribution, assert_same_tokens
from llmopt.testing.report import CheckResult, PluginReport
from llmopt.testing.scripted import ScriptedConfig, ScriptedModel, scripted_model
from llmopt.testing.tiny import TINY_KINDS, tiny_model, tiny_prompts, tiny_tokenizer

__all__ = [
    "TINY_KINDS",
    "CheckResult",
    "Guess",
    "PluginReport",
    "ScriptedConfig",
    "ScriptedDrafter",
    "ScriptedModel",
    "adversaries",
    "assert_same_distribution",
    "assert_same_tokens",
    "check_plugin",
    "draft_tokens",
    "scripted_model",
    "tiny_model",
    "tiny_prompts",
    "tiny_tokenizer",
]
