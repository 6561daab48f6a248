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
_DRAIN_SECONDS = 0.05


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


class _Unsent:
    """A frame, or what is left of one, that did not fit into a socket; with file descriptors of its own."""

    def __init__(self, data: memoryview, descriptors: tuple[int, ...]) -> None:
        self.data, self.descriptors = data, tuple(map(os.dup, descriptors))

    def send(self, link: socket.socket) -> bool:
        """Send as much as the socket takes; return whether that is all."""
        sent = _send(link, self.data, self.descriptors)
        self.forget()
        self.data = self.data[sent:]
        return not self.data

    def forget(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


class _Peer:
    """One other process: its socket, what came and is not read, what did not fit in, and a lock for those who send."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link = link
        self.lock = threading.Lock()
        self.unread = bytearray()
        self.unsent: deque[_Unsent] = deque()
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

    def send(self, peer: int, kind: int, body: bytes | bytearray, descriptors: tuple[int, ...] = ()) -> bool:
        """Send a frame, or as much of it as the socket takes; return whether that is all. The rest is sent later.

        Raises:
            LostError: when the other is gone.
        """
        to = self.peers[peer]
        data = memoryview(_HEAD.pack(len(body), kind) + body)
        with to.lock:
            if to.unsent:
                to.unsent.append(_Unsent(data, descriptors))
                return self._flush(peer, to)
            try:
                sent = _send(to.link, data, descriptors)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:  # what it said before it left is still to be read
                raise LostError(f"lane {peer} is gone") from None
            if sent < len(data):
                to.unsent.append(_Unsent(data[sent:], () if sent else descriptors))
            return sent == len(data)

    def flush(self, peer: int) -> bool:
        """Send what is left for a lane, as far as its socket takes it; return whether that is all.

        Raises:
            LostError: when the other is gone.
        """
        to = self.peers[peer]
        with to.lock:
            return self._flush(peer, to)

    def _flush(self, peer: int, to: _Peer) -> bool:
        while to.unsent:
            try:
                if not to.unsent[0].send(to.link):
                    return False
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                self._forget_unsent(to)
                raise LostError(f"lane {peer} is gone") from None
            to.unsent.popleft()
        return True

    def _forget_unsent(self, to: _Peer) -> None:
        while to.unsent:
            to.unsent.popleft().forget()

    def drain(self, peer: int, seconds: float) -> bool:
        """Wait until all has been sent to a lane, so long at most; return whether it was. Nothing is read meanwhile.

        Raises:
            LostError: when the other is gone.
        """
        end = time.monotonic() + seconds
        to = self.peers[peer]
        with selectors.DefaultSelector() as ready:
            ready.register(to.link, selectors.EVENT_WRITE)
            while not self.flush(peer):
                if time.monotonic() >= end or not to.is_open:
                    return False
                ready.select(min(_DRAIN_SECONDS, max(0.0, end - time.monotonic())))
        return True

    @property
    def has_unsent(self) -> bool:
        """Whether something did not fit into a socket, and is still to be sent."""
        return any(peer.unsent for peer in self.peers.values())

    def read(self, seconds: float) -> list[Frame]:
        """Return the frames that are there, or that come within so many seconds; none, if something can be sent on."""
        frames = [frame for other, peer in self.peers.items() if peer.unread for frame in self._frames(other, peer)]
        if frames:
            return frames
        for key, mask in self._select(seconds):
            peer = self.peers[key.data]
            if mask & selectors.EVENT_WRITE:
                with contextlib.suppress(LostError):  # it shows when it is read from
                    self.flush(key.data)
            if mask & selectors.EVENT_READ:
                self._fill(peer)
                frames += self._frames(key.data, peer)
        return frames

    def _select(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until something can be read, or be sent on where something is left to send."""
        full = {other: peer.link for other, peer in self.peers.items() if peer.unsent and peer.is_open}
        for other, link in full.items():
            self._selector.modify(link, selectors.EVENT_READ | selectors.EVENT_WRITE, other)
        try:
            return self._selector.select(seconds)
        finally:
            for other, link in full.items():
                self._selector.modify(link, selectors.EVENT_READ, other)

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
            self._forget_unsent(peer)
        self._selector.close()


def _send(link: socket.socket, data: memoryview, descriptors: tuple[int, ...]) -> int:
    """Return how many bytes a socket took."""
    if not descriptors:
        return link.send(data)
    return link.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])


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
