"""Runs a command under a seccomp filter, as a container runtime would: ``filtered.py RULES COMMAND…``.

RULES is a comma-separated list: ``438=EPERM`` refuses a system call by number with that errno, ``nocreate`` refuses to create any file or
folder. Plain ctypes: PR_SET_NO_NEW_PRIVS, then seccomp(2) with a filter program in classic BPF. The numbers of ``nocreate`` are x86-64's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from typing import ClassVar

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
O_CREAT = 0o100
OPEN, OPENAT = 2, 257
CREATORS = (83, 258, 85, 86, 88, 133, 259, 265, 266)  # mkdir, mkdirat, creat, link, symlink, mknod, mknodat, linkat, symlinkat


def statement(code: int, value: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, value)


def refuse(number: int, code: int) -> list[bytes]:
    return [statement(EQUAL, number, 0, 1), statement(RETURN, RET_ERRNO | code)]


def refuse_create(number: int, argument: int) -> list[bytes]:
    """Refuse an open whose flags (low word of an argument) hold O_CREAT; reload the number for the tests that follow."""
    return [
        statement(EQUAL, number, 0, 4), statement(LOAD, 16 + 8 * argument), statement(ANY_BIT, O_CREAT, 0, 1),
        statement(RETURN, RET_ERRNO | errno.EROFS), statement(LOAD, 0),
    ]  # fmt: skip


def program(rules: str) -> list[bytes]:
    steps = [statement(LOAD, 0)]
    for rule in rules.split(","):
        if rule == "nocreate":
            steps += refuse_create(OPENAT, 2) + refuse_create(OPEN, 1)
            for number in CREATORS:
                steps += refuse(number, errno.EROFS)
        else:
            number, _, name = rule.partition("=")
            steps += refuse(int(number), getattr(errno, name))
    return [*steps, statement(RETURN, RET_ALLOW)]


class Program(ctypes.Structure):
    _fields_: ClassVar = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install(rules: str) -> None:
    code = b"".join(program(rules))
    buffer = ctypes.create_string_buffer(code, len(code))
    libc = ctypes.CDLL(None, use_errno=True)
    shape = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(shape), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    install(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - arguments are a list
