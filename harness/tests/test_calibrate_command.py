"""`routebench calibrate` as a user meets it: tables on the terminal, a preset on disk, refusals in one line."""

from pathlib import Path

import pytest

from harness.cli import run_cli
from mock_engine import Batch, load_preset

COST = load_preset("llama-3.1-8b-h100").cost
KV = ["--kv-bytes", "131072", "--kv-blocks", "28200"]


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    lines = ["step_ms,new_tokens,cached_tokens,decodes,context_tokens"]
    for new in (16, 64, 256, 1024, 4096, 8192):
        for cached in (0, 4096):
            lines.append(f"{COST.step_ps(Batch.of([(new, cached)])) / 1e9},{new},{cached},,")
    for size in (1, 16, 128):
        for context in (128, 4096):
            lines.append(f"{COST.step_ps(Batch.of([], [context] * size)) / 1e9},,,{size},{context}")
    file = tmp_path / "steps.csv"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def test_it_prints_residuals_and_writes_a_preset(
    steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.toml"
    assert run_cli(["calibrate", str(steps), "--out", str(out), *KV]) == 0
    shown = capsys.readouterr().out
    assert "token_us" in shown
    assert "The 12 largest of 18 residuals" in shown
    assert "step: mean error 0.0 %, worst 0.0 %" in shown
    assert f"--set engine.preset={out}" in shown
    preset = load_preset(out)
    assert (preset.name, preset.token_us, preset.kv_blocks_16) == ("mine", 19.25, 28_200)
    assert out.read_text(encoding="utf-8").startswith("# Fitted by `routebench calibrate` to 18 values of steps")


def test_the_kv_blocks_may_follow_from_the_memory(steps: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    flags = ["--kv-bytes", "131072", "--hbm-gib", "79.6", "--weights-gib", "15.0", "--name", "other", "--all"]
    assert run_cli(["calibrate", str(steps), "--out", str(out), *flags]) == 0
    preset = load_preset(out)
    assert preset.name == "other"
    assert preset.kv_blocks_16 == pytest.approx(28_200, rel=0.002)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--out", "x.toml"], "give --kv-bytes and --kv-blocks"),
        (["--out", "x.txt", *KV], "ends in .toml"),
        (["--out", "x.toml", *KV, "--hbm-gib", "80"], "either given with --kv-blocks"),
        (["--out", "x.toml", *KV, "--base", "llama-9"], "no preset named"),
        (["--out", "x.toml", *KV, "--experts", "8"], "top_k"),
        (["--out", "x.toml", *KV, "--request-ms", "-1"], "--request-ms -1"),
        (["--out", "steps.csv", *KV], "exists already"),
    ],
)
def test_what_cannot_work_is_one_line_and_writes_nothing(
    steps: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(steps.parent)
    assert run_cli(["calibrate", str(steps), *flags]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert [path.name for path in steps.parent.iterdir()] == ["steps.csv"]


def test_a_poor_fit_is_said_on_the_terminal_and_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "served.csv", tmp_path / "mine.toml"
    points = ["512,128,1,40,9", "512,128,8,300,12", "1024,128,4,90,40", "2048,256,16,200,15", "4096,64,2,150,8"]
    file.write_text("\n".join(["isl,osl,concurrency,ttft_ms,tpot_ms", *points]), encoding="utf-8")
    assert run_cli(["calibrate", str(file), "--out", str(out), "--base", "llama-3.1-8b-h100"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    written = out.read_text(encoding="utf-8")
    for words in ("! a poor fit: TTFT is off by", "! not known from these measurements"):
        assert words in told
        assert f"# {words}" in written
    assert load_preset(out).name == "mine"


def test_a_good_fit_raises_no_doubt(steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["calibrate", str(steps), "--out", str(tmp_path / "mine.toml"), *KV]) == 0
    shown = capsys.readouterr()
    assert "!" not in shown.out
    assert "round" not in shown.err
