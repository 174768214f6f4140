"""The page in a real browser: opens, filters, clicks through to a rollout, and stays silent.

Needs a Chromium: one on the path, or where CHROMIUM says.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import sync_playwright
from support.run_factories import add_round, dialogue_run, shown_run

from marin_rl.pages.document import RunPage, report_html
from marin_rl.pages.live import view_app
from marin_rl.serving.http.auth import listen
from marin_rl.storage.runs import Run
from marin_rl.storage.upkeep.forks import fork_run

pytestmark = pytest.mark.slow

HANG_S = 300.0  # against hanging alone: a browser shares the cores with other work
SIZES = [(1280, 900), (400, 860)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        pytest.skip("no Chromium on the path, and CHROMIUM names none")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    path = folder / "report.html"
    path.write_text(report_html(RunPage(shown_run(folder)).page()), encoding="utf-8")
    return path


class Opened:
    """A page in a browser, with everything it said and asked for."""

    def __init__(
        self, browser: Any, url: str, size: tuple[int, int], scheme: str = "light"
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(HANG_S * 1000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready=yes]")

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def count(self) -> str:
        return self.page.inner_text("#count")

    def wait_for_count(self, expected: str) -> None:
        """Until the page shows it; by looking, for the page's policy forbids to evaluate text."""
        deadline = time.monotonic() + HANG_S
        while self.count() != expected and time.monotonic() < deadline:
            self.page.wait_for_timeout(50)
        assert self.count() == expected

    @property
    def unharmed(self) -> bool:
        return self.page.evaluate("window.hurt === undefined")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_open_filter_and_click_through(browser, file, size, scheme):
    with Opened(browser, file.as_uri(), size, scheme) as opened:
        page = opened.page
        assert page.locator("#charts figure").count() >= 3
        for figure in page.locator("#charts figure").all():
            figure.scroll_into_view_if_needed()  # charts are drawn when they come near
            figure.locator(".plot svg.main-svg").first.wait_for()
        assert page.locator("#charts .plot svg.main-svg").count() >= 3
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert opened.count() == "21 of 21 rollouts"
        page.fill("#f-text", "onerror")
        assert opened.count() == "12 of 21 rollouts"
        page.fill("#f-from", "1")
        page.fill("#f-to", "1")
        assert opened.count() == "4 of 21 rollouts"
        page.select_option("#f-place", "worst")
        assert opened.count() == "1 of 21 rollouts"
        page.click("#filters button[type=reset]")
        opened.wait_for_count("21 of 21 rollouts")
        page.select_option("#f-fate", "consumed")
        page.click("#table button.open >> nth=0")
        assert page.locator("#rollout").get_attribute("open") is not None
        told = page.inner_text("#r-body")
        for words in ("advantage", "Tokens", "Lineage", "shard-0000.parquet", "batches/round-0000"):
            assert words in told
        assert page.locator("#r-body .tokens .t").count() > 10
        page.click("#r-close")
        assert page.locator("#rollout").get_attribute("open") is None
        assert (opened.said, opened.unharmed) == ([], True)
        assert [url for url in opened.asked if not url.startswith(("file:", "data:"))] == []


def test_the_table_by_arrows_and_the_dialog_too(browser: Any, many: Path) -> None:
    """Rows, pages and rollouts without a pointer; what has the focus can be seen."""
    with Opened(browser, many.as_uri(), SIZES[0]) as opened:
        page, keys = opened.page, opened.page.keyboard
        focused = lambda: page.evaluate("document.activeElement.dataset.id")
        ids = lambda: page.evaluate(
            "[...document.querySelectorAll('#table button.open')].map((b) => b.dataset.id)"
        )
        first = ids()
        assert len(first) == 15
        page.focus("#table button.open >> nth=0")
        for key, expected in (("ArrowDown", 1), ("ArrowUp", 0), ("ArrowUp", 0), ("End", 14)):
            keys.press(key)
            assert focused() == first[expected], key
        keys.press("ArrowDown")
        second = ids()
        assert not set(first) & set(second)
        assert focused() == second[0]
        keys.press("ArrowUp")
        assert (ids(), focused()) == (first, first[14])
        keys.press("PageDown")
        assert focused() == ids()[-1]
        keys.press("PageUp")
        keys.press("Home")
        assert focused() == first[0]
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        keys.press("Enter")
        title = page.inner_text("#r-title")
        keys.press("ArrowRight")
        assert page.inner_text("#r-title") != title
        keys.press("ArrowLeft")
        assert page.inner_text("#r-title") == title
        page.focus("#r-next")
        keys.press("Enter")
        assert page.evaluate("document.activeElement.id") == "r-next"
        page.focus("#r-body select")
        moved = page.inner_text("#r-title")
        keys.press("ArrowRight")  # is the select's own
        assert page.inner_text("#r-title") == moved
        keys.press("Escape")
        assert focused() == first[0]
        assert opened.said == []


def test_tab_reaches_everything_in_order_and_shows_where_it_is(browser: Any, file: Path) -> None:
    with Opened(browser, file.as_uri(), SIZES[0]) as opened:
        page, reached, without_ring = opened.page, [], []
        for _ in range(400):
            page.keyboard.press("Tab")
            where, ring = page.evaluate(FOCUSED)
            if where == "BODY" or (reached and where == reached[0]):
                break
            reached.append(where)
            without_ring += [] if ring else [where]
        order = [where for where in reached if where in MILESTONES]
        assert order == list(MILESTONES)
        assert without_ring == []
        page.focus("th:has-text('Reward') .dt-column-order")
        page.keyboard.press("Enter")
        page.wait_for_selector("th[aria-sort=ascending]:has-text('Reward')")
        assert page.inner_text("#table tbody tr >> nth=0 >> td[data-label=fate]").startswith(
            "failed"
        )
        assert opened.said == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(browser: Any, file: Path, size: tuple[int, int], scheme: str) -> None:
    """WCAG 2.2 AA, 1.4.3: 4.5 to 1 for every text, that of coloured tokens too."""
    with Opened(browser, file.as_uri(), size, scheme) as opened:
        page = opened.page
        for mode in ("sampler", "difference", "entropies"):
            page.select_option("#g-mode", mode)
            assert page.evaluate(LOW_CONTRAST) == []
        page.click("#table button.open >> nth=0")
        assert page.evaluate(LOW_CONTRAST) == []
        page.evaluate("document.querySelector('#r-title').style.color = 'rgb(128 128 128 / .5)'")
        assert len(page.evaluate(LOW_CONTRAST)) == 1  # it sees what it looks for


def test_an_address_leads_to_a_rollout(browser: Any, file: Path) -> None:
    name = "round-00001%2Fgroup-00000%2F001"
    with Opened(browser, f"{file.as_uri()}#rollout={name}", SIZES[0]) as opened:
        assert "Round 1 ·" in opened.page.inner_text("#r-title")
        assert "sample 1 of 3" in opened.page.inner_text("#r-title")
        assert opened.unharmed


def test_a_rollout_of_a_shared_round_names_the_run_that_played_it(browser, tmp_path):
    parent = shown_run(tmp_path, rounds=2)
    fork = fork_run(parent, 1, "fork", ["objective.advantage=grpo"])
    add_round(fork, 1)
    path = tmp_path / "report.html"
    path.write_text(report_html(RunPage(fork).page()), encoding="utf-8")
    for round, run in ((0, parent), (1, fork)):
        name = f"round-0000{round}%2Fgroup-00000%2F001"
        digest = json.loads(run.folder.read("run.json"))["content_digest"]
        with Opened(browser, f"{path.as_uri()}#rollout={name}", SIZES[0]) as opened:
            told = opened.page.locator("#r-body .chain li").last.inner_text()
            assert told.split("\n") == [
                "under the configuration",
                f"run.json of {run.run_id}",
                digest,
            ]
            opened.page.locator("#r-body .buttons button").first.click()
            listed = opened.page.inner_text("#l-list")
            assert f"rollouts/round-0000{round}" in listed
            assert opened.said == []


MILESTONES = ("skip", "theme", "f-text", "f-place", "g-round", "g-mode", "l-round", "config")

FOCUSED = """() => {
  const node = document.activeElement;
  const style = getComputedStyle(node);
  const ringed = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  return [node.id || node.className || node.tagName, ringed];
}"""

LOW_CONTRAST = """() => {
  const sheet = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const read = (colour) => {
    sheet.clearRect(0, 0, 1, 1); sheet.fillStyle = colour; sheet.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = sheet.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = (rgb) => {
    const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(rgb[0]) + 0.7152 * part(rgb[1]) + 0.0722 * part(rgb[2]);
  };
  const behind = (node) => {
    if (!node) return over(read("Canvas"), [255, 255, 255]);
    return over(read(getComputedStyle(node).backgroundColor), behind(node.parentElement));
  };
  const low = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || node.closest("script, :disabled, .disabled, svg, option")) continue;
    const ground = behind(node);
    const [a, b] = [light(over(read(getComputedStyle(node).color), ground)), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${node.className || node.tagName}: ${text.data.slice(0, 40)}`);
  }
  return [...new Set(low)];
}"""  # noqa: E501 - as it reads in a browser


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    path = folder / "report.html"
    path.write_text(report_html(RunPage(shown_run(folder, rounds=5)).page()), encoding="utf-8")
    return path


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Run, str]]:
    run = shown_run(tmp_path, rounds=2)
    listener = listen("127.0.0.1", 0)
    app = view_app(RunPage(run), run.run_id)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, http="h11", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield run, f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


def test_the_live_page_follows_a_run(browser: Any, served: tuple[Run, str]) -> None:
    run, url = served
    with Opened(browser, url, SIZES[0]) as opened:
        page = opened.page
        opened.wait_for_count("14 of 14 rollouts")
        page.fill("#f-text", "svg")
        assert opened.count() == "4 of 14 rollouts"
        page.select_option("#g-round", "1")
        page.focus("#table button.open >> nth=1")
        held = "document.activeElement.dataset.id"
        name = page.evaluate(held)
        add_round(run, 2)
        opened.wait_for_count("6 of 21 rollouts")
        assert page.evaluate(held) == name  # updates do not take the focus
        assert page.input_value("#g-round") == "1"  # nor the round that somebody chose
        assert opened.said == []
        assert {asked.removeprefix(url).split("?")[0] for asked in opened.asked} <= {
            "", "assets/plotly.js", "assets/tables.js", "assets/page.js", "data.json", "data:,",
        }  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_a_dialogue_is_read_turn_by_turn_with_its_tool_folded(browser, tmp_path, size):
    path = tmp_path / "talks.html"
    path.write_text(report_html(RunPage(dialogue_run(tmp_path)).page()), encoding="utf-8")
    with Opened(browser, f"{path.as_uri()}#rollout=round-00000/group-00000/000", size) as opened:
        turns = opened.page.locator("#r-body .dialogue .turn")
        assert turns.count() == 4
        assert turns.nth(1).get_attribute("aria-label") == "Turn 2, assistant"
        assert "reward 0.250" in turns.nth(1).inner_text()
        assert turns.nth(1).locator(".t").count() == len("let me look")  # a span a token, coloured
        assert turns.nth(1).locator(".t").first.get_attribute("style")
        result = turns.nth(2).locator("details")
        assert result.get_attribute("open") is None
        result.locator("summary").click()
        assert "<b>Ada</b>" in turns.nth(2).inner_text()
        assert "⟨001b⟩" in turns.nth(2).inner_text()
        opened.page.locator("#r-body select").first.select_option("entropies")
        assert "no scores" in opened.page.inner_text("#r-body .dialogue")
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert opened.unharmed
        assert not opened.said


def test_turns_are_a_column_and_stop_reasons_tools_and_turns_filters(browser, tmp_path):
    path = tmp_path / "talks.html"
    path.write_text(report_html(RunPage(dialogue_run(tmp_path)).page()), encoding="utf-8")
    with Opened(browser, path.as_uri(), SIZES[0]) as opened:
        assert "Turns" in opened.page.locator("#table thead").inner_text()
        opened.page.select_option("#f-stop", "max_turns")
        assert opened.count() == "1 of 4 rollouts"
        assert "truncated (max_turns)" in opened.page.locator("#table tbody").inner_text()
        opened.page.click("#filters button[type=reset]")
        opened.page.select_option("#f-tool", "search")
        assert opened.count() == "1 of 4 rollouts"
        opened.page.select_option("#f-tool", "")
        opened.page.fill("#f-least", "2")
        assert opened.count() == "2 of 4 rollouts"
        opened.page.fill("#f-most", "2")
        assert opened.count() == "1 of 4 rollouts"
