"""Replicas that come and go, and two ingresses, in real processes: small, and what they leave behind."""

import json
import re
import signal
import subprocess

import pytest

from harness import live_churn
from harness.errors import ProcessLost
from harness.event_sources import ReplicaAddress
from harness.fleet import start_ingresses
from harness.live_churn import LiveChurn
from harness.load_plan import LoadPlan
from harness.processes import Children, get_json
from harness.spread import ingress_of
from harness.tests.arms import arm, small
from harness.tests.test_live import command, environment, ours
from reports import read_run

# Sessions start by the clock for 12 s, so that what happens up to 4.5 s has its time also on a busy machine.
SCENARIO = """
name = "come-and-go"
about = "Everything that may happen to a replica"
routers = ["dynamo-kv"]
seed = 7
[fleet]
replicas = 3
[engine]
preset = "llama-3.1-70b-fp8-h200-tp1"
num_gpu_blocks = 900
[workload]
kind = "multi-turn"
sessions = 36
turns = 3
shared_system_prompts = 1
system_prompt_tokens = 64
first_input_tokens = 100
input_tokens = 40
output_tokens = 20
think_time_ms = 200
[load]
driver = "rate"
arrival = "constant"
rate_per_s = 3.0
[router]
ingresses = 2
share_load = true
share_delay_ms = 5
"""
EVENTS = [
    (0.5, "add", "r3"),
    (1.0, "drain", "r0"),
    (1.5, "crash", "r1"),
    (2.0, "restart", "r2"),
    (2.5, "restart", "r1"),
    (3.0, "add", "r0"),
    (3.5, "crash", "r2"),
    (4.0, "add", "r2"),
    (4.5, "remove", "r3"),
]


@pytest.fixture(scope="module")
def churned(tmp_path_factory):
    """One run that several tests look at."""
    folder = tmp_path_factory.mktemp("churn")
    out = folder / "out"
    file = folder / "come-and-go.toml"
    listed = "".join(f'[[churn]]\nat_s = {at}\ndo = "{do}"\nreplica = "{name}"\n' for at, do, name in EVENTS)
    file.write_text(SCENARIO + listed)
    done = subprocess.run(
        command("run", str(file), "--quiet", "--out", str(out)),
        capture_output=True,
        text=True,
        env=environment(),
        cwd=folder,
        timeout=150,
    )
    return out, done


def test_everything_is_done_in_order_and_the_run_says_when(churned):
    out, done = churned
    document = json.loads((out / "run.json").read_text())
    assert document["status"] == "complete", done.stdout + done.stderr
    assert [(line["at_s"], line["do"], line["replica"]) for line in document["churn"]] == EVENTS
    assert not [line for line in document["churn"] if "error" in line]
    assert all(line["done_at_s"] is not None for line in document["churn"])
    assert all(line["done_at_s"] > line["at_s"] - 0.01 for line in document["churn"])


def test_a_replica_that_ends_by_order_is_no_lost_process(churned):
    out, done = churned
    document = json.loads((out / "run.json").read_text())
    assert "lost" not in done.stdout + done.stderr
    assert not [reason for reason in document["health"]["reasons"] if "was lost" in reason]
    assert ours(out) == []


def test_every_turn_has_one_row_whatever_became_of_it(churned):
    out, _ = churned
    rows = read_run(out).requests
    assert len(rows) == rows["request_id"].nunique() == 36 * 3
    assert set(rows["status"]) <= {"ok", "error", "incomplete", "cancelled"}
    failed = rows[rows["status"].isin(["error", "incomplete"])]
    assert set(failed["error_class"]) <= {"truncated"}  # what had not begun was sent elsewhere
    assert set(failed["replica"]) <= {"r1", "r2"}  # only these crashed or restarted


def test_a_replica_that_joins_takes_turns_and_one_that_drains_takes_none(churned):
    out, _ = churned
    run = read_run(out)
    rows = run.requests
    due_us = {(line["do"], line["replica"]): line["at_s"] * 1e6 for line in run.churn}
    done_us = {(line["do"], line["replica"]): line["done_at_s"] * 1e6 for line in run.churn}
    joined = rows[rows["replica"] == "r3"]
    assert len(joined)
    assert joined["routed_us"].min() >= due_us["add", "r3"]
    drained = rows[(rows["replica"] == "r0") & (rows["routed_us"] > done_us["drain", "r0"])]
    assert (drained["routed_us"] >= due_us["add", "r0"]).all()


def test_samples_are_of_replicas_while_they_are_there(churned):
    out, _ = churned
    run = read_run(out)
    at_us = {(line["do"], line["replica"]): line["done_at_s"] * 1e6 for line in run.churn}
    samples = run.fleet.groupby("replica")["t_us"]
    assert samples.min()["r3"] >= at_us["add", "r3"]
    assert samples.max()["r3"] <= at_us["remove", "r3"]
    gone = run.fleet[(run.fleet["replica"] == "r1") & (run.fleet["t_us"] > at_us["crash", "r1"])]
    assert (gone["t_us"] >= at_us["restart", "r1"]).all()
    assert len(gone)


def test_requests_go_round_two_router_processes_that_hear_of_each_other(churned):
    out, _ = churned
    rows = read_run(out).requests
    plan = LoadPlan(workload={}, seed=1, rows_dir="x", epoch_ns=0, concurrency=1)
    numbers = {session: int(re.match(r"s(\d+)-", session)[1]) for session in rows["session"]}
    for session, turn, ingress in rows[["session", "turn", "ingress"]].itertuples(index=False):
        assert ingress == f"i{ingress_of(plan.spread, numbers[session], turn, 2)}"
    logs = out / "logs" / "dynamo-kv.0"
    routed = {name: (logs / f"router-{name}.jsonl").read_text() for name in ("i0", "i1")}
    for name, text in routed.items():
        sent = rows[(rows["ingress"] == name) & rows["sent_us"].notna()]["request_id"]
        assert sorted({json.loads(line)["request_id"] for line in text.splitlines()}) == sorted(sent)
    environment_of = json.loads((out / "run.json").read_text())["environment"]
    assert {"router-i0", "router-i1", "replica-r3"} <= set(environment_of["cpu_s"]["dynamo-kv.0"])
    samples = read_run(out).router_samples
    assert set(samples["ingress"]) == {"i0", "i1"}


# ---- the performer alone, with processes and routers that only note what they are told -------------------------------


class Process:
    """Stands for a child process."""

    def __init__(self, name):
        self.name, self.running, self.dismissed, self.signals = name, True, False, []

    def send(self, number):
        self.signals.append(number)
        self.running = False

    def why_ended(self):
        return f"{self.name} ended with exit code 1"


class Processes(dict):
    find = dict.__getitem__


class World:
    """A clock, and what became of orders."""

    def __init__(self, monkeypatch, churn, tmp_path, **tables):
        self.now_s, self.calls, self.ready, self.busy, self.refuses = 0.0, [], set(), 0, ""
        monkeypatch.setattr(live_churn, "call", self._call)
        monkeypatch.setattr(live_churn, "get_json", self._get)
        monkeypatch.setattr(live_churn, "launch_replica", self._launch)
        monkeypatch.setattr(LiveChurn, "_now_us", lambda _: round(self.now_s * 1e6))
        names = ("r0", "r1", "r2")
        self.children = Processes({f"replica-{name}": Process(name) for name in names})
        self.started = []
        replicas = [ReplicaAddress(name, f"http://{name}") for name in names]
        (tmp_path / "locust-1.events.jsonl").write_text('{"event": "start", "starts_us": 0}\n')
        self.churn = LiveChurn(
            arm(small(churn=churn, **tables)), self.children, replicas, {"i0": "http://i0", "i1": "http://i1"},
            epoch_ns=0, folder=tmp_path,
        )  # fmt: skip

    def _call(self, method, url, body=None, *, timeout_s):
        if self.refuses and self.refuses in url:
            raise OSError("timed out")
        self.calls.append(f"{method} {url}")

    def _get(self, url, timeout_s):
        if url.endswith("/health"):
            if url not in self.ready:
                raise OSError("not yet")
            return {}
        return [{"name": name, "in_flight": self.busy} for name in ("r0", "r1", "r2")]

    def _launch(self, children, scenario, name, *, epoch_ns, seed, log_dir, place):
        process = Process(name)
        self.started.append((self.now_s, process))
        return process, place or ReplicaAddress(name, f"http://{name}-{len(self.started)}")

    def at(self, now_s):
        self.now_s = now_s
        self.churn.tick()
        done, self.calls = self.calls, []
        return done

    @property
    def done(self):
        return [line["done_us"] for line in self.churn.record]


@pytest.fixture
def world(monkeypatch, tmp_path):
    return lambda *churn, **tables: World(monkeypatch, list(churn), tmp_path, **tables)


def test_a_process_that_is_to_join_is_started_ahead_and_told_of_when_it_is_due_and_ready(world):
    one = world({"at_s": 20, "do": "add"})
    one.churn.prepare()
    assert one.at(14.0) == []
    assert not one.started
    one.at(15.0)
    assert [at for at, _ in one.started] == [15.0]
    assert one.at(20.0) == []  # not ready
    one.ready.add("http://r3-1/health")
    assert one.at(20.3) == ["POST http://i0/router/replicas", "POST http://i1/router/replicas"]
    assert one.done == [20_300_000]
    assert one.at(30.0) == []


def test_what_joins_in_the_first_seconds_is_started_before_the_load(world):
    one = world({"at_s": 2, "do": "add"}, {"at_s": 60, "do": "add"})
    one.churn.prepare()
    assert [process.name for _, process in one.started] == ["r3"]


def test_a_process_that_ends_while_it_starts_is_a_lost_one(world):
    one = world({"at_s": 1, "do": "add"})
    one.churn.prepare()
    one.started[0][1].running = False
    with pytest.raises(ProcessLost, match="r3 ended with exit code 1"):
        one.at(1.0)


def test_a_removal_waits_until_the_replica_is_idle_and_holds_up_nobody_else(world):
    one = world({"at_s": 1, "do": "remove", "replica": "r0"}, {"at_s": 1.2, "do": "drain", "replica": "r1"})
    one.busy = 1
    drains = ["POST http://i0/router/replicas/r0/drain", "POST http://i1/router/replicas/r0/drain"]
    assert one.at(1.0) == drains
    assert one.at(1.2) == [line.replace("r0", "r1") for line in drains]
    assert one.at(2.0) == []
    one.busy = 0
    assert one.at(2.1) == ["DELETE http://i0/router/replicas/r0", "DELETE http://i1/router/replicas/r0"]
    process = one.children["replica-r0"]
    assert (process.signals, process.dismissed) == ([signal.SIGTERM], True)
    assert one.done == [2_100_000, 1_200_000]


def test_a_removal_that_takes_too_long_is_a_kill(world):
    one = world({"at_s": 1, "do": "remove", "replica": "r0", "limit_s": 3})
    one.busy = 1
    one.at(1.0)
    one.at(4.0)
    assert one.children["replica-r0"].signals == []
    one.at(4.1)
    assert one.children["replica-r0"].signals == [signal.SIGKILL]


def test_a_crash_is_told_to_nobody_and_the_next_process_of_that_name_is(world):
    one = world({"at_s": 1, "do": "crash", "replica": "r1"}, {"at_s": 2, "do": "add", "replica": "r1"})
    one.churn.prepare()
    assert not one.started  # the old process is still there
    assert one.at(1.0) == []
    assert one.children["replica-r1"].signals == [signal.SIGKILL]
    one.ready.add("http://r1-1/health")
    said = one.at(2.0)
    assert [line.partition("/router")[0] for line in said] == [
        "DELETE http://i0", "DELETE http://i1", "POST http://i0", "POST http://i1",
    ]  # fmt: skip


def test_a_restart_is_in_place_and_told_to_nobody(world):
    one = world(
        {"at_s": 1, "do": "restart", "replica": "r0"},
        {"at_s": 2, "do": "crash", "replica": "r0"},
        {"at_s": 3, "do": "restart", "replica": "r0"},
    )
    assert one.at(1.0) == ["POST http://r0/mock/restart"]
    one.at(2.0)
    one.at(3.0)
    assert one.done[2] is None
    one.ready.add("http://r0/health")  # the address that routers know
    assert one.at(3.5) == []
    assert one.done[2] == 3_500_000


def test_what_a_router_refuses_is_in_the_record_and_the_rest_goes_on(world):
    one = world({"at_s": 1, "do": "drain", "replica": "r0"}, {"at_s": 2, "do": "drain", "replica": "r1"})
    one.refuses = "i1"
    one.at(1.0)
    one.refuses = ""
    one.at(2.0)
    assert [line.get("error") for line in one.churn.record] == ["timed out", None]
    assert one.done == [None, 2_000_000]


def test_any_router_that_is_started_can_stand_several_times_side_by_side(tmp_path):
    words = ["{python}", "-P", "-m", "routers", "--policy", "random", "--host", "{host}", "--port", "{port}"]
    other = {"name": "other", "command": [*words, "--replica", "a={worker_urls}"], "ready_path": "/router/health"}
    scenario = small(routers=[other], fleet={"replicas": 1}, router={"ingresses": 2})
    with Children(tmp_path) as children:
        replicas = [ReplicaAddress("r0", "http://127.0.0.1:9")]
        urls = start_ingresses(children, arm(scenario), replicas, epoch_ns=0, log_dir=tmp_path)
        assert list(urls) == ["i0", "i1"]
        assert len({get_json(f"{url}/router/state")["replicas"][0]["url"] for url in urls.values()}) == 1
        assert [child.name for child in children] == ["router-i0", "router-i1"]
