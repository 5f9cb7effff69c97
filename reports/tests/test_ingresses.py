from reports import finish_run
from reports.tests.rows_by_hand import request
from reports.tests.synthetic import header


def made(folder, ingress_of):
    rows = [
        request(n, session=f"s{n // 4}", turn=n % 4, sent_us=n * 1_000, cached_tokens=25, ingress=ingress_of(n))
        for n in range(16)
    ]
    return finish_run(folder, header(scenario={"name": "two"}), rows, [])


def test_every_router_process_and_all_together_stand_in_a_table(tmp_path):
    made(tmp_path, lambda n: f"i{n % 2}")
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "| a | all 2 | 16 | 25.0 |" in text
    assert "| a | i1 | 8 | 25.0 |" in text
    assert "Router processes side by side" in (tmp_path / "report.html").read_text("utf-8")


def test_how_often_a_session_meets_the_same_ingress_again_is_told(tmp_path):
    made(tmp_path / "turns", lambda n: f"i{n % 2}")
    made(tmp_path / "sessions", lambda n: f"i{n // 4 % 2}")
    whole = [(tmp_path / name / "report.md").read_text("utf-8") for name in ("turns", "sessions")]
    lines = [next(line for line in text.splitlines() if "all 2" in line) for text in whole]
    assert [line.split("|")[-2].strip() for line in lines] == ["0.0", "100.0"]


def test_one_process_has_no_table(tmp_path):
    made(tmp_path, lambda n: "i0")
    assert "ingress" not in (tmp_path / "report.md").read_text("utf-8")
