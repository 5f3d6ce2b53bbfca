"""The documentation site: it builds strictly, its reference holds all that the code has, and its checks find faults."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import quote_plus

import pytest

from rlcli.cli.command_group import COMMANDS
from rlcli.config.keys import keys
from rlcli.config.recipes import names as recipe_names
from rlcli.runs.event_kinds import EVENTS
from rlcli.runs.metric_names import METRIC_NAMES
from scripts._docs import staging
from scripts._docs.__main__ import build
from scripts._docs.built import Page, breakable, problems
from scripts._docs.questions import questions, with_questions
from scripts._docs.staging import DOCS, ROOT, SiteError, adapted, check_navigation, navigated
from scripts._docs.text import prose, table
from tests.browser import LAPTOP, PHONE, Visitor, chromium, url_of

pytestmark = pytest.mark.long
PAGE = "<html><body><h1 id='top'>Top</h1>{}</body></html>"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `scripts/docs` builds it; it would raise for a broken link, or anything fetched from elsewhere."""
    site_folder = tmp_path_factory.mktemp("out")
    build(tmp_path_factory.mktemp("staged"), site_folder)
    return site_folder


def anchors(site: Path, page: str) -> set[str]:
    return {*Page(site / "reference" / f"{page}.html").anchors}


def test_the_site_has_every_page_of_the_navigation(site: Path) -> None:
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html"}
    assert built == {page.removesuffix(".md") + ".html" for page in navigated()}


def test_the_reference_has_every_command_and_key(site: Path) -> None:
    commands = anchors(site, "commands")
    assert {f"rlcli-{name}" for name in COMMANDS} <= commands
    assert {"rlcli-runs-show", "rlcli-eval-compare", "rlcli-recipes-explain"} <= commands
    text = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert "--dry-run" in text
    assert "Check everything, print the derived plan and exit." in text
    assert {*keys()} <= anchors(site, "keys")


def test_the_reference_has_every_recipe_and_plugin(site: Path) -> None:
    assert {*recipe_names()} <= anchors(site, "recipes")
    for page, group in {
        "verifiers": "rlcli.verifiers",
        "environments": "rlcli.environments",
        "datasets": "rlcli.data_prep",
    }.items():
        assert {entry.name for entry in entry_points(group=group)} <= anchors(site, page)


def test_the_reference_has_every_metric_and_event(site: Path) -> None:
    assert {name for name in METRIC_NAMES if "/" in name} <= anchors(site, "metrics")
    text = (site / "reference" / "events.html").read_text(encoding="utf-8")
    assert all(f"<code>{kind.replace('_', '_<wbr>')}</code>" in text for kind in EVENTS)


def test_the_reference_has_every_algorithm_with_its_formula(site: Path) -> None:
    from rlcli.cli.recipes.algorithm_choices import MODULES, choices

    anchor_names = anchors(site, "algorithms")
    for key in MODULES:
        assert {f"{key.partition('.')[2]}-{choice.name}" for choice in choices(key)} <= anchor_names
    text = (site / "reference" / "algorithms.html").read_text(encoding="utf-8")
    assert "A = (R − mean_g) / (std_g + 1e-6)" in text
    assert "arXiv 2402.03300" in text


def test_keys_and_metrics_of_a_page_are_links(site: Path) -> None:
    links = Page(site / "debug.html").links
    assert "reference/keys.html#train.truncated" in links
    assert "reference/metrics.html#reward/equal_groups" in links


def test_a_diagram_is_part_of_the_page(site: Path) -> None:
    text = (site / "concepts" / "step.html").read_text(encoding="utf-8")
    assert re.search(r'<div class="diagram"><svg.*advantages A', text, re.DOTALL)
    assert "<style" not in text[text.index('<div class="diagram">') : text.index("</svg>", text.index('"diagram"'))]


@pytest.mark.parametrize("viewport", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_the_site_opens_from_disk_without_a_network(site: Path, viewport: dict[str, int]) -> None:
    with chromium() as browser:
        visitor = Visitor(browser, url_of(site / "index.html"), viewport=viewport)
        page = visitor.page
        for name in ("index", "debug", "looking_at_runs", "reference/keys", "reference/commands", "concepts/step"):
            page.goto(url_of(site / f"{name}.html"))
            page.wait_for_load_state("networkidle")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        diagram_box = page.locator(".diagram svg").bounding_box()
        assert diagram_box
        assert diagram_box["width"] > 200
        assert diagram_box["height"] > 40
        assert "advantages" in page.locator(".diagram svg").text_content()
        page.goto(url_of(site / "index.html"))
        page.locator("article a[href='start.html'], article a[href='./start.html']").first.click()
        page.wait_for_url("**/start.html")
        assert page.locator("h1").count() == 1
        visitor.close()


def test_the_search_index_has_the_pages(site: Path) -> None:
    assert "equal_groups" in (site / "search.json").read_text(encoding="utf-8")


QUESTIONS = {
    "reward stuck at 0": "debug.html",
    "reward is always zero": "debug.html",
    "does not learn": "debug.html",
    "no gradient": "debug.html",
    "multi-node": "several_machines.html",
    "hold out test split": "datasets.html",
    "out of memory": "bigger_model.html",
    "gpu memory": "planning.html",
    "resume from checkpoint": "resume.html",
    "llm as a judge": "judges.html",
    "custom reward": "your_own_verifier.html",
    "which algorithm": "choosing.html",
    "grpo vs ppo": "choosing.html",
    "compare with trl": "choosing.html",
    "tool calling": "environments.html",
    "entropy collapse": "debug.html",
    "wandb": "metrics.html",
    "slurm": "clusters.html",
    "reproducible": "nothing_lost.html",
    "jupyter": "from_python.html",
    "off-policy": "concepts/staleness.html",
    "rocm": "installing.html",
}

MOST_ASKED = ("reward stuck at 0", "multi-node", "hold out test split")
"""Questions that the site must answer, word for word."""
"""Query → the page that must be among the first two results, whichever of its sections."""


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The address of the site: from disk, browsers run no search."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_search_finds_the_page_that_answers(served: str) -> None:
    missed = {}
    with chromium() as browser:
        visitor = Visitor(browser, served)
        page = visitor.page
        page.goto(f"{served}/index.html")
        page.keyboard.press("/")
        box = page.locator("input[type=text], input:not([type])").locator("visible=true").first
        for typed, answer in QUESTIONS.items():
            box.fill(typed)
            results = page.locator(f"a[href*='?h={quote_plus(typed)}']")
            for _ in range(100):  # the list of the last query stays for a moment
                links = results.evaluate_all("links => links.slice(0, 2).map(link => link.getAttribute('href'))")
                first = [str(address).partition("?")[0] for address in links]
                if f"{served}/{answer}" in first:
                    break
                page.wait_for_timeout(100)
            else:
                missed[typed] = first
        visitor.close()
    assert missed == {}


def test_the_questions_are_many_and_have_those_most_asked() -> None:
    typed = [
        question for sections in questions().values() for text in sections.values() for question in text.split("; ")
    ]
    assert len(typed) >= 33
    assert all(any(phrase in question for question in typed) for phrase in MOST_ASKED)


def test_a_question_about_a_section_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts._docs.questions.questions", lambda: {"a.md": {"": "first", "gone": "x", "kept": "y"}})
    text, missing = with_questions("# A\n\n```bash\n# gone\n```\n\n## Kept\n", "a.md")
    assert missing == ["gone"]
    assert text.index(">first<") < text.index("```bash")
    assert text.endswith('## Kept\n\n<p class="asked">y</p>\n')


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<a href='other.html'>x</a>", "links to other.html, which does not exist"),
        ("<a href='/other.html'>x</a>", "links to /other.html, which does not exist"),
        ("<a href='#bottom'>x</a>", "links to #bottom, an anchor that does not exist"),
        ("<a href='../../outside.html'>x</a>", "which does not exist"),
        ("<p id='top'>x</p>", "the anchor top exists 2 times"),
        ("<script src='https://example.org/x.js'></script>", "fetches https://example.org/x.js"),
        ("<script src='//example.org/x.js'></script>", "fetches //example.org/x.js"),
        ("<link rel='stylesheet' href='https://example.org/x.css'>", "fetches https://example.org/x.css"),
        ("<img src='http://example.org/x.png'>", "fetches http://example.org/x.png"),
        ("<img src='x.png'>", "links to x.png, which does not exist"),
        ("<pre class='mermaid'>x</pre>", "a script from elsewhere would draw"),
    ],
)
def test_a_fault_of_a_built_page_is_found(body: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(PAGE.format(body))
    (message,) = problems(tmp_path)
    assert problem in message


def test_a_font_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(PAGE.format("<a href='#top'>x</a> <a href='https://example.org/'>x</a>"))
    assert problems(tmp_path) == []
    (tmp_path / "x.css").write_text("@font-face { src: url('https://example.org/x.woff2') }")
    assert len(problems(tmp_path)) == 1


@pytest.mark.parametrize(
    ("listed", "existing", "problem"),
    [
        (["a.md"], {"a.md", "b.md"}, "lacks b.md"),
        (["a.md", "b.md"], {"a.md"}, "do not exist: b.md"),
        (["a.md", "a.md"], {"a.md"}, "names twice: a.md"),
    ],
)
def test_navigation_and_pages_must_agree(listed: list[str], existing: set[str], problem: str) -> None:
    with pytest.raises(SiteError, match=re.escape(problem)):
        check_navigation(listed, existing)


@pytest.fixture
def on_site(tmp_path: Path) -> Callable[[str], str]:
    """The site's rendering of a text of docs/debug.md."""
    return lambda text: adapted(text, "debug.md", DOCS / "debug.md", tmp_path)


def test_links_lead_to_pages_of_the_site(on_site: Callable[[str], str], tmp_path: Path) -> None:
    assert on_site("[a](checks.md#warnings)") == "[a](checks.md#warnings)"
    assert on_site("[a](../CONTRIBUTING.md#tests)") == "[a](notes/contributing.md#tests)"
    assert on_site("[a](../README.md) [b](https://example.org/)") == "[a](index.md) [b](https://example.org/)"
    assert on_site("[a](../tests/attacks)") == "`a`"
    assert on_site("[a](../rlcli/errors.py)") == "[a](source/rlcli/errors.py.txt)"
    assert (tmp_path / "source/rlcli/errors.py.txt").read_text() == (ROOT / "rlcli" / "errors.py").read_text()
    with pytest.raises(SiteError, match=r"docs/debug\.md links to absent\.md, which does not exist"):
        on_site("[a](absent.md)")


def test_code_blocks_and_headings_stay_as_they_are(on_site: Callable[[str], str]) -> None:
    block = "```bash\nrlcli x `train.lr` [a](absent.md)\n```\n"
    assert on_site(block) == block
    assert on_site("## `train.lr`\n") == "## `train.lr`\n"
    assert on_site("`train.lr`, `train.lrr`") == "[`train.lr`](reference/keys.md#train.lr), `train.lrr`"


def test_a_folder_that_is_no_site_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(SiteError, match="is not empty and holds no site"):
        build(tmp_path / "staged", tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_staging_again_leaves_unchanged_pages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = [page for page in navigated() if page.startswith("reference/")]
    monkeypatch.setattr(staging, "generated", lambda: dict.fromkeys(reference, "# x\n"))
    monkeypatch.setattr(staging, "as_svg", lambda source, page: "")
    staging.stage(tmp_path / "staged")
    page = tmp_path / "staged" / "pages" / "debug.md"
    modified_ns = page.stat().st_mtime_ns
    staging.stage(tmp_path / "staged")
    assert page.stat().st_mtime_ns == modified_ns


def test_long_names_may_break_in_sentences_and_not_in_blocks() -> None:
    assert breakable("<code>a.b_c/d = 1.5</code>") == "<code>a.<wbr>b_<wbr>c/<wbr>d = 1.<wbr>5</code>"
    block = "<pre><code>a/b <span>c</span></code></pre>"
    assert breakable(block + "<code>a b</code>") == block + "<code>a b</code>"


def test_text_of_the_code_is_no_markup() -> None:
    assert prose("a * b < c | d, `x * y | z` [n]") == r"a \* b &lt; c &#124; d, `x * y | z` \[n\]"
    assert prose("Examples:\n\n  rlcli a\n\n  rlcli b", "bash") == "Examples:\n\n```bash\nrlcli a\nrlcli b\n```"
    assert table(["a", "b"], [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
