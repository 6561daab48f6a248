"""Loopback: a rendezvous for the processes of one machine, on a free port that other machines cannot reach."""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

HOST = "127.0.0.1"
_WAITING = 128  # maximum number of pending connections


def loopback_handler(parameters: RendezvousParameters) -> DynamicRendezvousHandler:
    """Return a c10d rendezvous whose stores listen on the loopback interface only.

    The store of torch listens on all interfaces unless it gets a socket that is already listening.
    """
    store = _store()
    handler = create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    handler._create_tcp_store_server = lambda *_: _store()  # type: ignore[method-assign]  # one store per attempt
    return handler


def _store() -> Any:  # noqa: ANN401 - torch's store
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen(_WAITING)
        port = listening.getsockname()[1]
        number = listening.detach()  # the store owns the socket from now on
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=number)
