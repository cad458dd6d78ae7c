"""Headless Chromium over its debugging pipe: open a page, run scripts in it, emulate print or a dark screen, take pictures.

Commands and answers are JSON with a zero byte after each (the Chrome DevTools Protocol); nothing listens on a port.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1400,1000"),
)
_PATIENCE_S = 60.0


class Browser:
    """`with Browser() as browser: browser.open(html)`. One page at a time; `console_lines`: its console's output and its errors."""

    def __init__(self) -> None:
        self.console_lines: list[str] = []
        self._numbers = itertools.count(1)
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._unread = b""
        self._events: list[dict[str, Any]] = []
        self._session = ""

    def __enter__(self) -> "Browser":
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = " ".join(f"'{flag}'" for flag in (*_FLAGS, f"--user-data-dir={self._folder.name}/profile"))
        # Chromium reads its commands from descriptor 3 and answers on 4: the shell puts the pipes there.
        command = f"exec '{CHROMIUM}' {flags} 3<&{to_browser} 4>&{from_browser}"
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()

    def open(self, html: str, *, dark: bool = False, wait: str = "true") -> None:
        """Show a page on a light or dark screen; return once it has loaded and the expression `wait` holds in it."""
        file = Path(self._folder.name) / "page.html"
        file.write_text(html, encoding="utf-8")
        self.console_lines.clear()
        self.screen(dark=dark)
        self._events.clear()
        self.ask("Page.navigate", url=file.as_uri())
        self._until(lambda: any(event["method"] == "Page.loadEventFired" for event in self._events), "load")
        self._until(lambda: bool(self.run(wait)), wait)

    def screen(self, *, dark: bool = False, paper: bool = False) -> None:
        """Set whether the reader prefers dark pages, and whether the page is being printed."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", media="print" if paper else "", features=[feature])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page, or of its promise. RuntimeError if it throws."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def picture(self, path: Path, *, clip: dict[str, float] | None = None) -> None:
        """Write the whole page as a PNG, or the part given by x, y, width and height."""
        part = {"clip": {**clip, "scale": 1}} if clip else {}
        answer = self.ask("Page.captureScreenshot", captureBeyondViewport=True, **part)
        path.write_bytes(base64.b64decode(answer["data"]))

    def printed(self) -> bytes:
        """The page on A4 paper, as a PDF."""
        answer = self.ask("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        return base64.b64decode(answer["data"])

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its answer."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") != number:
                continue
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            return dict(answer["result"])

    def _until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the page never fulfilled: {what}")
            self.ask("Runtime.evaluate", expression="0")
            time.sleep(0.02)

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium did not answer {what}")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RuntimeError("Chromium ended")
            self._unread += chunk
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._record_event(message)
        return message

    def _record_event(self, message: dict[str, Any]) -> None:
        method = message.get("method")
        if method is None:
            return
        self._events.append(message)
        if method == "Runtime.consoleAPICalled":
            self.console_lines.append(" ".join(str(argument.get("value")) for argument in message["params"]["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console_lines.append(
                str(message["params"]["exceptionDetails"].get("exception", {}).get("description"))
            )
        elif method == "Log.entryAdded":
            self.console_lines.append(str(message["params"]["entry"]["text"]))
