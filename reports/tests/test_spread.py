import pytest

from reports import fleet_frame
from reports.spread import engine_in_flight_peak
from reports.tests.rows_by_hand import MS, metrics_of, request, sample


def burst(place_of, *, bursts=2, size=8):
    """Siblings 1 ms apart, a burst every 10 s."""
    return [
        request(b * size + n, group=f"b{b}", replica=place_of(n), sent_us=(b * 10_000 + n) * MS)
        for b in range(bursts)
        for n in range(size)
    ]


def test_the_largest_burst_share_tells_scattering_from_keeping_together():
    scattered = metrics_of(burst(lambda n: f"r{n % 8}"))
    together = metrics_of(burst(lambda n: "r0"))
    half = metrics_of(burst(lambda n: f"r{n % 2}"))
    assert [each["burst_max_share"] for each in (scattered, half, together)] == [1 / 8, 1 / 2, 1]


def test_strangers_of_one_group_and_small_bursts_are_no_bursts():
    apart = [request(n, group="g", sent_us=n * 1_000 * MS) for n in range(8)]
    assert metrics_of(apart)["burst_max_share"] is None
    assert metrics_of(burst(lambda n: "r0", size=3))["burst_max_share"] is None
    later = [row | {"turn": 1} for row in burst(lambda n: "r0")]
    assert metrics_of(later)["burst_max_share"] is None


def busy_r0(choice):
    """r0 decodes all the time; ten new sessions go where `choice` says."""
    rows = [request(n, replica=choice(n), sent_us=(1_000 + n) * MS) for n in range(10)]
    samples = [sample(name, t * 500 * MS, active_decode_blocks=load) for t in range(4) for name, load in LOADS.items()]
    return metrics_of(rows, samples)["new_session_load_r"]


LOADS = {"r0": 90, "r1": 10}


def test_the_sign_says_whether_new_sessions_seek_or_avoid_load():
    assert busy_r0(lambda n: "r0") == pytest.approx(1)
    assert busy_r0(lambda n: "r1") == pytest.approx(-1)
    assert busy_r0(lambda n: f"r{n % 2}") == pytest.approx(0)


def test_without_load_or_engines_that_tell_there_is_no_sign():
    assert metrics_of([request(n) for n in range(4)])["new_session_load_r"] is None
    idle = [sample(name, 0, active_decode_blocks=0) for name in LOADS]
    assert metrics_of([request(1, sent_us=MS)], idle)["new_session_load_r"] is None


def test_the_peak_of_the_engines_is_their_own_count_at_one_instant():
    fleet = fleet_frame(
        [
            sample("r0", 0, running=3, waiting=1),
            sample("r1", 0, running=2, waiting=0),
            sample("r0", 500 * MS, running=4, waiting=0),
            sample("r1", 500 * MS, running=None),
        ]
    )
    assert engine_in_flight_peak(fleet) == 6
    assert engine_in_flight_peak(fleet_frame([])) is None
