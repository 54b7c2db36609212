"""Interfaces, addresses and ports of one machine."""

import errno
import os
import socket
from collections.abc import Mapping

import psutil

from spmd_rl.doctor.finding import Finding
from spmd_rl.platforms import record


def addresses() -> dict[str, str]:
    """Interface -> its IPv4 address, of those that are up."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        ours = [entry.address for entry in entries if entry.family == socket.AF_INET]
        if ours and name in up:
            found[name] = ours[0]
    return found


def interface_to(host: str) -> tuple[str, str]:
    """(interface, own address) that packets to `host` leave through. Raises ValueError where there is no way there."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # no packet is sent: the kernel only picks a route
            own = probe.getsockname()[0]
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(
            f"MASTER_ADDR = {host}: this machine has no way there ({why}); its interfaces are {_listed()}"
        ) from error
    # Packets to one's own address go through lo, but the address is another interface's.
    return next((name for name, address in addresses().items() if address == own), "lo"), own


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """The address that gloo will tell the other ranks, as it picks it itself.

    Raises ValueError where GLOO_SOCKET_IFNAME names no interface that is up and has an address.
    """
    named = environment.get("GLOO_SOCKET_IFNAME", "")
    if named:
        name, here = named.split(",")[0], addresses()
        if name not in here:
            raise ValueError(f"GLOO_SOCKET_IFNAME = {named}: no such interface that is up and has an IPv4 address")
        return here[name]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def interface_findings(kind: str, nodes: int, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check that the interfaces that the libraries are told to use are there and lead out of this machine."""
    found = []
    for variable in record(kind).socket_variables[1:]:
        named = environment.get(variable, "")
        if named and not any(_selects(named, name) for name in addresses()):
            fix = f"the interfaces that are up: {_listed()}; export {variable} with one of them, or unset it"
            found.append(Finding("interface", f"{variable} = {named} fits no interface that is up", "stop", fix))
    try:
        own = own_address(environment)
    except ValueError as error:
        fix = f"the interfaces that are up: {_listed()}; export GLOO_SOCKET_IFNAME with one of them"
        return [*found, Finding("interface", str(error), "stop", fix)]
    if nodes > 1 and own.startswith("127."):
        named = environment.get("GLOO_SOCKET_IFNAME")
        why = f"GLOO_SOCKET_IFNAME = {named}" if named else f"the host name {socket.gethostname()} is {own}"
        fix = f"export GLOO_SOCKET_IFNAME with the interface towards the other nodes: {_listed()}"
        return [*found, Finding("interface", f"{why}: other nodes cannot reach that", "stop", fix)]
    name = next((name for name, address in addresses().items() if address == own), "?")
    return [*found, Finding("interface", f"{name} ({own})", "ok")]


def _selects(named: str, interface: str) -> bool:
    """As NCCL and HCCL read their variables: prefixes, = for a whole name, ^ for all others."""
    without, named = named.startswith("^"), named.removeprefix("^")
    exact, named = named.startswith("="), named.removeprefix("=")
    words = [word for word in named.split(",") if word]
    fits = any(interface == word if exact else interface.startswith(word) for word in words)
    return fits != without


def port_finding(name: str, address: str, port: int) -> Finding:
    """Check that a port of this machine can be listened on."""
    fix = f"set another {name}, the same on every node; `ss -ltnp | grep :{port}` shows who has it"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            probe.listen(1)
    except (OSError, OverflowError) as error:
        code = getattr(error, "errno", None)
        if code == errno.EADDRNOTAVAIL:
            fix = f"MASTER_ADDR must be an address of node 0; this machine has {_listed()}"
            return Finding("port", f"{address} is no address of this machine", "stop", fix)
        why = "in use" if code == errno.EADDRINUSE else (getattr(error, "strerror", None) or str(error))
        return Finding("port", f"{name} = {port} on {address}: {why}", "stop", fix)
    return Finding("port", f"{name} = {port} on {address} is free", "ok")


def _listed() -> str:
    return ", ".join(f"{name} ({address})" for name, address in addresses().items()) or "none"
