"""Every error the library raises on purpose.

LlmoptError
├── ConfigError (ValueError)                 a setting that makes no sense
├── ModelError (ValueError)                  a model that cannot be loaded or run
│   └── UnsupportedModelError                the engine cannot run it; the message says why
├── MemoryBudgetError (ValueError)           the KV pool cannot hold a single request
├── PluginError
│   ├── PluginNotFoundError (LookupError)    no such name
│   ├── PluginConflictError                  two plugins want one stage, or exclude each other, or one is listed twice
│   ├── PluginRequirementError               a required plugin is missing
│   ├── PluginUnavailableError               this machine or this model cannot run it
│   ├── PluginOptionError (ValueError)       options the plugin does not take
│   └── PluginHookError                      a hook raised while the pipeline was built
├── RequestError (ValueError)                a request the engine refuses
│   ├── InvalidPromptError                   empty prompt, ids outside the vocabulary
│   ├── ContextLengthError                   prompt and new tokens exceed the context
│   ├── RequestTooLargeError                 the KV pool could never hold it
│   └── DeadlineError                        it can no longer end before its deadline
├── StageError (RuntimeError)                an exception inside a stage; names plugin and stage
├── NonFiniteLogitsError (RuntimeError)      the model returned NaN or infinity
├── RequestAbortedError (RuntimeError)       somebody aborted the request
└── PipelineClosedError (RuntimeError)       the pipeline was closed

Messages say what was asked, what was found, and what to do.
"""


class LlmoptError(Exception):
    """Base class of every error that llmopt raises on purpose."""


class ConfigError(LlmoptError, ValueError):
    """A setting that makes no sense."""


class ModelError(LlmoptError, ValueError):
    """A model that cannot be found, loaded or run."""


class UnsupportedModelError(ModelError):
    """The engine cannot run this model; the message says why. `generate` falls back to the model's own."""


class MemoryBudgetError(LlmoptError, ValueError):
    """The memory for KV cannot hold one sequence of the wanted length."""


class PluginError(LlmoptError):
    """Base class of what can be wrong with a plugin."""


class PluginNotFoundError(PluginError, LookupError):
    """No plugin has this name."""


class PluginConflictError(PluginError):
    """Two plugins want the same stage, exclude each other, or one is listed twice."""


class PluginRequirementError(PluginError):
    """A plugin needs another one that is not listed."""


class PluginUnavailableError(PluginError):
    """A plugin asked for by name cannot run on this machine or with this model."""


class PluginOptionError(PluginError, ValueError):
    """Options that the plugin does not take, or values it refuses."""


class PluginHookError(PluginError):
    """A hook raised while the pipeline was built."""


class RequestError(LlmoptError, ValueError):
    """A request that the engine refuses."""


class InvalidPromptError(RequestError):
    """An empty prompt, or ids outside the vocabulary."""


class ContextLengthError(RequestError):
    """Prompt and new tokens do not fit the context of the model."""


class RequestTooLargeError(RequestError):
    """The KV pool could not hold this request even if it were alone."""


class DeadlineError(RequestError):
    """A waiting request can no longer end before its deadline."""


class StageError(LlmoptError, RuntimeError):
    """An exception inside a stage. The message names the stage and the plugin; the cause is chained."""


class NonFiniteLogitsError(LlmoptError, RuntimeError):
    """The model returned NaN or infinite logits for a request."""


class RequestAbortedError(LlmoptError, RuntimeError):
    """The request was aborted before it finished."""


class PipelineClosedError(LlmoptError, RuntimeError):
    """The pipeline was closed and takes no more requests."""
