"""From a user's CSV to a preset: both forms, what is refused and with which mend, and the file that is written."""

import csv
from pathlib import Path

import pytest

from mock_engine import ConfigError, load_preset, preset_names
from mock_engine.calibrate import Calibration, Target, calibrate, closed_loop, read_rows
from mock_engine.cost_model import Batch
from mock_engine.presets import Evidence, Preset, preset_toml
from mock_engine.served import COLUMNS
from mock_engine.tests.served_table import rows

KNOWN = {"kv_bytes_per_token": 131_072, "kv_blocks": 28_200}
STEPS = "step_ms,prefill_chunks,new_tokens,cached_tokens,decodes,context_tokens"


def write(path: Path, text: str) -> Path:
    file = path / "measured.csv"
    file.write_text(text, encoding="utf-8")
    return file


def grid_file(path: Path, preset: str) -> Path:
    """The operator grid of a preset in the form that a user writes."""
    lines = [STEPS]
    for row in rows("kernel_step_grid.csv"):
        if row["preset"] == preset:
            chunk = f"{row['n_prefill']},{row['new_tokens']},{row['cached_ctx']}" if int(row["n_prefill"]) else "0,0,0"
            lines.append(f"{row['t_ms']},{chunk},{row['n_decode']},{row['decode_ctx']}")
    return write(path, "\n".join(lines) + "\n")


# -- single steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in preset_names() if load_preset(name).basis == "kernel"])
def test_the_operator_grid_calibrates_to_the_preset_that_was_fitted_to_it(tmp_path: Path, name: str) -> None:
    """Two least-squares programs of ours. They split fixed time and weights a little differently, which the grid hardly
    tells apart (llama-3.1-70b-a100-tp4: by 1.1 ms, four standard errors); the sum and all the rest agree."""
    published = load_preset(name)
    fitted = calibrate(grid_file(tmp_path, name), Target(name="again", **KNOWN)).preset
    floor_us = published.step_fixed_us + published.weight_read_us
    assert fitted.step_fixed_us + fitted.weight_read_us == pytest.approx(floor_us, rel=0.015)
    assert fitted.token_us == pytest.approx(published.token_us, rel=0.015)
    assert fitted.prefill_attention_ns == pytest.approx(published.prefill_attention_ns, rel=0.015)
    assert fitted.kv_read_ns == pytest.approx(published.kv_read_ns, rel=0.02)
    assert fitted.sequence_us == pytest.approx(published.sequence_us, abs=5)
    assert fitted.evidence.kernel_fit_median_pct == pytest.approx(published.evidence.kernel_fit_median_pct, abs=0.3)
    assert fitted.evidence.kernel_fit_p95_pct == pytest.approx(published.evidence.kernel_fit_p95_pct, abs=1)
    assert fitted.evidence.kernel_fit_r2 == pytest.approx(published.evidence.kernel_fit_r2, abs=2e-3)


def exact_steps(path: Path) -> Calibration:
    cost = load_preset("llama-3.1-8b-h100").cost
    lines = [STEPS + ",note", "# a comment"]
    for new in (16, 64, 256, 1024, 4096, 8192):
        for cached in (0, 4096):
            lines.append(f"{cost.step_ps(Batch.of([(new, cached)])) / 1e9:.9f},,{new},{cached},,,prefill")
    for size in (1, 16, 128):
        for context in (128, 4096):
            lines.append(f"{cost.step_ps(Batch.of([], [context] * size)) / 1e9:.9f},,,,{size},{context},decode")
    return calibrate(write(path, "\n".join(lines)), Target(name="exact", **KNOWN))


def test_the_preset_that_is_written_loads_and_foretells_the_same(tmp_path: Path) -> None:
    done = exact_steps(tmp_path)
    truth = load_preset("llama-3.1-8b-h100")
    file = tmp_path / "exact.toml"
    file.write_text(preset_toml(done.preset), encoding="utf-8")
    again = load_preset(file)
    assert again == done.preset
    assert (again.name, again.basis, again.form) == ("exact", "user", "max")
    for column in COLUMNS:
        assert getattr(again, column) == pytest.approx(getattr(truth, column), abs=2e-3)
    assert max(abs(residual.error_pct) for residual in done.residuals) < 0.01
    assert [done.residuals[0].where, done.residuals[1].where] == ["1 x 16 new", "1 x 16 new on 4096"]
    assert done.residuals[-1].where == "128 decodes at 4096"
    assert again.evidence == Evidence(
        kernel_fit_r2=1.0, kernel_fit_median_pct=0.0, kernel_fit_p95_pct=0.0, kernel_fit_max_pct=0.0
    )


def test_steps_say_nothing_of_requests_so_that_time_is_given_or_kept(tmp_path: Path) -> None:
    file = grid_file(tmp_path, "llama-3.1-8b-h100")
    assert calibrate(file, Target(name="a", **KNOWN)).preset.request_fixed_us == 8_000
    assert calibrate(file, Target(name="a", request_fixed_us=5_000, **KNOWN)).preset.request_fixed_us == 5_000
    on_base = calibrate(file, Target(name="a", base="llama-3.1-8b-fp8-h200")).preset
    assert (on_base.request_fixed_us, on_base.kv_blocks_16) == (15_000, 59_269)


# -- served points -----------------------------------------------------------------------------------------------------


def served_file(path: Path, preset: str, clients: set[str]) -> Path:
    lines = ["isl,osl,concurrency,length_ratio,ttft_ms,tpot_ms"]
    for row in rows("serving_closed.csv"):
        if row["preset"] == preset and row["concurrency"] in clients:
            lines.append(
                f"{row['isl']},{row['osl']},{row['concurrency']},{row['length_ratio']},"
                f"{row['ttft_ms_measured']},{row['tpot_ms_measured']}"
            )
    return write(path, "\n".join(lines))


def test_measured_serving_calibrates_to_the_errors_that_the_published_preset_has(tmp_path: Path) -> None:
    """Started from the same model on other GPUs, with the points of few clients."""
    told: list[int] = []
    done = calibrate(
        served_file(tmp_path, "llama-3.1-70b-fp8-h200-tp1", {"4", "8"}),
        Target(name="again", base="llama-3.1-70b-fp8-h100-tp2", tensor_parallel=1, kv_blocks=11_575),
        lambda number, error: told.append(number),
    )
    evidence = done.preset.evidence
    assert evidence.measured_rows == 6
    assert evidence.ttft_mean_abs_pct is not None
    assert evidence.tpot_mean_abs_pct is not None
    assert evidence.ttft_mean_abs_pct <= 8
    assert evidence.tpot_mean_abs_pct <= 6
    assert done.preset.token_us == pytest.approx(136.7, rel=0.15)
    assert len(done.residuals) == 12
    assert told == list(range(1, len(told) + 1))


def test_a_time_that_was_not_measured_is_left_out(tmp_path: Path) -> None:
    text = "isl,osl,concurrency,tpot_ms,ttft_ms\n" + "\n".join(
        f"{isl},32,{clients},{5 + 0.1 * clients + isl / 1000},{'' if clients == 1 else 30 + isl / 40}"
        for isl in (64, 512)
        for clients in (1, 2, 4)
    )
    done = calibrate(write(tmp_path, text), Target(name="a", base="llama-3.1-8b-h100"))
    assert [residual.what for residual in done.residuals].count("TTFT") == 4
    assert [residual.what for residual in done.residuals].count("TPOT") == 6


def test_lengths_spread_as_the_row_says() -> None:
    load = closed_loop(1000, 100, 4, 0.8)
    assert (load.input_tokens, load.output_tokens, load.requests) == ((800, 1000), (80, 100), 40)
    load = closed_loop(1000, 100, 4, None, 7)
    assert (load.input_tokens, load.output_tokens, load.requests) == ((950, 1050), (90, 110), 7)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no measurement"),
        ("step_ms\n", "holds no measurement"),
        ("isl,osl\n1,2\n", "no column concurrency"),
        ("isl,osl,concurrency\n1,2,3\n", "give ttft_ms or tpot_ms"),
        ("isl,osl,concurrency,tpot_ms,gpu\n1,2,3,4,H100\n", "no column 'gpu'.*call it note"),
        ("step_ms,step_ms\n1,1\n", "twice"),
        ("step_ms,decodes\n1\n", "measured.csv:2 has 1 values for 2 columns"),
        ("step_ms,decodes,context_tokens\nfast,1,10\n", "measured.csv:2: step_ms='fast' is no number"),
        ("step_ms,decodes,context_tokens\n-1,1,10\n", "step_ms='-1'"),
        ("step_ms,decodes,context_tokens\n,1,10\n", "step_ms is blank"),
        ("step_ms,decodes,context_tokens\n1,1.5,10\n", "decodes=1.5 is no whole number"),
        ("step_ms,decodes,context_tokens\n1,1,\n", "context_tokens is blank"),
        ("step_ms,decodes\n1,0\n", "schedules nothing"),
        ("step_ms,prefill_chunks,new_tokens\n1,2,\n", "2 prefill chunks of 0 new tokens"),
        ("isl,osl,concurrency,tpot_ms\n1,2,0,4\n", "concurrency='0' is no number of at least 1"),
        ("isl,osl,concurrency,tpot_ms\n9,9,3,\n", "measures nothing"),
        ("isl,osl,concurrency,tpot_ms\n9,9,3,0\n", "tpot_ms=0 is no duration"),
        ("isl,osl,concurrency,tpot_ms\n9,1,3,5\n", "one output token"),
        ("isl,osl,concurrency,tpot_ms,length_ratio\n9,9,3,5,1.2\n", "length_ratio=1.2"),
        ("isl,osl,concurrency,tpot_ms\n900000,9,3,5\n", "never fits 28200 KV blocks"),
        ("isl,osl,concurrency,tpot_ms\n90,9,1,5\n", "too few"),
    ],
)
def test_a_file_that_cannot_be_fitted_is_refused_with_the_mend(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        calibrate(write(tmp_path, text), Target(name="mine", **KNOWN))


def test_a_preset_needs_its_kv_memory(tmp_path: Path) -> None:
    file = grid_file(tmp_path, "llama-3.1-8b-h100")
    with pytest.raises(ConfigError, match=r"kv_bytes_per_token, kv_blocks_16.*base"):
        calibrate(file, Target(name="mine"))
    with pytest.raises(ConfigError, match="no preset named"):
        calibrate(file, Target(name="mine", base="llama-9"))
    with pytest.raises(ConfigError, match="cannot read"):
        calibrate(tmp_path / "none.csv", Target(name="mine", **KNOWN))


def test_a_spreadsheets_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    file = tmp_path / "bom.csv"
    file.write_bytes(b"\xef\xbb\xbfstep_ms,decodes,context_tokens\r\n1.5,1,10\r\n")
    (row,) = read_rows(file)
    assert row.number("step_ms") == 1.5


# -- the form of the file ----------------------------------------------------------------------------------------------


def test_the_built_in_presets_have_the_form_that_calibrate_writes() -> None:
    text = (Path(__file__).parents[1] / "presets.toml").read_text(encoding="utf-8")
    tables = text[text.index("[[preset]]") :]
    names = [line.split('"')[1] for line in tables.splitlines() if line.startswith("name = ")]
    assert tables == "\n".join(preset_toml(load_preset(name)) for name in names)


def test_an_odd_name_survives_the_file(tmp_path: Path) -> None:
    values = dict.fromkeys(COLUMNS, 1.25)
    preset = Preset(name='my "GPU" \\ 2', **values, kv_bytes_per_token=10, kv_blocks_16=5)
    file = tmp_path / "odd.toml"
    file.write_text(preset_toml(preset), encoding="utf-8")
    assert load_preset(file) == preset


def test_the_grid_in_the_repository_says_where_it_comes_from() -> None:
    data = Path(__file__).parent / "data"
    for name in ("kernel_step_grid.csv", "serving_closed.csv", "h200_llama31_8b_fp8_sweep.csv", "kv_capacity.csv"):
        head = [line for line in (data / name).read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        assert "Apache-2.0" in " ".join(head), name
        body = [line for line in (data / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert len(list(csv.reader(body))) > 5
