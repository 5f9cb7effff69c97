"""Samples of routers: what is asked, how often, and what a router that does not answer leaves."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from harness.router_samples import RouterWatch, watched
from harness.sim import Simulation
from harness.tests.arms import arm, small

STATE = {"now_us": 1_500_000, "index_size": 42, "in_flight": 3, "policy": "dynamo-kv"}


@pytest.fixture
def router():
    """(address, the paths that were asked for) of something that answers as a router of ours does."""
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            body = json.dumps(STATE).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_router_is_asked_once_a_half_second_and_its_answer_kept_at_once(router, tmp_path):
    url, asked = router
    watch = RouterWatch({"i0": url}, tmp_path)
    watch.sample()
    watch.sample()
    assert asked == ["/router/state"]
    assert watched(tmp_path) == [{"ingress": "i0", "t_us": 1_500_000, "index_size": 42, "in_flight": 3}]


def test_a_router_that_does_not_answer_leaves_a_gap_and_disturbs_nobody(router, tmp_path):
    url, _ = router
    watch = RouterWatch({"i0": "http://127.0.0.1:1", "i1": url}, tmp_path)
    watch.sample()
    assert [line["ingress"] for line in watched(tmp_path)] == ["i1"]


def test_a_router_that_stays_silent_is_told_of_once_with_what_its_log_says(tmp_path):
    (tmp_path / "router.log").write_text("router x on http://...\nwarning: its policy has been deciding\nbye\n")
    watch = RouterWatch({"i0": "http://127.0.0.1:1"}, tmp_path, silent_s=0.0)
    (said,) = watch.sample()
    assert said == "ingress i0 has not answered for 0 s: its policy has been deciding"
    watch._due_s = 0.0  # the next half second
    assert watch.sample() == []


def test_of_several_ingresses_each_has_a_log_of_its_own(tmp_path):
    (tmp_path / "router-i1.log").write_text("warning: it is i1\n")
    watch = RouterWatch({f"i{n}": "http://127.0.0.1:1" for n in (0, 1)}, tmp_path, silent_s=0.0)
    first, second = watch.sample()
    assert first.endswith(" s")
    assert second.endswith(": it is i1")


def test_a_router_that_answers_is_never_told_of(router, tmp_path):
    assert RouterWatch({"i0": router[0]}, tmp_path, silent_s=0.0).sample() == []


def test_without_routers_of_ours_there_is_no_file(tmp_path):
    RouterWatch({}, tmp_path).sample()
    assert watched(tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_in_virtual_time_every_ingress_is_sampled_with_the_fleet():
    rows = Simulation(arm(small(routers=["dynamo-kv"], router={"ingresses": 2}))).run()
    instants = sorted({sample["t_us"] for sample in rows.fleet})
    for ingress in ("i0", "i1"):
        own = [sample for sample in rows.router if sample["ingress"] == ingress]
        assert [sample["t_us"] for sample in own] == instants
        assert max(sample["index_size"] for sample in own) > 0
        assert own[-1]["in_flight"] == 0


def test_a_policy_without_an_index_has_no_size():
    rows = Simulation(arm(small(routers=["round-robin"]))).run()
    assert {sample["index_size"] for sample in rows.router} == {None}
