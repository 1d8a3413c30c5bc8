"""The pages in a real browser: live updates, the slider, answers, the keyboard, widths, and what axe finds."""

import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import anyio
import pytest

from replanning.view.pages import MAX_ROWS
from tests.support.cli import PATIENCE, STORE, cli, process, write_plan
from tests.view.runs import HOSTILE, asking_run, large_run, repaired_run
from tests.view.test_command import Served

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the dependency group `dev` is not installed"
)
axe = pytest.importorskip(
    "axe_playwright_python", reason="the dependency group `dev` is not installed"
)

pytestmark = [pytest.mark.deep, pytest.mark.integration]

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
AXE = Path(axe.__file__).with_name("axe.min.js")

WIDTHS = (390, 1440)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the store of two runs."""
    (tmp_path / STORE).parent.mkdir()
    carry_out(repaired_run, tmp_path / STORE)
    carry_out(asking_run, tmp_path / STORE)
    return tmp_path


def carry_out(run: Callable[[Path], Awaitable[object]], place: Path) -> None:
    """Carry out a run in another thread: in this one, the browser's program has an event loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(anyio.run, run, place).result()


class Reader:
    """Somebody who looks at a page, with what the browser complained about."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(PATIENCE * 1000)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("console", self._hear)
        self.page.goto(address)

    def _hear(self, message: Any) -> None:
        # A page that is refused is a failed request for the browser, and nothing else.
        if message.type == "error" and "status of 4" not in message.text:
            self.complaints.append(message.text)

    def sees(self, text: str) -> None:
        """Wait until the page shows a text."""
        self.page.get_by_text(text).first.wait_for()


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    """The pages of the two runs."""
    with Served(folder, "--store", STORE) as command:
        yield command


@pytest.fixture
def reader(browser: Any, served: Served) -> Iterator[Reader]:
    """Somebody who has opened the list of runs; the browser may complain about nothing."""
    reader = Reader(browser, served.address)
    yield reader
    assert reader.complaints == []
    reader.context.close()


def test_live_update(reader: Reader, folder: Path) -> None:
    """What another process records appears without loading the page again."""
    reader.page.get_by_role("link", name="asking").click()
    reader.sees("1 question waits for an answer")
    cli(folder, "reject", "asking", "--store", STORE, "--wait", 0)
    carry_out(asking_run, folder / STORE)
    reader.page.get_by_text("1 question waits for an answer").wait_for(state="detached")
    assert reader.page.locator("h1").inner_text() == f"Read a page {HOSTILE}"


def test_slider(reader: Reader) -> None:
    """The slider shows the plan at any revision, by the keyboard as well, and goes back to the newest."""
    reader.page.get_by_role("link", name="repaired").click()
    reader.sees("Why the plan changed")
    slider = reader.page.locator("#revision")
    slider.focus()
    slider.press("ArrowLeft")
    reader.sees("Plan at revision 0 of 1")
    assert "read~2" not in reader.page.locator("svg.plan").text_content()
    reader.page.locator("#revision").press("ArrowRight")
    reader.page.get_by_text("Plan at revision").wait_for(state="detached")
    assert "read~2" in reader.page.locator("svg.plan").text_content()


def test_slider_before_the_script(reader: Reader) -> None:
    """A slider that is moved before the script has come shows its revision as soon as it has."""
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    reader.page.route("**/static/view.js", hold)
    link = reader.page.get_by_role("link", name="repaired")
    address = urljoin(reader.page.url, link.get_attribute("href"))
    reader.page.goto(address, wait_until="commit")
    reader.page.locator("#revision").press("ArrowLeft")
    held[0].continue_()
    reader.sees("Plan at revision 0 of 1")


@pytest.mark.parametrize("verdict", ["approve", "reject", "modify"])
def test_answers(reader: Reader, folder: Path, verdict: str) -> None:
    """A question is answered with a button, and the answer is in the journal with the name."""
    reader.page.get_by_role("link", name="asking").click()
    reader.sees("1 question waits for an answer")
    button = {
        "approve": "Approve",
        "reject": "Reject: keep the plan",
        "modify": "Answer with these changes",
    }[verdict]
    if verdict == "modify":
        reader.page.get_by_text("Change the plan in another way").click()
    form = reader.page.locator("form", has=reader.page.get_by_role("button", name=button))
    form.get_by_label("Your name").fill("Ada Lovelace")
    form.get_by_label("Comment").fill("as agreed")
    with reader.page.expect_navigation():
        form.get_by_role("button", name=button).click()
    carry_out(asking_run, folder / STORE)
    told = cli(folder, "why", "asking", "--store", STORE).stdout
    assert re.search(rf"{verdict} by Ada\s+Lovelace", told)


def test_stale_answer(browser: Any, served: Served, folder: Path) -> None:
    """Of two people who answer, the second one is told that somebody was faster."""
    first = Reader(browser, served.address)
    first.page.get_by_role("link", name="asking").click()
    first.sees("1 question waits for an answer")
    form = first.page.locator("form", has=first.page.get_by_role("button", name="Approve"))
    form.get_by_label("Your name").fill("Ada")
    cli(folder, "reject", "asking", "--store", STORE, "--wait", 0)
    form.get_by_role("button", name="Approve").click()
    first.sees("The answer was refused")
    assert first.complaints == []
    first.context.close()


def press_tab_until(reader: Reader, selector: str) -> None:
    """Go on by the keyboard until an element has the focus, which is seen."""
    for _ in range(60):
        reader.page.keyboard.press("Tab")
        focused = reader.page.locator(":focus")
        if focused.evaluate("(element, selector) => element.matches(selector)", selector):
            assert focused.evaluate("element => getComputedStyle(element).outlineStyle") != "none"
            return
    raise AssertionError(f"the keyboard does not reach {selector}")


def test_keyboard(reader: Reader, folder: Path) -> None:
    """A question is found and answered by the keyboard alone; a link to the content comes first."""
    reader.page.keyboard.press("Tab")
    assert reader.page.locator(":focus").inner_text() == "Skip to the content"
    press_tab_until(reader, "a[href='/runs/asking']")
    reader.page.keyboard.press("Enter")
    reader.sees("1 question waits for an answer")
    press_tab_until(reader, ".answer [name=by]")
    reader.page.keyboard.type("Ada")
    press_tab_until(reader, ".answer button[value=approve]")
    with reader.page.expect_navigation():
        reader.page.keyboard.press("Space")
    carry_out(asking_run, folder / STORE)
    assert "approve by Ada" in cli(folder, "why", "asking", "--store", STORE).stdout


def test_enter_answers_nothing(reader: Reader) -> None:
    """Whoever presses Enter after their comment has not answered: there are several buttons."""
    reader.page.get_by_role("link", name="asking").click()
    reader.sees("1 question waits for an answer")
    form = reader.page.locator("form.answer")
    form.get_by_label("Your name").fill("Ada")
    form.get_by_label("Comment").press("Enter")
    form.get_by_role("button", name="Reject: keep the plan").focus()
    reader.sees("1 question waits for an answer")
    assert form.get_by_label("Your name").input_value() == "Ada"


def test_focus_stays(reader: Reader, folder: Path) -> None:
    """What has the focus keeps it when its part of the page is brought up to date."""
    link = reader.page.locator("a[href='/runs/repaired']")
    link.focus()
    cli(folder, "reject", "asking", "--store", STORE, "--wait", 0)
    carry_out(asking_run, folder / STORE)
    reader.page.locator("[data-part=runs]").get_by_text("failed").wait_for()
    assert reader.page.locator(":focus").get_attribute("href") == "/runs/repaired"


def test_copy_by_keyboard(browser: Any, folder: Path) -> None:
    """A command is copied by the keyboard; where the browser does not allow that, it is selected."""
    plan = write_plan(folder, {"fail": "exit 1"}, "id: first, tool: fail")
    process(folder, "run", plan, "--no-replan", "--run-id", "failed", "--store", STORE, code=1)
    command = f"replanning resume failed --retry --store {folder / STORE}"
    with Served(folder, "failed", "--store", STORE) as served:
        for granted in (["clipboard-read", "clipboard-write"], []):
            reader = Reader(browser, served.address, permissions=granted)
            if not granted:
                reader.page.evaluate("delete Navigator.prototype.clipboard")
            press_tab_until(reader, "summary")
            reader.page.keyboard.press("Enter")
            press_tab_until(reader, "[data-copy]")
            reader.page.keyboard.press("Enter")
            if granted:
                reader.page.get_by_text("Copied").first.wait_for()
                assert reader.page.evaluate("navigator.clipboard.readText()") == command
            else:
                reader.page.get_by_text("Selected").first.wait_for(state="attached")
                assert reader.page.evaluate("String(getSelection())") == command
            assert reader.complaints == []
            reader.context.close()


def test_writing_is_not_disturbed(reader: Reader, folder: Path) -> None:
    """A part of a page stays while somebody is in one of its fields, and is brought up to date afterwards."""
    reader.page.get_by_role("link", name="asking").click()
    reader.sees("1 question waits for an answer")
    name = reader.page.get_by_label("Your name").first
    name.focus()
    cli(folder, "reject", "asking", "--store", STORE, "--wait", 0)
    carry_out(asking_run, folder / STORE)
    reader.page.locator("[data-part=head]").get_by_text("failed").first.wait_for()
    assert name.is_visible()
    name.blur()
    name.wait_for(state="detached")


def test_large_plan(browser: Any, folder: Path) -> None:
    """A plan of 10,000 tasks is shown in lines that a person can read, and follows the run like any other."""
    carry_out(large_run, folder / STORE)
    with Served(folder, "large", "--store", STORE) as served:
        reader = Reader(browser, served.address)
        reader.sees("100 of 10000 tasks done")
        assert reader.page.locator("[data-part=tasks] tbody tr").count() <= MAX_ROWS + 10
        carry_out(large_run, folder / STORE)
        reader.sees("200 of 10000 tasks done")
        assert reader.complaints == []
        reader.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_looks(browser: Any, served: Served, folder: Path, width: int, scheme: str) -> None:
    """Nothing is wider than the window, and axe finds nothing serious, in both widths and schemes."""
    reader = Reader(
        browser,
        served.address,
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        bypass_csp=True,
    )
    root = reader.page.url.split("?")[0]
    paths = ("", "runs/repaired", "runs/asking", "runs/asking/tasks/read", "runs/repaired/journal")
    for path in (*paths, "runs/repaired/decisions/1", "runs/nothing"):
        reader.page.goto(f"{root}{path}")
        overflow = reader.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, path
        reader.page.add_script_tag(path=AXE)
        found = reader.page.evaluate("axe.run()")
        serious = []
        for violation in found["violations"]:
            if violation["impact"] in ("serious", "critical"):
                serious.append((violation["id"], violation["nodes"][0]["html"]))
        assert serious == [], path
    assert reader.complaints == []
    reader.context.close()
