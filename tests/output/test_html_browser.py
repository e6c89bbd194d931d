"""The HTML report in a real browser: opens offline without a complaint, looks like something, works by keyboard and by name."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_reports import everything, recorded, small

from xpufp8.output import html

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--force-prefers-reduced-motion",
)  # fmt: skip
SCHEMES = ("light", "dark")
WIDTHS = (1280, 400)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium, "needs Debian's package chromium"
    assert driver, "needs Debian's package chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    instance = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield instance
    finally:
        instance.quit()


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Any:
    """Opens a report; the console and the list of requests begin empty."""

    def open_(report: Any, scheme: str = "light", width: int = 1280) -> Any:
        path = tmp_path / "report.html"
        path.write_text(html.render(report), encoding="utf-8")
        emulate(browser, scheme, width)
        for log in ("browser", "performance"):
            browser.get_log(log)
        browser.get(path.as_uri())
        return browser

    return open_


def emulate(browser: Any, scheme: str, width: int) -> None:
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def pixels(browser: Any) -> Any:
    from PIL import Image

    data = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_drawn_without_a_complaint(page: Any, scheme: str, width: int) -> None:
    browser = page(everything(), scheme, width)
    assert browser.get_log("browser") == []
    requests = [entry["message"] for entry in browser.get_log("performance") if 'Network.requestWillBeSent"' in entry["message"]]
    assert len(requests) == 1, "a self-contained file asks for nothing but itself"
    image = pixels(browser)
    assert image.width == width
    colours = image.getcolors(maxcolors=1 << 24)
    background = max(colours)[1]
    assert len(colours) > 50, "an empty page has one colour"
    assert (sum(background) > 600) is (scheme == "light")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width, (
        "the page itself never scrolls sideways"
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_stands_out_from_its_ground(page: Any, scheme: str) -> None:
    """Contrast of every text, by the formula of WCAG 2: 4.5 for text of this size."""
    browser = page(everything(), scheme)
    assert browser.execute_script(CONTRAST) == []


CONTRAST = """
const channel = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
const light = (c) => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const c = numbers(getComputedStyle(node).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  }
  return [255, 255, 255];
};
const bad = [];
for (const details of document.querySelectorAll("details")) details.open = true;
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !element.checkVisibility() || element.closest("svg,script")) continue;
  const [a, b] = [light(numbers(getComputedStyle(element).color)), light(ground(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) bad.push([element.tagName, element.className, ratio.toFixed(2)]);
}
return bad;
"""


def accessible(browser: Any) -> list[dict[str, Any]]:
    """The accessibility tree as a screen reader gets it."""
    browser.execute_cdp_cmd("Accessibility.enable", {})
    nodes: list[dict[str, Any]] = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return [node for node in nodes if not node.get("ignored")]


NAMED = {"button", "link", "searchbox", "combobox", "region", "navigation", "table", "image", "heading", "group"}


def test_everything_that_can_be_used_has_a_name(page: Any) -> None:
    browser = page(everything())
    nodes = accessible(browser)
    roles = {node["role"]["value"] for node in nodes}
    assert {"button", "link", "searchbox", "combobox", "region", "navigation", "table", "heading", "main", "banner"} <= roles
    nameless = [
        node["role"]["value"]
        for node in nodes
        if node["role"]["value"] in NAMED
        and not node.get("name", {}).get("value", "").strip()
        and node["role"]["value"] != "group"
    ]
    assert nameless == []
    drawings = [n["name"]["value"] for n in nodes if n["role"]["value"] in ("image", "img") and n.get("name")]
    assert "PCI topology: 4 cards under 2 host bridges" in drawings
    levels = browser.execute_script("return [...document.querySelectorAll('h1,h2,h3,h4')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_every_control_is_reached_by_the_tab_key_and_shows_it(page: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser = page(everything())
    wanted = browser.execute_script(
        "window.wanted = [...document.querySelectorAll('a[href],button,input,select,summary,[tabindex=\"0\"]')]"
        ".filter((e) => e.checkVisibility()); return window.wanted.length"
    )
    reached: set[int] = set()
    for _ in range(wanted + 5):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        at, outlined = browser.execute_script(
            "const e = document.activeElement; return [window.wanted.indexOf(e), getComputedStyle(e).outlineStyle !== 'none']"
        )
        if at >= 0:
            reached.add(at)
            assert outlined
    assert reached == set(range(wanted))


def test_filters_narrow_the_op_table(page: Any) -> None:
    browser = page(recorded("sim-block-fp8"))
    total = browser.execute_script("return document.querySelectorAll('#ops-table tbody tr').length")
    shown = "return [...document.querySelectorAll('#ops-table tbody tr')].filter((r) => r.checkVisibility()).map((r) => r.textContent)"
    select = browser.find_element("css selector", "#ops select[data-key=traces]")
    search = browser.find_element("css selector", "#ops input[type=search]")
    browser.execute_script("arguments[0].value = ''; arguments[0].dispatchEvent(new Event('change'))", select)
    assert len(browser.execute_script(shown)) == total
    search.send_keys("fp8 QUANT")
    rows = browser.execute_script(shown)
    assert 0 < len(rows) < total
    assert all("fp8" in row.lower() and "quant" in row.lower() for row in rows)
    said = browser.find_element("css selector", "#ops output").text
    assert said == f"{len(rows)} of {total} shown"
    search.send_keys(" nothing-like-it")
    assert browser.execute_script(shown) == []


def test_the_matrix_shows_the_names_of_the_chosen_platform(page: Any) -> None:
    from selenium.webdriver.support.ui import Select

    browser = page(recorded("sim-block-fp8"))
    visible = (
        "return [...document.querySelectorAll('#matrix .names li')].filter((e) => e.checkVisibility()).map((e) => e.textContent)"
    )
    assert any(name.startswith("XPU") for name in browser.execute_script(visible))
    Select(browser.find_element("css selector", "[data-platforms]")).select_by_visible_text("CPU")
    names = browser.execute_script(visible)
    assert names
    assert not any(name.startswith("XPU") for name in names)


SAID = """
const done = arguments[0];
const look = () => { const text = document.getElementById("copied").textContent; text ? done(text) : setTimeout(look, 20); };
look();
"""


def test_the_command_is_copied_with_the_keyboard(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    report = everything()
    browser = page(report)
    browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    button = browser.find_element("css selector", "button.copy")
    assert button.accessible_name == "Copy the command"
    button.send_keys(Keys.ENTER)
    said = browser.execute_async_script(SAID)
    if said == "Copied.":
        held = browser.execute_async_script(
            "const done = arguments[0]; navigator.clipboard.readText().then(done, (e) => done(`${e}`))"
        )
    else:
        held = browser.execute_script("return getSelection().toString()").strip()
    assert held == report.plan.shell
    assert browser.get_log("browser") == []


def test_the_colours_can_be_turned_over(page: Any) -> None:
    browser = page(everything(), "light")
    button = browser.find_element("id", "theme")
    before = max(pixels(browser).getcolors(maxcolors=1 << 24))[1]
    assert button.text == "Dark colours"
    button.click()
    assert button.text == "Light colours"
    assert sum(max(pixels(browser).getcolors(maxcolors=1 << 24))[1]) < sum(before)


def test_text_of_a_probe_runs_no_script(page: Any) -> None:
    browser = page(everything())
    assert browser.execute_script("return document.scripts.length") == 1
    refused = browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); return window.ran ?? null"
    )
    assert refused is None
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))


def test_a_report_that_says_nothing_opens_too(page: Any) -> None:
    browser = page(small())
    assert browser.get_log("browser") == []
    assert browser.find_element("css selector", "#findings p").text == "Nothing was found."
