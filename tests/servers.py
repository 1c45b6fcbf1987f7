"""A real `kvtier serve` process, started on a free port and ended by its process id."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from support import until

START_SECONDS = 30


def clean_environment(**extra):
    """This environment without settings of kvtier."""
    return {name: value for name, value in os.environ.items() if "KVTIER" not in name} | extra


def run_kvtier(*arguments, timeout=START_SECONDS, **environment):
    """Run a command of kvtier to its end, as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "kvtier", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=clean_environment(**environment),
    )


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen
    socket: Path
    stderr: Path

    @property
    def log(self):
        return self.stderr.read_text()

    @property
    def url(self):
        """The control plane's address, once the server has announced it."""

        def announced():
            assert self.process.poll() is None, self.log
            return "HTTP on" in self.log

        until(announced, "the server's start", START_SECONDS)
        return re.search(r"HTTP on (http://\S+?),", self.log)[1]

    def get(self, path):
        """Return status and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def json(self, path):
        return json.loads(self.get(path)[1])

    def ready(self):
        until(lambda: self.get("/readyz")[0] == 200, "readiness", START_SECONDS)
        return self

    def end(self, number=signal.SIGTERM, timeout=20):
        """Send a signal, wait, and return exit code and seconds taken."""
        began = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(timeout)
        return code, time.monotonic() - began
