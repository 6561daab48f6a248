"""Links: a socket between each two processes of a pipeline, for everything but big values.

On one machine they are Unix sockets with abstract names, between machines TCP. A frame is a head of fixed size, then
a body. That a process is gone shows at once: its sockets close.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from typing import NamedTuple

from penstock.errors import LostError

__all__ = ["Frame", "Links", "Store"]

_HEAD = struct.Struct("<IB")  # bytes of the body, type
_TOKEN_BYTES = 16
_READ_BYTES = 1 << 18
_CONNECT_SECONDS = 120.0


class Store:
    """What processes use to find each other: texts under names, as torch.distributed's stores keep them."""

    def __init__(self, store: object, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def set(self, name: str, text: str) -> None:
        """Put a text under a name."""
        self._store.set(f"{self._prefix}/{name}", text)  # type: ignore[attr-defined]

    def get(self, name: str) -> str:
        """Return a text, when it is there."""
        return bytes(self._store.get(f"{self._prefix}/{name}")).decode()  # type: ignore[attr-defined]


class Frame(NamedTuple):
    """One message: who sent it, of which type, and its body; perhaps with a file descriptor."""

    peer: int
    type: int
    body: bytes
    descriptors: tuple[int, ...] = ()


class _Peer:
    """One other process: its socket, what came and is not read, and a lock for those who send."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link = link
        self.lock = threading.Lock()
        self.unread = bytearray()
        self.descriptors: deque[int] = deque()
        self.is_open = True
        self.said_goodbye = False


class Links:
    """This process's sockets to all others.

    Args:
        lane: of this process.
        num_lanes: processes in all.
        store: to find the others.
        hosts: a name for the machine of each process; those of one machine use Unix sockets.
        address: of this machine, for others to connect to.
    """

    def __init__(self, lane: int, num_lanes: int, *, store: Store, hosts: list[str], address: str) -> None:
        self.lane, self.num_lanes = lane, num_lanes
        self.peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._reader = threading.get_ident()  # only one thread reads: that of the lane
        if lane == 0:
            store.set("token", os.urandom(_TOKEN_BYTES).hex())
        self._token = bytes.fromhex(store.get("token"))
        # names of sockets can be seen by anyone on the machine, so nothing of the token is in them
        self._name = f"penstock-{hashlib.sha256(self._token).hexdigest()[:16]}"
        is_local = len(set(hosts)) == 1 and sys.platform == "linux"
        listener = _listen(address, is_local=is_local, name=f"{self._name}-{lane}")
        with listener:
            store.set(f"address/{lane}", "" if is_local else f"{address} {listener.getsockname()[1]}")
            for other in range(lane):  # each connects to those before it, and is connected to by those behind
                self._add(other, self._connect(other, store.get(f"address/{other}")))
            self._accept(listener)

    def _connect(self, other: int, address: str) -> socket.socket:
        if address:
            host, port = address.rsplit(" ", 1)
            link = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(_CONNECT_SECONDS)
            link.connect(f"\0{self._name}-{other}")
        link.sendall(self._token + struct.pack("<I", self.lane))
        return link

    def _accept(self, listener: socket.socket) -> None:
        """Take the connections of the lanes behind; who does not know the token is turned away."""
        listener.settimeout(_CONNECT_SECONDS)
        while len(self.peers) < self.num_lanes - 1:
            try:
                link, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(self.num_lanes)) - self.peers.keys() - {self.lane})
                raise LostError(f"lane {self.lane}: these lanes did not connect in time: {missing}") from None
            if not _is_own(link):
                link.close()
                continue
            link.settimeout(5.0)
            with contextlib.suppress(OSError):
                greeting = _read_exactly(link, _TOKEN_BYTES + 4)
                (other,) = struct.unpack("<I", greeting[_TOKEN_BYTES:])
                if hmac.compare_digest(greeting[:_TOKEN_BYTES], self._token) and self.lane < other < self.num_lanes:
                    if link.family == socket.AF_INET:
                        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._add(other, link)
                    continue
            link.close()

    def _add(self, other: int, link: socket.socket) -> None:
        self.peers[other] = _Peer(link)
        self._selector.register(link, selectors.EVENT_READ, other)

    def send(self, peer: int, kind: int, body: bytes | bytearray, descriptors: tuple[int, ...] = ()) -> None:
        """Send a frame; waits only where the other has not read for a long while.

        Raises:
            LostError: when the other is gone.
        """
        to = self.peers[peer]
        data = memoryview(_HEAD.pack(len(body), kind) + body)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with to.lock:
            while data:
                try:
                    sent = to.link.sendmsg([data], rights) if rights else to.link.send(data)
                except (BlockingIOError, InterruptedError):
                    self._wait_to_write(to)
                    continue
                except OSError:  # what it said before it left is still to be read
                    raise LostError(f"lane {peer} is gone") from None
                rights, data = [], data[sent:]

    def _wait_to_write(self, to: _Peer) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(to.link, selectors.EVENT_WRITE)
            # both may be sending: what comes meanwhile is read, or neither would go on
            if not ready.select(0.01) and threading.get_ident() == self._reader:
                for peer in self.peers.values():
                    self._fill(peer)

    def read(self, seconds: float) -> list[Frame]:
        """Return the frames that are there, or that come within so many seconds."""
        self._reader = threading.get_ident()
        frames = [frame for other, peer in self.peers.items() if peer.unread for frame in self._frames(other, peer)]
        if frames:
            return frames
        for key, _ in self._selector.select(seconds):
            peer = self.peers[key.data]
            self._fill(peer)
            frames += self._frames(key.data, peer)
        return frames

    def _fill(self, peer: _Peer) -> None:
        """Read what is there; a socket that has closed is marked so."""
        is_unix = peer.link.family == socket.AF_UNIX
        while peer.is_open:
            try:
                if is_unix:
                    data, descriptors, _, _ = socket.recv_fds(peer.link, _READ_BYTES, 32)
                    peer.descriptors.extend(descriptors)
                else:
                    data = peer.link.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                peer.is_open = False
                self._selector.unregister(peer.link)
                return
            peer.unread += data
            if len(data) < _READ_BYTES:
                return

    def _frames(self, other: int, peer: _Peer) -> list[Frame]:
        frames, at, unread = [], 0, peer.unread
        while len(unread) - at >= _HEAD.size:
            size, kind = _HEAD.unpack_from(unread, at)
            if len(unread) - at - _HEAD.size < size:
                break
            body = bytes(unread[at + _HEAD.size : at + _HEAD.size + size])
            at += _HEAD.size + size
            frames.append(Frame(other, kind, body))
        if at:
            del unread[:at]
        return frames

    def descriptor(self, peer: int) -> int:
        """Return the next file descriptor that came with a frame."""
        return self.peers[peer].descriptors.popleft()

    @property
    def lost(self) -> list[int]:
        """The lanes whose sockets have closed without a goodbye."""
        return [other for other, p in self.peers.items() if not p.is_open and not p.said_goodbye and not p.unread]

    def close(self) -> None:
        """Close all sockets."""
        for peer in self.peers.values():
            peer.is_open = False
            with contextlib.suppress(OSError):
                peer.link.close()
            for descriptor in peer.descriptors:
                os.close(descriptor)
        self._selector.close()


def _listen(address: str, *, is_local: bool, name: str) -> socket.socket:
    if is_local:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}")
    else:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((address, 0))
    listener.listen(128)
    return listener


def _is_own(link: socket.socket) -> bool:
    """Return whether the other end of a Unix socket is a process of the same user; of TCP only the token tells."""
    if link.family != socket.AF_UNIX:
        return True
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


def _read_exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    end = time.monotonic() + 5.0
    while len(data) < count:
        more = link.recv(count - len(data))
        if not more or time.monotonic() > end:
            raise OSError("closed")
        data += more
    return data
