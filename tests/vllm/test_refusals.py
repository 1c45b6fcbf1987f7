"""An engine that cannot use kvtier stops at start, with a sentence, and leaves nothing behind."""

from __future__ import annotations

import inspect
import json

import pytest
from support import until

from loadtest.stack import StackError


@pytest.mark.parametrize(
    ("options", "connector", "said"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, {}, "--prefix-caching-hash-algo sha256_cbor"),
        ({}, {"sockets": "x"}, "unknown key 'sockets': did you mean socket?"),
        ({}, {"deadline_ms": "soon"}, "deadline_ms is 'soon'"),
    ],
)
def test_an_engine_that_cannot_share_does_not_start(lab, options, connector, said):
    server = lab.server()
    with pytest.raises(StackError, match="did not start"):
        lab.local_engine(server.socket, connector, **options)
    log = (lab.folder / "part1.log").read_text()
    assert said in log
    until(lambda: json.loads(server.get("/v1/sessions")) == [], "no session")


def test_the_connector_fits_the_base_class_of_this_vllm():
    """Each hook takes what vLLM's own one takes: one argument more or fewer is found here."""
    from kvtier.connector import KVTierConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    for base in (KVConnectorBase_V1, SupportsHMA):
        for name, theirs in vars(base).items():
            ours = vars(KVTierConnector).get(name)
            if ours is None or not callable(theirs) or name.startswith("__"):
                continue
            wanted, found = (list(inspect.signature(f).parameters) for f in (theirs, ours))
            assert len(found) == len(wanted), name
            keywords = [each for each in found if each not in ("kw", "kwargs")]
            assert keywords == [each for each in wanted if each not in ("kw", "kwargs")], name
    assert not KVTierConnector.__abstractmethods__


def test_registering_twice_is_harmless():
    from kvtier.connector import NAME, register
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(NAME).__name__ == NAME
