"""The plain stage of each layer: correct, simple, and what every plugin is measured against."""

from llmopt.baseline.application import BaselineConstrain, BaselineDetokenize, BaselineEncodeMedia, BaselineTokenize
from llmopt.baseline.hardware import BaselinePlace, BaselineProbe
from llmopt.baseline.kernel import BaselineAttend, BaselineExecute
from llmopt.baseline.memory import BaselineAdapt, BaselineAllocate, BaselineLookup
from llmopt.baseline.parallelism import BaselineExchange, BaselineShard
from llmopt.baseline.scheduling import (
    BaselineAdmit,
    BaselineBudget,
    BaselineCommit,
    BaselineOrder,
    BaselineSchedule,
)
from llmopt.baseline.speculation import BaselinePropose, BaselineVerify

__all__ = [
    "BaselineAdapt",
    "BaselineAdmit",
    "BaselineAllocate",
    "BaselineAttend",
    "BaselineBudget",
    "BaselineCommit",
    "BaselineConstrain",
    "BaselineDetokenize",
    "BaselineEncodeMedia",
    "BaselineExchange",
    "BaselineExecute",
    "BaselineLookup",
    "BaselineOrder",
    "BaselinePlace",
    "BaselineProbe",
    "BaselinePropose",
    "BaselineSchedule",
    "BaselineShard",
    "BaselineTokenize",
    "BaselineVerify",
]
