"""Generated pages are current, the site builds without a broken link, and code that is shown runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomllib
import yaml
from shown import PAGES, ROOT, blocks

from xpufp8.output import Format
from xpufp8.output.json_report import schema
from xpufp8.rules import ALL

REPORTS = ROOT / "tests" / "data" / "reports"


def test_generated_pages_are_current() -> None:
    """Stale? `make docs` writes them."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "build_docs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run `make docs`; stale: {done.stdout}"


def test_a_stale_page_is_noticed(tmp_path: Path) -> None:
    for part in ("docs", "scripts"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    script = [sys.executable, tmp_path / "scripts" / "build_docs.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    page = tmp_path / "docs" / "rules" / f"{ALL[0].code}.md"
    page.write_text("old")
    (tmp_path / "docs" / "rules" / "KRN999.md").write_text("gone")
    said = subprocess.run([*script, "--check"], capture_output=True, text=True, check=False, env=environment)
    assert said.returncode == 1
    assert f"docs/rules/{ALL[0].code}.md" in said.stdout
    assert "docs/rules/KRN999.md" in said.stdout
    subprocess.run(script, check=True, capture_output=True, env=environment)
    assert subprocess.run([*script, "--check"], capture_output=True, check=False, env=environment).returncode == 0


def test_the_published_schema_takes_every_recorded_report_and_refuses_others() -> None:
    published = json.loads((ROOT / "docs" / "schema" / "report-1.json").read_text(encoding="utf-8"))
    assert published == json.loads(schema())
    check = jsonschema.Draft202012Validator(published)
    for path in REPORTS.glob("*.json"):
        data = json.loads(path.read_bytes())
        if "schema_version" in data:
            check.validate(data)
            for key, value in (("verdict", "splendid"), ("probes", 3), ("schema_version", "2")):
                assert not check.is_valid(data | {key: value})


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8")) | {"site_dir": "site"}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    build = [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "-f", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(build, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "site" / "rules" / f"{ALL[0].code}.html").is_file()
    outside = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\"\s>]+)", index)
    assert outside == [], "the site asks for nothing from elsewhere"


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if not t.startswith("http")]
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


PYTHON = [block for page in PAGES for block in blocks(page) if block.language == "python"]


def run_python(wanted: list[Any], tmp_path: Path) -> None:
    """The blocks of one page as one program, in a folder with the files they speak of."""
    for name in ("sim-llama.facts.json", "cpu-block-fp8.json"):
        shutil.copy(REPORTS / name, tmp_path)
    shutil.copy(REPORTS / "cpu-block-fp8.json", tmp_path / "before.json")
    (tmp_path / "xpufp8.toml").write_text('[[ignore]]\ncode = "MDL001"\nreason = "known"\nuntil = 2999-01-01\n')
    tiny = [sys.executable, ROOT / "scripts" / "tiny_models.py", "llama-fp8-block", tmp_path / "tiny-block-fp8", "--no-weights"]
    subprocess.run(tiny, check=True)
    program = "\n".join(block.body for block in wanted)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
def test_python_that_is_shown_runs(page: str, tmp_path: Path) -> None:
    run_python([block for block in PYTHON if block.page == page and "slow" not in block.tags], tmp_path)


@pytest.mark.sim
@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON if "slow" in block.tags}))
def test_python_that_probes_runs(page: str, tmp_path: Path) -> None:
    run_python([block for block in PYTHON if block.page == page], tmp_path)


def test_the_policy_that_is_shown_is_one(tmp_path: Path) -> None:
    from xpufp8.policy import load

    shown = [block.body for page in PAGES for block in blocks(page) if block.language == "toml" and "[[ignore]]" in block.body]
    assert shown
    for at, text in enumerate(shown):
        tomllib.loads(text)
        path = tmp_path / f"{at}.toml"
        path.write_text(text)
        assert load(path).policy.ignore[0].reason


def test_yaml_that_is_shown_names_inputs_and_jobs_that_exist() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    template = yaml.safe_load((ROOT / "ci-templates" / "gitlab.yml").read_text(encoding="utf-8"))
    shown = [yaml.safe_load(block.body) for page in PAGES for block in blocks(page) if block.language == "yaml"]
    steps = [step for data in shown for job in (data.get("jobs") or {}).values() for step in job["steps"]]
    ours = next(step for step in steps if "xpufp8@" in step.get("uses", ""))
    assert set(ours["with"]) <= set(action["inputs"])
    used = set(re.findall(rf"steps\.{ours['id']}\.outputs\.([\w-]+)", json.dumps(steps)))
    assert used and used <= set(action["outputs"])  # noqa: PT018 - both halves are one statement
    jobs = [job for data in shown for job in data.values() if isinstance(job, dict) and "extends" in job]
    assert jobs
    known = set(re.findall(r"XPUFP8_CI_\w+", (ROOT / "ci-templates" / "gitlab.yml").read_text(encoding="utf-8")))
    for job in jobs:
        assert job["extends"] in template
        assert set(job["variables"]) <= known


def test_every_format_and_exit_code_is_in_the_pages() -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    assert all(f"`{chosen.value}`" in text for chosen in Format)
    assert all(f"| {code} |" in text for code in range(4))


def test_the_public_names_import_without_the_serving_stack_or_pydantic() -> None:
    """The figure (150 ms of CPU) is in benchmarks/import_time.py; here what costs it."""
    code = "import sys; import xpufp8; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert not {name.split(".")[0] for name in loaded} & {"pydantic", "torch", "vllm", "typer", "rich", "jinja2"}
    code = "import sys; from xpufp8 import diagnose, Report; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert not {name.split(".")[0] for name in loaded} & {
        "torch",
        "vllm",
        "typer",
        "rich",
        "jinja2",
        "junitparser",
        "asyncio",
        "psutil",
    }
    assert not [name for name in loaded if name.startswith(("xpufp8.rules", "xpufp8.output", "xpufp8.planner"))]
