"""Connections that carry lines of text between the ranks' watches and rank 0's desk.

process_group.py says which processes the ranks trust, and why.
"""

import errno
import hashlib
import hmac
import ipaddress
import socket
from contextlib import suppress

LOOPBACK = "127.0.0.1"
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""The kernel probes a silent peer, so that a host that is cut off is noticed after 10 + 3 x 5 s. The last, in ms, is for data that
was sent and not acknowledged: no probes go out then."""
_LONGEST_LINE = 65_536


class Link:
    """One end of a connection. A line is a word and the rest. Reading blocks; writing to a peer that is gone does nothing."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._unfinished = b""
        self.has_ended = False
        """Whether the other side has closed the connection, or died."""
        peer.settimeout(None)
        notice_cut_off(peer)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._peer.fileno()

    def say(self, word: str, rest: str = "") -> None:
        """Send one line."""
        with suppress(OSError):
            self._peer.sendall(f"{word} {rest}\n".encode())

    def read(self) -> list[tuple[str, str]]:
        """The complete lines that have arrived, without characters that a terminal would obey. Waits for some data or the end."""
        try:
            data = self._peer.recv(4096)
        except OSError:
            data = b""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        self.has_ended = not data or len(self._unfinished) > _LONGEST_LINE
        parts = ("".join(filter(str.isprintable, line.decode(errors="replace"))).partition(" ") for line in lines)
        return [(word, rest) for word, _, rest in parts]

    def end_writing(self) -> None:
        """Send nothing more: the other side sees the end, and may still send."""
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_WR)

    def drain(self, timeout_s: float) -> None:
        """Wait until the other side ends: closing too early would lose the last lines."""
        self._peer.settimeout(timeout_s)
        with suppress(OSError):
            while self._peer.recv(4096):
                pass

    def close(self) -> None:
        self._peer.close()


def notice_cut_off(peer: socket.socket) -> None:
    """Have the kernel end this connection when its other host is cut off."""
    if peer.family == socket.AF_UNIX:
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # some systems lack the option or name it otherwise
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def proof(token: str, challenge: str, text: str) -> str:
    """Proves that the sender of `text` knows the token, without sending the token: the challenge is new for each connection."""
    return hmac.new(token.encode(), f"{challenge} {text}".encode(), hashlib.sha256).hexdigest()


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on this one address of the host; port 0: a free port. OSError (EADDRINUSE) for a port in use.

    It listens on all addresses where the host has no address of that name (the name of a service in a cluster), or where the name
    is a loopback address on this host but not on others.
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
    """The loopback interface's name, for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; None where it has none of the usual names."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
