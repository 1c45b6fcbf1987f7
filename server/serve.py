"""One server process: settings in, data plane and control plane up, and down again.

Everything runs on one uvloop event loop. The memory is made in the background, slab by slab, so
that engines are served at once. SIGTERM or SIGINT ends everything within `shutdown_seconds`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
import uvloop
from fastapi import FastAPI

from .api import build_app
from .audit import Audit
from .config import Settings
from .dataplane import DataPlane, DataPlaneOptions
from .errors import SettingsError, StartError
from .hierarchy import Hierarchy
from .http_section import HttpSettings
from .live import Kept, Live, forget, load_kept, state_folder
from .lowers import configured, drain, look_after, lower_tiers
from .metrics import Metrics
from .recording import Recorder
from .routes_quotas import quota_router
from .routes_tiers import settings_router
from .salts import load_salts
from .sizes import format_size
from .tiers.host import HostOptions, HostTier
from .tiers.slab import HugePages
from .waiting import PromotionOptions
from .worth import LoadMode

log = logging.getLogger("kvtier.serve")

LAG_SAMPLE_SECONDS = 0.1
FOLLOW_SECONDS = 1.0
DRAIN_SHARE = 0.6
"""Share of the shutdown time in which lower tiers still get what is theirs."""
SWITCH_SECONDS = 0.0005
"""How long a thread may keep the interpreter from the loop while it has no I/O to do."""
HTTP_GRACE_SHARE = 0.5
"""Share of the shutdown time that HTTP requests in flight may take."""


def serve(settings: Settings, again: Callable[[], Settings], *, reset: bool = False) -> None:
    """Run a server until SIGTERM or SIGINT. Blocks. Raises StartError if it can't run here.

    `again` reads the settings anew, at SIGHUP; `reset` forgets what was changed at run time.
    """
    if reset:
        forget(settings)
    settings, kept = load_kept(settings)
    _log_to_stderr(settings.log.level)
    sys.setswitchinterval(SWITCH_SECONDS)
    _collect_only_what_is_young()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Server(settings, kept, again).run())


def _collect_only_what_is_young() -> None:
    """Keep the garbage collector from looking at the same objects twice.

    A whole collection takes 0.6 µs an object and stops all threads: near a second with a million
    blocks, which never are garbage in a cycle. What survives a young collection of some hundred
    objects is out of the collector's sight from then on; references alone free it.
    """

    def survived(phase: str, _: dict[str, int]) -> None:
        if phase == "stop":
            gc.freeze()

    gc.collect()
    gc.freeze()
    gc.callbacks.append(survived)


class Server:
    """The parts of one server, and their life from start to stop."""

    def __init__(self, settings: Settings, kept: Kept, again: Callable[[], Settings]) -> None:
        self.settings = settings
        self._again = again
        self.metrics = Metrics(configured(settings))
        self.host = HostTier(_host_options(settings), self.metrics)
        self.lowers = lower_tiers(settings, self.metrics, self._post)
        self.hierarchy = Hierarchy(
            self.host, self.metrics, time.monotonic, self.lowers, self._later
        )
        self.hierarchy.promotions.options = PromotionOptions(
            LoadMode(settings.loads.mode), settings.loads.wait_seconds
        )
        self.hierarchy.pins.share = settings.host.pin_share
        self.audit = Audit(state_folder(settings), time.time)
        self.live = Live(settings, kept, self.hierarchy, self.audit, time.monotonic)
        self._loop: asyncio.AbstractEventLoop | None = None
        options = DataPlaneOptions(settings.socket, settings.group_id())
        self.plane = DataPlane(self.hierarchy, self.metrics, options)
        self.plane.salts = load_salts(settings.quotas.salts_file)
        self.recorder: Recorder | None = None
        if (folder := settings.recording.path) is not None:
            capacity = settings.recording.capacity
            self.recorder = Recorder(folder, capacity, self.metrics, self._post)
            self.hierarchy.recorder = self.recorder
        self._held = self.metrics.loop_hold_seconds.labels("lower")
        self._allocated = False
        self._stop = asyncio.Event()
        self._reloads: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until a signal comes. Raises StartError, also when memory turns out too short."""
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        self.audit.load()
        with contextlib.closing(_bind(self.settings.http)) as listener:
            try:
                await self.plane.start()
                await self._serve(listener)
            finally:
                await self.plane.stop()
                for tier in self.lowers:
                    tier.close()
                self.host.close()

    def app(self) -> FastAPI:
        """Return the control plane."""
        return build_app(
            self.hierarchy,
            self.metrics,
            self.settings,
            lambda: self._allocated,
            [settings_router(self.live), quota_router(self.live)],
        )

    async def _serve(self, listener: socket.socket) -> None:
        web = _Web(_web_options(self.app(), self.settings))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(web.serve([listener]))
                background = [
                    group.create_task(self._allocate()),
                    group.create_task(_sample_lag(self.metrics)),
                    group.create_task(look_after(self.lowers)),
                    group.create_task(_follow(self.live)),
                    group.create_task(self.live.quotas.run()),
                ]
                if self.recorder is not None:
                    background.append(group.create_task(self.recorder.run()))
                self._announce(listener)
                await self._stop.wait()
                _end_within(self.settings.shutdown_seconds)
                for task in background:
                    task.cancel()
                await self.plane.stop()
                await self.live.close()
                web.should_exit = True
                seconds = self.settings.shutdown_seconds * DRAIN_SHARE
                await drain(self.lowers, self.hierarchy.flush(), seconds)
                if self.recorder is not None:
                    await self.recorder.close()
        except* StartError as failed:
            raise failed.exceptions[0] from None

    async def _allocate(self) -> None:
        began = time.monotonic()
        await self.host.allocate()
        self._allocated = True
        log.info(
            "ready: %s of host memory allocated in %.1f s",
            format_size(self.host.options.capacity_bytes),
            time.monotonic() - began,
        )
        await self.live.resizer.run()

    def _reload(self) -> None:
        """SIGHUP: read the settings again."""
        task = asyncio.get_running_loop().create_task(self._read_again())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _read_again(self) -> None:
        try:
            await self.live.reload(await asyncio.to_thread(self._again))
            await self._read_salts()
        except SettingsError as error:
            log.error("the settings stay as they are: %s", error)

    async def _read_salts(self) -> None:
        """Read the salts again. Engines have the key of the start. Raises SettingsError."""
        file = self.settings.quotas.salts_file
        salts = await asyncio.to_thread(load_salts, file)
        if salts.key != self.plane.salts.key:
            raise SettingsError(f"{file} has another key than at the start: that needs a restart.")
        self.plane.salts = salts

    def _post(self, call: Callable[[], None]) -> None:
        """Make a call on the loop, from any thread; nothing once the loop is closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # A thread that hung comes back too late.
                self._loop.call_soon_threadsafe(self._held_by, call)

    def _held_by(self, call: Callable[[], None]) -> None:
        """Make a call, and take note of how long it held the loop."""
        began = time.thread_time()
        call()
        self._held.observe(time.thread_time() - began)

    def _later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        assert self._loop is not None, "engines come when the loop runs"
        return self._loop.call_later(seconds, self._held_by, call)

    def _announce(self, listener: socket.socket) -> None:
        address, port = listener.getsockname()[:2]
        log.info(
            "kvtier serves engines on %s and HTTP on http://%s:%d, host tier %s, policy %s%s%s",
            self.settings.socket,
            f"[{address}]" if ":" in address else address,
            port,
            format_size(self.settings.host.capacity),
            self.settings.host.policy,
            "".join(
                f", {tier.tier} tier {format_size(tier.options.capacity_bytes)}"
                for tier in self.lowers
            ),
            "" if self.settings.http.guarded else ", HTTP without a token",
        )


class _Web(uvicorn.Server):
    """uvicorn without its signal handlers: signals end the data plane too, so they are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _web_options(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # What they say of the client is not to be trusted.
        timeout_graceful_shutdown=max(1, int(settings.shutdown_seconds * HTTP_GRACE_SHARE)),
    )


def _host_options(settings: Settings) -> HostOptions:
    host = settings.host
    return HostOptions(
        capacity_bytes=host.capacity,
        policy=host.policy,
        high_watermark=host.high_watermark,
        low_watermark=host.low_watermark,
        huge_pages=HugePages(host.huge_pages),
    )


def _bind(http: HttpSettings) -> socket.socket:
    """Return a listening socket for HTTP. Raises StartError naming the address and the fix."""
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        return socket.create_server((http.host, http.port), family=family)
    except OSError as error:
        raise StartError(
            f"HTTP can't be served on {http.host}, port {http.port} ({error.strerror}): "
            f"stop what has the port, or set http.port (--port) to another."
        ) from error


async def _follow(live: Live) -> None:
    while True:
        await asyncio.sleep(FOLLOW_SECONDS)
        live.tick()
        await live.follow()


async def _sample_lag(metrics: Metrics) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(LAG_SAMPLE_SECONDS)
        late = time.perf_counter() - began - LAG_SAMPLE_SECONDS
        metrics.loop_lag_seconds.observe(max(late, 0.0))


def _end_within(seconds: float) -> None:
    """End the process after `seconds` if nothing else has, whatever the event loop does."""

    def end() -> None:
        log.error("not everything ended within shutdown_seconds (%s): exiting at once", seconds)
        os._exit(1)

    watchdog = threading.Timer(seconds, end)
    watchdog.daemon = True
    watchdog.start()


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
