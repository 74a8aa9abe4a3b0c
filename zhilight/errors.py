"""The errors a user of ZhiLight meets.

Each message carries the parameter, its value, the limit and the way out. `ZhiLightError` is the root, so
`except ZhiLightError` catches every fault that is the user's to mend; anything else is ours.
"""

from __future__ import annotations


class ZhiLightError(Exception):
    """Root of every error that ZhiLight raises on purpose."""


class ConfigError(ZhiLightError, ValueError):
    """A setting, a file of the model folder or a combination of both cannot be honoured."""


class UnsupportedModel(ConfigError):
    """The checkpoint's architecture, rope kind or quantisation is not built."""


class CheckpointError(ZhiLightError):
    """A tensor is missing, unknown or has the wrong shape, or a weight file cannot be read."""


class ShapeError(ZhiLightError, ValueError):
    """An operation got an array whose shape, dtype, layout or device disagrees with its contract."""


class RequestError(ZhiLightError, ValueError):
    """One request cannot be served as asked. `param` names the field, for the server's 400."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class OutOfMemory(ZhiLightError, MemoryError):
    """A region of a memory pool is exhausted: need, have and the setting to change are in the message."""


class DeviceError(ZhiLightError, RuntimeError):
    """No usable device, a driver too old, or a failed driver call (its name and code are in the message)."""


class EngineDead(ZhiLightError, RuntimeError):
    """The engine process ended; requests in flight cannot finish."""


class EngineBusy(ZhiLightError, RuntimeError):
    """The waiting queue is full; the caller should try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after
