import pytest

from reports import ReportError, RuleError, UnknownMetricError, default_rules, read_rules, rules_of
from reports.metrics_table import direction_of
from reports.rules import bound_rule, exact_rule, relative_rule, rule_lines


@pytest.mark.parametrize(
    ("name", "text", "address", "compare", "value"),
    [
        ("ttft_ms", "p(99)<500", "ttft_ms.p99", "<", 500),
        ("ttft_ms", " med <= 1_000 ", "ttft_ms.p50", "<=", 1000),
        ("tpot_ms", "avg<40.5", "tpot_ms.mean", "<", 40.5),
        ("ttft_ms", "count>=100", "ttft_ms.count", ">=", 100),
        ("slo_attainment", "rate>0.99", "slo_attainment", ">", 0.99),
        ("errors", "count==0", "errors", "==", 0),
        ("load_cv.decode_blocks", "value<0.5", "load_cv.decode_blocks", "<", 0.5),
        ("placement.max_share", "rate<0.5", "placement.max_share", "<", 0.5),
        ("ttft_ms.p99", "value<5e2", "ttft_ms.p99", "<", 500),
    ],
)
def test_a_bound_is_written_as_in_k6(name, text, address, compare, value):
    rule = bound_rule(name, text)
    assert (rule.address, rule.compare, rule.value) == (address, compare, value)


@pytest.mark.parametrize(
    ("text", "address", "value", "percent", "worse"),
    [
        ("ttft_ms:p99:+5%", "ttft_ms.p99", 0.05, True, "higher"),
        ("ttft_ms:p99:5%", "ttft_ms.p99", 0.05, True, "higher"),
        ("ttft_ms.p99:+20ms", "ttft_ms.p99", 20, False, "higher"),
        ("output_tokens_per_s:-5%", "output_tokens_per_s", 0.05, True, "lower"),
        ("hit_rate:-2points", "hit_rate", 0.02, False, "lower"),
        ("hit_rate:0.02", "hit_rate", 0.02, False, "lower"),
        ("errors:+0", "errors", 0, False, "higher"),
        ("load_cv:decode_blocks:+10%", "load_cv.decode_blocks", 0.1, True, "higher"),
        ("in_flight_mean:-50%", "in_flight_mean", 0.5, True, "lower"),
        ("tpot_ms:med:+5%", "tpot_ms.p50", 0.05, True, "higher"),
    ],
)
def test_a_relative_rule_is_written_as_in_pytest_benchmark(text, address, value, percent, worse):
    rule = relative_rule(text)
    assert (rule.address, rule.value, rule.percent, rule.worse) == (address, pytest.approx(value), percent, worse)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"bounds": {"ttft": ["p(99)<500"]}}, "no metric 'ttft'.*ttft_ms"),
        ({"bounds": {"ttft_ms": ["p(98)<500"]}}, r"choose one of|p\(99\)"),
        ({"bounds": {"ttft_ms": ["rate<500"]}}, "choose avg, med, max, count"),
        ({"bounds": {"ttft_ms": ["value<500"]}}, "no aggregation 'value'"),
        ({"bounds": {"hit_rate": ["p(99)>0.5"]}}, "single number"),
        ({"bounds": {"preemptions": ["rate<5"]}}, "no share"),
        ({"bounds": {"ttft_ms": ["p(99) 500"]}}, "not understood"),
        ({"bounds": {"ttft_ms": [{"threshold": "p(99)<5", "abortOnFail": True}]}}, "nothing can be aborted"),
        ({"bounds": {"ttft_ms": [{"threshold": "p(99)<5", "abortOnFail": "no"}]}}, "true or false"),
        ({"bounds": {"ttft_ms": [{"threshold": 5}]}}, "threshold = 5: write an expression"),
        ({"bounds": {"ttft_ms": [{"abortOnFail": False}]}}, "threshold = None"),
        ({"bounds": {"ttft_ms": [{"thresholds": "p(99)<5"}]}}, "did you mean 'threshold'"),
        ({"bounds": {"ttft_ms": [5]}}, "list of expressions"),
        ({"bounds": {"ttft": {"p99": "p(99)<5"}}}, "bounds.ttft is a table"),
        ({"bounds": {"load_cv": ["value<1"]}}, "load_cv.decode_blocks"),
        ({"bounds": {"ttft_ms": []}}, "list of expressions"),
        ({"relative": ["ttft_ms:p99:-5%"]}, "forbid an improvement"),
        ({"relative": ["hit_rate:+5%"]}, "forbid an improvement"),
        ({"relative": ["requests:5%"]}, "neither way is better"),
        ({"relative": ["ttft_ms:+5%"]}, "did you mean ttft_ms.mean"),
        ({"relative": ["ttft_ms:p99:+5s"]}, "is in ms, not in s"),
        ({"relative": ["ttft_ms:p99"]}, "not understood"),
        ({"relative": "ttft_ms:p99:+5%"}, "must be a list"),
        ({"exact": ["hits"]}, "no metric 'hits'"),
        ({"bound": {}}, "did you mean 'bounds'"),
        ({"rule": [{"routers": "a"}]}, "did you mean 'router'"),
        ({"rule": [{"router": 3, "relative": ["ttft_ms:p99:5%"]}]}, "must be texts"),
        ({"rule": {"router": "a"}}, r"\[\[rule\]\]"),
        ({}, "holds no rule"),
        ({"errors_max": 2, "exact": ["errors"]}, "errors_max = 2"),
        ({"errors_max": "many", "exact": ["errors"]}, "errors_max"),
        ({"repeats_min": 1, "exact": ["errors"]}, "at least 2"),
        ({"rule": [{"allow_degenerate_placement": 1}]}, "true or false"),
    ],
)
def test_a_rule_that_cannot_work_is_an_error_that_names_the_mend(document, told):
    with pytest.raises(ReportError, match=told):
        rules_of(document, "rules.toml")


def test_the_long_form_of_k6_says_the_same_as_the_short_one():
    short = rules_of({"bounds": {"ttft_ms": ["p(99)<500", "med<100"]}}, "rules.toml")
    each = [{"threshold": "p(99)<500", "abortOnFail": False, "delayAbortEval": "10s"}, {"threshold": "med<100"}]
    assert rules_of({"bounds": {"ttft_ms": each}}, "rules.toml") == short
    assert rules_of({"bounds": {"ttft_ms": each[0]}}, "rules.toml").rules == short.rules[:1]


def test_a_file_holds_rules_for_all_and_for_some(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(
        'errors_max = "2%"\nrelative = ["ttft_ms:p99:+5%"]\n[bounds]\nttft_ms = ["p(99)<500", "med<100"]\n'
        "[bounds.load_cv]\ndecode_blocks = 'value<0.5'\n"
        '[[rule]]\nrouter = "dynamo-*"\nscenario = "quickstart"\nmode = "sim"\nexact = ["placement"]\n'
        '[[rule]]\nrouter = "herd"\nallow_degenerate_placement = true\n'
    )
    rules = read_rules(path)
    assert rules.errors_max == 0.02
    assert [rule.kind for rule in rules.rules] == ["bound", "bound", "bound", "relative", "exact"]
    exact = rules.rules[-1]
    assert (exact.router, exact.scenario, exact.mode) == ("dynamo-*", "quickstart", "sim")
    assert exact.applies_to("quickstart", "sim")
    assert not exact.applies_to("quickstart", "live")
    assert rules.may_degenerate("herd", "quickstart", "sim")
    assert not rules.may_degenerate("dynamo-kv", "quickstart", "sim")
    assert "exact placement  (router dynamo-*, scenario quickstart, mode sim)" in rule_lines(rules)


def test_a_file_that_is_no_toml_says_where(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text("bounds = [")
    with pytest.raises(RuleError, match="not TOML"):
        read_rules(path)
    with pytest.raises(RuleError, match="cannot be read"):
        read_rules(tmp_path / "none.toml")


def test_every_default_rule_is_about_a_figure_that_can_get_worse():
    for rule in default_rules().rules:
        assert direction_of(rule.address) != "none"
        assert rule.default


def test_an_exact_rule_takes_a_mapping_as_a_whole():
    assert exact_rule("placement").address == "placement"
    assert exact_rule("step_makespan_ms:max").address == "step_makespan_ms.max"
    with pytest.raises(UnknownMetricError):
        exact_rule("ttft_ms")
