"""Moves a file descriptor between two sibling processes the ways oneCCL does: pidfd_getfd, and SCM_RIGHTS over a socket.

Both are done for real between two children of the probe, because oneCCL itself only asks whether a process may take a descriptor from
*itself*: that is refused by a seccomp filter, but not by ptrace restrictions, which hit first when two ranks exchange handles.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import json
import os
import secrets
import socket
import sys
from typing import Any

from probes.bounded import Child, Ended, child_environment, module_command
from probes.host_facts import CheckFact

NR_PIDFD_OPEN = 434
NR_PIDFD_GETFD = 438
"""The same numbers on every architecture."""
PR_SET_PTRACER = 0x59616D61
PTRACER_ANY = ctypes.c_ulong(-1)
TOKEN_BYTES = 32


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int) -> int:
    libc = _libc()
    libc.syscall.restype = ctypes.c_long
    value = int(libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments)))
    if value < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return value


def pidfd_open(pid: int) -> int:
    """A descriptor for a process.

    Raises:
        OSError: ENOSYS before Linux 5.3, EPERM under a filter.
    """
    return _syscall(NR_PIDFD_OPEN, pid, 0)


def pidfd_getfd(pidfd: int, descriptor: int) -> int:
    """A copy of another process's descriptor.

    Raises:
        OSError: ENOSYS before Linux 5.6, EPERM under a filter or without ptrace access to the process.
    """
    return _syscall(NR_PIDFD_GETFD, pidfd, descriptor, 0)


def take(pid: int, descriptor: int) -> int:
    """A copy of ``descriptor`` of process ``pid``; the exception names the call that failed in its second argument.

    Raises:
        OSError: as :func:`pidfd_open` and :func:`pidfd_getfd`.
    """
    try:
        handle = pidfd_open(pid)
    except OSError as error:
        raise OSError(error.errno, "pidfd_open") from error
    try:
        return pidfd_getfd(handle, descriptor)
    except OSError as error:
        raise OSError(error.errno, "pidfd_getfd") from error
    finally:
        os.close(handle)


def allow_any_tracer() -> bool:
    """Let any process of this user trace this one where Yama's ptrace_scope is 1. False where there is no Yama."""
    return int(_libc().prctl(PR_SET_PTRACER, PTRACER_ANY, 0, 0, 0)) == 0


def send(connection: socket.socket, message: dict[str, Any], descriptor: int | None = None) -> None:
    """Send one JSON message, with a descriptor when one is given."""
    control = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    connection.sendmsg([json.dumps(message).encode()], control)


def receive(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    """One message and the descriptor that came with it.

    Raises:
        EOFError: the other end is gone.
    """
    data, control, _, _ = connection.recvmsg(65_536, socket.CMSG_LEN(4))
    if not data:
        raise EOFError("the other process is gone")
    descriptor: int | None = None
    for level, kind, content in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptor = array.array("i", content[:4])[0]
    message = json.loads(data)
    return (message if isinstance(message, dict) else {}), descriptor


def check_self() -> CheckFact:
    """Whether this process may take a descriptor from itself, which is all that oneCCL asks before it settles on pidfd."""
    secret = secrets.token_bytes(TOKEN_BYTES)
    try:
        source = _secret_file(secret)
        taken = take(os.getpid(), source)
    except OSError as error:
        return _refused(error)
    right = os.pread(taken, TOKEN_BYTES, 0) == secret
    os.close(taken)
    os.close(source)
    return CheckFact("pass" if right else "fail", "a descriptor of its own" if right else "another file came back")


def _refused(error: OSError) -> CheckFact:
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    return CheckFact("fail", f"{error.strerror}: {os.strerror(error.errno or 0)}", name)


def _secret_file(secret: bytes) -> int:
    descriptor = os.memfd_create("xpufp8-exchange")
    os.write(descriptor, secret)
    return descriptor


def _hold(connection: socket.socket) -> None:
    """First sibling: owns a file in memory, and hands it over when asked."""
    secret = secrets.token_bytes(TOKEN_BYTES)
    descriptor = _secret_file(secret)
    send(connection, {"pid": os.getpid(), "fd": descriptor, "secret": secret.hex()})
    receive(connection)
    send(connection, {"tracer": allow_any_tracer()})
    receive(connection)
    send(connection, {}, descriptor)
    with contextlib.suppress(EOFError):
        receive(connection)


def _attempt(pid: int, descriptor: int, secret: str) -> dict[str, Any]:
    try:
        taken = take(pid, descriptor)
    except OSError as error:
        fact = _refused(error)
        return {"status": fact.status, "detail": fact.detail, "error": fact.error}
    right = os.pread(taken, TOKEN_BYTES, 0).hex() == secret
    os.close(taken)
    return {"status": "pass" if right else "fail", "detail": "between two processes" if right else "another file came back"}


def _fetch(connection: socket.socket) -> None:
    """Second sibling: takes the file by pidfd, by pidfd once tracing is allowed, and over the socket; prints what came of each."""
    message, _ = receive(connection)
    secret = str(message["secret"])
    found: dict[str, Any] = {"pidfd_sibling": _attempt(message["pid"], message["fd"], secret)}
    send(connection, {})
    answer, _ = receive(connection)
    if found["pidfd_sibling"]["status"] == "fail" and answer.get("tracer"):
        found["pidfd_traced"] = _attempt(message["pid"], message["fd"], secret)
    send(connection, {})
    _, descriptor = receive(connection)
    if descriptor is None:
        found["scm_rights"] = {"status": "fail", "detail": "no descriptor came with the message"}
    else:
        right = os.pread(descriptor, TOKEN_BYTES, 0).hex() == secret
        found["scm_rights"] = {"status": "pass" if right else "fail", "detail": "over a socket between two processes"}
    print(json.dumps(found), flush=True)


def start_pair(
    first: list[str], second: list[str], limit: float, environment: dict[str, str] | None = None,
) -> tuple[Ended, Ended]:  # fmt: skip
    """Run two sibling processes that share a socket, whose number each gets as its last argument, and end both at the limit."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = child_environment(environment)
    with left, right:
        one = Child([*first, str(left.fileno())], env, pass_fds=(left.fileno(),))
        try:
            other = Child([*second, str(right.fileno())], env, pass_fds=(right.fileno(),))
        except OSError:
            one.wait(0)
            raise
    ended = other.wait(limit)
    return one.wait(0.2 if ended.code is not None else 0.0), ended


def check_siblings(limit: float, environment: dict[str, str] | None = None) -> dict[str, CheckFact]:
    """pidfd_sibling, scm_rights and, where the first is refused, pidfd_traced."""
    me = module_command("probes.fd_exchange")
    try:
        _, ended = start_pair([*me, "hold"], [*me, "fetch"], limit, environment)
    except OSError as error:
        return {"pidfd_sibling": CheckFact("unknown", f"no processes: {error}"), "scm_rights": CheckFact("unknown", str(error))}
    data = ended.json()
    if data is None:
        reason = f"{ended.fate} {ended.err.strip().splitlines()[-1][:200] if ended.err.strip() else ''}".strip()
        return {"pidfd_sibling": CheckFact("unknown", reason), "scm_rights": CheckFact("unknown", reason)}
    return {name: CheckFact(**fact) for name, fact in data.items()}


def _main(arguments: list[str]) -> None:
    connection = socket.socket(fileno=int(arguments[1]))
    {"hold": _hold, "fetch": _fetch}[arguments[0]](connection)


if __name__ == "__main__":
    _main(sys.argv[1:])
