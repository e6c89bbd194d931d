"""The real attempt: one process exports device memory, another opens the handle on a second card, copies from it and checks.

``transfers`` starts the two processes. The first (``export``) owns an allocation on the source card; the second (``open``) gets
the handle's file descriptor the way oneCCL would, opens the handle with its own card, and, where Level Zero says that the cards can
reach each other, copies from it three times and compares every byte. A copy that the driver itself declares impossible is not tried:
on such machines it can reset the card's engines.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from ctypes import byref, c_void_p
from dataclasses import asdict
from typing import Any

from probes.bounded import Ended, module_command
from probes.fd_exchange import allow_any_tracer, receive, send, start_pair, take
from probes.host_facts import TransferFact
from probes.level_zero_api import SYNCHRONOUS, ContextDesc, DeviceMemAllocDesc, IpcMemHandle, LevelZero, QueueDesc, ZeError

SIZE = 8 << 20
"""Bytes copied: small against any watchdog, large against latency."""
REPEATS = 3
ALIGNMENT = 65_536


def pattern(source: int, target: int, size: int = SIZE) -> bytes:
    """Bytes that no other pair, no zeroed page and no all-ones read can be mistaken for."""
    return random.Random(f"{source}>{target}").randbytes(size)  # noqa: S311 - test data, no secret


class Card:
    """One device with a context, an immediate command list and an allocation."""

    def __init__(self, ze: LevelZero, driver: c_void_p, device: c_void_p, size: int = SIZE) -> None:
        self.ze, self.device, self.context, self.list, self.memory = ze, device, c_void_p(), c_void_p(), c_void_p()
        ze.call("zeContextCreate", driver, byref(ContextDesc()), byref(self.context))
        ze.call("zeCommandListCreateImmediate", self.context, device, byref(QueueDesc(mode=SYNCHRONOUS)), byref(self.list))
        ze.call("zeMemAllocDevice", self.context, byref(DeviceMemAllocDesc()), size, ALIGNMENT, device, byref(self.memory))

    def copy(self, target: Any, source: Any, size: int = SIZE) -> None:
        """Copy on the card's own engine and wait for it."""
        self.ze.call("zeCommandListAppendMemoryCopy", self.list, target, source, size, None, 0, None)


def _export(loader: str, connection: socket.socket) -> None:
    """First process: fill an allocation for each pair that is asked about and export it."""
    ze = LevelZero(loader or None)
    devices = ze.devices()
    allow_any_tracer()  # newer oneCCL does the same, so Yama's ptrace_scope of 1 is no obstacle to it
    while True:
        try:
            request, _ = receive(connection)
        except EOFError:
            return
        stage = "allocate"
        try:
            card = Card(ze, *devices[request["source"]])
            card.copy(card.memory, ctypes.create_string_buffer(pattern(request["source"], request["target"]), SIZE))
            stage = "export"
            handle = IpcMemHandle()
            ze.call("zeMemGetIpcHandle", card.context, card.memory, byref(handle))
        except (ZeError, IndexError) as error:
            send(connection, {"stage": stage, "error": getattr(error, "result", str(error))})
            continue
        data = bytes(handle)
        descriptor = int.from_bytes(data[:4], "little", signed=True)
        try:
            os.fstat(descriptor)
        except OSError:
            send(connection, {"stage": "export", "error": "the handle holds no file descriptor"})
            continue
        send(connection, {"pid": os.getpid(), "fd": descriptor, "handle": data.hex()}, descriptor)


def _say(fact: TransferFact) -> None:
    print(json.dumps(asdict(fact)), flush=True)


def _moved(answer: dict[str, Any], received: int | None, exchange: str) -> tuple[int, str]:
    """The handle's descriptor in this process, and how it came here.

    Raises:
        OSError: it was refused, or did not come.
    """
    if exchange == "pidfd":
        return take(int(answer["pid"]), int(answer["fd"])), "pidfd"
    if received is None:
        raise OSError(0, "SCM_RIGHTS")
    return received, "sockets"


class _Attempt:
    """One ordered pair as the opening process sees it. Its stage is printed before each step, so that a crash leaves it behind."""

    def __init__(self, source: int, target: int, exchange: str) -> None:
        self.source, self.target, self.exchange, self.stage, self.detail = source, target, exchange, "start", ""

    def enter(self, stage: str) -> None:
        self.stage = stage
        _say(self.fact("unknown"))

    def fact(self, status: Any, result: str = "", rate: float | None = None, size: int = 0) -> TransferFact:
        return TransferFact(self.source, self.target, self.exchange, self.stage, status, result, size, rate, self.detail)


def _open_one(
    ze: LevelZero, devices: list[tuple[c_void_p, c_void_p]], connection: socket.socket, pair: dict[str, Any]
) -> TransferFact:
    attempt = _Attempt(pair["source"], pair["target"], pair["exchange"])
    attempt.enter("allocate")
    card = Card(ze, *devices[attempt.target])
    send(connection, {"source": attempt.source, "target": attempt.target})
    attempt.enter("export")
    answer, received = receive(connection)
    if "error" in answer:
        attempt.stage = str(answer.get("stage", "export"))
        return attempt.fact("fail", str(answer["error"]))
    attempt.enter("exchange")
    try:
        descriptor, attempt.exchange = _moved(answer, received, attempt.exchange)
    except OSError as error:
        # oneCCL would stop here. The socket tells whether the handle itself can be opened.
        attempt.detail = (
            f"{attempt.exchange} was refused ({error.strerror}: {os.strerror(error.errno or 0)}), moved over a socket instead"
        )
        descriptor, attempt.exchange = _moved(answer, received, "sockets")
    if pair["exchange"] == "drmfd":
        attempt.detail = "oneCCL would move the handle through the card's DRM device (drmfd); here it went over a socket"
    attempt.enter("open")
    data = bytearray.fromhex(answer["handle"])
    data[:4] = descriptor.to_bytes(4, "little", signed=True)
    peer = c_void_p()
    ze.call("zeMemOpenIpcHandle", card.context, card.device, IpcMemHandle.from_buffer_copy(data), 0, byref(peer))
    if not pair["copy"]:
        attempt.detail = (
            attempt.detail + "; " if attempt.detail else ""
        ) + "opened; no copy was tried, because Level Zero denies access"
        return attempt.fact("unknown", "ZE_RESULT_SUCCESS")
    attempt.enter("copy")
    best = 0.0
    for _ in range(REPEATS):
        start = time.perf_counter()
        card.copy(card.memory, peer)
        best = max(best, SIZE / max(time.perf_counter() - start, 1e-9))
    attempt.enter("check")
    seen = ctypes.create_string_buffer(SIZE)
    card.copy(seen, card.memory)
    wrong = _differences(seen.raw, pattern(attempt.source, attempt.target))
    ze.raw("zeMemCloseIpcHandle", card.context, peer)
    if wrong:
        attempt.detail = wrong
        return attempt.fact("fail", "ZE_RESULT_SUCCESS", best, SIZE)
    attempt.stage = "done"
    return attempt.fact("pass", "ZE_RESULT_SUCCESS", best, SIZE)


def _differences(seen: bytes, wanted: bytes) -> str:
    """Which part of the copy is wrong, in words; empty when none is."""
    if seen == wanted:
        return ""
    page = 4096
    wrong = sum(seen[at : at + page] != wanted[at : at + page] for at in range(0, len(wanted), page))
    kind = {0xFF: "all ones", 0: "all zeros"}.get(seen[0]) if len(set(seen)) == 1 else None
    return f"{wrong} of {len(wanted) // page} pages differ ({kind or f'begins {seen[:8].hex()}, expected {wanted[:8].hex()}'})"


def _open(loader: str, pairs: Iterable[dict[str, Any]], connection: socket.socket) -> None:
    """Second process: open, copy and check each pair in turn, one line for each stage."""
    ze = LevelZero(loader or None)
    devices = ze.devices()
    for pair in pairs:
        try:
            fact = _open_one(ze, devices, connection, pair)
        except ZeError as error:
            fact = TransferFact(
                pair["source"], pair["target"], pair["exchange"], _STAGES.get(error.call, "open"), "fail", error.result
            )
        except (EOFError, ConnectionError):
            return  # the exporting process died; the parent sees how, and this pair's last stage
        except (OSError, IndexError) as error:
            fact = TransferFact(pair["source"], pair["target"], pair["exchange"], "exchange", "fail", str(error))
        _say(fact)
    print(json.dumps({"finished": True}), flush=True)


_STAGES = {
    "zeContextCreate": "allocate", "zeCommandListCreateImmediate": "allocate", "zeMemAllocDevice": "allocate",
    "zeMemOpenIpcHandle": "open", "zeCommandListAppendMemoryCopy": "copy",
}  # fmt: skip


def _facts(ended: Ended) -> dict[tuple[int, int], TransferFact]:
    """The last line printed for each pair."""
    found = {}
    for line in ended.out.splitlines():
        try:
            fact = TransferFact(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[fact.source, fact.target] = fact
    return found


def transfers(
    pairs: Sequence[tuple[int, int, bool]], exchange: str, limit: float, environment: dict[str, str], loader: str | None = None,
) -> list[TransferFact]:  # fmt: skip
    """Attempt ordered pairs of Level Zero device indices; each comes with whether a copy may be tried.

    A pair whose processes die or hang is ``fail`` with the stage it had reached, and the pairs after it get new processes as long as
    time is left; pairs without their turn are missing from the answer.
    """
    done: dict[tuple[int, int], TransferFact] = {}
    deadline = time.monotonic() + limit
    me = module_command("probes.level_zero_transfer")
    while True:
        rest = [pair for pair in pairs if pair[:2] not in done]
        left = deadline - time.monotonic()
        if not rest or left < 0.3:
            return list(done.values())
        plan = json.dumps([{"source": a, "target": b, "copy": copy, "exchange": exchange} for a, b, copy in rest])
        share = left if len(rest) == 1 else max(1.0, left * 0.7)
        exporter, opener = start_pair([*me, "export", loader or ""], [*me, "open", loader or "", plan], share, environment)
        found = _facts(opener)
        finished = '"finished"' in opener.out
        done.update(found)
        if finished:
            continue
        # The pair that was under way when a process died (or, before the first, the first one).
        open_pairs = [key for key, fact in found.items() if fact.status == "unknown" and fact.result == ""]
        key = open_pairs[-1] if open_pairs else rest[0][:2]
        last = found.get(key) or TransferFact(*key, exchange, "start", "unknown")
        fate = exporter.fate if exporter.code is not None and exporter.code < 0 else opener.fate
        words = opener.err.strip().splitlines()
        detail = f"{fate}{'; ' + words[-1][:200] if words else ''}"
        status: Any = "unknown" if last.stage == "start" else "fail"
        done[key] = TransferFact(last.source, last.target, last.exchange, last.stage, status, fate, 0, None, detail)


def _main(arguments: list[str]) -> None:
    connection = socket.socket(fileno=int(arguments[-1]))
    if arguments[0] == "export":
        _export(arguments[1], connection)
    else:
        _open(arguments[1], json.loads(arguments[2]), connection)
    sys.stdout.flush()
    os._exit(0)  # the unloading of a driver is where such processes hang


if __name__ == "__main__":
    _main(sys.argv[1:])
