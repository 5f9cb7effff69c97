"""The watch over a policy's decisions: it names a call that does not end, and tells calls apart."""

import random
import sys
import threading

from routers import BasePolicy, Decision, Router, TurnView
from routers.deciding import PolicyWatch, policy_call

WAIT_S = 30.0
"""Loose: a thread on a loaded machine may come late."""


class Slow(BasePolicy):
    """Does not decide before it may."""

    def __init__(self):
        super().__init__(rng=random.Random(0))
        self.may = threading.Event()

    def choose(self, turn, fleet):
        self.may.wait(WAIT_S)
        return Decision(fleet.replicas[0].name, "late", "late")


def test_a_call_that_does_not_end_is_named_with_its_line_in_the_policys_own_file():
    policy, said = Slow(), []

    def hear(line):
        said.append(line)
        policy.may.set()

    with PolicyWatch(hear, patience_s=0.02, look_s=0.01):
        assert Router(policy, ["r0"]).route(TurnView(request_id="q"), 0).replica == "r0"
    line = Slow.choose.__code__.co_firstlineno + 1
    assert said[0].startswith("its policy has been deciding for ")
    assert said[0].endswith(f" s (test_deciding.py, line {line})")


def test_a_watch_says_nothing_of_what_is_no_policy():
    said, waited = [], threading.Event()
    with PolicyWatch(said.append, patience_s=0.0, look_s=0.005) as watch:
        waited.wait(0.1)  # this thread is busy elsewhere
        assert not watch.stuck
    assert not said


class Framed(BasePolicy):
    """Writes down by which frames the router came, from as deep as its helpers."""

    def __init__(self):
        super().__init__(rng=random.Random(0))
        self.frames = []

    def choose(self, turn, fleet):
        self.note()
        return Decision(fleet.replicas[0].name, "noted", "noted")

    def observe(self, event):
        self.note()

    def note(self):
        self.frames.append(policy_call(sys._getframe()))


def test_every_call_is_one_of_its_own_however_deep_it_goes():
    policy = Framed()
    router = Router(policy, ["r0"])
    policy.frames.clear()
    router.route(TurnView(request_id="a"), 0)
    router.route(TurnView(request_id="b"), 1)
    names = [frame.f_code.co_name for frame in policy.frames]
    assert names == ["choose", "observe"] * 2
    assert len(set(policy.frames)) == 4
    assert policy_call(sys._getframe()) is None
