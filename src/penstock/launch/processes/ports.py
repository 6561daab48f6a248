"""Ports: check the rendezvous endpoint before processes start."""

from __future__ import annotations

import socket
from datetime import timedelta

from penstock.errors import UsageError

_SECONDS = 5.0


def check_endpoint(endpoint: str, *, is_shared: bool) -> None:
    """Check that a rendezvous at the endpoint is possible.

    Args:
        endpoint: HOST:PORT.
        is_shared: whether other machines or launchers use the endpoint too; then its store may be running already.

    Raises:
        UsageError: if the host is unknown or another program uses the port.
    """
    host, port = _parts(endpoint)
    try:
        places = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise UsageError(f"rdzv_endpoint: there is no host {host!r}: {error.strerror}") from error
    if not port or not any(_is_here(str(place)) for place in places):
        return
    with socket.socket(socket.AF_INET6 if all(":" in str(place) for place in places) else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return
        except OSError as error:
            reason = error.strerror
    if is_shared and _is_store(host, port):
        return
    from penstock.runtime.wire.rendezvous import owner_of_port

    raise UsageError(
        f"rdzv_endpoint: port {port} is in use{owner_of_port(port)} ({reason}); use another port, or leave the key out "
        "to use a free one"
    )


def _parts(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":") if endpoint.rpartition(":")[2].isdecimal() else (endpoint, "", "29400")
    return host.strip("[]"), int(port)


def _is_here(address: str) -> bool:
    """Return whether an address belongs to this machine: only such addresses can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _is_store(host: str, port: int) -> bool:
    """Return whether a store of torch answers there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in the stubs

    try:
        with socket.create_connection((host, port), _SECONDS):
            pass
        TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_SECONDS), wait_for_workers=False)
    except (OSError, RuntimeError):
        return False
    return True
