"""The house's structure, read from its source: who imports whom, how long a module is, what the wheel holds."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.rooms import ROOMS, stranger

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 420
"""Modules stay near 400 lines; a little above is no reason to tear one thing in two."""

STDLIB = sys.stdlib_module_names
CORE_LIBRARIES = {"msgspec", "xxhash", "cbor2", "numpy"}
SHELL_LIBRARIES = CORE_LIBRARIES | {"aiohttp", "zmq", "prometheus_client", "tokenizers", "jinja2", "multidict", "yarl"}
SHELLS = {
    "mock_engine": {"__main__", "server", "publisher"},
    "routers": {"__main__", "proxy", "subscriber"},
}
ALLOWED = {
    "workloads": {"msgspec", "numpy"},
    "mock_engine": SHELL_LIBRARIES,
    "routers": SHELL_LIBRARIES,
    "reports": {"msgspec", "numpy", "pandas", "pyarrow", "plotly", "jinja2", "markupsafe", "rich"},
}
IMPURE = {"asyncio", "socket", "time", "random", "threading", "subprocess", "aiohttp", "zmq"}


def modules(room: str) -> list[Path]:
    return [p for p in sorted((ROOT / room).rglob("*.py")) if "tests" not in p.relative_to(ROOT).parts]


def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.lineno, node.module))
    return found


@pytest.mark.parametrize("room", [r for r in ROOMS if r != "harness"])
def test_no_arrow_runs_sideways(room):
    complaints = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}; {room} may not know it, only harness sees several rooms"
        for path in modules(room)
        for line, name in imports(path)
        if name.split(".")[0] in set(ROOMS) - {room}
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_leans_only_on_its_libraries(room):
    complaints = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}; the import table of this test does not allow it in {room}"
        for path in modules(room)
        for line, name in imports(path)
        if (top := name.split(".")[0]) not in STDLIB and top not in ALLOWED[room] and top != room
    ]
    assert not complaints, "\n".join(complaints)


LOCUST_SIDE = {"locustfile", "users", "load_run", "load_watch", "web_tab"}
"""Modules of the harness that live in a load generator's process only."""


def test_only_the_locust_side_imports_locust_and_nobody_imports_the_locust_side():
    complaints = []
    for room in ROOMS:
        for path in modules(room):
            if room == "harness" and path.stem in LOCUST_SIDE:
                continue
            complaints += [
                f"{path.relative_to(ROOT)}:{line}: imports {name}; Locust patches the process that imports it, "
                "so only the load generator's own modules may"
                for line, name in imports(path)
                if name.split(".")[0] in {"locust", "gevent", "geventhttpclient"}
                or (name.startswith("harness.") and name.split(".")[1] in LOCUST_SIDE)
            ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("room", [r for r in ROOMS if r != "harness"])
def test_importing_a_room_opens_nothing(room):
    """A room's core needs no event loop, no socket library and no web framework."""
    code = (
        f"import sys, {room}; print([m for m in ('aiohttp', 'zmq', 'asyncio', 'locust', 'gevent') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.strip()
    if room == "reports":  # pandas and rich bring asyncio along
        loaded = loaded.replace("'asyncio'", "").replace("[, ", "[")
    assert loaded == "[]", f"import {room} loads {loaded}"


@pytest.mark.parametrize("room", ROOMS)
def test_no_module_outgrows_one_thing(room):
    long = [
        f"{p.relative_to(ROOT)}: {n} lines; split it by what it is about"
        for p in modules(room)
        if (n := len(p.read_text("utf-8").splitlines())) > LINES_MAX
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("room", ROOMS)
def test_a_module_says_what_it_is(room):
    silent = [str(p.relative_to(ROOT)) for p in modules(room) if not ast.get_docstring(ast.parse(p.read_text("utf-8")))]
    assert not silent, f"no opening paragraph in {', '.join(silent)}"


def test_no_circle_of_imports():
    graph: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in modules(room):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            tree = ast.parse(path.read_text("utf-8"))
            graph[name] = set()
            for node in tree.body:  # imports inside functions are deliberate and do not run at import
                if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == room:
                    graph[name] |= {f"{node.module}.{a.name}" for a in node.names} | {node.module}
                elif isinstance(node, ast.Import):
                    graph[name] |= {a.name for a in node.names}
    graph = {name: {d for d in needs if d in graph and d != name} for name, needs in graph.items()}
    # a submodule importing its own package's names is a circle only if the package imports the submodule
    state: dict[str, int] = {}

    def visit(name: str, trail: list[str]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, f"circle of imports: {' -> '.join([*trail[trail.index(name) :], name])}"
        state[name] = 1
        for need in sorted(graph[name]):
            visit(need, [*trail, name])
        state[name] = 2

    for name in sorted(graph):
        visit(name, [])


def test_a_stranger_of_the_same_name_is_found(tmp_path):
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "__init__.py").write_text("")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from harness.rooms import stranger; print(stranger())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "comes from" in done.stdout
    assert "virtual environment" in done.stdout


def test_without_a_stranger_nothing_is_said():
    assert stranger() is None


def test_the_wheel_holds_the_five_rooms_and_nothing_else(tmp_path):
    pytest.importorskip("build")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names if ".dist-info/" not in n}
    assert tops == set(ROOMS)
    assert not [n for n in names if "/tests/" in n]
    assert {f"{room}/py.typed" for room in ROOMS} <= set(names)
    assert any(n.startswith("harness/scenarios/") and n.endswith(".toml") for n in names)
    assert "mock_engine/presets.toml" in names
