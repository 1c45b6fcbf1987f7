"""The OpenAPI document is true: of everything that is sent to a real server, and of all it says.

Schemathesis makes requests from the document. Bodies of changes come from here as well, because few
that are made from their types name a setting and a value that it can have.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

import httpx
import pytest
import requests
import schemathesis
from control.sites import SPACE, Site, keys_of, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier.access import BODY_BYTES_AT_MOST, OPEN_PATHS
from kvtier.accounts import QUOTA_KEYS
from kvtier.config import load_settings
from kvtier.hashing import seed_digest
from kvtier.live import LIVE, Kept
from kvtier.serve import Server
from requests.adapters import HTTPAdapter
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance
from support import manifest

CHANGE, READ = "change-token-0123456789", "reading-token-0123456789"
SEEDED = manifest(hash_seed=seed_digest("4711"))
PROMPT = {"tokens": tokens(1, 2), "namespace": SPACE.digest()}
EVIL = {"Origin": "http://evil.example"}


class Session(requests.Session):
    """Requests with a token, from one address of this machine after the other.

    The server slows down who changes much, by address.
    """

    def __init__(self, token):
        super().__init__()
        self.trust_env = False
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"
        self._from = itertools.cycle([From(f"127.0.1.{number}") for number in range(1, 40)])

    def get_adapter(self, url):
        return next(self._from)


class From(HTTPAdapter):
    """Sends from one address."""

    def __init__(self, address):
        self.address = address
        super().__init__()

    def init_poolmanager(self, *arguments, **options):
        super().init_poolmanager(*arguments, source_address=(self.address, 0), **options)


@pytest.fixture
def site(serve, tmp_path):
    """A server with tokens and a disk tier, blocks in it, and engines of two namespaces."""
    served = serve(
        "--capacity", "1MiB", "--disk", tmp_path / "blocks",
        KVTIER_HTTP__TOKEN=CHANGE, KVTIER_HTTP__READ_TOKEN=READ,
        KVTIER_STATE=str(tmp_path / "state"),
    )  # fmt: skip
    sites = [Site(served, SPACE), Site(served, SEEDED)]
    sites[0].store(keys_of(PROMPT["tokens"]))
    yield sites[0]
    for each in sites:
        each.client.close()


@pytest.fixture
def document(site):
    url = site.served.url
    found = schemathesis.openapi.from_dict(tuples_as_lists(read(site, "/openapi.json").json()))
    found.config.update(base_url=url)
    return found


def read(site, path):
    return Session(READ).get(site.served.url + path, timeout=20)


def tuples_as_lists(schema):
    """Return a schema with `items` for the `prefixItems` of tuples, all of which are alike.

    Schemathesis takes `prefixItems` of answers for the `items` of an older draft, and refuses them.
    """
    if isinstance(schema, list):
        return [tuples_as_lists(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: tuples_as_lists(each) for name, each in schema.items()}
    if "prefixItems" in plain:
        first, *others = plain.pop("prefixItems")
        assert all(each == first for each in others)
        plain["items"] = first
    return plain


# What the document says occurs.


@dataclass(frozen=True)
class Ask:
    """What varies of a request."""

    path: dict = field(default_factory=dict)
    query: dict = field(default_factory=dict)
    body: object = None
    headers: dict = field(default_factory=dict)


ANY = {"If-Match": "*"}
OTHERS = PROMPT | {"namespace": "f" * 64}
OF_A_SEED = PROMPT | {"namespace": SEEDED.digest()}
NO_PROMPT = {"tokens": "many"}
PIN = {"ttl_seconds": 60}


def prompts(**more):
    """Return what is asked with a prompt, by status; "good" is the success."""
    return {
        "good": Ask(body=PROMPT | more),
        404: Ask(body=OTHERS | more),
        409: Ask(body=OF_A_SEED | more),
        422: Ask(body=NO_PROMPT | more),
    }


GOOD_AND_WRONG = {
    "settings": ({"policy": "lru"}, {"polizy": "lru"}),
    "changes": ({"host.policy": "lru"}, {"host.polizy": "lru"}),
    "quotas": ({"acme": {"hard": "64KiB"}}, {"acme": {"hart": "64KiB"}}),
}


def changes(name, path):
    good, wrong = ({name: each} for each in GOOD_AND_WRONG[name])
    return {
        "good": Ask(path, body=good, headers=ANY),
        412: Ask(path, body=good, headers={"If-Match": '"999"'}),
        422: Ask(path, body=wrong, headers=ANY),
        428: Ask(path, body=good),
    }


ASKED = {
    ("GET", "/v1/tiers/{tier}"): {
        "good": Ask({"tier": "host"}),
        404: Ask({"tier": "moon"}),
        422: Ask({"tier": "m" * 65}),
    },
    ("PATCH", "/v1/tiers/{tier}"): changes("settings", {"tier": "host"}),
    ("PATCH", "/v1/settings"): changes("changes", {}),
    ("PUT", "/v1/quotas"): changes("quotas", {}),
    ("POST", "/v1/blocks/lookup"): prompts(),
    ("POST", "/v1/blocks/prefetch"): prompts(),
    ("POST", "/v1/blocks/drop"): prompts(dry_run=True),
    ("POST", "/v1/pins"): prompts(**PIN),
    ("GET", "/v1/prefixes"): {
        "good": Ask(query={"namespace": SPACE.digest()}),
        404: Ask(query={"namespace": "f" * 64}),
        422: Ask(query={"limit": 0}),
    },
    ("GET", "/v1/audit"): {"good": Ask(), 422: Ask(query={"limit": 0})},
}
"""What each operation is asked to get each of its own statuses."""


def asked(operation, pin):
    """Return a request for each status of an operation that is its own."""
    name = (operation.method.upper(), operation.path)
    if name == ("DELETE", "/v1/pins/{pin}"):
        return {"good": Ask({"pin": pin}), 404: Ask({"pin": "none"}), 422: Ask({"pin": "p" * 65})}
    if is_probe(operation):
        return {"good": Ask()}
    return ASKED.get(name, {"good": Ask(), 422: Ask(query={"limits": 1})})


def is_probe(operation):
    return operation.path in OPEN_PATHS


def send(site, operation, ask, session, **headers):
    return session.request(
        operation.method,
        site.served.url + operation.path.format(**ask.path),
        params=ask.query,
        json=ask.body,
        headers=ask.headers | headers,
        timeout=20,
    )


def all_statuses(site, operation, pin):
    """Return an answer of an operation for each of its statuses that a running server gives."""
    own = asked(operation, pin)
    good = own.pop("good")
    answers = {status: send(site, operation, ask, Session(CHANGE)) for status, ask in own.items()}

    def refused(session=None, **headers):
        return send(site, operation, Ask(good.path), session or Session(CHANGE), **headers)

    answers[400] = refused(Host="two names")
    answers[413] = refused(**{"Content-Length": str(BODY_BYTES_AT_MOST + 1)})
    answers[421] = refused(Host="evil.example")
    if not is_probe(operation):
        answers[401] = refused(Session(None))
        answers[429] = slowed_down(site, operation, good)
    if operation.method.upper() != "GET":
        answers[403] = refused(Session(READ), **EVIL)
    success = send(site, operation, good, Session(CHANGE))
    return answers | {success.status_code: success}


def slowed_down(site, operation, ask):
    """Return how a request with the right token is answered after too many wrong ones."""
    session = Session(CHANGE)
    session._from = itertools.repeat(From("127.0.2.1"))
    wrong = {"Authorization": f"Bearer {'wrong' * 4}"}
    while (answer := send(site, operation, ask, session)).status_code != 429:
        session.get(f"{site.served.url}/v1/stats", headers=wrong, timeout=20)
    return answer


def test_every_status_that_the_document_names_occurs_and_looks_like_it(site, document):
    pin = Session(CHANGE).post(f"{site.served.url}/v1/pins", json=PROMPT | PIN, timeout=20).json()
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        documented = {int(status): said for status, said in operation.responses.items()}
        answers = all_statuses(site, operation, pin["id"])
        if operation.path == "/readyz":
            documented.pop(503)  # Which a server is only while it starts: see below.
        assert answers.keys() == documented.keys(), operation.label
        for status, answer in answers.items():
            assert answer.status_code == status, (operation.label, status, answer.text)
            operation.validate_response(answer)


def test_a_misspelt_query_changes_nothing_and_is_named(site):
    before = what_changes_change(site)
    answer = Session(CHANGE).patch(
        f"{site.served.url}/v1/settings",
        params={"dryrun": "true"},
        json={"changes": {"host.policy": "lru"}},
        headers=ANY,
        timeout=20,
    )
    assert answer.status_code == 422
    assert "dry_run" in answer.json()["detail"]
    assert what_changes_change(site) == before


def test_a_server_that_is_not_ready_says_so_as_the_document_has_it(tmp_path):
    given_settings = {"state": str(tmp_path / "s"), "socket": str(tmp_path / "k.sock")}
    made = Server(load_settings(None, given_settings), Kept(1, 1, {}), load_settings)
    app = made.app()

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/readyz")

    answer = asyncio.run(ask())
    made.host.close()
    assert answer.status_code == 503
    schemathesis.openapi.from_dict(app.openapi())["/readyz"]["GET"].validate_response(answer)


# Whatever is sent.

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["lru", "2MiB", "64KiB", "through", "always", "0", "-1", "auto", "info"]),
)
KEYS = st.one_of(
    st.sampled_from(LIVE), st.text(max_size=20), st.sampled_from(["http.port", "host"])
)
NAMES = st.one_of(st.sampled_from([key.partition(".")[2] for key in LIVE]), st.text(max_size=12))
GUARDS = st.one_of(
    st.just({"max_drop": 0.5}), SCALARS, st.dictionaries(st.text(max_size=8), SCALARS)
)


def a_change(name, keys):
    return st.fixed_dictionaries(
        {name: st.dictionaries(keys, SCALARS, max_size=4)}, optional={"guard": GUARDS}
    )


a_quota = st.dictionaries(
    st.one_of(st.sampled_from(QUOTA_KEYS), st.text(max_size=8)), SCALARS, max_size=3
)
CHANGED = {
    "/v1/settings": a_change("changes", KEYS),
    "/v1/tiers/{tier}": a_change("settings", NAMES),
    "/v1/quotas": st.fixed_dictionaries(
        {"quotas": st.dictionaries(st.text(max_size=8), a_quota, max_size=3)},
        optional={"guard": GUARDS},
    ),
}
"""Bodies of changes that come near to what makes sense."""


def requests_of(operation):
    """Return a strategy of requests, good ones and bad ones, that the document gives rise to."""
    made = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]
    if operation.path in CHANGED and operation.method.upper() != "GET":
        made.append(
            st.builds(
                operation.Case,
                path_parameters=st.fixed_dictionaries(
                    {"tier": st.sampled_from(["host", "disk"])}
                    if "{tier}" in operation.path
                    else {}
                ),
                headers=st.just(ANY),
                body=CHANGED[operation.path],
                media_type=st.just("application/json"),
            )
        )
    return st.one_of(made)


def what_changes_change(site):
    """Return what a refused request leaves as it is."""
    pins = [pin["id"] for pin in read(site, "/v1/pins").json()["pins"]]
    blocks = read(site, "/v1/namespaces").json()
    return read(site, "/v1/settings").json(), pins, [space["blocks"] for space in blocks]


NOT_MEANT = [ignored_auth, positive_data_acceptance]
"""Wrong tokens are slowed down. What may be asked for depends on more than its form."""


def send_made(site, case):
    """Send a request that was made from the document, and check the answer and what it did."""
    changing = case.method.upper() != "GET"
    before = what_changes_change(site) if changing else None
    answer = case.call(session=Session(CHANGE))
    case.validate_response(answer, excluded_checks=NOT_MEANT)
    if changing and answer.status_code >= 400:
        assert what_changes_change(site) == before, case.as_curl_command()


def send_much(site, document, examples):
    """Send requests made from the document, so many to each operation."""
    operations = [found.ok() for found in document.get_all_operations()]
    for operation in operations:

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=requests_of(operation))
        def go(case):
            send_made(site, case)

        go()


def test_what_is_sent_is_answered_as_the_document_has_it(site, document):
    send_much(site, document, 3)


GOOD_BODY = b'{"changes": {"host.policy": "lru"}, "settings": {"policy": "lru"}, "quotas": {}}'
BODIES = st.one_of(
    st.binary(max_size=64),
    st.integers(0, len(GOOD_BODY) - 1).map(lambda end: GOOD_BODY[:end]),
    st.builds(
        lambda at, byte: GOOD_BODY[:at] + byte + GOOD_BODY[at + 1 :],
        st.integers(0, len(GOOD_BODY) - 1),
        st.binary(min_size=1, max_size=3),
    ),
    st.sampled_from([b"null", b"[]", b'"', b"1e999", b"NaN", b"[" * 5000, b"\xef\xbb\xbf{}"]),
)
"""Bodies that are no JSON, are cut off, have a wrong byte, or are none of our objects."""
TYPES = st.sampled_from(["application/json", "application/x-www-form-urlencoded", "", "x"])


@pytest.mark.parametrize("path", ["/v1/settings", "/v1/tiers/host", "/v1/quotas"])
def test_bytes_that_are_no_change_change_nothing(site, path):
    session = Session(CHANGE)
    method = "PUT" if path == "/v1/quotas" else "PATCH"
    before = what_changes_change(site)

    @settings(max_examples=30, deadline=None, database=None)
    @given(body=BODIES, media_type=TYPES)
    def go(body, media_type):
        headers = ANY | {"Content-Type": media_type}
        answer = session.request(method, site.served.url + path, data=body, headers=headers)
        assert 400 <= answer.status_code < 500, (body, answer.text)
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert what_changes_change(site) == before

    go()


@pytest.mark.slow
def test_whatever_is_sent_is_answered_as_the_document_has_it(site, document):
    send_much(site, document, 40)
