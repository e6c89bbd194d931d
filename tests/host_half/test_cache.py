"""The cache: a change of anything that matters is another key, and nothing wrong with it ever breaks a start."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from xpufp8 import cache
from xpufp8.report import Plan, Report, TargetInfo, Tool
from xpufp8.target import Target, resolve


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XPUFP8_CACHE_DIR", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return model


def target(model: Path, *args: str) -> Target:
    return resolve([str(model), *args], device="cpu")


def report() -> Report:
    info = TargetInfo(python="p", device="cpu", simulated=False)
    return Report(tool=Tool(version="0"), verdict="servable", target=info, plan=Plan(argv=["vllm"], shell="vllm"))


def fake_site(tmp_path: Path) -> Path:
    """A site-packages with a vLLM in it, for an interpreter that sees it through PYTHONPATH."""
    site = tmp_path / "site"
    tables = site / "vllm" / "model_executor" / "kernels" / "linear"
    tables.mkdir(parents=True)
    (tables / "__init__.py").write_text("TABLE = 1\n")
    info = site / "vllm-9.9.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("x")
    return site


def test_the_same_question_has_the_same_key(folder: Path) -> None:
    assert cache.key_of(target(folder), ("probe",)) == cache.key_of(target(folder), ("probe",))


def change_config(model: Path, site: Path, patch: pytest.MonkeyPatch) -> Target:
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "x": 1}))
    return target(model)


def change_table(model: Path, site: Path, patch: pytest.MonkeyPatch) -> Target:
    file = site / "vllm" / "model_executor" / "kernels" / "linear" / "__init__.py"
    stat = file.stat()
    file.write_text("TABLE = 2\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time: only the content tells
    return target(model)


def change_package(model: Path, site: Path, patch: pytest.MonkeyPatch) -> Target:
    (site / "vllm-9.9.dist-info").rename(site / "vllm-9.10.dist-info")
    return target(model)


def change_option(model: Path, site: Path, patch: pytest.MonkeyPatch) -> Target:
    return target(model, "--dtype", "half")


def change_variable(model: Path, site: Path, patch: pytest.MonkeyPatch) -> Target:
    patch.setenv("CCL_TOPO_P2P_ACCESS", "0")
    return target(model)


def change_device(model: Path, site: Path, patch: pytest.MonkeyPatch) -> Target:
    return resolve([str(model)], device="cuda")


@pytest.mark.parametrize("change", [change_config, change_table, change_package, change_option, change_variable, change_device])
def test_a_change_of_anything_that_matters_is_another_key(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Path, pytest.MonkeyPatch], Target]
) -> None:
    site = fake_site(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(site))
    before = cache.key_of(target(folder), ())
    assert cache.key_of(change(folder, site, monkeypatch), ()) != before


def test_what_does_not_matter_keeps_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.key_of(target(folder), ())
    monkeypatch.setenv("SHELL_HISTORY", "1")
    (folder / "model-00001.safetensors").write_bytes(b"0")
    assert cache.key_of(target(folder), ()) == before


def test_what_was_saved_is_loaded(folder: Path) -> None:
    assert cache.load("k" * 64) is None
    assert cache.save("k" * 64, report())
    assert cache.load("k" * 64) == report()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"key": "other", "report": {}}',
        '{"key": "KEY", "report": {"verdict": "maybe"}}',
        "\x00" * 99,
        "[" * 100_000,
    ],
)
def test_a_torn_or_foreign_file_is_no_answer_and_no_error(folder: Path, text: str) -> None:
    key = "a" * 64
    cache.save(key, report())
    (cache.cache_root() / "reports" / f"{key}.json").write_text(text.replace("KEY", key))
    assert cache.load(key) is None
    assert cache.save(key, report())
    assert cache.load(key) == report()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XPUFP8_CACHE_DIR", str(blocked / "below"))
    assert not cache.save("k" * 64, report())
    assert cache.load("k" * 64) is None


def test_many_writers_and_readers_never_meet_half_a_file(folder: Path) -> None:
    bad: list[object] = []

    def work() -> None:
        for _ in range(30):
            cache.save("s" * 64, report())
            if cache.load("s" * 64) != report():
                bad.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad
    assert not list((cache.cache_root() / "reports").glob(".part-*"))


def test_old_reports_are_forgotten(folder: Path) -> None:
    for number in range(cache.KEPT + 5):
        cache.save(f"{number:064}", report())
    assert len(list((cache.cache_root() / "reports").glob("*.json"))) == cache.KEPT


def test_the_search_path_is_the_targets_own() -> None:
    assert cache._search_path(sys.executable)[1:] != []
    assert cache._search_path("/bin/false") == []
