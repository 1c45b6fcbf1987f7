"""One measured point: a server with so many blocks, so many engines, one kind of work."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..rig import RigError
from ..stack import Part, start_server
from .engine import Work
from .fleet import Done, Engines, Fleet
from .prompts import Shape

ROOM = 1.03
"""Slots of a server ÷ the blocks that it is filled with: stores beyond that let others go."""
ROOM_BLOCKS = 512
"""At least so many more: engines hold some reserved."""
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Filled:
    """A server with prompts in it."""

    server: Part
    shape: Shape
    blocks: int
    prompts: Sequence[str]

    def joined(self, fleet: Fleet, engines: int) -> AbstractContextManager[Engines]:
        """Connect so many engines of the fleet, for the time of a `with`."""
        return fleet.joined(self.socket, self.shape, engines)

    @property
    def socket(self) -> Path:
        """Where engines connect."""
        assert self.server.socket is not None, "a server has a socket"
        return self.server.socket


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured. Rates are a second; a share is of one core."""

    work: Work
    engines: int
    directory_blocks: int
    block_bytes: int
    think_seconds: float
    requests_per_second: float
    blocks_per_second: float
    bytes_per_second: float
    """Copied between slots and engines; 0.0 where nothing is copied."""
    latency_seconds: dict[str, dict[str, float]]
    """Of each call, its percentiles."""
    server_cpu_per_block: float
    engine_cpu_per_block: float
    server_core_share: float
    engines_core_share: float
    machine_share: float
    """How busy all cores were, by whomever."""


@contextmanager
def filled(fleet: Fleet, shape: Shape, blocks: int, engines: int) -> Iterator[Filled]:
    """Run a server with so many blocks, at least one prompt, each byte of which was compared.

    So many engines of the fleet store and check them. Raises RigError or StackError.
    """
    count = max(blocks // shape.prompt_blocks, 1)
    rest = max(blocks - count * shape.prompt_blocks, 0)
    prompts = [f"prompt-{number}" for number in range(count)]
    whole = count * shape.prompt_blocks + rest
    slots = max(int(whole * ROOM), whole + ROOM_BLOCKS)
    capacity = f"{slots * shape.block_bytes >> 10}KiB"
    with TemporaryDirectory(prefix="kvtier-plane-") as folder:
        server = start_server(Path(folder), "--capacity", capacity)
        try:
            server.wait()
            at = Filled(server, shape, whole, prompts)
            with at.joined(fleet, engines) as joined:
                joined.add(prompts, shape.prompt_blocks)
                if rest:
                    joined.add(["rest"], rest)
                joined.check(prompts)
            yield at
        finally:
            server.stop()


def measure(engines: Engines, at: Filled, work: Work, seconds: float, think: float = 0.0) -> Point:
    """Let engines that are connected to the server work for a while. Raises RigError."""
    run = engines.begin(work, seconds, think, at.prompts)
    time.sleep(max(run.begin - time.monotonic(), 0.0))
    used, machine = _cpu_seconds(at.server.child.pid), _machine()
    time.sleep(max(run.end - time.monotonic(), 0.0))
    used = _cpu_seconds(at.server.child.pid) - used
    busy, total = (after - before for before, after in zip(machine, _machine(), strict=True))
    done = engines.finish()
    blocks = sum(one.blocks for one in done)
    if not blocks:
        raise RigError("no request was answered in the time of a measurement.")
    cpu = sum(one.cpu_seconds for one in done)
    return Point(
        work=work,
        engines=len(engines),
        directory_blocks=at.blocks,
        block_bytes=at.shape.block_bytes,
        think_seconds=think,
        requests_per_second=sum(one.turns for one in done) / seconds,
        blocks_per_second=blocks / seconds,
        bytes_per_second=0.0 if work is Work.LOOKUP else blocks / seconds * at.shape.block_bytes,
        latency_seconds=_latencies(done),
        server_cpu_per_block=used / blocks,
        engine_cpu_per_block=cpu / blocks,
        server_core_share=used / seconds,
        engines_core_share=cpu / seconds,
        machine_share=busy / total,
    )


def _latencies(done: Sequence[Done]) -> dict[str, dict[str, float]]:
    """Return the percentiles of each call, over all engines."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for one in done:
        for call, seconds in one.seconds.items():
            found[call] += seconds
    return {call: percentiles(sorted(seconds)) for call, seconds in found.items()}


def percentiles(ordered: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99 of samples in rising order, each a sample (nearest rank)."""
    last = len(ordered) - 1
    return {name: ordered[round(share * last)] for name, share in PERCENTILES.items()}


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its threads have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _machine() -> tuple[int, int]:
    """Return the ticks for which cores have been busy, and all ticks."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    total = sum(ticks)
    return total - ticks[3] - ticks[4], total
