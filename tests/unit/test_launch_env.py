"""Which address the first rank gives to the others where mpirun started them on several machines."""

import socket

import pytest

from alto_distributed.pretrain.runtime import launch_env


class Probe:
    """A datagram socket on a machine whose packets leave from ``address``; None for a machine without a network."""

    address = None

    def __init__(self, *_kind):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass

    def connect(self, _where):
        if self.address is None:
            raise OSError("Network is unreachable")

    def getsockname(self):
        return self.address, 40000


@pytest.mark.parametrize(
    ("name", "route", "address"),
    [
        ("10.0.0.4", "10.0.0.5", "10.0.0.4"),
        ("127.0.1.1", "10.0.0.5", "10.0.0.5"),  # what Debian's /etc/hosts says of a host's own name
        (None, "10.0.0.5", "10.0.0.5"),
        ("127.0.1.1", None, ""),
        (None, None, ""),
    ],
)
def test_other_machines_are_never_given_a_loopback_address(name, route, address, monkeypatch):
    """They would look for the first rank on themselves, and wait."""

    def resolve(_host):
        if name is None:
            raise socket.gaierror("Name or service not known")
        return name

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(socket, "socket", type("Probe", (Probe,), {"address": route}))
    assert launch_env._address(one_machine=False) == address
    assert launch_env._address(one_machine=True) == "127.0.0.1"
