"""Access to a real server: its tokens, its clients, and what it shows of secrets, which is none."""

import contextlib
import http.client
import http.server
import json
import re
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kvtier.asking import AskError, ask
from kvtier.config import load_settings
from kvtier.up import _server_environment

pytestmark = pytest.mark.slow

CHANGE = "change-token-0123456789"
READ = "reading-token-0123456789"
PASSWORD = "redis-password-0123456789"
SECRETS = (CHANGE, READ, PASSWORD)


@pytest.fixture
def guarded(serve):
    return serve(KVTIER_HTTP__TOKEN=CHANGE, KVTIER_HTTP__READ_TOKEN=READ).ready()


def send(server, method, path, token=None, body=None, **headers):
    """Return status, headers and text of a request to a server."""
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_tokens_guard_a_real_server(guarded):
    assert send(guarded, "GET", "/v1/stats")[0] == 401
    assert send(guarded, "GET", "/v1/stats", READ)[0] == 200
    assert send(guarded, "GET", "/metrics", READ)[0] == 200
    assert send(guarded, "GET", "/metrics", CHANGE)[0] == 200
    assert send(guarded, "DELETE", "/v1/stats", READ)[0] == 403
    assert send(guarded, "DELETE", "/v1/stats", CHANGE)[0] == 405
    assert send(guarded, "GET", "/healthz")[0] == 200
    assert "HTTP without a token" not in guarded.log


def test_without_tokens_the_log_says_so(serve):
    assert "HTTP without a token" in serve().ready().log


def test_another_name_is_refused_by_a_real_server(serve):
    server = serve(KVTIER_HTTP__HOSTS="kv.internal").ready()
    assert send(server, "GET", "/v1/stats", Host="evil.example")[0] == 421
    assert send(server, "GET", "/v1/stats", Host="kv.internal")[0] == 200


def raw(server, *pieces):
    """Send bytes as they are, until the server has closed; return what it said."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as sock:
        with contextlib.suppress(OSError):  # It closes when it has heard enough.
            for piece in pieces:
                sock.sendall(piece)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(65536):
                said += piece
    return said.decode()


def test_a_body_that_is_too_large_is_refused_by_a_real_server(guarded):
    head = (
        f"POST /v1/stats HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {CHANGE}\r\n"
        f"Content-Length: {2 << 20}\r\n\r\n"
    )
    said = raw(guarded, head.encode())  # Whoever still sends when it closes may lose the answer.
    assert said.startswith("HTTP/1.1 413 ")
    assert json.loads(said.partition("\r\n\r\n")[2])["status"] == 413
    assert send(guarded, "GET", "/v1/stats", READ)[0] == 200


def test_a_chunked_body_is_counted_by_a_real_server(guarded):
    head = (
        f"POST /v1/blocks/lookup HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {CHANGE}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"10000\r\n" + b"[" * 0x10000 + b"\r\n"
    said = raw(guarded, head.encode(), *[chunk] * 32)
    assert said.startswith("HTTP/1.1 413 ")
    assert "application/problem+json" in said
    assert send(guarded, "GET", "/v1/stats", READ)[0] == 200


def test_what_follows_a_body_that_is_longer_than_it_said_is_no_request_with_rights(guarded):
    head = (
        f"DELETE /v1/stats HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {CHANGE}\r\n"
        "Content-Length: 2\r\n\r\n"
    )
    hidden = b"DELETE /v1/stats HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    said = raw(guarded, head.encode() + b"{}" + hidden)
    assert re.findall(r"HTTP/1\.1 (\d+)", said) == ["405", "401"]


def test_what_a_proxy_says_of_the_client_is_not_believed(guarded):
    codes = [
        send(guarded, "GET", "/v1/stats", "wrong" * 5, **{"X-Forwarded-For": f"10.0.0.{number}"})[0]
        for number in range(40)
    ]
    assert codes[0] == 401
    assert codes[-1] == 429


def test_with_a_token_it_listens_on_all_addresses(serve):
    server = serve(KVTIER_HTTP__HOST="0.0.0.0", KVTIER_HTTP__READ_TOKEN=READ)
    port = urlsplit(server.url).port
    answer = ask(f"http://127.0.0.1:{port}", "GET", "/v1/stats",
                 headers={"Authorization": f"Bearer {READ}"})  # fmt: skip
    assert answer.status == 200
    with pytest.raises(AskError, match="token"):
        ask(f"http://127.0.0.1:{port}", "GET", "/v1/stats")


def everything_shown(server, kvtier, **environment):
    """Return by source what a server and its commands show."""
    url = server.url
    requests = {
        f"{method} {path} with {token}": "".join(map(str, send(server, method, path, token)))
        for path in ("/v1/config", "/metrics", "/v1/tiers", "/v1/none", "/openapi.json", "/docs")
        for method in ("GET", "POST")
        for token in (CHANGE, READ, f"{READ}x", None)
    }
    commands = {
        " ".join(words): f"{(done := kvtier(*words, **environment)).stdout}{done.stderr}"
        for words in (
            ["config"],
            ["config", "--json"],
            ["config", "--explain"],
            ["status", "--url", url],
            ["status", "--url", url, "--json"],
            ["doctor", "--url", url],
            ["doctor", "--url", url, "--json"],
            ["top", "--url", url],
            ["status", "--url", "http://127.0.0.1:1"],
        )
    }
    process = Path(f"/proc/{server.process.pid}")
    titles = {name: (process / name).read_text() for name in ("cmdline", "comm", "status")}
    return {**requests, **commands, **titles, "log": server.log}


def test_secrets_are_shown_nowhere(serve, kvtier, tmp_path):
    secret = {
        "KVTIER_HTTP__TOKEN": CHANGE,
        "KVTIER_HTTP__READ_TOKEN": READ,
        "KVTIER_REDIS__PASSWORD": PASSWORD,
        "KVTIER_REDIS__URL": "redis://127.0.0.1:1",
        "KVTIER_LOG__LEVEL": "debug",
    }
    server = serve(**secret).ready()
    shown = everything_shown(server, kvtier, **secret, KVTIER_TOKEN=READ)
    assert "kvtier 0" in shown[f"status --url {server.url}"]
    for source, text in shown.items():
        for each in SECRETS:
            assert each not in text, source
    assert json.loads(send(server, "GET", "/v1/config", READ)[2])["http"]["token"] == "*" * 10


def test_a_failed_start_shows_no_secret(kvtier, tmp_path):
    for name in ("KVTIER_HTTP__TOKEN", "KVTIER_HTTP__READ_TOKEN"):
        secret = {name: "secret with spaces in it"}
        result = kvtier("serve", "--socket", tmp_path / "s", **secret)
        assert result.returncode == 1
        assert "secret with" not in result.stderr
        assert name in result.stderr


# The commands.


def test_commands_send_the_token_of_the_variable_or_of_a_file(guarded, kvtier, tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{READ}\n")
    for arguments, environment in (
        ([], {"KVTIER_TOKEN": READ}),
        (["--token-file", file], {}),
        (["--token-file", file], {"KVTIER_TOKEN": "wrong-wrong-wrong-wrong"}),
    ):
        done = kvtier("status", "--url", guarded.url, *arguments, **environment)
        assert done.returncode == 0, done.stderr
        assert "64 MiB" in done.stdout


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({}, ["wants a token", "KVTIER_TOKEN", "--token-file"]),
        ({"KVTIER_TOKEN": "wrong-wrong-wrong-wrong"}, ["not the server's token", "KVTIER_TOKEN"]),
        ({"KVTIER_TOKEN": "bad\nheader-bad-header"}, ["KVTIER_TOKEN: a token is 16"]),
    ],
)
def test_a_command_without_the_right_token_says_what_to_do(guarded, kvtier, environment, parts):
    done = kvtier("status", "--url", guarded.url, **environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    for part in parts:
        assert part in done.stderr
    assert "wrong-wrong" not in done.stderr
    assert "bad-header" not in done.stderr


def test_a_token_file_that_is_missing_is_named(kvtier):
    done = kvtier("status", "--token-file", "/nowhere/token")
    assert done.returncode == 1
    assert "--token-file (/nowhere/token) can't be read" in done.stderr


def test_a_url_with_a_password_is_refused_without_showing_it(kvtier):
    done = kvtier("status", "--url", "http://user:hunter2@127.0.0.1:9555")
    assert done.returncode == 1
    assert "hunter2" not in done.stderr
    assert "KVTIER_TOKEN" in done.stderr


@pytest.fixture
def elsewhere():
    """A server that sends whoever asks somewhere else, and remembers who came."""
    came = []

    class Redirects(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            came.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/stolen")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Redirects)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", came
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_token_is_never_taken_elsewhere(elsewhere):
    url, came = elsewhere
    with pytest.raises(AskError, match="not a kvtier server"):
        ask(url, "GET", "/v1/stats", headers={"Authorization": f"Bearer {CHANGE}"})
    assert came == ["/v1/stats"]


def test_a_refusal_is_told_in_the_servers_words(serve):
    server = serve().ready()
    with pytest.raises(AskError, match='There is no tier "cloud" here') as refused:
        ask(server.url, "GET", "/v1/tiers/cloud")
    assert refused.value.status == 404
    answer = ask(server.url, "GET", "/v1/tiers/host")
    assert answer.json["tier"] == "host"
    assert re.match("application/json", answer.headers["content-type"])


@pytest.mark.parametrize("hosts", ["", "a,b"])
def test_up_hands_its_server_all_that_it_knows(monkeypatch, hosts):
    monkeypatch.setenv("KVTIER_HTTP__TOKEN", CHANGE)
    monkeypatch.setenv("KVTIER_HTTP__READ_TOKEN", READ)
    monkeypatch.setenv("KVTIER_HTTP__HOSTS", hosts)
    first = load_settings()
    for name, value in _server_environment({}, first).items():
        monkeypatch.setenv(name, value)
    assert load_settings() == first
    assert load_settings().http_tokens().change == CHANGE
