import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from workloads import Streams


@given(st.integers(0, 2**31), st.integers(1, 20))
def test_drawing_from_one_stream_never_shifts_another(seed, draws):
    alone = Streams(seed)["workloads.spans"].random()
    streams = Streams(seed)
    for _ in range(draws):
        streams["workloads.turns"].random()
    assert streams["workloads.spans"].random() == alone


def test_a_name_gives_the_same_stream_further_along():
    streams = Streams(1)
    first = streams["a"].random()
    assert streams["a"].random() != first
    assert streams["a"] is streams["a"]


def test_names_and_seeds_give_streams_of_their_own():
    assert len({Streams(seed)[name].getrandbits(64) for seed in range(8) for name in ("a", "b")}) == 16


def test_known_draws_of_a_known_seed():
    assert Streams(42)["workloads.spans"].getrandbits(63) == 2446333620479934916


PROGRAM = """
from pathlib import Path
from workloads import WORKLOADS, Streams, make_workload, token_ids
tables = [{"kind": kind, "timestamp_prefix": True} for kind in sorted(WORKLOADS) if kind != "trace"]
tables += [
    {"kind": "multi-turn", "turns": {"dist": "geometric", "mean": 3}, "sessions": 5, "shared_system_prompts": 2},
    {"kind": "rl-rollout", "output_tokens": {"dist": "lognormal", "mean": 90, "sigma": 1}, "steps": 2},
]
tables += [{"kind": "trace", "path": str(p)} for p in sorted(Path("workloads/tests/data").iterdir())]
for table in tables:
    for session in make_workload(table).sessions(Streams(7)):
        print(session, token_ids(*session.turns[0].output[:1], 0, 3).tolist())
"""


def test_sessions_are_the_same_under_every_hash_seed():
    outputs = set()
    for hash_seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            check=True,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert "Session(" in outputs.pop()
