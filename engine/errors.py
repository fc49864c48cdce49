"""Errors that a user can act on. Each message names the number, the limit and the flag that mends it."""

from collections.abc import Sequence

SHOWN = 8  # names of a long list that a message gives


class EngineError(ValueError):
    """Bad input or an impossible deployment, found before any GPU work."""


class CheckpointError(EngineError):
    """The model directory is incomplete, inconsistent or of an unsupported kind."""


class RequestError(EngineError):
    """One request cannot be served; the engine goes on."""


class DeviceError(RuntimeError):
    """The device reported a failure while running: a spin that expired, NaN logits, a lost peer."""


def first_few(names: Sequence[str]) -> str:
    """The names for a message: the first SHOWN of them, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
