"""The pages in a real Chromium: from disk as one file and in pieces, and served during the run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rlcli_inspect.report import sample_queries, static_report
from rlcli_inspect.report.page_api import Api
from rlcli_inspect.report.page_server import Server
from rlcli_inspect.report.static_report import write_report

from rlcli.runs.folder import add_event
from rlcli.runs.run_data import RunData
from tests.browser import PHONE, url_of
from tests.report_runs import Settings, write_run, write_step

pytestmark = pytest.mark.long
PAGES = {
    "overview": "Reward",
    "samples": "plus",
    "group?step=6&prompt=sums%2F3": "4 samples, 4 right",
    "sample?step=6&prompt=sums%2F3&sample=1": "Conversation",
    "prompt?prompt=sums%2F3": "Last responses",
    "time?step=2": "worker 1",
    "signals": "threshold",
}
HOSTILE = (
    "<script>window.broken = 1</script></script><img src=x onerror='window.broken = 2'><svg onload=window.broken=3>"
    "\u2028\u2029\u202eevil\u202c\x00\x1b[31m{{data}} javascript:window.broken=4 שלום עולם"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "sums", steps=6, tools=True)


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return url_of(write_report([RunData(folder)], tmp_path_factory.mktemp("report") / "out").path)


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The address of `rlcli view` of the runs, in a thread of this process."""
    loop, started, urls = asyncio.new_event_loop(), threading.Event(), []
    done = asyncio.Event()

    async def serve() -> None:
        async with Server(Api([RunData(folder) for folder in folders])) as server:
            urls.append(server.url)
            started.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(30)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def overflows(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


@pytest.mark.parametrize("viewport", [None, PHONE], ids=["laptop", "phone"])
def test_every_page_of_a_report_opens_from_disk(visit: Any, report: str, viewport: Any) -> None:
    visitor = visit(report, **({"viewport": viewport} if viewport else {}))
    for where, text in PAGES.items():
        page = visitor.open(where)
        assert text in page.text_content("main"), where
        assert page.get_attribute(".page", "data-page") == where.partition("?")[0]
        assert not overflows(page), where


def test_every_page_is_served(visit: Any, folder: Path) -> None:
    with served(folder) as url:
        visitor = visit(url)
        for where, text in PAGES.items():
            assert text in visitor.open(where).text_content("main"), where
        visitor.page.goto("about:blank")


def test_a_report_in_pieces_loads_them_from_disk(
    visit: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_report, "ONE_FILE", 1000)
    written = write_report([RunData(folder)], tmp_path / "out")
    assert written.files == 1 + 6 + 3
    visitor = visit(url_of(written.path))
    for where, text in PAGES.items():
        assert text in visitor.open(where).text_content("main"), where
    (tmp_path / "out" / "data" / "0" / "samples" / "2.js").unlink()
    visitor.page.reload()  # what was loaded is kept in memory
    assert "data/0/samples/2.js is missing" in visitor.open("group?step=2&prompt=sums%2F3").inner_text("main")
    assert any("ERR_FILE_NOT_FOUND" in error for error in visitor.errors)
    visitor.errors.clear()


def test_filters_narrow_the_list_and_are_part_of_the_link(visit: Any, report: str) -> None:
    page = visit(report).open("samples")
    total = page.locator(".sample").count()
    assert total == 50
    page.select_option("label:has-text('Outcome') select", "wrong")
    page.wait_for_function("() => document.querySelectorAll('.sample').length === 27")
    assert "outcome=wrong" in page.url
    assert page.locator(".sample.good").count() == 0
    page.fill("#search", "2 PLUS 1 IS")
    page.wait_for_function("() => location.hash.includes('text=') && document.querySelectorAll('.sample').length === 6")
    assert page.locator(".sample mark").first.text_content() == "2 plus 1 is"
    page.fill("#search", "no such text")
    page.wait_for_selector("text=No sample of 6 steps matches.")


def test_a_phone_folds_the_filters_until_they_are_asked_for(visit: Any, report: str) -> None:
    page = visit(report, viewport=PHONE).open("samples")
    assert not page.is_visible("text=Stop")
    page.click("text=More filters")
    page.select_option("label:has-text('Stop') select", "length")
    page.wait_for_selector(".pill:has-text('cut off')")
    page.reload()
    page.wait_for_selector("label:has-text('Stop')")


def test_a_report_filters_like_the_server(
    visit: Any, folder: Path, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_queries, "ANSWER_S", 600.0)  # a busy machine must not cut the server's answer
    api, page = Api([RunData(folder)]), visit(report).open("overview")
    for query in (
        {"outcome": "wrong", "last": "2"},
        {"text": "#### 9"},
        {"high": "0.5"},
        {"left_out": "1"},
        {"tokens": "1"},
    ):
        ours = api.answer("samples", query)
        theirs = page.evaluate("given => R.source.ask('samples', {run: 0, ...given})", query)
        keys = ("step", "prompt_id", "sample", "response", "advantage", "tokens", "prompt")
        assert [[row.get(key) for key in keys] for row in theirs["rows"]] == [
            [row[key] for key in keys] for row in ours["rows"]
        ]
        assert (theirs["cursor"], theirs["searched"]) == (ours["cursor"], ours["searched"])


def test_keys_move_open_search_and_help(visit: Any, report: str) -> None:
    page = visit(report).open("samples")
    for key in ("j", "ArrowDown", "k", "j"):
        page.keyboard.press(key)
    assert page.locator(".sample[aria-current]").count() == 1
    assert page.evaluate("[...document.querySelectorAll('.sample')].findIndex(one => one.ariaCurrent)") == 1
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Sample 1')")
    page.keyboard.press("]")
    page.wait_for_selector("h1:has-text('Sample 2')")
    page.keyboard.press("u")
    page.wait_for_selector("h1:has-text('Group')")
    first = page.inner_text(".id")
    page.keyboard.press("]")
    page.wait_for_function("first => document.querySelector('.id').innerText !== first", arg=first)
    page.click("text=‹ previous")
    page.wait_for_function("first => document.querySelector('.id').innerText === first", arg=first)
    page.keyboard.press("?")
    assert "search samples" in page.inner_text("dialog")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("/")
    page.wait_for_selector("#search:focus")
    page.keyboard.type("15")
    page.keyboard.press("Escape")
    page.keyboard.press("1")
    page.wait_for_selector("[data-page=overview]")
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_a_curve_of_any_metric_can_be_added_and_linked(visit: Any, report: str) -> None:
    visitor = visit(report)
    page = visitor.open("overview")
    page.fill("[aria-label='add a curve']", "plan/none")
    page.click("text=Add a curve")
    assert not page.evaluate("document.querySelector('form.add input').checkValidity()")
    page.fill("[aria-label='add a curve']", "time/plan_s")
    page.click("text=Add a curve")
    page.wait_for_selector("figure:has-text('time/plan_s')")
    assert "curves=time%2Fplan_s" in page.url
    page.reload()
    page.wait_for_selector("figure:has-text('time/plan_s')")


def test_a_refresh_keeps_what_is_open_and_the_focus(visit: Any, report: str) -> None:
    page = visit(report).open("overview")
    page.click("summary")
    page.evaluate("R.show({keep: true})")
    page.wait_for_timeout(100)
    assert page.evaluate("[document.querySelector('details').open, document.activeElement.tagName]") == [
        True,
        "SUMMARY",
    ]


@pytest.mark.parametrize("viewport", [None, PHONE], ids=["laptop", "phone"])
def test_a_step_after_which_a_file_changed_is_marked_on_the_curves(visit: Any, tmp_path: Path, viewport: Any) -> None:
    folder = write_run(tmp_path / "run", steps=6)
    add_event(folder, "inputs_changed", step=2, text=HOSTILE, files=[{"path": "<b>mine.py"}])
    url = url_of(write_report([RunData(folder)], tmp_path / "out").path)
    page = visit(url, **({"viewport": viewport} if viewport else {})).open("overview")
    assert "<b>mine.py changed after step 2" in page.locator(".chart.wide .legend").inner_text()
    labels = page.eval_on_selector_all(".plot", "all => all.map(one => one.getAttribute('aria-label'))")
    assert len(labels) > 3
    assert all(label.endswith("mine.py changed after step 2") for label in labels)
    assert not overflows(page)


def test_tokens_are_coloured_by_the_chosen_figure(visit: Any, report: str) -> None:
    page = visit(report).open("sample?step=6&prompt=sums%2F3&sample=1&heat=entropy")
    assert page.eval_on_selector(".heat select", "one => one.value") == "entropy"
    choices = page.locator(".heat option").all_inner_texts()
    assert choices == ["engine against trainer", "entropy", "improbability", "advantage", "version of the weights"]
    for value in ("difference", "advantage", "version"):
        page.select_option(".heat select", value)
        shades = page.eval_on_selector_all(".token", "all => all.map(one => getComputedStyle(one).backgroundColor)")
        assert len(set(shades)) > 1
    assert page.locator(".token.masked").count() == 4
    page.focus(".tokens")
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    assert "entropy" in page.inner_text(".detail")
    assert "advantage 0.5" in page.inner_text(".detail")


def test_many_equal_tokens_of_a_prompt_are_shown_as_one(visit: Any, report: str) -> None:
    page = visit(report).open("sample?step=6&prompt=sums%2F3&sample=1")
    page.evaluate(
        "() => { const pads = Array(20000).fill('<pad>');"
        " const text = ['a', 'b', 'b', ...pads, 'x', 'x', 'x', 'x', 'x', 'x', 'x', 'x', 'x'];"
        " const drawn = text.map((one) => one === 'x');"
        " const none = text.map(() => null);"
        " const entropy = text.map((one) => (one === 'x' ? 1 : null));"
        " const columns = { text, drawn, engine_log_prob: none, trainer_log_prob: none, advantage: none, entropy };"
        " R.fill(document.getElementById('main'), R.tokens(columns, {})); }"
    )
    assert page.locator(".token").all_inner_texts() == ["a", "b", "b", "<pad> × 20,000 ", *"xxxxxxxxx"]
    page.locator(".token").nth(3).click()
    assert page.inner_text(".detail").startswith('3 to 20002 "<pad>" not sampled')
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".detail").startswith('20003 "x" entropy 1')


def test_what_the_policy_did_not_draw_is_dimmed(visit: Any, report: str) -> None:
    page = visit(report).open("sample?step=6&prompt=sums%2F3&sample=1")
    roles = page.eval_on_selector_all(
        ".message", "all => all.map(one => [one.className, one.querySelector('b').textContent])"
    )
    sampled_roles = [name for kind, name in roles if "drawn" in kind]
    assert [name for _, name in roles] == ["System", "User", "Model", "Tool", "Model"]
    assert sampled_roles == ["Model", "Model"]
    rewards = page.locator(".message.drawn header").all_inner_texts()
    assert all("turn reward" in text for text in rewards), rewards
    assert "calculator" in page.inner_text(".call")
    left_out = visit(report).open("sample?step=1&prompt=sums%2F0&sample=3")
    assert "Not trained on: truncated." in left_out.inner_text("main")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_light_and_dark(visit: Any, report: str, scheme: str) -> None:
    visitor = visit(report, scheme=scheme)
    sample = "sample?step=6&prompt=sums%2F3&sample=1"
    for where in (*PAGES, f"{sample}&heat=entropy", f"{sample}&heat=advantage", f"{sample}&heat=version"):
        page = visitor.open(where)
        least, text = page.evaluate(CONTRAST)
        assert least >= (3 if where.startswith("time") else 4.5), (where, text)  # short labels on bars, with a legend
    assert (
        page.evaluate("getComputedStyle(document.body).backgroundColor")
        == {
            "light": "rgb(247, 247, 245)",
            "dark": "rgb(16, 19, 23)",
        }[scheme]
    )


CONTRAST = """() => {
  const parsed = (color) => {
    const found = color.match(/[0-9.e-]+/g).map(Number).filter((one) => !Number.isNaN(one));
    const [scale, from] = color.startsWith("color(") ? [1, found.length - (color.includes("/") ? 4 : 3)] : [255, 0];
    return { rgb: found.slice(from, from + 3).map((one) => one / scale), alpha: found[from + 3] ?? 1 };
  };
  const over = (layers) => layers.reduceRight((below, { rgb, alpha }) =>
    rgb.map((one, at) => one * alpha + below[at] * (1 - alpha)), [1, 1, 1]);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (; element; element = element.parentElement) layers.push(parsed(getComputedStyle(element).backgroundColor));
    return layers;
  };
  const texts = [...document.querySelectorAll("main *, #bar a")].filter((one) =>
    [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  return texts.map((one) => {
    const layers = behind(one);
    const back = over(layers);
    const front = over([parsed(getComputedStyle(one).color), ...layers]);
    const faded = front.map((channel, at) => {
      const opacity = Number(getComputedStyle(one).opacity);
      return channel * opacity + back[at] * (1 - opacity);
    });
    const [a, b] = [light(faded), light(back)].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), one.className + " " + one.textContent.slice(0, 40)];
  }).sort((x, y) => x[0] - y[0])[0];
}"""


def test_hostile_text_executes_nothing_and_stays_readable(visit: Any, tmp_path: Path) -> None:
    long = "w" * 1_000_000
    folder = write_run(
        tmp_path / "<b>run",
        steps=1,
        question=HOSTILE.replace("{", "{{").replace("}", "}}"),
        texts={(1, 0, 0): HOSTILE, (1, 0, 1): long, (1, 0, 2): "</script><!--<script>" + HOSTILE},
        warning=HOSTILE,
    )
    group_query = "step=1&prompt=sums%2F0"
    written = write_report([RunData(folder)], tmp_path / "out")
    with served(folder) as url:
        for origin in (url_of(written.path), url):
            visitor = visit(origin, viewport=PHONE)
            for where in (
                "overview",
                "samples",
                f"group?{group_query}",
                f"sample?{group_query}",
                f"sample?{group_query}&sample=2",
                "time",
            ):
                page = visitor.open(where)
                page.wait_for_timeout(50)
                assert page.evaluate("window.broken === undefined"), where
                assert not overflows(page), where
                assert page.locator("main img, main svg, main script, main b > script").count() == 0
            assert "<script>window.broken = 1</script>" in page.evaluate("document.title") or "<b>run" in page.title()
            page = visitor.open(f"sample?{group_query}")
            shown = page.locator(".message.drawn .prose").inner_text()
            assert shown.startswith("<script>window.broken = 1</script></script><img")
            assert "⟨U+2028⟩⟨U+2029⟩⟨U+202E⟩evil⟨U+202C⟩⟨U+0000⟩⟨U+001B⟩[31m{{data}}" in shown
            page = visitor.open(f"sample?{group_query}&sample=1")
            page.click(".message.drawn button.more")
            assert page.locator(".message.drawn .prose").evaluate("one => one.textContent.length") >= 40_000
            assert not overflows(page)
            if origin == url:
                page.goto("about:blank")


def test_view_follows_a_run_that_grows(visit: Any, tmp_path: Path) -> None:
    settings = Settings(steps=9, alive=True)
    folder = write_run(tmp_path / "live", Settings(steps=2, alive=True))
    with served(folder) as url:
        page = visit(url).open("overview")
        page.evaluate("R.POLL_MS = 50")
        assert "step 2 of 2" in page.inner_text(".progress")
        write_step(folder, settings, 3)
        page.wait_for_selector(".progress:has-text('step 3 of 2')")
        page.evaluate("location.hash = '#/samples'")
        page.wait_for_selector(".sample:has-text('step 3')")
        write_step(folder, settings, 4)
        page.click("text=New samples, up to step 4")
        page.wait_for_selector(".sample:has-text('step 4')")
        page.goto("about:blank")


def test_a_page_of_another_server_says_what_to_open(visit: Any, folder: Path) -> None:
    with served(folder) as url:
        visitor = visit(url)
        page = visitor.open("overview")
        page.evaluate("R.source.token = 'of the one before'")
        page.evaluate("location.hash = '#/samples'")
        page.wait_for_selector("text=Open the whole address that rlcli view has printed.")
        page.goto("about:blank")
    assert all("403" in error for error in visitor.errors)
    visitor.errors.clear()


def test_two_runs_are_chosen_between_in_the_bar(visit: Any, folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", steps=2)
    written = write_report([RunData(folder), RunData(other)], tmp_path / "out")
    page = visit(url_of(written.path)).open("overview")
    page.select_option("select.run", label="other")
    page.wait_for_selector("h1:has-text('other')")
    assert "run=1" in page.url
    page.click("nav >> text=Samples")
    page.wait_for_selector(".sample:has-text('step 2')")


def test_a_page_that_does_not_exist_says_so(visit: Any, report: str) -> None:
    visitor = visit(report)
    assert "has no samples in this report" in visitor.open("group?step=99&prompt=x").inner_text("main")
    assert "no such group" in visitor.open("group?step=2&prompt=x").inner_text("main")
    assert visitor.open("nonsense").get_attribute(".page", "data-page") == "overview"


def test_signals_and_a_comparison_of_real_runs_are_shown(visit: Any, folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", steps=6, sets=["train.lr=2e-6"])
    written = write_report([RunData(folder), RunData(other)], tmp_path / "out")
    visitor = visit(url_of(written.path))
    page = visitor.open("signals")
    assert page.locator(".answer").count() > 5
    page = visitor.open("compare")
    assert page.locator(".chart").count() >= 3
    assert "train.lr" in page.text_content("main")
    assert "paired by prompt" in page.text_content("main")


def test_signals_and_comparison_show_every_field(visit: Any, report: str) -> None:
    page = visit(report).open("overview")
    assert page.locator("nav >> text=Compare").count() == 0
    page.evaluate(
        "found => { R.index.compare = true;"
        " R.source.data.signals[0] = found.signals; R.source.data.compare = found.compare }",
        json.loads(CONTRACT),
    )
    page.evaluate("location.hash = '#/signals'")
    page.wait_for_selector("text=1 signal past the threshold")
    assert "Length without gain" in page.inner_text(".answer.bad")
    page.click("text=step 3")
    page.wait_for_selector("h1:has-text('Sample 1')")
    page.evaluate("location.hash = '#/compare?x=tokens'")
    page.wait_for_selector("text=paired by prompt")
    text = page.inner_text("main")
    for part in ("+10.0", "train.lr", "another dataset", "What is 1+1?", "new response"):
        assert part in text


CONTRACT = json.dumps(
    {
        "signals": {
            "signals": [
                {
                    **{"name": "length", "title": "Length without gain", "value": 2.0, "threshold": 1.5},
                    **{"state": "warning", "explanation": "Longer, not better.", "series": [[1, 1.0], [3, 2.0]]},
                    "examples": [{"step": 3, "prompt_id": "sums/0", "sample": 1, "excerpt": "2 plus", "note": "long"}],
                },
                {"name": "kl", "title": "KL", "value": None, "threshold": None, "state": "unknown"}
                | {"explanation": "No reference.", "series": [], "examples": []},
            ]
        },
        "compare": {
            "runs": [{"name": "a", "recipe": "grpo"}, {"name": "b", "recipe": "dapo"}],
            "curves": [
                {"title": "Reward", "x": x, "series": [{"run": run, "points": [[1, 0.5], [2, 0.75]]} for run in "ab"]}
                for x in ("step", "tokens", "seconds")
            ],
            "evaluations": [
                {
                    **{"step": 3, "metric": "pass@1", "prompts": 5},
                    "a": {"mean": 0.5, "low": 0.4, "high": 0.6},
                    "b": {"mean": 0.6, "low": 0.5, "high": 0.7},
                    "difference": {"mean": 0.1, "low": 0.02, "high": 0.2},
                }
            ],
            "changed": [
                {
                    **{"prompt_id": "p", "prompt": "What is 1+1?", "difference": 0.5},
                    "a": {"pass_rate": 0.0, "response": "old response", "score": 0.0},
                    "b": {"pass_rate": 0.5, "response": "new response", "score": 1.0},
                }
            ],
            "config": [{"key": "train.lr", "a": 1e-6, "b": 2e-6}],
            "notes": ["another dataset"],
        },
    }
)
