"""The page in a real browser: it answers to mouse and keyboard, asks nobody for anything, and can be read."""

import shutil
import threading

import pytest

from helpers.small_vit import HOSTILE, small_look
from nalaformer.analysis.attention_page import ExploreServer, explorer_of
from nalaformer.analysis.attention_page.report import stored_page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: apt install chromium"),
]


@pytest.fixture(scope="module")
def looks():
    """Two models of different depth, with the worst of names."""
    return [small_look(HOSTILE), small_look("linear", attention="nalaformer", depth=3)]


@pytest.fixture(scope="module")
def stored(looks, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(stored_page(looks).text())
    return path.as_uri()


@pytest.fixture(scope="module")
def served(looks):
    with ExploreServer(explorer_of(looks)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Opens an address; at the end there must have been no error, and no request to anywhere else."""
    trouble, contexts = [], []

    def visit(url, *, width=1600, scheme="light", expected="no such trouble"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)

        def allow_ours(route):
            asked = route.request.url
            if asked == url or (url.startswith("http") and asked.startswith(f"{url}rows?")):
                route.continue_()
            else:
                trouble.append(f"request: {asked}")
                route.abort()

        context.route("**/*", allow_ours)
        page = context.new_page()
        bad = ("error", "warning")
        page.on("console", lambda said: trouble.append(said.text) if said.type in bad and expected not in said.text else None)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: trouble.append("dialog"))
        page.goto(url)
        settled(page)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert trouble == []


def settled(page, than=0):
    """Wait until the maps of a choice after that number are drawn; its own number."""
    page.wait_for_function("than => Number(document.body.dataset.turn) > than", arg=than)
    return int(page.evaluate("document.body.dataset.turn"))


def after(page, act):
    turn = int(page.evaluate("document.body.dataset.turn"))
    act()
    settled(page, turn)


def pictures(page):
    """Pixels of every map."""
    return page.evaluate("[...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())")


def caption(page, model=0):
    return page.locator(".model").nth(model).locator(".title .facts").first.text_content()


@pytest.mark.parametrize("kind", ["stored", "served"])
def test_a_click_changes_every_map_and_says_where_it_looks(kind, request, visit):
    page = visit(request.getfixturevalue(kind))
    before, where = pictures(page), caption(page)
    canvas = page.locator("canvas.map").first
    size = canvas.bounding_box()
    # the second row and last column of 4 x 4 patches
    after(page, lambda: canvas.click(position={"x": 0.9 * size["width"], "y": 0.3 * size["height"]}))
    assert "row 2 of 4, column 4 of 4" in caption(page)
    assert "row 2 of 4, column 4 of 4" in caption(page, 1)
    assert caption(page) != where
    now = pictures(page)
    assert len(now) == len(before)
    assert all(old != new for old, new in zip(before, now, strict=True))


def test_both_ways_show_the_same_weights(stored, served, visit):
    """Stored in a byte or computed on request: within the accuracy that the page states."""
    found = []
    for url in (stored, served):
        page = visit(url)
        found.append(
            [float(text.rpartition(": ")[2].rstrip("%")) for text in page.locator(".strongest li").all_text_contents()]
        )
    assert len(found[0]) == 2 * 5
    largest = max(found[1])
    assert found[0] == pytest.approx(found[1], abs=largest / 255 + 0.01 * largest)


def test_the_keyboard_alone_moves_patch_layer_and_head(stored, visit):
    page = visit(stored)
    page.locator("#layer").focus()
    after(page, lambda: page.keyboard.press("Home"))
    assert caption(page).startswith("Layer 1 of 2")
    assert caption(page, 1).startswith("Layer 1 of 3")
    # the same part of the depth: the last of three layers stands beside the last of two
    after(page, lambda: page.keyboard.press("End"))
    assert caption(page).startswith("Layer 2 of 2")
    assert caption(page, 1).startswith("Layer 3 of 3")
    # TAB walks to the map, arrows move the patch there
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('canvas.map')"):
            break
    assert page.evaluate("document.activeElement.matches('canvas.map')")
    after(page, lambda: page.keyboard.press("Home"))
    for key in ("ArrowRight", "ArrowUp", "ArrowUp", "ArrowUp", "ArrowDown"):
        after(page, lambda key=key: page.keyboard.press(key))
    assert "row 2 of 4, column 2 of 4" in caption(page)
    # then come the heads
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "tile"
    after(page, lambda: page.keyboard.press("Enter"))
    assert "head 1 of 2" in caption(page)
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    # and what changed is said to those who do not see it
    assert "head 1 of 2" in page.locator("[role=status]").text_content()


def test_everything_that_takes_the_focus_has_a_name(stored, visit):
    page = visit(stored)
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, input, select, canvas[tabindex], [role=region], svg')].filter((each) =>
           !(each.getAttribute('aria-label') || each.getAttribute('aria-labelledby') || each.labels?.length
             || each.textContent.trim())).map((each) => each.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []


def test_the_class_token_can_be_asked(stored, visit):
    page = visit(stored)
    before = pictures(page)
    after(page, lambda: page.get_by_role("button", name="class token").click())
    assert "From the class token" in caption(page)
    assert pictures(page) != before


def test_another_image_and_another_scale_change_the_maps(stored, visit):
    page = visit(stored)
    first = pictures(page)
    after(page, lambda: page.get_by_role("radio", name="1.png").check())
    second = pictures(page)
    assert second != first
    ticks = page.locator(".ticks").first
    before = ticks.text_content()
    after(page, lambda: page.get_by_label("Colours").select_option("root"))
    assert ticks.text_content() != before
    assert pictures(page) != second


def test_colour_is_not_the_only_code(stored, visit):
    page = visit(stored)
    numbers = page.locator(".ticks").first.locator("span").all_text_contents()
    assert len(numbers) == 5
    assert [float(number) for number in numbers] == sorted(float(number) for number in numbers)
    assert page.locator(".model").first.locator(".strongest li").count() == 5
    canvas = page.locator("canvas.map").first
    canvas.hover(position={"x": 5, "y": 5})
    assert "Row 1, column 1: weight" in page.locator(".readout").first.text_content()


# of the colours as the browser computes them: WCAG's relative luminance
CONTRAST = """(selector) => {
  const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, channel) => sum + part * [0.2126, 0.7152, 0.0722][channel], 0);
  const element = document.querySelector(selector);
  let ground = element;
  while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor].map(light);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_can_be_read(stored, visit, width, scheme):
    page = visit(stored, width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # a patch that a finger can meet
    assert page.locator("canvas.map").first.bounding_box()["width"] >= 300
    for selector in ("body", ".small", ".facts", ".warning", ".brand", ".tile .fact", "td", "footer"):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector


def test_a_hostile_name_is_shown_and_not_obeyed(stored, visit):
    page = visit(stored)
    assert HOSTILE in page.locator(".model h3").first.text_content()
    assert page.locator("img[src=x]").count() == 0
    assert page.title().startswith("See inside")


def test_an_answer_that_fails_is_said_on_the_page(served, visit):
    page = visit(served, expected="status of 400")
    page.evaluate("state.image = 99")
    turn = int(page.evaluate("document.body.dataset.turn"))
    with page.expect_response(lambda answer: answer.status == 400):
        page.locator("canvas.map").first.press("ArrowUp")
    settled(page, turn)
    assert "image must be a whole number from 0 to 1" in page.locator(".readout").first.text_content()
