"""What a change of policy there and back costs, in a server that engines use.

`python -m loadtest.swap_keep`: two real `kvtier serve`, each with an engine that asks and stores
the same chats, more than fit. In one of them the policy is changed to another one and back, with
`PATCH /v1/tiers/host`; its hit ratio over the 1,000 requests after that ÷ the other server's over
the same requests.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from .engines import Chats, connect, serve_prompt
from .report import Row, show
from .rig import RigError
from .stack import Part, start_server

CAPACITY = "8MiB"
REQUESTS = 1000
WARM = 4000
OTHERS = ("lru", "arc", "slru", "mq", "s3fifo")
CHATS, TURNS, TURN_BLOCKS, SKEW = 120, 12, 6, 6.0
CHANGE_SECONDS = 30.0


class Engine:
    """Asks for chats that grow, hot ones more often, and stores what is missing."""

    def __init__(self, server: Part) -> None:
        self.client = connect(server.socket, "swap")
        self._chats = Chats(3, CHATS, TURNS, TURN_BLOCKS, SKEW)

    def hit_ratio(self, requests: int) -> float:
        """Return the share of blocks that were there, over so many requests. Raises RigError."""
        asked = hits = 0
        for _ in range(requests):
            keys = self._chats.prompt()
            asked += len(keys)
            hits += serve_prompt(self.client, keys).hits
        return hits / asked


def measure() -> list[float]:
    """Return the hit ratio with a change ÷ without, for each policy that was there for a moment."""
    with contextlib.ExitStack() as ends:
        servers = [_server(ends) for _ in range(2)]
        changed, still = (Engine(server) for server in servers)
        pairs = [(engine.hit_ratio(WARM), engine) for engine in (changed, still)]
        if pairs[0][0] != pairs[1][0]:
            raise RigError("the same requests had other hits before any change")
        with_it, without = [], []
        for other in OTHERS:
            for policy in (other, "auto"):
                _change(servers[0], policy)
            with_it.append(changed.hit_ratio(REQUESTS))
            without.append(still.hit_ratio(REQUESTS))
        for engine in (changed, still):
            engine.client.close()
    ratios = [mine / other for mine, other in zip(with_it, without, strict=True)]
    rows = [Row("with a change and back", with_it), Row("without", without), Row("ratio", ratios)]
    show(f"hit ratio over {REQUESTS} requests", rows)
    return ratios


def _server(ends: contextlib.ExitStack) -> Part:
    folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-swap-"))
    server = start_server(Path(folder), "--capacity", CAPACITY)
    ends.callback(server.stop)
    return server


def _change(server: Part, policy: str) -> None:
    body = json.dumps({"settings": {"policy": policy}}).encode()
    headers = {"If-Match": "*", "Content-Type": "application/json"}
    url = f"{server.url}/v1/tiers/host"
    request = urllib.request.Request(url, body, headers, method="PATCH")
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()
    end = time.monotonic() + CHANGE_SECONDS
    while json.loads(server.get("/v1/tiers/host"))["policy"] != policy:
        if time.monotonic() > end:
            raise RigError(f"the policy did not become {policy}")
        time.sleep(0.01)


if __name__ == "__main__":
    print(*measure(), file=sys.stdout)
