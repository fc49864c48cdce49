"""Errors that a user can act on. Each message names the number, the limit and the flag that mends it."""


class EngineError(ValueError):
    """Bad input or an impossible deployment, found before any GPU work."""


class CheckpointError(EngineError):
    """The model directory is incomplete, inconsistent or of an unsupported kind."""


class RequestError(EngineError):
    """One request cannot be served; the engine goes on."""


class DeviceError(RuntimeError):
    """The device reported a failure while running: a spin that expired, NaN logits, a lost peer."""
