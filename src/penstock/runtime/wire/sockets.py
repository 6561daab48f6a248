"""Links: one socket between every two processes of a pipeline, for everything except large values.

On one machine these are Unix sockets with abstract names, between machines TCP. A frame is a head of fixed size,
followed by a body. When a process ends, its sockets close, so the other processes notice it at once.
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

_HEAD = struct.Struct("<IB")  # bytes of the body, type
_TOKEN_BYTES = 16
_READ_BYTES = 1 << 18
_CONNECT_SECONDS = 120.0
_DRAIN_SECONDS = 0.05


class Store:
    """Texts under names, with which processes find each other; they are kept in a store of torch.distributed."""

    def __init__(self, store: object, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def set(self, name: str, text: str) -> None:
        """Store a text under a name."""
        self._store.set(f"{self._prefix}/{name}", text)  # type: ignore[attr-defined]

    def get(self, name: str) -> str:
        """Wait for the text under a name, and return it."""
        return bytes(self._store.get(f"{self._prefix}/{name}")).decode()  # type: ignore[attr-defined]


class Frame(NamedTuple):
    """One frame: its sender, its type, and its body; some come with file descriptors."""

    peer: int
    type: int
    body: bytes
    descriptors: tuple[int, ...] = ()


class _Unsent:
    """A frame, or the rest of a frame, that did not fit into a socket; it holds duplicates of the file descriptors."""

    def __init__(self, data: memoryview, descriptors: tuple[int, ...]) -> None:
        self.data, self.descriptors = data, tuple(map(os.dup, descriptors))

    def send(self, link: socket.socket) -> bool:
        """Send as much as the socket takes; return whether everything was sent."""
        sent = _send(link, self.data, self.descriptors)
        self.forget()
        self.data = self.data[sent:]
        return not self.data

    def forget(self) -> None:
        """Close the duplicated descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


class _Peer:
    """One other process: its socket, the bytes to read, the frames to send, and a lock for threads that send."""

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
    """This process's sockets to all other processes.

    Args:
        lane: the lane of this process.
        num_lanes: the number of processes.
        store: the store with which the processes find each other.
        hosts: a name for the machine of each process; if all are on one machine, they use Unix sockets.
        address: the address of this machine, to which other processes connect.
    """

    def __init__(self, lane: int, num_lanes: int, *, store: Store, hosts: list[str], address: str) -> None:
        self.lane, self.num_lanes = lane, num_lanes
        self.peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        if lane == 0:
            store.set("token", os.urandom(_TOKEN_BYTES).hex())
        self._token = bytes.fromhex(store.get("token"))
        # every user of the machine can see socket names, so these contain only a hash of the token
        self._name = f"penstock-{hashlib.sha256(self._token).hexdigest()[:16]}"
        is_local = len(set(hosts)) == 1 and sys.platform == "linux"
        listener = _listen(address, is_local=is_local, name=f"{self._name}-{lane}")
        with listener:
            store.set(f"address/{lane}", "" if is_local else f"{address} {listener.getsockname()[1]}")
            for other in range(lane):  # each lane connects to the lower lanes, and accepts the higher lanes
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
        """Accept the connections of the higher lanes; close connections that do not send the token."""
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
        """Send as much of a frame as the socket takes; return whether everything was sent. The rest is sent later.

        Raises:
            LostError: if the other process is gone.
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
            except OSError:  # frames that it sent before it left can still be read
                raise LostError(f"lane {peer} is gone") from None
            if sent < len(data):
                to.unsent.append(_Unsent(data[sent:], () if sent else descriptors))
            return sent == len(data)

    def flush(self, peer: int) -> bool:
        """Send as many unsent frames to a lane as its socket takes; return whether everything was sent."""
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
        """Wait at most `seconds` until everything has been sent to a lane; return whether it was. Reads nothing."""
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
        """Whether there are frames that did not fit into a socket and must still be sent."""
        return any(peer.unsent for peer in self.peers.values())

    def read(self, seconds: float) -> list[Frame]:
        """Return the frames that arrive within `seconds`; if unsent frames can be sent first, there may be none."""
        frames = [frame for other, peer in self.peers.items() if peer.unread for frame in self._frames(other, peer)]
        if frames:
            return frames
        for key, mask in self._select(seconds):
            peer = self.peers[key.data]
            if mask & selectors.EVENT_WRITE:
                with contextlib.suppress(LostError):  # the next read from this socket finds the loss
                    self.flush(key.data)
            if mask & selectors.EVENT_READ:
                self._fill(peer)
                frames += self._frames(key.data, peer)
        return frames

    def _select(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until a socket can be read, or can take unsent frames."""
        full = {other: peer.link for other, peer in self.peers.items() if peer.unsent and peer.is_open}
        for other, link in full.items():
            self._selector.modify(link, selectors.EVENT_READ | selectors.EVENT_WRITE, other)
        try:
            return self._selector.select(seconds)
        finally:
            for other, link in full.items():
                self._selector.modify(link, selectors.EVENT_READ, other)

    def _fill(self, peer: _Peer) -> None:
        """Read all bytes that are there; mark a peer whose socket has closed."""
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
        """Return the next file descriptor that arrived with a frame."""
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
    """Send data; return the number of bytes that the socket took."""
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
    """Return whether the other end of a Unix socket is a process of the same user; for TCP, only the token shows it."""
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
