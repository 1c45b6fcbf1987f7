"""Child processes that can't outlive this one.

Each child leads a session, and so a process group, of its own: a terminal's Ctrl-C reaches only
this process, which decides in what order its children end, and whatever a child started goes with
it. Linux sends SIGTERM to a child whose parent died without ending it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

PR_SET_PDEATHSIG = 1
GROUP_GONE_SECONDS = 1.0
"""Longest wait for killed processes of a group to be gone; an init that never reaps keeps them."""
POLL_SECONDS = 0.02
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child:
    """One running child. Its process id stays its own until `reap`, so signals can't go astray.

    Needs a process without threads while it starts, and SIGCHLD at its default.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int | None = None,
    ) -> None:
        self.name = name
        """What a person calls it. What it writes goes where this process's does, or to `output`."""
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_setup(os.getpid()),  # noqa: PLW1509 (there are no threads here)
        )
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        """Return how it ended (128 and the signal's number if by one), or None while it runs."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; what it started is its own to end."""
        os.kill(self.pid, number)

    def reap(self) -> int:
        """Kill what is left of the group, wait for it, and return the exit code.

        Blocks for as long as the kernel takes, and at most GROUP_GONE_SECONDS for descendants.
        """
        os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        end = time.monotonic() + GROUP_GONE_SECONDS
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.killpg(self.pid, 0)
                time.sleep(POLL_SECONDS)
        return code if code >= 0 else 128 - code


def _setup(parent: int) -> Callable[[], None]:
    """Return what the child does between fork and exec: only plain system calls."""
    prctl = ctypes.CDLL(None).prctl

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*FORWARDED, signal.SIGCHLD))
        if os.getppid() != parent:  # It died before the first line took effect.
            os._exit(1)

    return in_child
