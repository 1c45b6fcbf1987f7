"""How `kvtier up` ends, with a vLLM that is faked so that its faults come when they should."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvtier.endpoints import free_port
from servers import Served, clean_environment
from support import until

FAKE = """
import http.server, os, signal, subprocess, sys, threading

if os.environ["FAKE"] == "dies":
    sys.exit(7)
if os.environ["FAKE"] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("worker", worker.pid, flush=True)

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if os.environ["FAKE"] == "loading" else 200)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
SECONDS = 30
pytestmark = pytest.mark.slow


def runs(pid):
    """Whether a process runs; one that only waits for its parent to look does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass
class Up:
    """A running `kvtier up`."""

    process: subprocess.Popen
    socket: Path
    output: Path

    @property
    def said(self):
        return self.output.read_text()

    def says(self, text):
        until(lambda: text in self.said, f"{text!r} in:\n{self.said}", SECONDS)

    @property
    def server(self):
        return children(self.process.pid)[0]

    @property
    def engine(self):
        return children(self.process.pid)[-1]

    @property
    def worker(self):
        self.says("worker ")
        return int(re.search(r"worker (\d+)", self.said)[1])

    def all(self):
        """Process ids of everything that runs once vLLM does."""
        return [self.process.pid, *children(self.process.pid), self.worker]

    def ends(self):
        """Wait for its end and return the exit code."""
        return self.process.wait(SECONDS)


@pytest.fixture
def up(tmp_path):
    """Start `kvtier up` beside a fake vLLM that behaves in the given way."""
    package = tmp_path / "fake/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    (tmp_path / "fake/vllm/__init__.py").touch()
    (package / "api_server.py").write_text(FAKE)
    started = []

    def start(behaviour="well", socket=None, port="0"):
        path = socket or tmp_path / "kvtier.sock"
        output = tmp_path / f"output-{len(started)}"
        command = ["-m", "kvtier", "up", "--socket", path, "--port", port, "--capacity", "1MiB"]
        command += ["--", "some/model", "--port", free_port("127.0.0.1")]
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdout=sink,
                stderr=sink,
                env=clean_environment(
                    PYTHONPATH=str(tmp_path / "fake"),
                    FAKE=behaviour,
                    XDG_CACHE_HOME=str(tmp_path / "cache"),
                ),
            )
        started.append(process)
        return Up(process, path, output)

    yield start
    for process in started:
        process.kill()
        process.wait()


def gone(pids):
    until(lambda: not any(map(runs, pids)), f"the end of {pids}", SECONDS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_both_and_leaves_nothing(up, number):
    running = up()
    running.says("ready;")
    pids = running.all()
    running.process.send_signal(number)
    assert running.ends() == 0
    assert f"{number.name} came: ending vLLM, then the kvtier server" in running.said
    gone(pids)
    assert not running.socket.exists()


def test_a_signal_while_vllm_loads_ends_both(up):
    running = up("loading")
    pids = running.all()
    running.process.send_signal(signal.SIGTERM)
    assert running.ends() == 0
    assert "ready;" not in running.said
    gone(pids)


def test_everything_is_named_once_both_are_ready(up):
    running = up()
    running.says("socket ")
    for name in ("OpenAI API", "vLLM metrics", "control plane", "kvtier metrics", "socket"):
        assert re.search(rf"  {name} +\S+", running.said), running.said
    assert str(running.socket) in running.said


def test_blocks_lie_in_the_users_cache_folder_unless_a_setting_says_otherwise(up, tmp_path):
    running = up()
    running.says("ready;")
    folder = tmp_path / "cache/kvtier/blocks"
    assert str(folder) in running.said
    until(folder.is_dir, "the directory", SECONDS)


def test_the_end_of_vllm_ends_the_server_and_its_exit_code_is_kept(up):
    running = up("dies")
    assert running.ends() == 7
    assert "vLLM ended by itself (exit code 7): ending the kvtier server" in running.said
    assert not running.socket.exists()


def test_a_killed_vllm_takes_its_workers_and_the_server_with_it(up):
    running = up()
    running.says("ready;")
    pids = running.all()
    os.kill(running.engine, signal.SIGKILL)
    assert running.ends() == 137
    gone(pids)
    assert not running.socket.exists()


def test_the_end_of_the_server_ends_vllm(up):
    running = up()
    running.says("ready;")
    pids = running.all()
    os.kill(running.server, signal.SIGKILL)
    assert running.ends() == 1
    assert "the kvtier server ended by itself (exit code 137): ending vLLM" in running.said
    gone(pids)


def test_a_second_signal_kills_a_vllm_that_does_not_end(up):
    running = up("stubborn")
    running.says("ready;")
    pids = running.all()
    running.process.send_signal(signal.SIGTERM)
    running.says("SIGTERM came")
    running.process.send_signal(signal.SIGTERM)
    assert running.ends() == 137
    assert "vLLM has not ended yet, and is killed" in running.said
    gone(pids)
    assert not running.socket.exists()


def test_children_do_not_outlive_a_killed_up(up):
    running = up()
    running.says("ready;")
    pids, worker = children(running.process.pid), running.worker
    running.process.kill()
    gone(pids)
    assert not running.socket.exists()
    os.kill(worker, signal.SIGKILL)  # vLLM ends its own at SIGTERM; the fake does not.


def test_a_server_that_lives_on_the_socket_is_used_and_stays(up, serve):
    served = serve().ready()
    running = up(socket=served.socket)
    running.says("this engine joins it")
    running.says("ready; Ctrl-C ends this engine; the server stays")
    assert len(children(running.process.pid)) == 1
    running.process.send_signal(signal.SIGTERM)
    assert running.ends() == 0
    assert served.get("/healthz")[0] == 200


def test_a_joined_server_is_named_only_where_it_answers(up, serve):
    served = serve().ready()
    right = up(socket=served.socket, port=served.url.rpartition(":")[2])
    right.says(f"control plane   {served.url}")
    wrong = up(socket=served.socket)
    wrong.says("control plane   not where http.host and http.port say")


def test_settings_reach_the_server_whatever_the_environment_says(up, tmp_path):
    running = up()
    running.says("ready;")
    url = re.search(r"control plane +(\S+)", running.said)[1]
    served = Served(running.process, running.socket, running.output)
    assert url == served.url
    assert served.json("/v1/config")["host"]["capacity"] == "1MiB"
