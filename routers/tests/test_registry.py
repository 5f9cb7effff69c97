"""Names, variants, files and options of policies."""

import subprocess
import sys
from pathlib import Path

import pytest

from routers import (
    POLICIES,
    OptionError,
    Router,
    TurnView,
    make_policy,
    parse_option,
    policy_help,
    policy_names,
    register_policy,
)
from routers import registry as registry_module

OWN = """
from routers import BasePolicy, Decision, Options

class Last(BasePolicy):
    about = "the last replica, always"
    def choose(self, turn, fleet):
        return Decision(fleet.replicas[-1].name, "it is the last", "last")

class Tuned(Last):
    class Options(Options, frozen=True):
        step: int = 2
"""


@pytest.fixture
def own_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_every_policy_has_a_line_of_help_and_can_be_made_without_options():
    for name in policy_names():
        assert len(policy_help(name)) > 20
        assert "\n" not in policy_help(name)
        assert make_policy(name).needs is not None
    assert list(POLICIES) == policy_names()


def test_an_unknown_policy_lists_the_choices():
    with pytest.raises(OptionError, match="no policy named 'prefix': choose one of random, round-robin"):
        make_policy("prefix")


def test_an_unknown_option_lists_the_choices_and_guesses():
    with pytest.raises(OptionError, match=r"no option 'temprature' \(did you mean 'temperature'\?\): choose from "):
        make_policy("dynamo-kv", {"temprature": 1})
    with pytest.raises(OptionError, match="has no options"):
        make_policy("round-robin", {"x": 1})


@pytest.mark.parametrize("value", ["soon", 1.5, None, [1]])
def test_a_value_of_the_wrong_kind_names_the_option(value):
    with pytest.raises(OptionError, match="option virtual_nodes: expected"):
        make_policy("session-ring", {"virtual_nodes": value})


def test_a_value_out_of_range_says_the_range():
    with pytest.raises(OptionError, match="virtual_nodes=0 cannot work: give a finite number of at least 1"):
        make_policy("session-ring", {"virtual_nodes": 0})


def test_a_variant_is_a_named_option_set_that_explicit_options_beat():
    policy = make_policy("dynamo-kv:decay", {"overlap_score_credit_decay": 3.0})
    assert policy.options.overlap_score_credit_decay == 3.0
    with pytest.raises(OptionError, match="no variant 'x': choose one of decay, no-overlap"):
        make_policy("dynamo-kv:x")
    with pytest.raises(OptionError, match="it has none"):
        make_policy("random:x")


def test_a_class_in_a_file_is_a_policy(own_file):
    router = Router(make_policy(f"{own_file}:Last"), ["r0", "r1"])
    assert router.route(TurnView(request_id="q"), 0).replica == "r1"
    assert policy_help(f"{own_file}:Last") == "the last replica, always"
    assert make_policy(f"{own_file}:Tuned", {"step": 4}).options.step == 4


def test_a_file_that_cannot_serve_says_why(own_file, tmp_path):
    with pytest.raises(OptionError, match="no class 'Lost': choose one of Last, Tuned"):
        make_policy(f"{own_file}:Lost")
    with pytest.raises(OptionError, match="names a file but no class"):
        make_policy(str(own_file))
    with pytest.raises(OptionError, match="does not exist"):
        make_policy(f"{tmp_path / 'gone.py'}:Last")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    with pytest.raises(OptionError, match="fails when loaded: ModuleNotFoundError"):
        make_policy(f"{tmp_path / 'broken.py'}:Last")
    (tmp_path / "odd.py").write_text("Last = 3")
    with pytest.raises(OptionError, match="is not a policy"):
        make_policy(f"{tmp_path / 'odd.py'}:Last")


class Point:
    def __init__(self, name, load):
        self.name, self.load, self.value = name, load, f"package:{name}"


def test_an_entry_point_is_a_policy(monkeypatch):
    def broken():
        raise ImportError("no such module")

    points = [Point("theirs", lambda: POLICIES["random"]), Point("lost", broken)]
    monkeypatch.setattr(registry_module, "_entry_points", lambda: points)
    assert policy_names()[-2:] == ["lost", "theirs"]
    assert type(make_policy("theirs")) is POLICIES["random"]
    with pytest.raises(OptionError, match=r"does not load: ImportError: no such module \(test_registry.py, line "):
        make_policy("lost")


def test_a_name_that_is_taken_stays_with_its_owner(monkeypatch):
    monkeypatch.setattr(registry_module, "POLICIES", dict(POLICIES))
    register_policy("mine", POLICIES["random"])
    with pytest.raises(OptionError, match="is taken by RandomChoice"):
        register_policy("mine", POLICIES["round-robin"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("temperature=0.5", ("temperature", 0.5)),
        ("track-active-blocks=false", ("track_active_blocks", False)),
        ("ties=first", ("ties", "first")),
        ("a=b=c", ("a", "b=c")),
    ],
)
def test_a_command_line_option_is_read_as_a_value(text, expected):
    assert parse_option(text) == expected


def test_a_command_line_option_without_value_is_an_error():
    with pytest.raises(OptionError, match="write it as key=value"):
        parse_option("ties")


def test_importing_the_package_opens_nothing_and_loads_no_transport():
    code = "import routers, sys; print(sorted(set(sys.modules) & {'aiohttp', 'zmq', 'asyncio', 'locust'}))"
    root = Path(registry_module.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"
