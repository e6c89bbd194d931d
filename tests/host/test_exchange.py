"""Descriptors between real sibling processes: as this machine allows it, and under filters and rules that forbid it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from probes.bounded import module_command
from probes.fd_exchange import check_self, check_siblings, start_pair
from probes.host_ipc import check_hostname, check_loopback, check_shm
from probes.peer_access import exchange_of

pytestmark = pytest.mark.host
FILTERED = str(Path(__file__).with_name("filtered.py"))
ROOT = Path(__file__).resolve().parents[2]


def probe(*before: str, name: str = "host_ipc", **context: object) -> dict:
    """Run a probe below a command that restricts it, and return its facts."""
    text = json.dumps({"device": "cpu", **context})
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*before, sys.executable, "-m", "probes", name],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment,
        cwd="/",
    )
    envelope = json.loads(done.stdout.splitlines()[-1])
    assert envelope["error"] is None, envelope["error"]
    return envelope["facts"]


def outcome(facts: dict, *names: str) -> dict:
    return {name: (facts["checks"][name]["status"], facts["checks"][name]["error"]) for name in names}


@pytest.fixture(scope="module")
def free() -> dict:
    """Facts of this machine as it is."""
    return probe()


KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])


@pytest.mark.skipif(KERNEL < (5, 6), reason="pidfd_getfd came with Linux 5.6")
def test_this_machine_lets_siblings_exchange_or_says_by_which_call_not():
    own, pair = check_self(), check_siblings(10)
    assert pair["scm_rights"].status == "pass"
    for check in (own, pair["pidfd_sibling"]):
        assert check.status == "pass" or (
            check.error in {"EPERM", "ENOSYS"} and check.detail.startswith(("pidfd_open", "pidfd_getfd"))
        )


@pytest.mark.parametrize(
    ("rule", "call", "error"),
    [
        ("438=EPERM", "pidfd_getfd", "EPERM"),
        ("434=EPERM", "pidfd_open", "EPERM"),
        ("438=ENOSYS", "pidfd_getfd", "ENOSYS"),
    ],
)
def test_a_filter_is_told_apart_from_this_machine(free, rule, call, error):
    held = probe(sys.executable, FILTERED, rule)
    assert held["seccomp"] == 2
    assert outcome(held, "pidfd_self", "pidfd_sibling") == {"pidfd_self": ("fail", error), "pidfd_sibling": ("fail", error)}
    assert held["checks"]["pidfd_self"]["detail"].startswith(call)
    assert outcome(held, "scm_rights", "shm", "loopback") == outcome(free, "scm_rights", "shm", "loopback")
    if free["checks"]["pidfd_self"]["status"] == "pass":
        assert outcome(free, "pidfd_self", "pidfd_sibling") != outcome(held, "pidfd_self", "pidfd_sibling")


@pytest.mark.skipif(
    subprocess.run(["unshare", "-Ur", "true"], capture_output=True, check=False).returncode != 0, reason="no user namespaces"
)
def test_a_user_namespace_is_seen_and_forbids_only_with_the_filter():
    inside = probe("unshare", "-Ur")
    assert inside["user_namespace"] is True
    assert outcome(inside, "pidfd_sibling") == {"pidfd_sibling": ("pass", None)}
    held = probe("unshare", "-Ur", sys.executable, FILTERED, "438=EPERM")
    assert held["user_namespace"] is True
    assert outcome(held, "pidfd_self", "pidfd_sibling") == {"pidfd_self": ("fail", "EPERM"), "pidfd_sibling": ("fail", "EPERM")}


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="changing users needs root and setpriv")
def test_ptrace_rules_refuse_siblings_and_not_oneself():
    """Two users stand for Yama: own descriptor allowed, the sibling's not. oneCCL's own test would pass here."""
    me = module_command("probes.fd_exchange")
    users = [["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"] for uid in (65531, 65532)]
    _, ended = start_pair([*users[0], *me, "hold"], [*users[1], *me, "fetch"], 10)
    found = ended.json()
    assert (found["pidfd_sibling"]["status"], found["pidfd_sibling"]["error"]) == ("fail", "EPERM")
    assert found["scm_rights"]["status"] == "pass"
    code = "from probes.fd_exchange import check_self; print(check_self().status)"
    own = subprocess.run([*users[0], sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert own.stdout.strip() == "pass"


def test_a_sibling_that_dies_leaves_an_answer():
    me = module_command("probes.fd_exchange")
    first, second = start_pair([sys.executable, "-c", "raise SystemExit(3)"], [*me, "fetch"], 10)
    assert first.code == 3
    assert second.code not in (0, None)
    assert "the other process is gone" in second.err


def test_shared_memory_loopback_and_name_are_really_tried():
    assert check_shm().status == "pass"
    assert check_loopback().status == "pass"
    assert check_hostname().status in {"pass", "fail"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter's system call numbers are those of x86-64")
@pytest.mark.parametrize("name", ["devices", "peer_access", "host_ipc", "host_tree"])
def test_no_probe_creates_a_file(name, loader):
    """Under a filter that refuses to create anything the answers are the same."""
    options = {"ze_loader": loader, "attempt": True, "limit": 30, "collective": False}
    held = probe(sys.executable, FILTERED, "nocreate", name=name, options=options)
    free = probe(name=name, options=options)
    differing = {key for key in free if free[key] != held[key]}
    # What may differ: the filter itself, timings, and free memory.
    assert differing <= {"seccomp", "shm_free", "observations", "files"}, differing
    if name == "host_tree":
        assert set(free["observations"]) == set(held["observations"])
        assert free["observations"]["checks"] == held["observations"]["checks"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="changing users needs root and setpriv")
@pytest.mark.parametrize("name", ["devices", "peer_access", "host_ipc"])
def test_no_probe_needs_root(name):
    facts = probe("setpriv", "--reuid=65531", "--regid=65531", "--clear-groups", name=name, options={"limit": 30})
    assert facts["mode"] == "live"


@pytest.mark.parametrize(
    ("settings", "own", "expected"),
    [
        ({}, "pass", "pidfd"),
        ({}, "fail", "drmfd"),
        ({}, "unknown", "drmfd"),
        ({"CCL_ZE_IPC_EXCHANGE": "sockets"}, "pass", "sockets"),
        ({"CCL_ZE_IPC_EXCHANGE": "sockets"}, "fail", "drmfd"),
        ({"CCL_ZE_IPC_EXCHANGE": "drmfd"}, "pass", "drmfd"),
        ({"CCL_ZE_IPC_EXCHANGE": "nonsense"}, "pass", "pidfd"),
    ],
)
def test_the_exchange_is_the_one_that_oneccl_would_take(settings, own, expected):
    assert exchange_of(settings, own) == expected


def test_the_probes_answer_within_their_limits_when_everything_hangs(loader, monkeypatch):
    """A driver that hangs, and ranks that get no time to import torch: three answers, none of them good news."""
    monkeypatch.setenv("FAKE_ZE_HANG", "zeInit")
    options = {"ze_loader": loader, "attempt": True, "collective": True, "limit": 1.0}
    found = {
        name: probe(name=name, device="xpu", vllm_args=["-tp", "2"], options=options)
        for name in ("devices", "peer_access", "host_ipc")
    }
    assert found["devices"]["level_zero"]["status"] == "timeout"
    assert found["devices"]["torch"]["status"] in {"timeout", "not-built", "no-torch"}
    assert found["host_ipc"]["collective"]["status"] == "unknown"
    assert found["peer_access"]["pairs"] == []
