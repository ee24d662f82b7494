"""A headless Chromium for tests, driven through a pipe by its DevTools protocol."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name)) is not None), None)
NO_CHROMIUM = f"there is no browser here: none of {', '.join(NAMES)}"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)
TIMEOUT_S = 120.0
"""Only a page that hangs takes so long, or a machine with much else to do."""
WITH_PIPES = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(given), fcntl.F_DUPFD, 100) for given in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3 and writes answers to 4."""


class Browser:
    """A browser, and the page that is looked at.

    Attributes:
        errors: what the page's script has thrown or logged as an error, and what its policy has refused.
        requests: paths of the requests that the page has made.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None, NO_CHROMIUM
        command_read, self._commands = os.pipe()
        self._answers, answer_write = os.pipe()
        flags = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        given = [str(command_read), str(answer_write), CHROMIUM, *flags]
        with (profile / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WITH_PIPES, *given],
                pass_fds=(command_read, answer_write),
                stdout=log,
                stderr=log,
            )
        os.close(command_read)
        os.close(answer_write)
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self._context: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []

    def new_page(self) -> None:
        """Leave the page, if there is one, for a fresh one that remembers nothing."""
        self._session = None
        if self._context is not None:
            self.call("Target.disposeBrowserContext", browserContextId=self._context)
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.errors.clear()
        self.requests.clear()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Give a command and return its result."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(deadline)
            assert answer is not None, f"no answer to {method} within {TIMEOUT_S} s"
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message; record what events say."""
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - monotonic(), 0))
            if not ready:
                return None
            read = os.read(self._answers, 1 << 20)
            assert read, "the browser has ended"
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            case "Log.entryAdded" if message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        return message

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page and return its value."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_until(self, script: str) -> None:
        """Wait until an expression is something."""
        deadline = monotonic() + TIMEOUT_S
        while not self.run(f"Boolean({script})"):
            assert monotonic() < deadline, f"not so within {TIMEOUT_S} s: {script}\n{self.text()}\n{self.errors}"
            self.idle(0.05)

    def idle(self, duration_s: float) -> None:
        """Take in events for a while."""
        deadline = monotonic() + duration_s
        while self._receive(deadline) is not None:
            pass

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def press(self, key: str) -> None:
        """Press and release a key, by its DOM name."""
        codes = {"Enter": 13, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"text": "\r"} if key == "Enter" else {}
        options: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **options, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Choose between the ``light`` and the ``dark`` look."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._commands)
        os.close(self._answers)


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """Yield a browser with a fresh page; end it afterwards."""
    browser = Browser(profile)
    try:
        browser.new_page()
        yield browser
    finally:
        browser.close()
