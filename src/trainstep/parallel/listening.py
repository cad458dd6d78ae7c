"""Where rank 0 listens: on one address of this host, not on all of them.

Whom the ranks trust, and why, stands in process_group.py.
"""

import errno
import ipaddress
import socket

LOOPBACK = "127.0.0.1"


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening socket at this host's own address; port 0 takes a free one. OSError (EADDRINUSE) for a port that is taken.

    It listens on all addresses where the host has none by that name (a service's name in a cluster), or takes its own name for
    itself alone while other hosts do not.
    """
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        hidden = ipaddress.ip_address(place[0]).is_loopback and address not in ("localhost", place[0])
        return socket.create_server(("" if hidden else place[0], port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return socket.create_server(("", port))


def loopback_interface() -> str | None:
    """Its name on this host, as GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME want it; None where it has none of the usual names."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
