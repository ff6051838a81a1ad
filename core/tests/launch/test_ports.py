"""Reserved ports: taken ones and locked ones are passed over."""

import socket

import pytest

from powertrain.errors import ConfigError
from powertrain.launch import ports


@pytest.fixture
def one_port(monkeypatch, tmp_path):
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(ports.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(ports, "FIRST_PORT", port)
    monkeypatch.setattr(ports, "LAST_PORT", port)
    return port


def test_reserved_port_is_not_given_again(one_port):
    assert ports.free_port() == one_port
    with pytest.raises(ConfigError, match="no free port"):
        ports.free_port()


def test_port_in_use_is_passed_over(one_port):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", one_port))
        holder.listen()
        with pytest.raises(ConfigError, match="no free port"):
            ports.free_port()
    assert ports.free_port() == one_port
