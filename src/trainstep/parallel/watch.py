"""Who died: when a process of the group ends without a goodbye, the others say so and leave, even out of a hanging collective.

    trainstep: rank 2 (node7, pid 4711) died; rank 0 leaves

[Note: how a death is seen]
Every rank but the first keeps a connection to rank 0. The kernel closes a dead process's connection at once, so that its end
without a goodbye is a death, never a slow step; a node that is cut off is missed after 25 s by TCP's own probes. Rank 0 tells the
others whose it was; when rank 0 itself is gone, all see it. A thread does this: the main one may hang in a collective for good.
While native code keeps the interpreter's lock no thread runs; collectives let it go.

[Note: an error of one rank]
Where a peer died, a collective raises on the living ones before anyone knows why. An uncaught exception therefore waits a moment
for the news, which ends the process with the sentence above; without news it is this rank's own, and is printed as ever.
"""

import functools
import hmac
import ipaddress
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from types import TracebackType
from typing import NoReturn, Protocol

LEAVES = "leaves"
"""Last word of the sentence of a process that ends because another died."""
_MOMENT_S = 2.0
_GOODBYE_S = 10.0
"""For the others to say goodbye too: rank 0, who keeps the store, should be the last to go."""
_HELLO_S = 5.0
_TOKEN_BYTES = 16
_BYE = "bye"
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Store(Protocol):
    """As much of torch's key-value store as is used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


class Watch:
    """This process's end of the watch. Constructing it waits until every rank is there; `goodbye` ends it."""

    def __init__(self, store: Store, *, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        self._rank = rank
        self._name = f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})"
        self._leaving = False
        self._someone_died = False
        connect = _wait_for_others if rank == 0 else _reach_first
        self._peers = connect(store, self._name, rank, world_size, address, timeout_s)
        """Socket and name of each rank that is watched from here: all others from rank 0, rank 0 from all others."""
        self._thread = threading.Thread(target=self._listen, name="trainstep-watch", daemon=True)
        self._hook_before = sys.excepthook
        sys.excepthook = self._on_exception
        os.register_at_fork(after_in_child=functools.partial(_forget_in_child, weakref.ref(self)))
        self._thread.start()

    def goodbye(self) -> None:
        """Leave in peace: nobody is told off, and nobody is watched from now on. Waits until the others leave too."""
        if self._leaving:
            return
        self._leaving = True
        if sys.excepthook == self._on_exception:  # somebody may have put his own over it
            sys.excepthook = self._hook_before
        for peer, _ in self._peers.values():
            _say(peer, _BYE)
            with suppress(OSError):
                peer.shutdown(socket.SHUT_WR)
        self._thread.join(_GOODBYE_S)
        self.close()

    def _listen(self) -> None:
        """Until everyone has gone: what peers say, and their ends."""
        with selectors.DefaultSelector() as selector:
            for rank, (peer, _) in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            said: dict[int, bytes] = dict.fromkeys(self._peers, b"")
            while selector.get_map():
                for key, _ in selector.select():
                    rank = key.data
                    data = _receive(self._peers[rank][0])
                    said[rank] += data
                    *lines, _ = said[rank].decode(errors="replace").split("\n")
                    told = next((line for line in lines if line != _BYE), None)
                    if told is not None and not self._leaving:
                        self._leave(told)
                    if data:
                        continue
                    if not lines and not self._leaving:
                        self._leave(self._peers[rank][1], tell_others_but=rank)
                    selector.unregister(key.fileobj)

    def _leave(self, dead: str, *, tell_others_but: int | None = None) -> NoReturn:
        """Say who died, to the others too, and end this process."""
        self._someone_died = True
        others = [peer for rank, (peer, _) in self._peers.items() if self._rank == 0 and rank != tell_others_but]
        for peer in others:
            _say(peer, dead)
        os.write(2, f"trainstep: {dead} died; rank {self._rank} {LEAVES}\n".encode())
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # whoever should read it may not
        flush.start()
        flush.join(1.0)
        deadline_s = time.monotonic() + _MOMENT_S
        for peer in others:  # a connection that is closed too early takes the news with it
            peer.settimeout(max(deadline_s - time.monotonic(), 0.01))
            while _receive(peer):
                pass
        os._exit(1)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """See the note: an error of one rank. The others are told now, not after all that happens at exit."""
        if issubclass(kind, Exception):
            self._thread.join(_MOMENT_S)
        if self._someone_died:
            self._thread.join()  # it ends this process
        self._hook_before(kind, error, trace)
        self._leaving = True
        for peer, _ in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's ends of the connections."""
        for peer, _ in self._peers.values():
            peer.close()


Peers = dict[int, tuple[socket.socket, str]]


def _wait_for_others(store: Store, name: str, rank: int, world_size: int, address: str, timeout_s: float) -> Peers:
    """Rank 0's side: listen on its own address, tell port and token through the store, and let in who knows the token."""
    deadline_s = time.monotonic() + timeout_s
    token = secrets.token_hex(_TOKEN_BYTES)
    with _listener(address) as listener:
        store.set("watch", f"{listener.getsockname()[1]} {token} {name}")
        peers: Peers = {}
        while len(peers) < world_size - 1:
            listener.settimeout(max(deadline_s - time.monotonic(), 0.01))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, world_size)) - set(peers))
                raise TimeoutError(f"ranks {missing} did not come within {timeout_s:g} s") from None
            told_token, _, rest = _first_line(peer).partition(" ")
            told_rank, _, told_name = rest.partition(" ")
            if hmac.compare_digest(told_token.encode(), token.encode()) and told_rank.isdecimal():
                _probe(peer)
                peers[int(told_rank)] = peer, told_name
            else:
                peer.close()
    return peers


def _reach_first(store: Store, name: str, rank: int, world_size: int, address: str, timeout_s: float) -> Peers:
    """The others' side: a connection to rank 0, at the port that the store tells."""
    port, token, first_name = store.get("watch").decode().split(" ", 2)
    peer = socket.create_connection((address, int(port)), timeout=timeout_s)
    peer.settimeout(None)
    _probe(peer)
    _say(peer, f"{token} {rank} {name}")
    return {0: (peer, first_name)}


def _listener(address: str) -> socket.socket:
    """Bound to this host's own address. To all of them where it has none by that name, or takes its own name for itself alone
    while other hosts do not (the token guards it)."""
    try:
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        hidden = ipaddress.ip_address(place[0]).is_loopback and address not in ("localhost", place[0])
        return socket.create_server(("" if hidden else place[0], 0), family=family)
    except OSError:
        return socket.create_server(("", 0))


def _probe(peer: socket.socket) -> None:
    """Have the kernel ask a silent peer whether its host is still there."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # not everywhere by this name
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _first_line(peer: socket.socket) -> str:
    """What a new peer says first; as much as came where it is slow or a stranger. Then it may take its time."""
    peer.settimeout(_HELLO_S)
    said = b""
    while not said.endswith(b"\n") and len(said) < 1024 and (more := _receive(peer, 1)):
        said += more
    peer.settimeout(None)
    return said.decode(errors="replace").rstrip("\n")


def _receive(peer: socket.socket, most: int = 4096) -> bytes:
    """Empty at the end of the connection, whatever ended it."""
    try:
        return peer.recv(most)
    except OSError:
        return b""


def _say(peer: socket.socket, line: str) -> None:
    with suppress(OSError):
        peer.sendall(f"{line}\n".encode())


def _forget_in_child(parents: weakref.ref[Watch]) -> None:
    """A forked child would hold its parent's connections open beyond the parent's death."""
    watch = parents()
    if watch is not None:
        watch.close()
