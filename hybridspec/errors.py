"""Errors a user can act on: each message names what was given and what to do."""


class HybridspecError(Exception):
    """Base of every error that the command line prints without a traceback."""


class ModelLoadError(HybridspecError):
    """A model folder is missing, incomplete or of a kind that cannot run."""


class UnsupportedLayerError(HybridspecError):
    """A layer's state has no known rollback in the mode that was asked for."""


class IncompatiblePairError(HybridspecError):
    """Target and draft do not share one vocabulary."""


class CheckFailedError(HybridspecError):
    """The quick check before a command found errors."""


class SessionError(HybridspecError, RuntimeError):
    """A session was used out of order, or after it was closed."""


class ContextLengthError(HybridspecError, ValueError):
    """Prompt, output and block do not fit into the model's context."""


class InputError(HybridspecError, ValueError):
    """A prompt, a workload file or an option is malformed."""
