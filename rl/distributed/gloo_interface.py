"""Choose the network interface of gloo groups on several machines.

gloo listens on the address of the machine's own host name. Debian, Ubuntu and many clouds map that
name to 127.0.1.1 in /etc/hosts, where no other machine can reach it. NCCL launches create gloo
groups too.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_OUTSIDE = "192.0.2.1"  # reserved for documentation (RFC 5737); no packet is sent to it


def select_gloo_interface() -> None:
    """Set GLOO_SOCKET_IFNAME to the interface on the route to MASTER_ADDR.

    Does nothing if the variable is set, if all processes are on this machine, or if no interface is
    found. The machine of MASTER_ADDR itself takes the interface of that address; if its host name
    is mapped to loopback, the interface of the default route.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME") or not spans_machines():
        return
    for host in (os.environ.get("MASTER_ADDR", ""), _OUTSIDE):
        address = _find_local_address(host)
        if address is not None and not address.startswith("127."):
            interface = _find_interface(address)
            if interface is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
                return


def spans_machines() -> bool:
    """Return whether the launch has processes on other machines."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return world > int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))


def _find_local_address(host: str) -> str | None:
    """Return the IPv4 address from which this machine reaches `host`; None if there is no route.

    Connecting a UDP socket sends nothing.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _find_interface(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(query.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
