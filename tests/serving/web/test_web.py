"""The web page in a real Chromium, against real servers: one of this machine's user, one with API keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.browser import ask, needs_chromium, opened, ready
from tests.helpers.processes import DEADLINE, ServerProcess
from tests.helpers.services import Keyed, weather

import keepwarm

VIEWS = ("Ask", "Cache map", "Live", "Sessions")
HOSTILE = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"


def register(page: Any, sample: str, name: str) -> None:
    page.get_by_role("button", name="Register…").click()
    page.get_by_role("button", name=sample).click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_role("button", name="Compile and keep").click()
    page.get_by_role("radio", name=re.compile(rf"^{name} ")).wait_for()


@needs_chromium
def test_register_ask_and_compare(page: Any) -> None:
    register(page, "Smart home", "house")
    assert "tokens compiled in" in page.locator("#registered").inner_text()
    page.evaluate(
        """() => { window.lengths = new Set();
        new MutationObserver(() => window.lengths.add(document.querySelector(".answer").textContent.length))
            .observe(document.querySelector("#results"), {childList: true, subtree: true, characterData: true}); }"""
    )
    card = ask(page, "It is cold in the bath room.", 12)
    assert page.evaluate("window.lengths.size") > 3  # it grew as tokens came
    assert re.search(r"[1-9]\d* of \d+ tokens reused from", card.inner_text())
    assert {"link", "load", "prefill", "decode"} <= set(card.get_by_role("list", name="Phases").inner_text().split())
    page.get_by_role("button", name="Cold beside warm").click()
    beside = page.get_by_role("article", name="Cold beside warm")
    beside.wait_for()
    assert "Same answer, same logits to the bit." in beside.inner_text()
    assert float(beside.locator("strong").inner_text().rstrip("×")) > 1
    assert beside.get_by_role("img").count() == 2
    page.get_by_role("button", name="Remove the set house").click()
    page.locator("#confirm-yes").click()
    page.get_by_role("radio", name=re.compile("^house ")).wait_for(state="detached")


@needs_chromium
def test_a_set_is_pasted_or_uploaded_and_a_wrong_one_is_explained(page: Any) -> None:
    page.get_by_role("button", name="Register…").click()
    page.get_by_label("Name", exact=True).fill("pasted")
    page.get_by_label("Tools, as JSON").fill("[{")
    page.get_by_role("button", name="Compile and keep").click()
    page.get_by_text("This is not JSON").wait_for()
    page.get_by_label("Tools, as JSON").fill('[{"name": "t", "input_schema": {"type": "nonsense"}}]')
    page.get_by_role("button", name="Compile and keep").click()
    page.get_by_text("nonsense").and_(page.get_by_role("alert")).wait_for()
    page.complaints.clear()  # Chromium's console tells of the 400
    tools = b'[{"name": "now", "description": "Says the time.", "input_schema": {"type": "object"}}]'
    page.get_by_label("Upload a JSON file").set_input_files({
        "name": "my tools.json",
        "mimeType": "application/json",
        "buffer": tools,
    })
    page.get_by_role("button", name="Compile and keep").click()
    page.get_by_role("radio", name=re.compile("^pasted .*1 tool")).wait_for()


@pytest.mark.slow
@needs_chromium
def test_the_cache_map_shows_pins_and_purges(page: Any, server: ServerProcess) -> None:
    register(page, "Support desk", "shop")
    page.get_by_role("link", name="Cache map").click()
    run = page.get_by_role("treeitem", name=re.compile("^shop, "))
    run.click()
    page.get_by_role("region", name="Text of this stretch").get_by_text("track_parcel").wait_for()
    page.get_by_role("button", name="Pin for an hour").click()
    page.get_by_role("treeitem", name=re.compile("^shop, .*pinned")).wait_for()
    page.get_by_role("button", name="Unpin").click()
    page.get_by_role("button", name="Pin for an hour").wait_for()
    page.get_by_role("button", name="Purge…", exact=True).click()
    page.get_by_role("button", name="Cancel").locator("visible=true").click()
    assert run.count() == 1
    page.get_by_role("button", name="Purge…", exact=True).click()
    page.locator("#confirm-yes").click()
    run.wait_for(state="detached")
    entries = httpx.get(f"{server.url}/v1/cache/entries", timeout=DEADLINE).json()["entries"]
    assert "shop" not in [one["name"] for one in entries]
    page.get_by_role("button", name="Purge all of mine…").click()
    page.locator("#confirm-yes").click()
    page.get_by_text("Nothing is stored yet").wait_for()


@needs_chromium
def test_the_map_is_a_tree_of_shared_beginnings(page: Any) -> None:
    words = "The lighthouse keeper writes down every ship that passes. " * 5
    for question in ("Which ship was first?", "Which ship was last?", "Which ship was last?"):
        ask(page, words + question)
    page.get_by_role("link", name="Cache map").click()
    shared = page.get_by_role("treeitem", name=re.compile("2 prompts begin so"))
    shared.last.wait_for()
    shared.last.click()
    text = page.get_by_role("region", name="Text of this stretch")
    text.get_by_text("lighthouse keeper").wait_for()
    assert text.inner_text().rstrip().endswith("Which ship was")
    page.get_by_text("2 stored prompts begin so").wait_for()
    level = int(shared.last.get_attribute("aria-level"))
    for word in ("first", "last"):  # both stand behind it, and each begins with what it alone has
        branch = page.get_by_role("treeitem", name=re.compile(f"^{word}"))
        assert int(branch.get_attribute("aria-level")) == level + 1
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.get_by_text("one stored prompt").wait_for()
    assert page.complaints == []


@needs_chromium
def test_why_it_missed_is_a_diff(page: Any) -> None:
    words = "The desk opens at nine and closes at six. " * 9
    ask(page, f"{words} The bell rings at noon. {words} When?")
    card = ask(page, f"{words} The bell rings at midnight. {words} When?")
    why = card.get_by_role("region", name="Why it missed")
    assert "The text differs" in why.inner_text()
    assert "noon" in why.locator("del").first.inner_text()
    assert "midnight" in why.locator("ins").first.inner_text()
    colours = [why.locator(tag).first.evaluate("e => getComputedStyle(e).backgroundColor") for tag in ("del", "ins")]
    assert len(set(colours)) == 2


@pytest.mark.slow
@needs_chromium
def test_live_charts_follow_other_clients_and_sessions_go_on(page: Any, server: ServerProcess) -> None:
    page.get_by_role("link", name="Live").click()
    page.get_by_text("No answers yet.").first.wait_for()
    chat = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "Warm. " * 80}]}
    headers = {"x-session-id": "a talk"}
    for _ in range(2):
        assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=DEADLINE).status_code == 200
    asked = {"messages": chat["messages"], "max_new_tokens": 2}
    assert httpx.post(f"{server.url}/query", json=asked, headers=headers, timeout=DEADLINE).status_code == 200
    page.get_by_role("img", name=re.compile(r"^3 answers, [1-9]\d* of \d+ prompt tokens reused")).wait_for()
    assert page.locator("#ttft-chart circle").count() == 3
    page.get_by_text("The same as a table").click()
    assert page.locator("#live-table").get_by_role("row").count() == 4
    page.get_by_role("link", name="Sessions").click()
    page.get_by_role("button", name=re.compile("^a talk")).click()
    page.get_by_role("button", name="Continue").click()
    ask(page, "And now?")
    page.get_by_role("link", name="Sessions").click()
    page.get_by_role("button", name=re.compile("^a talk 2 turns")).click()
    page.get_by_role("list").get_by_text("And now?").wait_for()
    page.get_by_role("button", name="Forget…").click()
    page.locator("#confirm-yes").click()
    page.get_by_text("None yet.").wait_for()


@pytest.mark.slow
@needs_chromium
def test_hostile_texts_stay_texts(page: Any, server: ServerProcess) -> None:
    tool = weather("plain", 8)
    tool["function"]["description"] = HOSTILE
    tool["function"]["parameters"]["properties"][HOSTILE] = {"type": "string"}
    made = {"name": "evil", "tools": [tool], "system": HOSTILE * 3}
    assert httpx.post(f"{server.url}/tools", json=made, timeout=DEADLINE).status_code == 200
    headers = {"x-session-id": HOSTILE}
    talk = {"messages": [{"role": "user", "content": HOSTILE * 8}], "max_new_tokens": 2}
    assert httpx.post(f"{server.url}/query", json=talk, headers=headers, timeout=DEADLINE).status_code == 200
    page.reload()
    ready(page)
    page.get_by_role("radio", name=re.compile("^evil ")).check()
    ask(page, HOSTILE)
    page.get_by_role("link", name="Cache map").click()
    page.get_by_role("treeitem", name=re.compile("^evil, ")).click()
    page.get_by_role("region", name="Text of this stretch").get_by_text("onerror").wait_for()
    page.get_by_role("link", name="Sessions").click()
    page.get_by_role("button", name=re.compile("onerror")).click()
    page.get_by_role("list").get_by_text("onerror").first.wait_for()
    assert page.evaluate("window.pwned") is None
    assert page.locator("main img, main script").count() == 0


@pytest.mark.slow
@needs_chromium
def test_by_keyboard_alone(page: Any) -> None:
    def press(*keys: str) -> None:
        for key in keys:
            page.keyboard.press(key)

    def tab_to(name: str) -> None:
        for _ in range(40):
            press("Tab")
            if page.evaluate("(document.activeElement.labels?.[0] ?? document.activeElement).textContent") == name:
                return
        raise AssertionError(f"Tab does not reach {name!r}")

    press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    press("Enter")
    tab_to("Register…")
    press("Enter")
    tab_to("Support desk, 5 tools")
    press("Enter")
    tab_to("Compile and keep")
    press("Enter")
    page.get_by_role("radio", name=re.compile("^support ")).wait_for()
    page.wait_for_timeout(50)
    assert page.evaluate("document.activeElement.id") == "question"
    press("Control+a")
    page.keyboard.type("Where is it?")
    press("Control+Enter")
    page.get_by_role("region", name="Why it missed").wait_for()
    page.evaluate("document.activeElement.blur()")
    tab_to("Cache map")
    press("Enter")
    page.get_by_role("treeitem").first.wait_for()
    tab_to("Purge all of mine…")
    press("Tab")
    first = page.evaluate("document.activeElement.querySelector('.unseen').textContent")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "treeitem"
    press("End", "Home", "ArrowDown", "ArrowUp", "Enter")
    page.get_by_role("region", name="Text of this stretch").wait_for()
    assert page.evaluate("document.activeElement.getAttribute('role')") == "treeitem"
    tab_to("Purge…")
    press("Enter")
    tab_to("Purge")
    press("Enter")
    page.get_by_role("treeitem", name=first, exact=True).wait_for(state="detached")


@pytest.mark.slow
@needs_chromium
def test_a_phones_width_dark_and_light_and_the_names_of_controls(browser: Any, empty: ServerProcess) -> None:
    server = empty
    made = {"name": "phone", "tools": [weather(words=20)]}
    httpx.post(f"{server.url}/tools", json=made, timeout=DEADLINE)
    asked = {"tools": "phone", "query": "Rain?", "max_new_tokens": 2}
    httpx.post(f"{server.url}/query", json=asked, headers={"x-session-id": "s"}, timeout=DEADLINE)
    page = opened(browser, server.url, viewport={"width": 390, "height": 800}, color_scheme="light")
    ready(page)
    ask(page, "How " + "very" * 40 + " long?")
    tree = page.context.new_cdp_session(page)
    for view in VIEWS:
        page.get_by_role("link", name=view).click()
        if view == "Cache map":
            page.get_by_role("treeitem").first.click()
            page.get_by_role("region", name="Text of this stretch").wait_for()
        if view == "Live":
            page.locator("#ttft-chart svg").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
        assert not nameless(tree), view
    page.get_by_role("link", name="Ask").click()
    page.get_by_role("button", name="Register…").click()
    page.get_by_role("button", name="Smart home").wait_for()
    assert page.evaluate("document.querySelector('#register').scrollWidth") <= 390
    assert not nameless(tree)
    page.get_by_role("button", name="Close").click()
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colour)
    assert light != dark
    page.get_by_role("button", name="Theme: auto").click()
    assert page.evaluate(colour) == light
    page.get_by_role("button", name="Theme: light").click()
    page.emulate_media(color_scheme="light")
    page.reload()
    assert page.get_by_role("button", name="Theme: dark").count() == 1
    assert page.evaluate(colour) == dark
    page.context.close()


def nameless(session: Any) -> list[str]:
    """Controls that a screen reader has no name for."""
    controls = ("button", "link", "textbox", "radio", "spinbutton", "treeitem", "combobox", "img", "image", "dialog")
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"] and node["role"]["value"] in controls]
    assert shown
    return [str(node) for node in shown if not node.get("name", {}).get("value")]


@needs_chromium
def test_a_key_is_asked_for_kept_in_the_tab_and_sent_in_a_header(browser: Any, keyed: Keyed) -> None:
    for key, name in ((keyed.acme, "webby"), (keyed.umbrella, "hidden")):
        made = {"name": name, "tools": [weather(words=9)]}
        httpx.post(f"{keyed.url}/tools", json=made, headers={"x-api-key": key}, timeout=DEADLINE)
    page = opened(browser, keyed.url)
    sent: list[str | None] = []
    page.on("request", lambda request: sent.append(request.headers.get("authorization")))
    page.get_by_label("Key", exact=True).fill("kw-0-wrong")
    page.get_by_role("button", name="Use this key").click()
    page.get_by_text("this API key is not known").wait_for()
    page.get_by_label("Key", exact=True).fill(keyed.acme)
    page.get_by_role("button", name="Use this key").click()
    page.get_by_role("radio", name=re.compile("^webby ")).wait_for()
    assert page.get_by_role("radio", name=re.compile("^hidden ")).count() == 0
    page.get_by_role("link", name="Cache map").click()
    page.get_by_role("treeitem", name=re.compile("^webby, ")).wait_for()
    assert page.get_by_role("treeitem", name=re.compile("^hidden, ")).count() == 0
    public = page.get_by_role("treeitem", name=re.compile("shared by all tenants"))
    public.first.click()
    page.get_by_text("only the operator changes it").wait_for()
    assert page.get_by_role("button", name="Purge…", exact=True).count() == 0
    assert f"Bearer {keyed.acme}" in sent
    assert not [url for url in page.asked if keyed.acme in url]
    assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]") == [[keyed.acme], []]
    page.context.close()


def test_the_page_is_strict_about_what_it_loads(keyed: Keyed) -> None:
    with httpx.Client(base_url=keyed.url, timeout=DEADLINE) as http:
        found = http.get("/")  # without a key
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert found.headers["x-content-type-options"] == "nosniff"
        files = set(re.findall(r"/web/[0-9a-f]{32}/[a-z]+\.\w+", found.text))
        (folder,) = {file.rpartition("/")[0] for file in files}
        assert "no-cache" in found.headers["cache-control"]
        for file in sorted(files):
            one = http.get(file)
            assert one.status_code == 200, file
            assert "immutable" in one.headers["cache-control"]
            files |= {f"{folder}/{name}" for name in re.findall(r'"\./([a-z]+\.\w+)"', one.text)}
            tag = one.headers["etag"]
            earlier = file.replace(folder, "/web/" + "0" * 32)
            for again in (earlier, f"/web/{file.rpartition('/')[2]}"):  # not what the document names
                assert "no-cache" in http.get(again).headers["cache-control"]
                assert http.get(again, headers={"if-none-match": tag}).status_code == 304
        assert any(file.endswith("/samples.json") for file in files)
        for file in files | {"/"}:
            text = http.get(file).text
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|style=|onclick=", text), file
            assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), file
        wrongs = ["/web/none.js", "/web/..%2Fpage.py", "/web/%2e%2e/page.py", "/web/app.js%00", "/web/APP.js"]
        for wrong in [*wrongs, "/web/0/app.js", f"{folder}/none.js", f"{folder}/..%2Findex.html"]:
            assert http.get(wrong).status_code in (400, 404), wrong


def test_no_element_has_the_name_of_a_view() -> None:
    """A browser puts the focus on the element that an address like `/#ask` names."""
    folder = Path(keepwarm.__file__).parent / "serving" / "web"
    (views,) = re.findall(r"const VIEWS = \{(.*)\};", (folder / "app.js").read_text())
    names = set(re.findall(r"(\w+):", views))
    assert {"ask", "cache", "live", "sessions"} <= names
    assert names & set(re.findall(r'id="([^"]+)"', (folder / "index.html").read_text())) == set()
