"""`kvtier serve` as a process: its start, its refusals, its end."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvtier.config import default_socket
from servers import clean_environment
from support import until

pytestmark = pytest.mark.slow

BOUND_SECONDS = 5


def check_refused(result, *parts):
    """One sentence on stderr that holds `parts`, and exit code 1."""
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    sentence = result.stderr.strip().splitlines()[-1]
    assert sentence.startswith("kvtier: ")
    for part in parts:
        assert part in sentence


def leftovers(folder):
    return sorted(entry.name for entry in folder.iterdir() if "stderr" not in entry.name)


def test_one_line_at_start_says_where_everything_is(serve):
    server = serve().ready()
    port = server.url.rpartition(":")[2]
    lines = [line for line in server.log.splitlines() if "kvtier serves" in line]
    assert len(lines) == 1
    for part in (" INFO ", str(server.socket), f"127.0.0.1:{port}", "64MiB", "policy auto"):
        assert part in lines[0]


def test_it_serves_engines_and_http_once_ready(serve):
    server = serve().ready()
    assert server.socket.is_socket()
    assert server.socket.stat().st_mode & 0o777 == 0o600
    assert server.get("/healthz") == (200, '{"status":"ok"}')
    with socket.socket(socket.AF_UNIX) as engine:
        engine.connect(str(server.socket))


def test_it_answers_while_memory_is_still_being_allocated(serve):
    server = serve("--capacity", "2GiB")
    codes = {server.get("/readyz")[0], server.get("/healthz")[0]}
    assert codes <= {200, 503}
    assert server.get("/healthz")[0] == 200
    server.ready()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_within_the_bound_and_leaves_no_file(serve, tmp_path, number):
    server = serve().ready()
    code, seconds = server.end(number)
    assert code == 0, server.log
    assert seconds < BOUND_SECONDS
    assert leftovers(tmp_path) == []
    assert "Traceback" not in server.log


def test_a_signal_during_allocation_ends_it_too(serve, tmp_path):
    server = serve("--capacity", "4GiB")
    assert server.url
    code, seconds = server.end()
    assert code == 0, server.log
    assert seconds < BOUND_SECONDS
    assert leftovers(tmp_path) == []


def test_open_engines_and_http_clients_do_not_delay_the_end(serve, tmp_path):
    server = serve().ready()
    host, port = re.fullmatch(r"http://(.*):(\d+)", server.url).groups()
    with (
        socket.socket(socket.AF_UNIX) as engine,
        socket.create_connection((host, int(port))) as half_a_request,
    ):
        engine.connect(str(server.socket))
        half_a_request.sendall(b"GET /v1/stats HTTP/1.1\r\nHost: x\r\n")
        code, seconds = server.end()
    assert code == 0, server.log
    assert seconds < BOUND_SECONDS
    assert leftovers(tmp_path) == []


STUCK = """
import time
from pathlib import Path
from kvtier import serve
from kvtier.config import load_settings

async def hang(plane):
    time.sleep(60)

serve.DataPlane.stop = hang
options = {"socket": SOCKET, "http.port": 0, "host.capacity": "1MiB", "shutdown_seconds": 1}
settings = load_settings(None, options)
serve.serve(settings, lambda: settings)
"""


def test_a_server_whose_loop_hangs_at_the_end_is_ended_at_the_bound(tmp_path):
    program = STUCK.replace("SOCKET", repr(str(tmp_path / "kvtier.sock")))
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=clean_environment()
    ) as process:
        while "ready" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(10) == 1
        assert time.monotonic() - began == pytest.approx(1, abs=0.5)
        assert "exiting at once" in process.stderr.read()


def test_a_second_server_on_the_socket_is_refused_and_the_first_lives_on(serve, kvtier):
    server = serve().ready()
    second = kvtier("serve", "--socket", server.socket, "--port", 0, "--capacity", "64MiB")
    check_refused(second, str(server.socket), "another")
    assert server.get("/readyz")[0] == 200
    with socket.socket(socket.AF_UNIX) as engine:
        engine.connect(str(server.socket))


def test_a_server_starts_on_a_socket_that_a_killed_one_left(serve):
    first = serve().ready()
    first.process.kill()
    first.process.wait()
    assert first.socket.exists()
    assert serve(socket=first.socket).ready().get("/healthz")[0] == 200


def test_a_taken_port_is_refused_naming_it_and_leaves_no_file(kvtier, tmp_path):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        path = tmp_path / "kvtier.sock"
        result = kvtier("serve", "--socket", path, "--port", port, "--capacity", "64MiB")
    check_refused(result, str(port), "http.port")
    assert leftovers(tmp_path) == []


def test_a_socket_path_that_linux_cannot_take_is_refused(kvtier, tmp_path):
    path = tmp_path / ("s" * (108 - len(str(tmp_path)) - 1))
    assert len(str(path)) == 108
    check_refused(kvtier("serve", "--socket", path, "--port", 0), str(path), "107")
    assert leftovers(tmp_path) == []


def test_the_longest_socket_path_that_linux_takes_is_served(serve, tmp_path):
    path = tmp_path / ("s" * (107 - len(str(tmp_path)) - 1))
    serve(socket=path).ready()
    assert path.is_socket()


def test_a_folder_that_cannot_hold_the_socket_is_refused(kvtier, tmp_path):
    # A file in place of the folder stops root too, whom permissions do not.
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "kvtier.sock"
    check_refused(kvtier("serve", "--socket", path, "--port", 0), str(path))
    assert leftovers(tmp_path) == ["file"]


def test_a_folder_without_write_permission_is_refused(kvtier):
    # Nobody may make files in /proc, not even root.
    check_refused(kvtier("serve", "--socket", "/proc/kvtier.sock", "--port", 0), "/proc")


def test_a_file_that_is_no_socket_is_left_alone(kvtier, tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    check_refused(kvtier("serve", "--socket", path, "--port", 0), str(path), "not a socket")
    assert path.read_text() == "data"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--capacity", "5"], ["host.capacity", '"5GiB"']),
        (["--capacity", "999TiB"], ["host.capacity (999TiB)", "memory"]),
        (["--port", "http"], ["http.port", '"http"']),
        (["--config", "/nonexistent.yaml"], ["/nonexistent.yaml", "does not exist"]),
    ],
)
def test_wrong_settings_stop_the_start_with_one_sentence(kvtier, tmp_path, arguments, parts):
    result = kvtier("serve", "--socket", tmp_path / "kvtier.sock", *arguments)
    check_refused(result, *parts)
    assert len(result.stderr.strip().splitlines()) == 1
    assert leftovers(tmp_path) == []


def free_huge_pages():
    return int(re.search(r"HugePages_Free:\s+(\d+)", Path("/proc/meminfo").read_text())[1])


@pytest.mark.skipif(free_huge_pages() > 0, reason="the machine has huge pages to give")
def test_memory_that_cannot_be_had_ends_the_server_with_one_sentence(kvtier, tmp_path):
    arguments = ["serve", "--socket", tmp_path / "kvtier.sock", "--port", 0]
    result = kvtier(*arguments, "--capacity", "64MiB", KVTIER_HOST__HUGE_PAGES="always")
    check_refused(result, "host.huge_pages", "vm.nr_hugepages")
    assert leftovers(tmp_path) == []


def test_a_misspelt_key_stops_the_start(kvtier, tmp_path):
    file = tmp_path / "kvtier.yaml"
    file.write_text("host: {capcity: 1GiB}")
    check_refused(kvtier("serve", "--config", file), '"host.capcity"', '"host.capacity"')


def test_a_wrong_variable_stops_the_start(kvtier):
    result = kvtier("serve", KVTIER_HOST_CAPACITY="1GiB")
    check_refused(result, "KVTIER_HOST_CAPACITY", "KVTIER_HOST__CAPACITY")


def test_the_default_socket_is_in_the_runtime_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket() == tmp_path / "kvtier" / "kvtier.sock"


def test_the_lag_of_the_loop_is_sampled(serve):
    server = serve().ready()

    def sampled():
        text = server.get("/metrics")[1]
        return float(re.search(r"^kvtier_loop_lag_seconds_count (\S+)", text, re.MULTILINE)[1]) > 3

    until(sampled, "loop-lag sampling", 10)
