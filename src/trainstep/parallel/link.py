"""A connection that carries lines of text: how the ranks' watches and rank 0's desk speak to each other."""

import hashlib
import hmac
import socket
from contextlib import suppress

_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_LONGEST_LINE = 65_536


class Link:
    """One end. A line is a word and what comes after it. Reading blocks; writing to a peer that is gone does nothing."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._unfinished = b""
        self.has_ended = False
        """Whether the other side has closed it, or died."""
        peer.settimeout(None)
        if peer.family != socket.AF_UNIX:
            _probe(peer)

    def fileno(self) -> int:
        """For selectors."""
        return self._peer.fileno()

    def say(self, word: str, rest: str = "") -> None:
        """Send one line."""
        with suppress(OSError):
            self._peer.sendall(f"{word} {rest}\n".encode())

    def read(self) -> list[tuple[str, str]]:
        """The lines that have come, at least a part of one or the end. Without what a terminal would obey."""
        try:
            data = self._peer.recv(4096)
        except OSError:
            data = b""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        self.has_ended = not data or len(self._unfinished) > _LONGEST_LINE
        parts = ("".join(filter(str.isprintable, line.decode(errors="replace"))).partition(" ") for line in lines)
        return [(word, rest) for word, _, rest in parts]

    def end_writing(self) -> None:
        """Nothing more is said from here; the other side hears of the end, and may still speak."""
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_WR)

    def drain(self, timeout_s: float) -> None:
        """Wait for the other side's end: a connection that is closed too early takes the last news with it."""
        self._peer.settimeout(timeout_s)
        with suppress(OSError):
            while self._peer.recv(4096):
                pass

    def close(self) -> None:
        """Close this end."""
        self._peer.close()


def proof(token: str, challenge: str, text: str) -> str:
    """Proof that the sender of `text` knows the token, without sending it: the challenge is new for each connection."""
    return hmac.new(token.encode(), f"{challenge} {text}".encode(), hashlib.sha256).hexdigest()


def _probe(peer: socket.socket) -> None:
    """Have the kernel ask a silent peer whether its host is still there: it is missed after 25 s."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # not everywhere by this name
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
