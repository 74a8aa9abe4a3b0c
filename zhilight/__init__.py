"""ZhiLight: LLM inference and serving. `from zhilight import LLM, SamplingParams` is all that offline use needs.

The names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zhilight.version import __version__

if TYPE_CHECKING:
    from zhilight.config.engine import EngineConfig
    from zhilight.config.sampling import SamplingParams, StructuredOutput
    from zhilight.engine.client import AsyncEngine
    from zhilight.engine.llm import LLM
    from zhilight.engine.outputs import CompletionOutput, RequestOutput

_HOMES = {
    "LLM": "zhilight.engine.llm",
    "AsyncEngine": "zhilight.engine.client",
    "SamplingParams": "zhilight.config.sampling",
    "StructuredOutput": "zhilight.config.sampling",
    "EngineConfig": "zhilight.config.engine",
    "RequestOutput": "zhilight.engine.outputs",
    "CompletionOutput": "zhilight.engine.outputs",
}

__all__ = ["LLM", "AsyncEngine", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams", "StructuredOutput",
           "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zhilight' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
