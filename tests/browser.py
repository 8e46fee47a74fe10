"""A headless Chromium for tests, spoken to over a pipe: it needs no package and no port."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and answers on 4
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Page:
    """One page at one width; collects what the console complains about and which addresses are asked for.

    Attributes:
        complaints: Errors of scripts, of the console and of the log.
        requests: Every address that was asked for, the page itself among them.
    """

    def __init__(self, width: int, height: int = 900, *, phone: bool = False) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.mkdtemp(prefix="otpdag-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        arguments = [CHROMIUM, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        to_browser, from_browser = _high(to_browser), _high(from_browser)
        start = [sys.executable, "-c", _START, str(to_browser), str(from_browser), *arguments]
        self._process = subprocess.Popen(
            start, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers, self._buffer = itertools.count(1), b""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._session: str | None = None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, path: Path | str) -> None:
        """Open a file or an address, and wait until it is loaded and has drawn."""
        self._ask("Page.navigate", url=path.resolve().as_uri() if isinstance(path, Path) else path)
        self.wait("document.readyState === 'complete'")
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"still not true: {condition}"
            time.sleep(0.05)

    def point(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def press(self, key: str) -> None:
        """Press a key, for instance ``Tab``."""
        code = {"Tab": 9, "Enter": 13}[key]
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def overflow(self) -> int:
        """How many pixels the page is wider than the window."""
        # a phone makes its window as wide as the page: innerWidth would never be exceeded
        return int(self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG file of the page, or of what the window shows."""
        answer = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        if whole:
            size = self._ask("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12_000), "scale": 1}
            answer = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        content = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(content["exceptionDetails"].get("exception", content)))
            case "Runtime.consoleAPICalled" if content["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(content["args"]))
            case "Log.entryAdded" if content["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(content["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(str(content["request"]["url"]))


def _high(descriptor: int) -> int:
    """The same descriptor under a number that is not in the way of 3 and 4."""
    other = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)
    os.close(descriptor)
    return other
