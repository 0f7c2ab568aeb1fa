"""Test the chat page of the server."""

import base64
import hashlib
import json
import re
import shutil
import subprocess

import pytest
from serving import BASE, TestClient, hold_requests, server

from rl.programs.program_rollout import LoopServer

KEY = "tml-of-the-chat-page"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"


@pytest.fixture(scope="module")
def model_server(tmp_path_factory):
    with server(tmp_path_factory.mktemp("page"), keys=[KEY]) as parts:
        yield parts


@pytest.fixture(scope="module")
def site_server(tmp_path_factory):
    with server(tmp_path_factory.mktemp("sites"), allowed_hosts=["GPU.lab"]) as parts:
        yield parts


def test_a_browser_gets_the_page_without_a_key_and_other_clients_what_they_got(model_server):
    http = TestClient(model_server.app, raise_server_exceptions=False)
    page = http.get("/", headers={"accept": BROWSER})
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert http.head("/", headers={"accept": BROWSER}).status_code == 200
    for accept in ("*/*", "application/json", "application/json, text/html"):
        assert http.get("/", headers={"accept": accept}).status_code == 401
        answer = http.get("/", headers={"accept": accept, "x-api-key": KEY})
        assert answer.status_code == 404 and "GET /: Not Found" == answer.json()["detail"]
    assert http.post("/", headers={"accept": BROWSER}).status_code == 401
    assert http.post("/", headers={"accept": BROWSER, "x-api-key": KEY}).status_code == 404
    # only this path works without a key
    assert http.get("/v1/models", headers={"accept": BROWSER}).status_code == 401
    assert http.get("/index.html", headers={"accept": BROWSER}).status_code == 401


SITES = """
    127.0.0.1:8000  -                       200
    localhost:8000  http://localhost:8000   200
    [::1]:8000      http://localhost:3000   200
    LOCALHOST       -                       200
    gpu.lab         https://gpu.lab         200
    127.0.0.1:8000  https://gpu.lab:444     200
    evil.net:8000   http://evil.net:8000    403
    evil.net:8000   -                       403
    127.0.0.1:8000  http://evil.net         403
    localhost       http://localhost.evil.net  403
    localhost       null                    403
    [::1            -                       403
"""


@pytest.mark.parametrize("row", SITES.strip().splitlines())
def test_pages_of_other_sites_cannot_use_a_server_without_keys(site_server, model_server, row):
    """Neither directly nor by a name that resolves to 127.0.0.1 (DNS rebinding)."""
    host, origin, status = row.split()
    http = TestClient(site_server.app, raise_server_exceptions=False)
    headers = {"host": host, "accept-language": "en"}
    headers |= {"origin": origin} if origin != "-" else {}
    for path in ("/v1/models", "/api/v1/sessions"):
        answer = http.get(path, headers=headers)
        assert answer.status_code == int(status), answer.text
        assert status == "200" or "--allowed-hosts" in answer.text
    if status == "403":  # clients that are no browser keep the name of any proxy
        assert http.get("/v1/models", headers={"host": host}).status_code == 200
        # and a page with a key may use a server with keys
        with_keys = TestClient(model_server.app, raise_server_exceptions=False)
        assert with_keys.get("/v1/models", headers={**headers, "x-api-key": KEY}).status_code == 200


def test_the_policy_of_the_page_allows_its_own_code_and_nothing_else(model_server):
    http = TestClient(model_server.app, raise_server_exceptions=False)
    page = http.get("/", headers={"accept": BROWSER})
    parts = page.headers["content-security-policy"].split(";")
    policy = dict(part.strip().split(" ", 1) for part in parts)
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}[^>]*>(.*?)</{kind}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy) and policy["frame-ancestors"] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"
    for forbidden in ("http:", "https:", "innerHTML", "localStorage", "eval(", "document.write"):
        assert forbidden not in page.text
    assert not re.search(r'\s(on\w+|style)="', page.text), "the policy blocks inline handlers"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_parses(model_server, tmp_path):
    http = TestClient(model_server.app, raise_server_exceptions=False)
    page = http.get("/", headers={"accept": BROWSER}).text
    ((kind, text),) = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    file = tmp_path / f"page.{'mjs' if 'module' in kind else 'cjs'}"
    for script, is_valid in ((text, True), (text + "\n}", False)):
        file.write_text(script)
        check = subprocess.run(["node", "--check", str(file)], capture_output=True, text=True)
        assert (check.returncode == 0) == is_valid, check.stderr


@pytest.mark.extras
@pytest.mark.slow
def test_a_conversation_in_a_browser(model_server, browser):
    loop_server = LoopServer(lambda: model_server.app, "the chat page")
    page = browser.new_page()
    requests, bodies, problems = [], [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("request", lambda request: bodies.append(request.post_data or ""))
    page.on("pageerror", lambda error: problems.append(str(error)))

    def send(text):
        page.fill("#message", text)
        page.press("#message", "Enter")

    def wait_for_answers():
        page.wait_for_selector("#send:visible")

    try:
        page.goto(loop_server.url)
        page.wait_for_selector("#status:visible")
        assert "needs an API key" in page.inner_text("#status")
        page.fill("#key", KEY)
        page.press("#key", "Tab")
        page.wait_for_selector("select option", state="attached")
        assert page.eval_on_selector("select", "select => select.value") == BASE
        page.fill("#max-tokens", "8")
        page.fill("#system", HOSTILE)
        page.check("#compare")

        # both models answer, and markup stays text
        page.fill("#message", HOSTILE)
        page.press("#message", "Shift+Enter")
        page.keyboard.type("second line")
        page.press("#message", "Enter")
        wait_for_answers()
        users = page.locator(".message.user .text")
        assert users.all_text_contents() == [f"{HOSTILE}\nsecond line"] * 2
        assert page.locator(".message.assistant").count() == 2
        assert page.locator("main img, main b").count() == 0 and "taken" not in page.title()
        send("and again")
        wait_for_answers()
        assert page.locator(".message.assistant .note").count() == 4

        # an error of the server is shown, and the message can be sent again
        page.uncheck("#compare")
        page.fill("#max-tokens", "100000")
        send("too long")
        wait_for_answers()
        assert "exceed the model's context" in page.inner_text(".failure")
        assert page.input_value("#message") == "too long"

        # stop
        page.fill("#max-tokens", "8")
        with hold_requests(model_server):
            send("to be stopped")
            page.click("#stop")
            wait_for_answers()
        note = page.locator(".message.assistant .note").last.text_content()
        assert note == "stopped before the answer: the conversation is unchanged"
        send("after the stop")
        wait_for_answers()
        messages = json.loads(bodies[-1])["messages"]
        assert messages[-1]["content"] == "after the stop"
        assert "to be stopped" not in bodies[-1]

        # the key is kept for this tab only, the conversation until a reset
        page.click("#reset")
        assert page.locator(".message").count() == 0
        page.reload()
        page.wait_for_selector("select option", state="attached")
        assert page.input_value("#key") == KEY
        assert page.evaluate("localStorage.length") == 0 and not page.context.cookies()
        assert not problems
        assert all(url.startswith(loop_server.url) for url in requests)
    finally:
        page.close()
        loop_server.close()
