"""`kvtier top`: what changed between two readings, and the command in and without a terminal."""

import contextlib
import dataclasses
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from kvtier.core import Role, Tier, WriteMode
from kvtier.stats import Stats
from kvtier.tier_readings import LowerDetails, SessionReading, TierReading, TierTraffic
from kvtier.top import Moment, compare, render
from rich.console import Console
from servers import clean_environment

SECONDS = 20


def moment(at=0.0, lookups=0, asked=0, hit=0, evictions=0, sessions=()):
    lower = LowerDetails(False, WriteMode.THROUGH, "half_open", True, 5 << 20, 6 << 20, None, None)
    traffic = [TierTraffic(Tier.DEVICE, asked, 0), TierTraffic(Tier.DISK, asked, hit)]
    return Moment(
        at,
        Stats("1.2.3", True, lookups, traffic, 0.25, {}),
        [TierReading(Tier.DISK, "auto", 4 << 30, 3 << 30, 1234, evictions, lower=lower)],
        list(sessions),
    )


def session(number, role):
    return SessionReading(number, role, "e", 0, 1, "d", 0.0, 0, 0)


def shown(reading, said=""):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render(reading, "http://x", said))
    return capture.get()


def test_the_first_reading_has_totals_and_no_rates():
    reading = compare(None, moment(lookups=9, asked=100, hit=40))
    assert reading.lookups == 9
    assert reading.lookups_per_second is None
    disk = reading.tiers[1]
    assert (disk.hit_ratio, disk.interval_hit_ratio, disk.evictions_per_second) == (0.4, None, None)
    assert reading.tiers[0].used_bytes is None


def test_rates_are_of_what_happened_in_between():
    before = moment(10.0, lookups=5, asked=100, hit=0, evictions=3)
    reading = compare(before, moment(12.0, lookups=25, asked=200, hit=75, evictions=13))
    assert reading.interval_seconds == 2.0
    assert reading.lookups_per_second == 10.0
    disk = reading.tiers[1]
    assert disk.interval_hit_ratio == 0.75
    assert disk.hit_ratio == 0.375
    assert disk.evictions_per_second == 5.0


def test_an_interval_without_traffic_has_no_hit_ratio():
    reading = compare(moment(0.0, 5, 100, 50), moment(1.0, 5, 100, 50))
    assert reading.lookups_per_second == 0.0
    assert reading.tiers[1].interval_hit_ratio is None


def test_a_restarted_server_counts_from_nothing():
    reading = compare(moment(0.0, lookups=50, evictions=9), moment(1.0, lookups=2))
    assert reading.lookups_per_second is None
    assert reading.tiers[1].evictions_per_second is None


def test_a_picture_has_all_that_is_asked_for():
    workers = [session(number, Role.WORKER) for number in range(2)]
    now = moment(2.0, 30, 200, 80, 10, [session(9, Role.SCHEDULER), *workers])
    text = shown(compare(moment(0.0, 10, 100, 5, 0), now), "gone")
    for part in ("10.0 lookups/s", "25.0%", "1 schedulers, 2 workers", "3 GiB", "75%", "1,234",
                 "40.0%", "5.0", "5 MiB", "6 MiB", "half open", "hits 2 s", "gone"):  # fmt: skip
        assert part in text


def test_what_is_not_known_is_a_dash():
    assert "- lookups/s" in shown(compare(None, moment()))


@pytest.mark.slow
def test_without_a_terminal_one_reading_is_printed(serve, kvtier):
    server = serve().ready()
    for arguments in ([], ["--once"]):
        done = kvtier("top", "--url", server.url, *arguments, COLUMNS="140")
        assert done.returncode == 0, done.stderr
        assert "host" in done.stdout
        assert "\x1b[" not in done.stdout


@pytest.mark.slow
def test_one_reading_as_json(serve, kvtier):
    server = serve().ready()
    reading = json.loads(kvtier("top", "--url", server.url, "--json").stdout)
    assert reading["lookups_per_second"] is None
    assert [tier["tier"] for tier in reading["tiers"]] == ["device", "host"]
    assert reading["tiers"][1]["capacity_bytes"] == 64 << 20
    assert reading["sessions"] == {"scheduler": 0, "worker": 0}


def test_without_a_server_it_says_so(kvtier):
    done = kvtier("top", "--url", "http://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "No kvtier server answers" in done.stderr


@dataclasses.dataclass
class Terminal:
    """A `kvtier top` in a terminal of its own."""

    process: subprocess.Popen
    master: int
    text: str = ""

    def shows(self, part):
        end = time.monotonic() + SECONDS
        while part not in self.text:
            left = end - time.monotonic()
            assert left > 0, self.text
            if select.select([self.master], [], [], left)[0]:
                self.text += os.read(self.master, 65536).decode(errors="replace")

    def ends(self):
        """Read on, so that it is not held up, until it has ended; return the exit code."""
        end = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text
            if select.select([self.master], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # Linux says EIO once nobody writes any more.
                    self.text += os.read(self.master, 65536).decode(errors="replace")
        return self.process.returncode


@pytest.fixture
def terminal():
    """Run commands in terminals."""
    started = []

    def run(*arguments):
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtier", *map(str, arguments)],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env=clean_environment(COLUMNS="140", LINES="40", TERM="xterm"),
        )  # fmt: skip
        os.close(slave)
        started.append(Terminal(process, master))
        return started[-1]

    yield run
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.master)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["q", "ctrl-c"])
def test_it_watches_until_it_is_told_to_quit(serve, terminal, way):
    server = serve().ready()
    top = terminal("top", "--url", server.url, "--interval", "0.2")
    top.shows("0.0 lookups/s")  # The second picture: the first one has no rates.
    if way == "q":
        os.write(top.master, b"xq")
    else:
        top.process.send_signal(signal.SIGINT)
    assert top.ends() == 0
    assert "Traceback" not in top.text


@pytest.mark.slow
def test_a_server_that_goes_is_told_and_watched_for(serve, terminal):
    server = serve().ready()
    top = terminal("top", "--url", server.url, "--interval", "0.2")
    top.shows("lookups/s")
    server.end()
    top.shows("No kvtier server answers")
    os.write(top.master, b"q")
    assert top.ends() == 0
