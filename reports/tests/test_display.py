import pytest

from reports.display import join, label, percent, phrase, shares, unit, value_text, with_unit


@pytest.mark.parametrize(
    ("address", "value", "text"),
    [
        ("ttft_ms.p99", None, "–"),
        ("ttft_ms.p99", 0.0, "0.0"),
        ("ttft_ms.p99", 812.34, "812.3"),
        ("ttft_ms.p99", 81_234.5, "81,234"),
        ("ttft_ms.count", 1_200, "1,200"),
        ("tpot_ms.p50", 12.345, "12.35"),
        ("hit_rate", 0.7123, "71.2"),
        ("load_cv.waiting", -0.001, "0.00"),
        ("errors", 0, "0"),
    ],
)
def test_a_figure_reads_the_same_everywhere(address, value, text):
    assert value_text(address, value) == text


def test_labels_and_units_come_from_the_table():
    assert label("ttft_ms.p99") == "TTFT p99"
    assert phrase("session_e2e_ms.p99") == "session end to end p99"
    assert phrase("ttft_ms.p99") == "TTFT p99"
    assert unit("hit_rate") == "%"
    assert with_unit("hit_rate", 0.5) == "50.0 %"
    assert with_unit("preemptions", 3) == "3"
    assert with_unit("ttft_ms.p50", None) == "unknown"


def test_percent_has_a_sign_only_where_there_is_a_difference():
    assert percent(0.123, signed=True) == "+12.3 %"
    assert percent(-0.123, signed=True) == "-12.3 %"
    assert percent(0.00001, signed=True) == "0.0 %"
    assert percent(None) == "–"


def test_placement_shows_each_of_few_replicas_and_the_extremes_of_many():
    assert shares({"r0": 1, "r1": 3}) == "25/75"
    assert shares({f"r{n}": n for n in range(9)}) == "0.0 to 22.2"
    assert shares(None) == "–"


def test_words_are_joined_as_in_a_sentence():
    assert join([]) == ""
    assert join(["a"]) == "a"
    assert join(["a", "b", "c"]) == "a, b and c"
