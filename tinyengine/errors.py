"""The errors that a user can cause. Each message says what was wrong and what to do about it.

A command-line program prints the message alone; any other exception is a fault of ours and shows its traceback.
"""


class TinyEngineError(Exception):
    """Base of every error that the user of the engine can cause and mend."""


class ConfigError(TinyEngineError):
    """The model, or an option of the engine, is not one that this engine can run."""


class CheckpointError(TinyEngineError):
    """The weights on disk do not fit the model: missing, unexpected, misshaped or damaged."""


class RequestError(TinyEngineError):
    """One request cannot be served; the other requests are not touched."""


class BlockError(TinyEngineError):
    """A KV block was freed twice, used after it was freed, or asked for when none was left."""


class CaptureError(TinyEngineError):
    """A function cannot be captured as a graph: it reads a value on the host, or its shapes depend on one."""
