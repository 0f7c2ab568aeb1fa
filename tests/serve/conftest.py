"""Fixtures that several tests of the server share."""

import pytest


@pytest.fixture(scope="module")
def model_server(tmp_path_factory):
    from serving import server  # skips without the extra `serve`

    with server(tmp_path_factory.mktemp("served")) as first:
        yield first


@pytest.fixture
def wires(model_server):
    from serving import Wire

    first = Wire(model_server)
    first.open()
    return first
