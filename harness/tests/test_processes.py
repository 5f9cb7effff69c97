"""Children: what is started is stopped, and what ends early says why."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from harness.errors import ProcessLost, StartError
from harness.processes import HOME, Children, free_ports, wait_ready

WAIT_S = 10.0
"""Loose: a process table on a loaded machine may lag a little."""


def gone(pid: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_leaving_the_block_stops_every_child(tmp_path):
    with Children(tmp_path) as children:
        pids = [children.start(f"c{i}", python("import time; time.sleep(60)")).process.pid for i in range(3)]
    assert all(gone(pid) for pid in pids)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )
    with Children(tmp_path) as children:
        child = children.start("stubborn", python(code))
        while "ready" not in child.tail():
            time.sleep(0.02)
        child.stop(within_s=0.2)
        assert not child.running


def test_a_grandchild_does_not_stay(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    with Children(tmp_path) as children:
        child = children.start("parent", python(code))
        while not child.tail().strip():
            time.sleep(0.02)
        grandchild = int(child.tail())
    assert gone(grandchild)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child of its parent's death")
def test_children_end_when_the_harness_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from harness.processes import Children\n"
        "c = Children(Path(sys.argv[1])).start('c', [sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(c.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(child)


def test_a_child_that_ends_by_itself_is_named_with_its_last_words(tmp_path):
    with Children(tmp_path) as children:
        child = children.start("replica-r1", python("print('out of luck'); raise SystemExit(7)"))
        child.process.wait()
        with pytest.raises(ProcessLost, match=r"replica-r1 ended with exit code 7: out of luck"):
            children.require_alive()


def test_a_process_that_never_gets_ready_is_an_error_with_its_reason(tmp_path):
    (port,) = free_ports(1)
    with Children(tmp_path) as children:
        child = children.start("router", python("raise SystemExit('no policy named x')"))
        with pytest.raises(StartError, match="router ended with exit code 1: no policy named x"):
            wait_ready(child, f"http://127.0.0.1:{port}/health", 20)


def test_a_process_that_stays_silent_is_given_up_after_its_time(tmp_path):
    (port,) = free_ports(1)
    with Children(tmp_path) as children:
        child = children.start("router", python("import time; time.sleep(60)"))
        with pytest.raises(StartError, match="was not ready within 0 s"):
            wait_ready(child, f"http://127.0.0.1:{port}/health", 0.3)


def test_a_child_does_not_import_from_its_working_directory(tmp_path):
    (tmp_path / "routers").mkdir()
    (tmp_path / "routers" / "__init__.py").write_text("print('stranger')")
    from harness.processes import PYTHON

    with Children(tmp_path) as children:
        child = children.start("c", [*PYTHON, "-c", "import routers; print(routers.__file__)"])
        child.process.wait()
        assert str(tmp_path) not in child.tail()
        assert "stranger" not in child.tail()


def test_free_ports_differ():
    ports = free_ports(8)
    assert len(set(ports)) == 8


def test_children_may_open_as_many_files_as_the_system_allows(tmp_path):
    """A shell's own limit, 256 or 1,024, is that of connections too."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from harness.processes import PYTHON, Children\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "told = 'import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])'\n"
        "with Children(Path(sys.argv[1])) as children:\n"
        "    child = children.start('child', [*PYTHON, '-c', told])\n"
        "    child.process.wait(30)\n"
        "    print(child.tail(), hard)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=HOME, timeout=60, check=True
    )
    soft, hard = map(int, done.stdout.split())
    assert soft >= (10_240 if hard < 0 else min(10_240, hard))
