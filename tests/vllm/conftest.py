"""Fixtures for end-to-end tests: a tiny model, real servers, real engines."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]  # for harness.py and loadtest

import harness
import inprocess


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)


def pytest_sessionfinish():
    inprocess.Nursery.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections += [(f"log of {each.child.name}", each.tail()) for each in harness.OPEN]
    return report


@pytest.fixture(scope="session")
def tiny_model():
    """Folder of a model whose answers depend on every block of the prompt."""
    return harness.make_tiny_model()


@pytest.fixture
def lab(tmp_path, tiny_model):
    """Starts servers and engines, which end with the test."""
    with harness.lab(tmp_path, tiny_model) as opened:
        yield opened


@pytest.fixture(scope="module")
def module_lab(tmp_path_factory, tiny_model):
    """Starts servers and engines, which end with the module: starting an engine takes a while."""
    with harness.lab(tmp_path_factory.mktemp("lab"), tiny_model) as opened:
        yield opened


@pytest.fixture(scope="session")
def plain(tmp_path_factory, tiny_model):
    """vLLM without kvtier and without any cache: what it answers is right."""
    with harness.lab(tmp_path_factory.mktemp("plain"), tiny_model) as opened:
        yield opened.local_engine(enable_prefix_caching=False)


@pytest.fixture
def kvtier_server(lab):
    """A ready `kvtier serve`; engines connect at its `socket`."""
    return lab.server()
