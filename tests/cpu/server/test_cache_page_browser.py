"""``/cache`` in a real browser: what people see, click and type. Skipped where there is none."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.server.browser import CHROMIUM, NO_CHROMIUM, Browser, running_browser
from tests.cpu.server.process import ServerProcess, running_server
from tests.cpu.server.test_cache_page import KEY, complete, state

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

IS_LIVE = "document.querySelector('#status')?.className === 'live'"
ROWS = "[...document.querySelectorAll('#requests tbody tr')]"
LABELS = "[...document.querySelectorAll('#chart text')]"
RUNS = "[...document.querySelectorAll('#tree [role=treeitem]')]"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser")) as process:
        yield process


@pytest.fixture
def browser(process: Browser) -> Browser:
    """The browser, with a fresh page."""
    process.new_page()
    return process


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Browser:
    """The page of the shared server, live."""
    browser.open(f"{server.url}/cache")
    browser.wait_until(IS_LIVE)
    return browser


def row_of(answer: Any) -> str:
    """Return an expression for the row of an answer's request."""
    return f"{ROWS}.find(row => row.dataset.key === '{answer['id']}-0')"


def test_the_page_shows_new_requests_as_they_come(page: Browser, server: ServerProcess) -> None:
    answer = complete(server, f"~{'as they come ' * 10}")  # no other test's prompt begins so
    page.wait_until(row_of(answer))
    assert page.errors == []
    cells = page.run(f"[...{row_of(answer)}.cells].map(cell => cell.textContent)")
    assert cells[2:4] == ["131", "0 %"]
    page.wait_until(f"{RUNS}.some(run => run.textContent.includes('as they come'))")


def test_rows_show_whole_words_and_more_on_hover(page: Browser, server: ServerProcess) -> None:
    prompts = [f"how to tell requests apart: {end}" for end in ("by their text", "by their testimony")]
    answer = [complete(server, prompt) for prompt in prompts][-1]
    page.wait_until(row_of(answer))
    assert page.run(f"{row_of(answer)}.cells[0].textContent") == "their testimony"
    assert answer["id"] in page.run(f"{row_of(answer)}.title")
    run = f"{RUNS}.find(run => run.textContent.includes('testimony'))"
    page.wait_until(run)
    assert page.run(f"{run}.title").startswith("testimony")


def test_control_tokens_are_left_out_of_rows(page: Browser) -> None:
    page.run("state.control_tokens = ['<|im_end|>', '<|im_start|>']")
    assert page.run("oneLine('<|im_end|>\\n<|im_start|>user\\nHello')") == "user⏎Hello"


def test_ages_are_rounded_to_two_digits(page: Browser) -> None:
    shown = page.run("[0.9, 59.9, 60, 90, 3599, 5400, 1e6].map(age_s => ago(age_s))")
    assert shown == ["0 s", "59 s", "1 min", "1.5 min", "59 min", "1.5 h", "11 d"]


def test_acceptance_of_drafts_is_among_the_figures(page: Browser) -> None:
    page.run("document.querySelector('#pause').click()")
    pairs = "[...document.querySelectorAll('#figures div')].map(x => [...x.children].map(y => y.textContent.trim()))"
    figures = f"Object.fromEntries({pairs})"
    assert "drafts accepted" not in page.run(figures)
    page.run("state.stats.speculation = {num_drafts: 10, num_draft_tokens: 20, num_accepted_by_position: [9, 4]}")
    page.run("showFigures()")
    found = page.run(figures)
    assert found["drafts accepted"] == "65.0 % of 20"
    assert found["accepted by position"] == "90.0 %, 40.0 %"
    assert found["tokens per step"] == "2.30 with drafts"


@pytest.mark.parametrize("width", [600, 1280, 1800])
def test_time_labels_stand_at_their_times(page: Browser, width: int) -> None:
    page.size(width, 900)
    page.run("document.querySelector('#pause').click()")
    chart = page.run("document.querySelector('#chart').clientWidth")
    for oldest_s in (2, 26, 163, 700, 4000, 50000, 1e5, 1e7):
        page.run(f"state.memory = [[{oldest_s}, 0, 0, 0, 0], [0, 0, 0, 0, 0]]; showMemory()")
        labels = page.run(f"{LABELS}.map(label => [label.textContent, Number(label.getAttribute('x'))])")
        times = [(label.split(), place) for label, place in labels if label.endswith("ago")]
        units = {"s": 1, "min": 60, "h": 3600, "d": 86400}
        assert 1 <= len(times) <= chart / 90
        for (value, unit, _), place in times:
            assert (chart - 4 - place) / (chart - 62) * oldest_s == pytest.approx(float(value) * units[unit], rel=1e-6)


def test_a_click_explains_a_request(page: Browser, server: ServerProcess) -> None:
    complete(server, "|clicked upon" * 10 + " first")  # no other test's prompt begins so
    answer = complete(server, "|clicked upon" * 10 + " second")
    page.wait_until(row_of(answer))
    page.run(f"{row_of(answer)}.click()")
    page.wait_until("document.querySelector('.verdict')")
    text = page.text()
    assert "0 of 137 tokens were hit; 137 were computed." in text
    assert "no snapshot" in text
    assert "Where it diverges from the cache: token 131" in text
    assert "it would hit 137 of 137" in text
    assert page.errors == []


def test_the_keyboard_is_enough(page: Browser, server: ServerProcess) -> None:
    for end in ("a", "b"):
        complete(server, "by keyboard " * 20 + end * 70)
    page.wait_until(f"{RUNS}.some(run => run.textContent.includes('by keyboard'))")
    page.run("document.querySelector('#pause').click()")
    page.run(f"{ROWS}[0].focus()")
    page.press("ArrowDown")
    page.press("Enter")
    page.wait_until("document.querySelector('.verdict')")
    assert page.run(f"{ROWS}[1].getAttribute('aria-selected')") == "true"
    branch = f"{RUNS}.find(run => run.textContent.includes('by keyboard') && run.getAttribute('aria-expanded'))"
    page.run(f"{branch}.focus()")
    page.press("Enter")
    assert page.run("document.querySelector('#detail-title').textContent") == "Prefix"
    size = page.run(f"{RUNS}.length")
    page.press("ArrowLeft")
    assert page.run(f"{RUNS}.length") < size
    assert page.run("document.activeElement.getAttribute('aria-expanded')") == "false"
    page.press("ArrowRight")
    assert page.run(f"{RUNS}.length") == size
    assert page.run("[...document.querySelectorAll('#tree [tabindex=\"0\"]')].length") == 1


def test_what_prompts_say_is_never_taken_for_html(page: Browser, server: ServerProcess) -> None:
    attack = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>" * 3
    complete(server, attack)
    answer = complete(server, attack + "<b>bold</b>")
    page.wait_until(row_of(answer))
    page.run(f"{row_of(answer)}.click()")
    page.wait_until("document.querySelector('.verdict')")
    assert "<img src=x" in page.text()
    assert page.run("document.querySelectorAll('img, main script').length") == 0
    assert page.run("window.hacked") is None
    assert page.errors == []


def test_a_prompt_can_be_asked_about_without_being_run(page: Browser, server: ServerProcess) -> None:
    complete(server, "asked about " * 10)
    server.wait_until_idle()
    before = state(server)["stats"]
    page.run("document.querySelector('#ask').open = true")
    page.run("document.querySelector('#prompt').value = 'asked about '.repeat(10) + 'it'")
    page.run("document.querySelector('#ask-form').requestSubmit()")
    page.wait_until("document.querySelector('.verdict')")
    assert "120 of 122 tokens would be hit; 2 would be computed." in page.text()
    assert state(server)["stats"] == before


def test_a_salt_opens_its_tree(page: Browser, server: ServerProcess) -> None:
    complete(server, "under a salt " * 10, cache_salt="tenänt")
    page.run("document.querySelector('#salt').value = 'tenänt'")
    page.run("document.querySelector('#salt-form').requestSubmit()")
    page.wait_until(f"{RUNS}.some(run => run.textContent.includes('under a salt'))")
    assert page.errors == []


def test_nothing_is_asked_while_nobody_looks(page: Browser) -> None:
    page.run("Object.defineProperty(document, 'hidden', { get: () => window.away, configurable: true })")
    page.run("window.away = true; document.dispatchEvent(new Event('visibilitychange'))")
    page.idle(0.2)
    num_asked = len(page.requests)
    page.idle(2.5)
    assert len(page.requests) == num_asked
    page.run("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_until(IS_LIVE)
    assert len(page.requests) > num_asked
    page.run("document.querySelector('#pause').click()")
    page.idle(0.2)
    num_asked = len(page.requests)
    page.idle(2.5)
    assert len(page.requests) == num_asked


def test_page_asks_for_key_and_reports_wrong_one(browser: Browser, bytes_dir: Path, tmp_path: Path) -> None:
    with running_server(bytes_dir, tmp_path / "log", "--api-key", "secret") as server:
        complete(server, "behind a key " * 10, KEY)
        browser.open(f"{server.url}/cache")
        browser.wait_until("document.querySelector('dialog')?.open")
        assert "behind a key" not in browser.text()
        for key in ("wrong", "secret"):
            browser.run(f"document.querySelector('#key').value = '{key}'")
            browser.run("document.querySelector('#gate form').requestSubmit()")
            if key == "wrong":
                browser.wait_until("document.querySelector('#gate-note').textContent === 'That key is not valid.'")
        browser.wait_until(IS_LIVE)
        browser.wait_until(f"{RUNS}.some(run => run.textContent.includes('behind a key'))")
        assert "secret" not in browser.run("location.href")


def test_it_says_when_the_server_has_gone(browser: Browser, bytes_dir: Path, tmp_path: Path) -> None:
    with running_server(bytes_dir, tmp_path / "log") as server:
        browser.open(f"{server.url}/cache")
        browser.wait_until(IS_LIVE)
    browser.wait_until("document.querySelector('#status').className === 'failed'")
    assert re.search(r"no answer since \d\S+.*: the server cannot be reached", browser.text())
    assert float(browser.run("getComputedStyle(document.querySelector('main')).opacity")) < 1


def test_tiers_are_in_figures_and_noted_beside_prefixes(page: Browser) -> None:
    page.run("document.querySelector('#pause').click()")
    page.run(
        """(() => {
        const tier = (name, num_snapshots, num_loads) => ({ name, num_bytes: 1 << 20, num_used_bytes: 1 << 19,
            num_snapshots, num_loads, num_loaded_bytes: 1 << 18, num_failed_loads: 0, num_snapshots_demoted: 9 });
        state.stats.tiers = [tier("host", 7, 3), tier("disk", 60, 2)];
        show();
    })()"""
    )
    shown = page.text()
    assert "67 snapshots in lower tiers not shown" in shown
    assert "taken, 5 loads, 0 evicted" in shown
    assert "of 1 MiB, 60 snapshots" in shown


def test_notes_of_figures_are_not_wider_than_their_columns(page: Browser) -> None:
    page.size(400, 900)
    page.run("document.querySelector('#pause').click()")
    page.run("state.stats.num_snapshots_evicted = 123456789012; show()")
    assert page.run("[...document.querySelectorAll('#figures div')].every(x => x.scrollWidth <= x.clientWidth)")


def test_details_come_into_view_on_narrow_screens(page: Browser, server: ServerProcess) -> None:
    page.size(360, 500)
    answer = complete(server, "brought into view " * 10)
    page.wait_until(row_of(answer))
    page.run("scrollTo(0, 0)")
    page.run(f"{row_of(answer)}.click()")
    page.wait_until("document.querySelector('.verdict')")
    page.wait_until("document.querySelector('.verdict').getBoundingClientRect().bottom <= innerHeight")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    page.run("scrollTo(0, 0)")
    page.run(f"{RUNS}[0].click()")
    page.wait_until("document.querySelector('#detail-title').textContent === 'Prefix'")
    page.wait_until("document.querySelector('#detail-title').getBoundingClientRect().bottom <= innerHeight")


def test_key_that_no_header_can_carry_is_not_valid(page: Browser) -> None:
    page.run("sessionStorage.setItem('key', '鍵'); poll()")
    page.wait_until("document.querySelector('#gate-note').textContent === 'That key is not valid.'")
    assert page.errors == []


@pytest.mark.parametrize("width", [400, 1400])
def test_a_thousand_runs_stay_readable(page: Browser, width: int) -> None:
    page.size(width, 900)
    page.run("document.querySelector('#pause').click()")
    page.run(
        """(() => {
        const run = (place) => ({ parent: place ? (place < 40 ? 0 : place % 39 + 1) : null, start: place < 40 ? 0 : 512,
            end: place ? (place < 40 ? 512 : 1024) : 0, num_blocks: place ? 8 : 0, digest: `run ${place}`, parts_at: 0,
            text: place ? `prompt number ${place} ` + 'word '.repeat(9) : '', age: place, num_users: 0, snapshots: [],
            num_snapshots_left_out: 0, num_children: place ? (place < 40 ? 25 : 0) : 39, num_children_left_out: 0 });
        state.tree = { ...state.tree, runs: Array.from({ length: 1000 }, (_, place) => run(place)), leases: [] };
        show();
    })()"""
    )
    assert page.run(f"{RUNS}.length") == 39
    page.run(
        "const filter = document.querySelector('#filter'); filter.value = 'number 77';"
        "filter.dispatchEvent(new Event('input'))"
    )
    assert page.run(f"{RUNS}.map(run => run.textContent).filter(text => text.includes('number 77')).length") == 11
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.errors == []
