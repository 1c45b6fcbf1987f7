"""The error tree. A message names the thing that is wrong and what to do about it.

Exceptions are for the world (settings, sockets, peers); an expected result of an operation is an
enum in `core.py` instead.
"""


class KVTierError(Exception):
    """Base of every error that kvtier raises on purpose."""


class SettingsError(KVTierError):
    """A setting is unknown, unparsable or contradicts another one. Start-up stops."""


class StartError(KVTierError):
    """The server or a process beside it cannot start here (socket taken, port in use, memory)."""


class EngineError(KVTierError):
    """An engine cannot use kvtier as it is configured. vLLM's start-up stops with the reason."""


class ProtocolError(KVTierError):
    """A data-plane frame is malformed, oversized or out of order. Its session is closed.

    `reason` is one of a closed set, used as a metric label.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class HelloRefused(KVTierError):
    """The server refuses a hello. `field` names what does not fit; the text says why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
