"""Who may use the control plane: tokens, names, sizes and rates. Every refusal is a problem."""

import asyncio
import json
import secrets
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier.access import (
    ADDRESSES_AT_MOST,
    BODY_BYTES_AT_MOST,
    QUESTIONS,
    Access,
    AccessOptions,
    Buckets,
    Rate,
)
from kvtier.api import build_app
from kvtier.config import load_settings
from kvtier.http_section import HttpTokens, Refusal
from kvtier.metrics import Metrics
from support import hierarchy

CHANGE = "change-token-0123456789"
READ = "reading-token-0123456789"
TOKENS = HttpTokens(CHANGE, READ)
CHANGES = ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "INVENTED"]
PROBLEM = {"type", "title", "status", "detail", "instance"}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Answer:
    """What came back."""

    def __init__(self, sent):
        self.status = sent[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        self.text = b"".join(each.get("body", b"") for each in sent[1:]).decode()

    @property
    def served(self):
        return self.text == "served"


class Door:
    """The middleware in front of an application that serves everything and reads its body."""

    def __init__(self, app=None, **options):
        self.clock = Clock()
        self.asked = 0
        self.metrics = Metrics()
        self.access = Access(app or self._serve, AccessOptions(**options), self.metrics, self.clock)

    async def _serve(self, scope, receive, send):
        self.asked += 1
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})

    def refused(self):
        """Return how many requests were not let in, by reason, of those that there were."""
        counts = {one: self.metrics.http_refusals.labels(one)._value.get() for one in Refusal}
        return {reason: count for reason, count in counts.items() if count}

    def ask(self, method="GET", path="/v1/stats", *, token=None, body=(b"",), client="127.0.0.1",
            **headers):  # fmt: skip
        """Send one request, and check that a refusal is a problem document."""
        given = {"host": "localhost:9555"} | headers
        if token is not None:
            given["authorization"] = f"Bearer {token}"
        pairs = [
            (name.replace("_", "-").encode(), each.encode("latin-1"))
            for name, value in given.items()
            for each in ([value] if isinstance(value, str) else value)
        ]
        scope = {"type": "http", "method": method, "path": path, "headers": pairs,
                 "client": (client, 1), "query_string": b"", "root_path": "",
                 "server": ("x", 1), "scheme": "http"}  # fmt: skip
        parts, sent = list(body), []

        async def receive():
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message):
            sent.append(message)

        asyncio.run(self.access(scope, receive, send))
        answer = Answer(sent)
        if answer.status >= 400:
            problem = json.loads(answer.text)
            assert set(problem) == PROBLEM
            assert answer.headers["content-type"] == "application/problem+json"
            assert (problem["status"], problem["instance"]) == (answer.status, path)
            assert problem["detail"].endswith(".")
        return answer


# Tokens.


def test_without_tokens_everything_is_served_on_loopback():
    for method in ["GET", *CHANGES]:
        assert Door().ask(method).served


def test_probes_need_no_login_and_everything_else_does():
    door = Door(tokens=TOKENS)
    assert door.ask(path="/healthz").served
    assert door.ask(path="/readyz").served
    for path in ("/metrics", "/v1/stats", "/docs", "/openapi.json", "/none", "/healthz/", "/"):
        answer = door.ask(path=path)
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert door.ask("POST", "/healthz").status == 401


@pytest.mark.parametrize("token", [CHANGE, READ])
@pytest.mark.parametrize("path", ["/metrics", "/v1/stats", "/docs"])
def test_either_token_reads(token, path):
    assert Door(tokens=TOKENS).ask(path=path, token=token).served


@pytest.mark.parametrize("method", CHANGES)
def test_only_the_first_token_changes(method):
    door = Door(tokens=TOKENS)
    assert door.ask(method, token=CHANGE).served
    answer = door.ask(method, token=READ)
    assert answer.status == 403
    assert "insufficient_scope" in answer.headers["www-authenticate"]
    assert door.ask(method).status == 401


@pytest.mark.parametrize("question", QUESTIONS)
def test_who_may_read_may_ask_questions_that_have_a_body(question):
    method, path = question
    door = Door(tokens=TOKENS)
    assert door.ask(method, path, token=READ).served
    assert door.ask(method, path, token=CHANGE).served
    assert door.ask(method, path).status == 401
    assert door.ask(method, path, token="wrong" * 4).status == 401
    for other in (f"{path}/", f"{path}/x", path.upper(), "/v1/blocks/drop"):
        assert door.ask(method, other, token=READ).status == 403
    assert door.ask("PATCH", path, token=READ).status == 403


def test_every_question_is_a_route_of_the_application(app):
    routes = app.openapi()["paths"]
    assert all(method.lower() in routes[path] for method, path in QUESTIONS)


def test_questions_are_slowed_down_like_changes_and_pages_of_others_may_ask_none():
    door = Door(tokens=TOKENS, changes=Rate(1, 1.0))
    path = "/v1/blocks/lookup"
    assert door.ask("POST", path, token=READ, origin="http://evil.example").status == 403
    assert door.ask("POST", path, token=READ).served
    assert door.ask("POST", path, token=READ).status == 429


def test_with_a_reading_token_alone_nobody_changes_anything():
    door = Door(tokens=HttpTokens(read=READ))
    assert door.ask(token=READ).served
    assert door.ask("DELETE", token=READ).status == 403


def test_with_a_changing_token_alone_it_reads_too():
    door = Door(tokens=HttpTokens(CHANGE))
    assert door.ask(token=CHANGE).served
    assert door.ask(token=READ).status == 401


latin = st.characters(codec="latin-1")


@given(st.text(latin, max_size=40))
def test_no_other_header_is_taken_for_a_token(authorization):
    door = Door(tokens=TOKENS)
    answer = door.ask(authorization=authorization)
    assert answer.status == 401
    assert 'error="invalid_token"' in answer.headers["www-authenticate"]
    assert door.asked == 0


@given(st.sampled_from([CHANGE, READ]), st.data())
def test_a_token_that_is_nearly_right_is_wrong(token, data):
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.sampled_from(string.ascii_letters).filter(lambda c: c != token[at]))
    near = [token[:at] + other + token[at + 1 :], token[:-1], token + other, token.upper()]
    door = Door(tokens=TOKENS)
    for wrong in near:
        assert door.ask(token=wrong).status == 401


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer"])
def test_the_schemes_case_does_not_matter(scheme):
    assert Door(tokens=TOKENS).ask(authorization=f"{scheme} {CHANGE}").served


@pytest.mark.parametrize("scheme", ["Basic", "Digest", "", "Token"])
def test_another_scheme_is_refused(scheme):
    assert Door(tokens=TOKENS).ask(authorization=f"{scheme} {CHANGE}").status == 401


def test_two_tokens_at_once_are_refused():
    both = [f"Bearer {CHANGE}", f"Bearer {READ}"]
    assert Door(tokens=TOKENS).ask(authorization=both).status == 401


@pytest.mark.parametrize("token", [CHANGE, READ, "wrong", ""])
def test_every_token_is_compared_with_both_in_constant_time(monkeypatch, token):
    compared = []

    def compare(one, other):
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(secrets, "compare_digest", compare)
    Door(tokens=TOKENS).ask(token=token)
    assert compared == [(32, 32), (32, 32)]


def test_the_middleware_keeps_no_login():
    access = Door(tokens=TOKENS).access
    assert CHANGE not in f"{vars(access)} {vars(access._tokens)}"
    assert CHANGE not in repr(AccessOptions(tokens=TOKENS))


# Names.


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9555", "[::1]", "[::1]:80",
     "[0:0:0:0:0:0:0:1]:80", "kv.internal:9555", "localhost:"],
)  # fmt: skip
def test_the_servers_own_names_are_taken_with_any_port(host):
    assert Door(hosts=frozenset({"kv.internal"})).ask(host=host).served


def test_the_address_that_is_listened_on_is_a_name():
    assert Door(host="127.0.0.9").ask(host="127.0.0.9:1").served
    assert Door().ask(host="127.0.0.9:1").status == 421


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "evil-localhost", "10.0.0.1", "0.0.0.0"]
)
@pytest.mark.parametrize("path", ["/v1/stats", "/healthz"])
def test_another_name_is_misdirected_for_every_path(host, path):
    door = Door(tokens=TOKENS)
    assert door.ask(path=path, host=host, token=CHANGE).status == 421
    assert door.asked == 0


@pytest.mark.parametrize(
    "host",
    ["", "[::1", "::1", "a b", "localhost/x", "user@localhost", "localhost:x", "[localhost]",
     "localhost:123456", ["localhost", "localhost"], "locälhost", "[127.0.0.1]"],
)  # fmt: skip
def test_what_is_no_name_is_a_bad_request(host):
    assert Door().ask(host=host).status == 400
    assert Door(host="10.0.0.7", tokens=TOKENS).ask(host=host, token=CHANGE).status == 400


def test_a_request_without_a_name_is_a_bad_request():
    assert Door().ask(host=[]).status == 400


@given(st.text(latin, max_size=60))
def test_a_name_is_one_of_ours_or_is_refused(host):
    answer = Door().ask(host=host)
    bare = host.lower().rpartition(":")[0] if ":" in host else host.lower()
    if answer.served:
        assert bare in {"localhost", "127.0.0.1"} or bare.startswith("[")
    else:
        assert answer.status in (400, 421)


def test_off_loopback_the_token_protects_and_names_are_free():
    door = Door(host="0.0.0.0", tokens=TOKENS)
    assert door.ask(host="kv-7.cluster.local", token=READ).served
    assert door.ask(host="kv-7.cluster.local").status == 401


def test_a_change_that_another_servers_page_wants_is_refused():
    door = Door(hosts=frozenset({"kv.internal"}))
    for origin in ("http://evil.example", "null", "http://localhost:3000", "", "http://[::1"):
        assert door.ask("POST", origin=origin).status == 403
    for origin in ("http://localhost:9555", "https://kv.internal", "https://kv.internal:8443"):
        assert door.ask("POST", origin=origin).served
    assert door.ask(origin="http://evil.example").served


# Sizes.

MIB = b"x" * (1 << 20)


@pytest.mark.parametrize("length", [BODY_BYTES_AT_MOST + 1, 10**30, "9" * 5000])
def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(length):
    door = Door()
    answer = door.ask("POST", content_length=str(length))
    assert (answer.status, answer.headers["connection"], door.asked) == (413, "close", 0)


def test_a_body_of_just_the_limit_is_served():
    door = Door()
    assert door.ask("POST", body=[MIB], content_length=str(len(MIB))).served
    assert door.ask("POST", body=[MIB[: 1 << 19], MIB[: 1 << 19]]).served


@pytest.fixture
def app():
    """The real application with a route that reads a body."""
    cache = hierarchy(4)
    real = build_app(cache, cache.metrics, load_settings(), lambda: True)

    @real.post("/echo")
    async def echo(text: dict[str, str]) -> int:
        return len(text)

    yield real
    cache.host.close()


@pytest.mark.parametrize("headers", [{}, {"content_length": "5"}, {"transfer_encoding": "chunked"}])
def test_a_body_that_turns_out_too_large_is_refused_whatever_it_said(app, headers):
    door = Door(app)
    headers = {"content_type": "application/json"} | headers
    answer = door.ask("POST", "/echo", body=[b'{"a": "', MIB[:-5], b"xxxxx", b'"}'], **headers)
    assert (answer.status, answer.headers["connection"]) == (413, "close")
    assert door.refused() == {Refusal.SIZE: 1}
    assert door.ask("POST", "/echo", body=[b'{"a": ', b'"b"}'], **headers).text == "1"


# Rates.


def test_wrong_logins_are_slowed_down_by_address_and_right_ones_with_them():
    door = Door(tokens=TOKENS, failed_logins=Rate(3, 0.5))
    for _ in range(3):
        assert door.ask(token="wrong" * 4).status == 401
    for token in ("wrong" * 4, CHANGE):
        answer = door.ask(token=token)
        assert (answer.status, answer.headers["retry-after"]) == (429, "2")
    assert door.ask(token=CHANGE, client="127.0.0.2").served
    assert door.ask(path="/healthz").served
    assert door.ask().status == 401, "no token is no guess"
    door.clock.now += int(answer.headers["retry-after"])
    assert door.ask(token=CHANGE).served


def test_changes_are_slowed_down_by_address_and_reads_are_not():
    door = Door(changes=Rate(2, 1.0))
    assert door.ask("POST").served
    assert door.ask("DELETE").served
    answer = door.ask("PATCH")
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert door.ask().served
    assert door.ask("POST", client="127.0.0.2").served
    door.clock.now += 1
    assert door.ask("POST").served
    assert door.ask("POST").status == 429


def test_refusals_are_counted_by_reason():
    door = Door(tokens=TOKENS, failed_logins=Rate(2, 0.1), changes=Rate(1, 1.0))
    door.ask(token=READ)
    door.ask("POST", token=CHANGE)
    assert door.refused() == {}
    door.ask(host="evil.example")
    door.ask()
    for _ in range(4):
        door.ask(token="wrong" * 4, client="127.0.0.2")
    door.ask("POST", token=READ)
    door.ask("POST", token=CHANGE, origin="http://evil.example")
    door.ask("POST", token=CHANGE)
    door.ask("POST", token=CHANGE, content_length=str(len(MIB) + 1))
    assert door.refused() == {
        Refusal.HOST: 1,
        Refusal.NO_LOGIN: 1,
        Refusal.WRONG_LOGIN: 2,
        Refusal.LOGIN_RATE: 2,
        Refusal.SCOPE: 1,
        Refusal.ORIGIN: 1,
        Refusal.CHANGE_RATE: 1,
        Refusal.SIZE: 1,
    }
    assert {*door.refused()} == {*Refusal}


def test_changes_that_are_refused_do_not_count():
    door = Door(tokens=TOKENS, changes=Rate(1, 1.0))
    for _ in range(5):
        assert door.ask("POST", token=READ).status == 403
        assert door.ask("POST").status == 401
    assert door.ask("POST", token=CHANGE).served


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("", "10.0.0.1", False),
    ],
)
def test_addresses_that_one_client_may_have_are_one(one, other, same):
    door = Door(changes=Rate(1, 1.0))
    assert door.ask("POST", client=one).served
    assert door.ask("POST", client=other).served is not same


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=60), st.integers(1, 5))
def test_a_bucket_gives_what_a_counted_one_gives(steps, burst):
    """The model fills a counter; rounding may decide only where both are nearly at one."""
    buckets, now, level = Buckets(Rate(burst, 2.0)), 0.0, float(burst)
    for seconds, takes in steps:
        now += seconds
        level = min(float(burst), level + seconds * 2.0)
        wait = buckets.wait("a", now)
        assert wait == pytest.approx(max(0.0, (1 - level) / 2.0), abs=1e-6)
        if takes:
            taken = buckets.take("a", now) == 0.0
            if abs(level - 1) > 1e-6:
                assert taken is (level >= 1)
            level -= taken


@given(st.lists(st.integers(0, 200), max_size=300))
def test_the_memory_of_rates_is_bounded_and_forgets_who_came_longest_ago(clients):
    buckets = Buckets(Rate(1, 1.0), most=8)
    latest = []
    for now, client in enumerate(clients):
        if buckets.take(str(client), now * 1e-3) == 0.0:
            latest = [each for each in latest if each != client] + [client]
        assert len(buckets) <= 8
        for each in latest[-8:]:
            assert buckets.wait(str(each), now * 1e-3) > 0


def test_many_addresses_leave_the_default_bound():
    door = Door()
    for number in range(ADDRESSES_AT_MOST + 10):
        door.ask("POST", client=f"10.0.{number >> 8}.{number & 255}")
    assert len(door.access._changes) == ADDRESSES_AT_MOST


def test_a_wrong_login_is_logged_once_a_minute_without_it(caplog):
    door = Door(tokens=TOKENS, failed_logins=Rate(1000, 1.0))
    for _ in range(5):
        door.ask(token="guessed-guessed-guessed")
    assert len(caplog.records) == 1
    assert "127.0.0.1" in caplog.text
    assert "guessed" not in caplog.text
    door.clock.now += 61
    door.ask(token="guessed-guessed-guessed")
    assert len(caplog.records) == 2


def test_websockets_are_closed_and_never_reach_the_application():
    door, sent = Door(), []

    async def send(message):
        sent.append(message["type"])

    asyncio.run(door.access({"type": "websocket", "path": "/"}, None, send))
    assert (sent, door.asked) == (["websocket.close"], 0)
