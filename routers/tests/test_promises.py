"""What a policy of somebody's gets wrong is said at once, in terms of its own file."""

import math

import aiohttp
import pytest

from routers import (
    BasePolicy,
    Decision,
    DecisionError,
    FleetError,
    OptionError,
    Router,
    Signal,
    TurnView,
    make_policy,
    told,
)

HEAD = "import sys\nfrom routers import BasePolicy, Decision, Signal\n"
CHOOSES = "    def choose(self, turn, fleet):\n        return Decision(fleet.replicas[0].name, 'first', 'first')\n"


class Says(BasePolicy):
    """Answers what it was made to answer."""

    def __init__(self, answer):
        super().__init__(rng=None)
        self.answer = answer

    def choose(self, turn, fleet):
        return self.answer


class NoRepr:
    def __repr__(self):
        raise ValueError("none")


def route(answer):
    router = Router(Says(answer), ["r0", "r1"])
    try:
        return router.route(TurnView(request_id="q"), 0)
    except Exception:
        assert router.in_flight == 0
        raise


@pytest.mark.parametrize(
    "answer",
    [
        Decision("r0", "any", "rule"),
        Decision("r1", "schön", "rule", {"r0": 1.5}, 0),
        Decision("r1", "", "", {}, 1 << 40),
    ],
)
def test_a_decision_is_passed_on_as_it_is(answer):
    assert route(answer) is answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"Says.choose \(test_promises.py, line \d+\) returned None: return a Decision"),
        ("r0", "returned 'r0': return a Decision"),
        (NoRepr(), "returned a NoRepr: return a Decision"),
        ("r" * 1000, r"returned 'r{56}\.\.\.: return a Decision"),
        (Decision(0, "x", "y"), "chose the replica 0: give the name"),
        (Decision(["r0"], "x", "y"), r"chose the replica \['r0'\]"),
        (Decision("r0", None, "y"), "gave reason=None: give a str"),
        (Decision("r0", "\ud800", "y"), r"gave a reason with half a character in it \('\\ud800'\)"),
        (Decision("r0", "x", "\udfff"), "gave a rule with half a character"),
        (Decision("r0", "x", 3), "gave rule=3"),
        (Decision("r0", "x", "y", [1]), r"gave scores=\[1\]"),
        (Decision("r0", "x", "y", None, math.nan), "gave believed_hit_tokens=nan: give a whole number"),
        (Decision("r0", "x", "y", None, -5), "gave believed_hit_tokens=-5"),
        (Decision("r0", "x", "y", None, 2.0), "gave believed_hit_tokens=2.0"),
        (Decision("r0", "x", "y", None, True), "gave believed_hit_tokens=True"),
        (Decision("r0", "x", "y", None, 10**30), "gave believed_hit_tokens=10000"),
    ],
)
def test_an_answer_that_is_no_decision_is_refused_in_words_of_the_policy(answer, message):
    with pytest.raises(DecisionError, match=message):
        route(answer)


def test_a_replica_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(FleetError, match=r"chose 'r9', which is not routable now \(r0, r1 are\)"):
        route(Decision("r9", "x", "y"))


def test_a_coroutine_is_no_decision_and_is_not_left_to_be_warned_of(recwarn):
    async def later():
        return Decision("r0", "x", "y")

    with pytest.raises(DecisionError, match=r"returned <coroutine object .*: return a Decision"):
        route(later())
    assert not recwarn.list


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sys.exit(0)\n", r"fails when loaded: SystemExit: 0 \(mine.py, line 3\); mend it"),
        ("raise BaseException('b')\n", r"fails when loaded: BaseException: b \(mine.py, line 3\)"),
        ("raise ValueError('one\\ntwo')\n", r"fails when loaded: ValueError: one \(mine.py, line 3\)"),
        ("def (\n", r"fails when loaded: SyntaxError: .* \(mine.py, line 3\)"),
        ("x = 1\n", "has no class 'P': it has no class with choose"),
        ("P = 3\n", "is not a policy"),
        (
            "class P(BasePolicy):\n    async def choose(self, turn, fleet): ...\n",
            r"its choose is `async def` \(mine.py, line 4\)",
        ),
        (
            f"class P(BasePolicy):\n{CHOOSES}    async def observe(self, event): ...\n",
            r"its observe is `async def` \(mine.py, line 6\)",
        ),
        (
            f"class P(BasePolicy):\n    def __init__(self):\n        pass\n{CHOOSES}",
            r"cannot be made: TypeError: .*; its __init__ \(mine.py, line 4\) is called as __init__\(options, rng=",
        ),
        (
            f"class P(BasePolicy):\n    def __init__(self, *a, **k):\n        raise KeyError('no')\n{CHOOSES}",
            r"cannot be made: KeyError: 'no' \(mine.py, line 5\)",
        ),
        (
            f"class P(BasePolicy):\n    def __init__(self, *a, **k):\n        sys.exit(0)\n{CHOOSES}",
            r"cannot be made: SystemExit: 0 \(mine.py, line 5\)",
        ),
        (
            f"class P(BasePolicy):\n    needs = {{'tokens'}}\n{CHOOSES}",
            "needs 'tokens', which is no signal: write .*TOK",
        ),
        (f"class P(BasePolicy):\n    needs = None\n{CHOOSES}", "needs None, which is no signal"),
        (f"class P(BasePolicy):\n    needs = [Signal.TEXT]\n{CHOOSES}", "needs .*, which is no signal"),
    ],
)
def test_a_file_that_cannot_serve_is_one_line_that_says_where(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(HEAD + text)
    with pytest.raises(OptionError, match=message) as caught:
        make_policy(f"{tmp_path / 'mine.py'}:P")
    assert "\n" not in str(caught.value)


def test_an_interrupted_load_stays_an_interruption(tmp_path):
    (tmp_path / "mine.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        make_policy(f"{tmp_path / 'mine.py'}:P")


def test_a_set_of_signals_may_be_a_plain_set(tmp_path):
    (tmp_path / "mine.py").write_text(f"{HEAD}class P(BasePolicy):\n    needs = {{Signal.TEXT}}\n{CHOOSES}")
    assert make_policy(f"{tmp_path / 'mine.py'}:P").needs == {Signal.TEXT}


def test_an_error_is_told_with_the_place_in_the_file_that_is_asked_about():
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("x")
    said = "ValueError: invalid literal for int() with base 10: 'x'"
    assert told(caught.value, __file__).startswith(f"{said} (test_promises.py, line ")
    assert told(caught.value, "/elsewhere.py") == said
    assert told(SystemExit()) == "SystemExit"


@pytest.mark.parametrize("line", ["sys.exit(0)", "raise BaseException('b')", "return None"])
async def test_a_router_outlives_whatever_its_policy_does_to_one_turn(fleet, router_for, tmp_path, line):
    (tmp_path / "mine.py").write_text(
        f"{HEAD}class P(BasePolicy):\n    def choose(self, turn, fleet):\n        {line}\n"
    )
    service = await router_for(await fleet(1), policy=f"{tmp_path / 'mine.py'}:P")
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            async with session.post(f"{service.url}/v1/completions", json={}) as answer:
                assert answer.status == 500
                assert (await answer.json())["error"]["message"].startswith("router: ")
        async with session.get(f"{service.url}/router/state") as answer:
            assert (await answer.json())["in_flight"] == 0
