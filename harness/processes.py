"""Child processes that never outlive their parent.

Every process the harness starts (replicas, routers, load generators) is a `Child`: it runs in a session of its
own, so that a Ctrl-C at the terminal reaches the harness alone and is passed on in the right order; on Linux the
kernel also ends it when the harness dies without a word. `Children` stops all it started when its block ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil

from harness.errors import ProcessLost, StartError

HOME = Path(__file__).resolve().parent.parent
PYTHON = (sys.executable, "-P")
"""How a child of ours starts: without its working directory on the import path, which could hold a stranger of
the same name; our own packages are found through `PYTHONPATH` instead, installed or not."""
POLL_S = 0.05
STOP_S = 5.0
"""How long a child may take to end after SIGTERM before it is killed."""
TAIL_LINES = 12


FILES_WANTED = (65_536, 10_240)
"""Open files of a process that serves or sends many streams: a connection is one. The second is macOS' own limit."""


def raise_file_limit() -> None:
    """Takes as many open files as this process may without asking, for itself and for all it starts: shells give 256
    or 1,024 of them, and a load beyond would look like a router that refuses connections."""
    for wanted in FILES_WANTED:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return


def _die_with_parent() -> Callable[[], None] | None:
    """What a Linux child runs before exec so that it is ended when its parent dies; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()
    pr_set_pdeathsig = 1

    def ask_the_kernel() -> None:
        libc.prctl(pr_set_pdeathsig, signal.SIGKILL)  # a stopped child would keep SIGTERM waiting for ever
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)

    return ask_the_kernel


def _environment() -> dict[str, str]:
    """Ours is found wherever the child runs, and replicas open the routes that empty a cache between arms."""
    path = os.pathsep.join(p for p in (str(HOME), os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "VLLM_SERVER_DEV_MODE": "1"}


class Child:
    """One running process with its log file."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self._out = log.open("ab")
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env=_environment(),
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        except OSError as error:
            self._out.close()
            raise StartError(f"{name} could not be started: {command[0]}: {error.strerror or error}") from error
        with contextlib.suppress(psutil.Error):
            self._usage = psutil.Process(self.process.pid)
        self.cpu_s = 0.0
        self.dismissed = False
        """Its end is wanted, so that it is no loss."""

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def measure(self) -> None:
        """Keeps the CPU seconds used so far; the last reading before the end is what counts."""
        with contextlib.suppress(psutil.Error, AttributeError):
            times = self._usage.cpu_times()
            self.cpu_s = times.user + times.system

    def send(self, number: int) -> None:
        """Sends a signal to the process and everything it started."""
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def stop(self, number: int = signal.SIGTERM, within_s: float = STOP_S) -> None:
        """Ends it: politely, then by force. Safe to call twice."""
        self.measure()
        self.send(number)
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self.process.wait()
        self._sweep()
        self._out.close()

    def _sweep(self) -> None:
        """Ends what the process started and left behind; its group outlives it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def tail(self) -> str:
        """The last lines it printed, for an error message."""
        return "\n".join(self._printed()[-TAIL_LINES:])

    def _printed(self) -> list[str]:
        try:
            return self.log.read_text("utf-8", "replace").splitlines()
        except OSError:
            return []

    def why_ended(self) -> str:
        """One line: how it ended and, if it could still say so, its last error or else the last thing it printed."""
        code = self.exit_code
        if code is not None and code < 0:  # whatever it printed before has nothing to do with the signal
            return f"{self.name} was ended by signal {-code} (log: {self.log})"
        lines = [line.strip() for line in self._printed() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]  # which others may have followed
        said = f": {(errors or lines)[-1].removeprefix('error: ')}" if lines else ""
        return f"{self.name} ended with exit code {code}{said} (log: {self.log})"


class Children:
    """All processes of one arm; leaving the block stops them, last started first."""

    def __init__(self, logs: Path) -> None:
        raise_file_limit()
        self.logs = logs
        self.logs.mkdir(parents=True, exist_ok=True)
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __iter__(self) -> Iterator[Child]:
        return iter(self._children)

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Starts a process in the folder of its log, a folder of our own."""
        child = Child(name, command, self.logs / f"{name}.log")
        self._children.append(child)
        return child

    def stop(self) -> None:
        for child in self._children:
            child.measure()
        for child in reversed(self._children):
            child.stop()

    def measure(self) -> None:
        for child in self._children:
            child.measure()

    def cpu_s(self) -> dict[str, float]:
        """By name; processes that bore one name after each other are added up."""
        sums: dict[str, float] = {}
        for child in self._children:
            sums[child.name] = sums.get(child.name, 0.0) + child.cpu_s
        return {name: round(total, 3) for name, total in sums.items()}

    def find(self, name: str) -> Child:
        """The latest of that name. Raises KeyError."""
        for child in reversed(self._children):
            if child.name == name:
                return child
        raise KeyError(name)

    def require_alive(self, *, but: Sequence[Child] = ()) -> None:
        """Raises ProcessLost for the first child that ended and was not dismissed."""
        for child in self._children:
            if child not in but and not child.dismissed and not child.running:
                raise ProcessLost(child.why_ended())


def free_ports(count: int) -> list[int]:
    """Loopback TCP ports that are free now; all are held until all are found, so they differ."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(int(probe.getsockname()[1]))
        return ports


def get_json(url: str, timeout_s: float = 2.0) -> Any:
    """The JSON body of a GET, or {} where there is none. Raises OSError (urllib's errors are OSErrors)."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            body = answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"what answers there does not speak HTTP ({type(error).__name__})") from error
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}


def call(method: str, url: str, body: bytes | None = None, *, timeout_s: float = 2.0) -> None:
    """A request whose answer does not matter unless it is an error. Raises OSError (urllib's errors are OSErrors)."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    asked = urllib.request.Request(url, data=body, method=method, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"what answers there does not speak HTTP ({type(error).__name__})") from error


def wait_ready(child: Child, url: str, within_s: float, ready: Callable[[Any], bool] = lambda _: True) -> Any:
    """Waits until `url` answers 200 with a body that is `ready`. Raises StartError with the log's last line."""
    deadline = time.monotonic() + within_s
    last = "nothing answered"
    while time.monotonic() < deadline:
        if not child.running:
            raise StartError(child.why_ended())
        try:
            body = get_json(url)
            if ready(body):
                return body
            last = f"{url} answered but is not ready"
        except urllib.error.HTTPError as error:
            last = f"{url} answered {error.code}"
        except OSError as error:
            last = str(getattr(error, "reason", error))
        time.sleep(POLL_S)
    said = child.tail().strip().rpartition("\n")[2].strip() or "nothing"
    raise StartError(
        f"{child.name} was not ready within {within_s:.0f} s ({last}); it printed last: {said} (log: {child.log})"
    )
