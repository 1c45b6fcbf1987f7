"""Which share of the server's CPU time goes into its eviction policy, at full load.

    python -m loadtest.policy_share

A real server in a process of its own, with the default policy, which looks now and then at what it
is doing; and processes with simulated engines that ask and store as fast as they are answered, but
copy nothing. Blocks are of the smallest size, so that bytes cost nothing and bookkeeping
everything. Chats grow by 1,024 tokens a turn, which makes prompts of 6,500 tokens (public traces of
conversations have 12,000), and do not all fit, so that each block that comes lets another one go.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from kvtier import policies
from kvtier.config import load_settings
from kvtier.core import PAGE_BYTES
from kvtier.serve import serve

from .engines import Chats, connect, serve_prompt
from .report import Row, show
from .rig import RigError

RUNS = 3
ENGINES = 3
SECONDS = 15.0
CAPACITY = 100_000
CHATS = 80
TURN_BLOCKS = 64
TURNS = 12
SKEW = 8.0
START_SECONDS = 30.0
SAMPLE_SECONDS = 0.004
PARTS = ("policy", "hierarchy", "directory", "eviction", "dataplane", "protocol", "host", "other")
"""Of which the share is shown: files of the server, and `other` for libraries."""


class Sampler:
    """Looks, again and again by CPU time, whether the policy is at work or somebody else.

    The innermost function of the server tells: what a policy calls back is not the policy.
    """

    def __init__(self) -> None:
        self.samples: Counter[str] = Counter()
        self._package = Path(policies.__file__).parents[1]
        self._of: dict[str, str | None] = {}

    def start(self) -> None:
        """Begin to look, in this thread."""
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)

    def stop(self) -> None:
        """Look no more."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)

    def _look(self, _: int, frame: FrameType | None) -> None:
        while frame is not None:
            part = self._part(frame.f_code.co_filename)
            if part is not None:
                self.samples[part] += 1
                return
            frame = frame.f_back
        self.samples["other"] += 1

    def _part(self, file: str) -> str | None:
        """Return which part of the server a file is of; None for a library."""
        if file not in self._of:
            path = Path(file)
            inside = path.is_relative_to(self._package)
            mine = inside and path.parent.name == "policies"
            self._of[file] = "policy" if mine else path.stem if inside else None
        return self._of[file]


def measure(policy: str = "auto") -> list[float]:
    """Return the policy's share of the server's CPU time, run by run. Raises RigError."""
    found = [_run(policy) for _ in range(RUNS)]
    rows = [
        Row("CPU time of the server", [one["cpu"] for one in found], "s"),
        Row("samples", [one["samples"] for one in found]),
        Row("blocks asked for", [one["asked"] for one in found]),
        Row("blocks stored", [one["stored"] for one in found]),
        Row("CPU time a block asked for or stored", [_per_block(one) for one in found], "µs", 1e6),
        *(Row(f"share of {part}", [one.get(part, 0.0) for one in found]) for part in PARTS),
    ]
    show(f"policy {policy}, {ENGINES} engines, {SECONDS:g} s a run", rows)
    return [one["policy"] for one in found]


def _per_block(one: dict[str, float]) -> float:
    return one["cpu"] / (one["asked"] + one["stored"])


def _run(policy: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="kvtier-share-") as folder:
        path = Path(folder) / "kvtier.sock"
        server = _start("serve", str(path), policy)
        try:
            _wait(path, server)
            engines = [_start("engine", str(path), str(number)) for number in range(ENGINES)]
            lines = [json.loads(engine.communicate()[0]) for engine in engines]
        finally:
            server.send_signal(signal.SIGTERM)
            said = server.communicate()[0]
    if not said.strip():
        raise RigError("the server did not say what it needed")
    totals = {name: sum(line[name] for line in lines) for name in ("asked", "stored")}
    return json.loads(said) | totals


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loadtest.policy_share", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _wait(path: Path, server: subprocess.Popen[str]) -> None:
    end = time.monotonic() + START_SECONDS
    while not path.exists():
        if server.poll() is not None or time.monotonic() > end:
            raise RigError("the server did not start")
        time.sleep(0.05)


def run_server(path: str, policy: str) -> None:
    """Serve until SIGTERM; then print the CPU seconds, and which share of them each part took."""
    given = {
        "socket": path,
        "host.capacity": f"{CAPACITY * PAGE_BYTES // 1024}KiB",
        "host.policy": policy,
        "http.port": "0",
        "log.level": "warning",
    }
    sampler = Sampler()
    began = time.process_time()
    sampler.start()
    settings = load_settings(None, given)
    serve(settings, lambda: settings)
    sampler.stop()
    total = sampler.samples.total()
    found = {part: count / total for part, count in sampler.samples.items()}
    print(json.dumps(found | {"cpu": time.process_time() - began, "samples": total}))


def run_engine(path: str, number: int) -> None:
    """Ask and store for a while; then print how many blocks that were."""
    client = connect(Path(path), f"share-{number}")
    chats = Chats(number, CHATS, TURNS, TURN_BLOCKS, SKEW)
    asked = stored = 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        keys = chats.prompt()
        asked += len(keys)
        stored += serve_prompt(client, keys).stored
    client.close()
    print(json.dumps({"asked": asked, "stored": stored}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", path, policy]:
            run_server(path, policy)
        case ["engine", path, number]:
            run_engine(path, int(number))
        case _:
            for name in ("auto", "lru"):
                measure(name)
