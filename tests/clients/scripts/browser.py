"""Visits the pages of a server whose model chats, and of one with a key whose model has no chat
template.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import BrowserContext, Page, sync_playwright

URL, KEYED_URL, KEY, CHROMIUM, REPORT = sys.argv[1:]
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text()
WIDTHS = (390, 1200)
REBOUND = "rebound.example"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1",
    # Newer browsers ask their user first
    "--disable-features=LocalNetworkAccessChecks",
]
# On the console, and by scripts that fail
said: list[str] = []
asked_elsewhere: list[str] = []  # addresses


def opened(context: BrowserContext, url: str) -> Page:
    page = context.new_page()
    page.on(
        "console",
        lambda message: said.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request",
        lambda asked: (
            None
            if asked.url.startswith((URL, KEYED_URL, REPORT))
            else asked_elsewhere.append(asked.url)
        ),
    )
    page.goto(url)
    return page


def faults(page: Page) -> list[str]:
    """What axe finds grave at each width, in the light and in the dark, and each width at which it
    scrolls sideways.
    """
    faults_found = []
    page.evaluate(AXE)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            violations = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
            grave = [
                violation["help"]
                for violation in violations
                if violation["impact"] in ("serious", "critical")
            ]
            faults_found += [f"{scheme} at {width}: {help}" for help in grave]

        if page.evaluate("document.documentElement.scrollWidth") > width:
            faults_found.append(f"scrolls at {width}")

    return faults_found


def answer_to(page: Page, text: str) -> str:
    page.fill("#said", text)
    page.press("#said", "Enter" if page.is_checked("[value=chat]") else "Control+Enter")
    # Hidden while the answer comes
    page.locator("#send").wait_for(state="visible")
    return page.locator(".turn.assistant .said").last.inner_text()


def chat(context: BrowserContext) -> dict[str, Any]:
    page = opened(context, URL)  # the root
    page.fill("[name=temperature]", "0")
    page.fill("[name=max_tokens]", "8")
    results: dict[str, Any] = {"plain": answer_to(page, "Hello")}
    page.click("#clear")
    page.check("#logprobs")
    results["marked"] = answer_to(page, "Hello")
    results["status"] = page.inner_text("#status")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    results["by_keyboard"] = page.locator("#alternatives div").all_inner_texts()
    page.keyboard.press("Escape")
    results["after_escape"] = page.locator("#alternatives div").count()
    page.locator(".tokens span").nth(1).hover()
    results["by_pointer"] = page.locator("#alternatives div").all_inner_texts()
    page.fill("[name=temperature]", "3")
    page.fill("#said", "too hot")
    page.press("#said", "Enter")
    results["turns_after_a_value_out_of_bounds"] = page.locator(".turn").count()
    page.fill("[name=temperature]", "0")
    page.fill("#said", "")
    page.click("#code summary")
    results["code"] = {}
    for language in ("curl", "python", "boto3"):
        page.check(f"[value={language}]", force=True)
        page.click("#copy")
        results["code"][language] = page.evaluate("navigator.clipboard.readText()")

    results["faults"] = faults(page)
    return results


END_OF_TALK = """() => {
  const end = document.querySelector("#turns").lastElementChild.getBoundingClientRect().bottom;
  const box = document.querySelector("#ask").getBoundingClientRect();
  return {hidden: end - box.top, box_bottom: box.bottom, window: innerHeight};
}"""
SCROLL_UP_AT_THE_FIRST_TOKEN = """() => {
  const turns = document.querySelector("#turns");
  const numTurns = turns.children.length;
  const observer = new MutationObserver(() => {
    const answer = turns.children[numTurns + 1]?.querySelector(".said").textContent;
    if (!answer) return;
    observer.disconnect();
    scrollTo(0, 0);
  });
  observer.observe(turns, {childList: true, characterData: true, subtree: true});
}"""


def following(context: BrowserContext) -> dict[str, Any]:
    """Where the end of a long answer lies at the width of a screen and of a phone, and where a
    refusal stands.
    """
    page = opened(context, URL)
    page.fill("[name=temperature]", "0")
    page.fill("[name=max_tokens]", "250")
    results: dict[str, Any] = {"ends": [], "scrolled_up_by": []}

    for width, height in ((1280, 800), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        page.click("#clear")
        page.fill("#more", '{"ignore_eos": true}')
        for question in ("Hello", "And then?"):
            answer_to(page, question)
            results["ends"].append(page.evaluate(END_OF_TALK))

        # a reader who scrolls up while an answer comes stays there
        page.evaluate(SCROLL_UP_AT_THE_FIRST_TOKEN)
        answer_to(page, "More")
        results["scrolled_up_by"].append(page.evaluate(END_OF_TALK)["hidden"])

        page.fill("#more", '{"top_p": 7}')
        answer_to(page, "refused")
        results.setdefault("refusals", []).append(page.inner_text("#status"))
        results["ends"].append(page.evaluate(END_OF_TALK))

    page.set_viewport_size({"width": 1200, "height": 800})
    return results


def completion(context: BrowserContext) -> dict[str, Any]:
    page = opened(context, f"{KEYED_URL}/playground")
    page.get_by_text("This server wants an API key.").wait_for()
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    page.locator("#no-chat").wait_for(state="visible")
    results: dict[str, Any] = {
        "can_chat": page.is_enabled("[value=chat]"),
        "is_chosen": page.is_checked("[value=completion]"),
    }
    results["answer"] = answer_to(page, "say hello")
    page.fill("#said", "hang abc")
    page.press("#said", "Control+Enter")
    page.locator(".turn.assistant .said", has_text="abc").wait_for()
    page.click("#stop")
    page.locator("#send").wait_for(state="visible")
    results["stopped"] = page.inner_text("#status")
    results["kept"] = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
    return results


def docs(context: BrowserContext) -> dict[str, Any]:
    page = opened(context, f"{URL}/docs")
    operation = page.locator("[id='post/v1/completions']")
    operation.locator("summary").first.click()
    operation.get_by_label("Body").fill(
        json.dumps({"prompt": "Hello", "max_tokens": 4, "stream": True})
    )
    operation.get_by_role("button", name="Send").click()
    answer = operation.get_by_label("answer")
    operation.get_by_text("[DONE]").last.wait_for()
    return {
        "status": operation.get_by_role("status").inner_text(),
        "headers": operation.get_by_label("headers").text_content(),
        "answer": answer.inner_text(),
        "faults": faults(page),
    }


def report(context: BrowserContext) -> dict[str, Any]:
    page = opened(context, REPORT)
    return {"plots": page.get_by_role("img").count(), "faults": faults(page)}


def foreign(context: BrowserContext) -> dict[str, Any]:
    """What the server answers a page of another origin, and one whose name turns into the server's
    address.
    """
    page = context.new_page()
    page.route(
        "http://evil.example/",
        lambda asked: asked.fulfill(body="<html></html>", content_type="text/html"),
    )
    page.goto("http://evil.example/")
    body = json.dumps({"prompt": "Hello", "max_tokens": 4})
    # A browser asks nothing before it sends this
    with page.expect_response(f"{URL}/v1/completions") as simple:
        page.evaluate(
            "([url, body]) => fetch(url, {method: 'POST', mode: 'no-cors', body})",
            [f"{URL}/v1/completions", body],
        )

    rebound = page.goto(f"{URL.replace('127.0.0.1', REBOUND)}/v1/models")
    return {"simple": simple.value.status, "rebound": rebound.status if rebound else None}


@contextmanager
def chromium() -> Iterator[BrowserContext]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        context = browser.new_context(
            permissions=["clipboard-read", "clipboard-write"],
            viewport={"width": 1200, "height": 800},
        )
        context.set_default_timeout(120_000)
        yield context
        browser.close()


with chromium() as context:
    visits = (chat, following, completion, docs, report, foreign)
    found: dict[str, Any] = {visit.__name__: visit(context) for visit in visits}
print(json.dumps(found | {"said": said, "asked_elsewhere": asked_elsewhere}))
