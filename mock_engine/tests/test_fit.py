"""The least squares behind `calibrate`: laws of the solver, then coefficients recovered from what they produced."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_engine import Batch, ConfigError, EngineConfig, StepCost, load_preset
from mock_engine.fit import ServedPoint, fit_served, fit_steps, nonnegative_least_squares, serve_points
from mock_engine.served import COLUMNS, SERVED_COLUMNS, ClosedLoop

DENSE = load_preset("llama-3.1-8b-h100").cost
MOE = load_preset("gpt-oss-120b-h100-tp2").cost

GRID = [
    *(Batch.of([(new, cached)]) for new in (16, 64, 128, 256, 512, 2048, 8192) for cached in (0, 2048, 32_768)),
    *(Batch.of([], [context] * size) for size in (1, 8, 64, 512) for context in (128, 2048, 8192)),
    *(Batch.of([(new, 0)], [context] * size) for new in (128, 1024) for size in (4, 32) for context in (256, 4096)),
]


# -- the solver --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), columns=st.integers(1, 6), scale=st.sampled_from([1.0, 1e-6, 1e6]))
def test_no_feasible_direction_leads_down_from_a_solution(seed: int, columns: int, scale: float) -> None:
    """The conditions of Karush, Kuhn and Tucker: zero slope inside, upward slope at the bound."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(12, columns)) * scale ** rng.integers(0, 2, size=columns)
    target = rng.normal(size=12)
    x = nonnegative_least_squares(matrix, target)
    assert (x >= 0).all()
    slope = matrix.T @ (matrix @ x - target) / np.linalg.norm(matrix, axis=0)
    assert (slope >= -1e-9).all()
    assert (np.abs(slope[x > 0]) <= 1e-9).all()


def test_a_coefficient_that_wants_to_be_negative_is_zero() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative_least_squares(matrix, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])


# -- single steps ------------------------------------------------------------------------------------------------------


def durations_us(cost: StepCost) -> list[float]:
    return [cost.step_ps(batch) / 1e6 for batch in GRID]


@pytest.mark.parametrize(
    "preset", ["llama-3.1-8b-h100", "llama-3.1-8b-l40s", "qwen3-32b-h200", "gpt-oss-120b-b200-tp1"]
)
def test_steps_without_noise_give_their_coefficients_back_exactly(preset: str) -> None:
    cost = load_preset(preset).cost
    found = fit_steps(GRID, durations_us(cost), experts=cost.experts, top_k=cost.top_k, prior={})
    for name in COLUMNS:
        assert found[name].value == pytest.approx(getattr(cost, name), rel=1e-6), name


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_noise_moves_a_coefficient_by_a_few_of_its_standard_errors(seed: int) -> None:
    rng = Random(seed)
    noisy = [value * rng.gauss(1, 0.01) for value in durations_us(DENSE)]
    found = fit_steps(GRID, noisy, experts=0, top_k=0, prior={})
    for name in COLUMNS:
        estimate = found[name]
        error = estimate.standard_error or getattr(DENSE, name)
        assert abs(estimate.value - getattr(DENSE, name)) <= 6 * error, name
    assert found["token_us"].value == pytest.approx(DENSE.token_us, rel=0.05)


def test_weights_that_no_step_waits_for_cost_nothing() -> None:
    cost = StepCost(step_fixed_us=900, token_us=20, prefill_attention_ns=1, sequence_us=3, kv_read_ns=40)
    found = fit_steps(GRID, durations_us(cost), experts=0, top_k=0, prior={})
    assert found["weight_read_us"].value == 0
    assert found["token_us"].value == pytest.approx(20, rel=1e-6)


def test_steps_that_do_not_vary_are_refused_with_what_to_measure() -> None:
    decodes = [Batch.of([], [context] * size) for size in (1, 2, 4, 8) for context in (128, 512, 1024, 2048)]
    values = [DENSE.step_ps(batch) / 1e6 for batch in decodes]
    with pytest.raises(ConfigError, match=r"prefill_attention_ns.*measure also.*base preset"):
        fit_steps(decodes, values, experts=0, top_k=0, prior={})
    prefills = [Batch.of([(new, cached)]) for new in (16, 64, 512, 2048) for cached in (0, 512, 4096)]
    values = [DENSE.step_ps(batch) / 1e6 for batch in prefills]
    with pytest.raises(ConfigError, match=r"no row shows kv_read_ns.*context lengths"):
        fit_steps(prefills, values, experts=0, top_k=0, prior={})
    several = [Batch.of([(new, 0)], [1000]) for new in (16, 32, 64, 512, 700, 900, 1024, 1500, 2048, 3000, 4096, 8192)]
    values = [DENSE.step_ps(batch) / 1e6 for batch in several]
    with pytest.raises(ConfigError, match=r"cannot tell .*sequence_us.* numbers of sequences"):
        fit_steps(several, values, experts=0, top_k=0, prior={})


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="11 measured values are too few for 6 coefficients: give at least 12"):
        fit_steps(GRID[:11], durations_us(DENSE)[:11], experts=0, top_k=0, prior={})


def test_a_base_keeps_what_the_steps_do_not_show() -> None:
    """Decodes of one batch size on an engine with twice the KV time: that is seen, the prefill terms stay."""
    truth = StepCost(**{name: getattr(DENSE, name) * (2 if name == "kv_read_ns" else 1) for name in COLUMNS})
    decodes = [Batch.of([], [context] * 16) for context in (128, 1024, 4096, 16_384)]
    values = [truth.step_ps(batch) / 1e6 for batch in decodes]
    prior = {name: getattr(DENSE, name) for name in COLUMNS}
    found = fit_steps(decodes, values, experts=0, top_k=0, prior=prior)
    assert found["kv_read_ns"].value == pytest.approx(truth.kv_read_ns, rel=0.02)
    assert found["token_us"].value == pytest.approx(DENSE.token_us)
    assert found["prefill_attention_ns"].value == pytest.approx(DENSE.prefill_attention_ns)


# -- served points -----------------------------------------------------------------------------------------------------


def points(cost: StepCost, noise: float = 0.0) -> list[ServedPoint]:
    config = EngineConfig(num_gpu_blocks=20_000)
    rng = Random(5)
    asked = [
        ServedPoint(
            load=ClosedLoop(
                concurrency=clients,
                input_tokens=(round(prompt * 0.95), round(prompt * 1.05)),
                output_tokens=(round(answer * 0.9), round(answer * 1.1)),
                requests=10 * clients,
            ),
            config=config,
            ttft_us=1.0,
            tpot_us=1.0,
        )
        for prompt, answer in ((64, 32), (1024, 64), (7000, 32))
        for clients in (1, 4, 8)
    ]
    return [
        ServedPoint(
            load=point.load,
            config=config,
            ttft_us=served.ttft_us * (1 + noise * (2 * rng.random() - 1)),
            tpot_us=served.tpot_us * (1 + noise * (2 * rng.random() - 1)),
        )
        for point, served in zip(asked, serve_points(asked, cost), strict=True)
    ]


def test_served_means_without_noise_give_their_coefficients_back() -> None:
    """Started from another GPU's preset; within what whole microseconds of instants leave open."""
    truth = load_preset("llama-3.1-8b-l40s").cost
    found, cost = fit_served(points(truth), DENSE, prior={})
    for name in SERVED_COLUMNS:
        assert getattr(cost, name) == pytest.approx(getattr(truth, name), rel=2e-3), name
        assert found[name].value == getattr(cost, name)


def test_noisy_served_means_are_met_within_their_noise_and_the_stated_errors() -> None:
    truth = load_preset("llama-3.1-8b-l40s").cost
    measured = points(truth, noise=0.03)
    found, cost = fit_served(measured, DENSE, prior={})
    errors = []
    for point, served in zip(measured, serve_points(measured, cost), strict=True):
        assert point.ttft_us is not None
        assert point.tpot_us is not None
        errors += [served.ttft_us / point.ttft_us - 1, served.tpot_us / point.tpot_us - 1]
    assert np.sqrt(np.mean(np.square(errors))) <= 0.025
    for name in SERVED_COLUMNS:
        error = found[name].standard_error
        assert error is None or abs(found[name].value - getattr(truth, name)) <= 4 * error, name


def test_too_few_served_points_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few for 7 coefficients: give at least 14"):
        fit_served(points(DENSE)[:6], DENSE, prior={})
