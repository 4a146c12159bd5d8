"""Standings, comparisons and exports from stored rows."""

import csv
import io
import json
import math
from datetime import UTC, datetime

import numpy as np
import pytest
from pyarrow import parquet
from sqlalchemy import insert, update

from db.board import Choice
from db.records import ROW_TABLES, row_values
from db.standings import COPIED, stand
from db.tables import MeasurementTable, RunTable
from fp8dash.choose.metrics import METRICS
from fp8dash.choose.records import Measurement, NeedleCell, Window
from fp8dash.choose.request import Request
from fp8dash.choose.windows import DISJOINT, Reading
from fp8dash.errors import InvalidChoice
from fp8dash.report import comparison, export
from fp8dash.report.contest import contest
from fp8dash.report.headline import headline
from fp8dash.report.needles import baseline_difference, graded_difference, mean_grade

MEASURED = {"ppl": 15.0, "kld": 0.03, "top1": 0.9, "ln_ppl_diff": 0.02, "needle": 1.0, "gemm_speedup": 1.5,
            "ln_ppl_diff_low": 0.01, "ln_ppl_diff_high": 0.03, "bits_per_weight": 8.0, "coverage": 0.8}  # fmt: skip


def finished(
    store, recipe, *, windows=(), cells=(), owner="me", backend="emulated", state="finished", model_hash="m",
    corpus_hash="c", **values,
):  # fmt: skip
    """A run as a worker would have left it."""
    run_id, _ = store.add_run(Request.of(recipe=recipe), owner=owner)
    backend = "baseline" if recipe == "BF16" else backend
    rows = [Measurement(k, v, "", "", "method", backend) for k, v in (MEASURED | values).items()]
    rows += [Window(i, 511, nll, 2.5, kld, 0.9) for i, (nll, kld) in enumerate(windows)] + list(cells)
    with store.session() as session:
        for row in rows:
            session.execute(insert(ROW_TABLES[type(row)]).values(row_values(run_id, "stage", row)))
        change = {
            "state": state,
            "finished_at": datetime.now(UTC),
            "request_key": None,
            "backend": backend,
            "device": "CPU",
            "model_hash": model_hash,
            "corpus_hash": corpus_hash,
        }
        session.execute(update(RunTable).where(RunTable.id == run_id).values(change))
        stand(session, run_id)
    return run_id


def test_standings_rank_by_divergence_within_a_group_and_backend_and_missing_never_wins(store):
    base = finished(store, "BF16", kld=0.0)
    good, bad = finished(store, "FP8_BLOCK", kld=0.02), finished(store, "FP8_TENSOR", kld=0.04)
    tied = finished(store, "MXFP8", kld=0.02)
    native = finished(store, "FP8_DYNAMIC", kld=0.01, backend="native")
    odd, missing = finished(store, "INT8", kld=math.nan), finished(store, "FP8_E5M2", kld=None)
    ranks = {row.run: row.rank for row in comparison.standings(store)}
    assert ranks == {base: None, good: 1, tied: 1, bad: 3, native: 1, odd: None, missing: None}
    assert [row.run for row in comparison.standings(store)][-2:] != [good, bad]
    choice = Choice(states=("finished",), backends=("emulated",))
    assert [row.run for row in store.front(choice, "gemm_speedup", "higher")] == [good]


def test_unfinished_runs_are_not_standing_unless_asked_for(store):
    failed = finished(store, "FP8_BLOCK", state="failed")
    assert comparison.standings(store) == []
    assert [row.run for row in comparison.standings(store, states=("failed",))] == [failed]


def test_json_has_every_promised_key_and_no_nan(store):
    finished(store, "FP8_BLOCK", kld=math.inf)
    (row,) = json.loads(export.to_json(comparison.standings(store)))
    promised = (
        "run, model, recipe, preset, state, owner, backend, device, ppl, ln_ppl_diff, ln_ppl_diff_low, "
        "ln_ppl_diff_high, kld, top1, needle, gemm_speedup, bits_per_weight, coverage"
    )
    assert set(promised.split(", ")) <= set(row) and row["kld"] is None
    assert row["recipe"] == "w=e4m3fn/128x128 a=e4m3fn/1x128"


def test_the_csv_has_the_same_columns_and_runs_no_formula(store):
    finished(store, "FP8_BLOCK", owner='=HYPERLINK("http://x";"y")', kld=0.0235, ln_ppl_diff=-0.001)
    rows = comparison.standings(store)
    (read,) = csv.DictReader(io.StringIO(export.to_csv(rows)))
    assert list(read) == [export.titled(name) for name in json.loads(export.to_json(rows))[0]]
    assert float(read["kld (nats)"]) == 0.0235 and float(read["ln_ppl_diff (nats)"]) == -0.001
    assert read["owner"].startswith("'=")


def test_parquet_has_the_numbers_in_full_with_units_and_moments(store):
    finished(store, "FP8_BLOCK", kld=1 / 3, ppl=None)
    (row,) = rows = comparison.standings(store)
    table = parquet.read_table(io.BytesIO(export.to_parquet(rows)))
    assert table.column_names == list(export.COLUMNS)
    assert table["kld"].to_pylist() == [1 / 3] and table["ppl"].to_pylist() == [None]
    assert table["created"].to_pylist() == [datetime.fromisoformat(row.created)]
    assert table.schema.field("model_bytes").metadata == {b"unit": b"bytes"}


def test_every_metric_of_the_leaderboard_has_its_column():
    assert set(METRICS) <= set(COPIED) <= set(export.COLUMNS)


def test_markdown_is_a_table_whatever_the_names_hold(store):
    finished(store, "w=e4m3fn/row skip=*.down_pro[!b]", ln_ppl_diff=-0.0123)
    text = export.to_markdown(comparison.standings(store))
    widths = {line.replace("\\|", "").count("|") for line in text.splitlines()}
    assert len(widths) == 1 and "−0.0123" in text


def windows(shift, spread=0.001, kld=0.02):
    return [(2.5 + shift + spread * (-1) ** i, kld + spread * (-1) ** i) for i in range(8)]


def test_a_comparison_marks_the_better_and_says_when_it_is_a_tie(store):
    a = finished(store, "FP8_BLOCK", windows=windows(0.02, kld=0.020), kld=0.020, ppl=15.0)
    b = finished(store, "FP8_TENSOR", windows=windows(0.05, kld=0.040), kld=0.040, ppl=16.0, gemm_speedup=1.49)
    c = finished(
        store, "MXFP8", windows=windows(0.0201, spread=0.01, kld=0.0202), kld=0.0202, ppl=15.001, gemm_speedup=None
    )
    compared = comparison.comparison(store, [a, b, c])
    verdicts = {v.metric.name: v for v in compared.verdicts}
    assert verdicts["kld"].best == (0, 2) and verdicts["kld"].is_tied and verdicts["kld"].more > 0
    assert verdicts["gemm_speedup"].is_tied and verdicts["gemm_speedup"].more is None
    assert verdicts["ppl"].best == (0, 2)
    assert verdicts["gemm_speedup"].best == (0, 1)  # within timing noise; the third was not measured
    assert compared.unlike == ()
    assert {v.metric.name for v in compared.verdicts} == set(METRICS)


def test_the_windows_that_a_comparison_names_do_settle_it(store):
    """The same difference and spread over as many windows as it asked for is no tie any more."""
    rng = np.random.default_rng(0)

    def pair(count):
        steps = rng.standard_normal(count)
        steps = 0.004 * (steps - steps.mean()) / steps.std()
        a = finished(store, "FP8_BLOCK", windows=[(2.5, 0.020) for _ in steps], kld=0.020)
        b = finished(store, "FP8_TENSOR", windows=[(2.5, 0.021 + step) for step in steps], kld=0.021)
        return next(v for v in comparison.comparison(store, [a, b]).verdicts if v.metric.name == "kld")

    few = pair(16)
    more = few.more
    assert few.best == (0, 1) and 50 < more < 300
    assert pair(16 + more).best == (0,)


def test_a_run_that_stopped_early_is_compared_on_the_windows_that_both_read_and_ranked_apart(store):
    a = finished(store, "FP8_BLOCK", windows=windows(0.02, kld=0.020), kld=0.020, scored_windows=8.0)
    b = finished(store, "MXFP8", windows=windows(0.02, kld=0.030)[:4], kld=0.030, scored_windows=4.0)
    first, second = comparison.standings(store, ids=[a, b])
    assert {first.windows, second.windows} == {8, 4} and first.group != second.group
    compared = comparison.comparison(store, [a, b])
    assert next(v for v in compared.verdicts if v.metric.name == "kld").best == (0,)
    assert "Different windows: their perplexities are not on the same scale." in compared.unlike


def test_a_run_whose_interval_reaches_the_noise_floor_is_as_bf16(store):
    ids = [
        finished(store, "FP8_BLOCK", kld=0.003, kld_low=0.0015, kld_high=0.005, kld_noise_floor=0.002),
        finished(store, "FP8_TENSOR", kld=0.03, kld_low=0.02, kld_high=0.04, kld_noise_floor=0.002),
        finished(store, "BF16", kld=0.0, kld_low=0.0, kld_high=0.0, kld_noise_floor=0.002),
        finished(store, "MXFP8", kld=0.001),
    ]
    within = {row.run: row.is_within_noise for row in comparison.standings(store)}
    assert [within[run] for run in ids] == [True, False, False, False]


def test_conventions_are_groups_of_their_own(store):
    usual, half = DISJOINT.method, Reading("half", bos="none").method
    ids = [finished(store, "FP8_BLOCK"), finished(store, "MXFP8")]
    with store.session() as session:
        for run, method in zip(ids, (usual, half), strict=True):
            session.execute(update(MeasurementTable).where(MeasurementTable.run_id == run).values(method=method))
            stand(session, run)
    assert {row.rank for row in comparison.standings(store)} == {1}
    assert {group.method for group in store.groups()} == {usual, half}
    assert any(sentence.startswith("Different methods") for sentence in comparison.comparison(store, ids).unlike)


def test_needles_are_compared_cell_by_cell(store):
    def cells(hits):
        return [NeedleCell(256, d, float(d < hits), 250, "1", "1") for d in range(10)]

    a = finished(store, "FP8_BLOCK", cells=cells(10), needle=1.0)
    b = finished(store, "FP8_TENSOR", cells=cells(9), needle=0.9)
    c = finished(store, "MXFP8", cells=cells(0), needle=0.0)
    best = {v.metric.name: v.best for v in comparison.comparison(store, [a, b, c]).verdicts}
    assert best["needle"] == (0, 1)  # one cell in ten is chance, ten are not


def test_needles_that_ask_different_questions_have_no_winner(store):
    cells = [[NeedleCell(256, d, score, 250, "1", "1", prompt=prompt) for d in (0, 50)] for score, prompt in
             ((1.0, "a"), (0.5, "b"))]  # fmt: skip
    runs = [finished(store, name, cells=c, needle=c[0].score) for name, c in zip(("FP8_BLOCK", "MXFP8"), cells)]  # noqa: B905
    (verdict,) = [v for v in comparison.comparison(store, runs).verdicts if v.metric.name == "needle"]
    assert verdict.best == () and verdict.why == "different needles"


def graded(shift, *, kind="single_1", count=8):
    """Cells whose grades vary much more than they differ."""
    return [
        NeedleCell(256, d, 1.0, 250, "1", "1", kind, 0, -0.1 * d + shift + 1e-3 * (-1) ** d, 1.0, -0.1 * d)
        for d in range(count)
    ]


def test_graded_needles_are_compared_pair_by_pair():
    lost, again, few = baseline_difference(graded(-0.02)), baseline_difference(graded(0.0)), graded(-0.02, count=3)
    assert lost.mean == pytest.approx(-0.02) and lost.high < 0 and not lost.is_tie and again.is_tie
    between = graded_difference(graded(-0.02), graded(-0.01)[:4])
    assert between.mean == pytest.approx(-0.01) and not between.is_tie
    assert baseline_difference(few).low is None
    assert graded_difference(graded(0.0), graded(0.0, kind="single_3")) is None
    old = [NeedleCell(256, 0, 1.0, 250, "1", "1")]
    assert baseline_difference(old) is mean_grade(old) is None and mean_grade(graded(0.0, count=2)) == -0.05


def test_unlike_runs_are_compared_with_the_difference_named(store):
    a = finished(store, "FP8_BLOCK")
    b = finished(store, "FP8_DYNAMIC", backend="native")
    assert comparison.comparison(store, [a, b]).unlike == ("Different backends: emulated, native.",)


def test_runs_made_by_unlike_software_are_said_to_be(store):
    made = {"versions": {"torch": "2.13.0", "fp8dash": "0.1.0"}, "threads": 2, "seed": 0, "commit": "a" * 40}
    runs = [finished(store, name) for name in ("FP8_BLOCK", "FP8_DYNAMIC", "MXFP8")]
    others = made | {"versions": {"torch": "2.14.0", "fp8dash": "0.1.0"}, "threads": 4, "commit": "b" * 40}
    with store.session() as session:
        for run_id, facts in zip(runs, (made, others, {}), strict=True):
            session.execute(update(RunTable).where(RunTable.id == run_id).values(facts=facts))
    assert comparison.comparison(store, runs).unlike == (
        "Different versions of torch: 2.13.0, 2.14.0.",
        "Different commits of fp8dash: aaaaaaaaaaaa, bbbbbbbbbbbb.",
        "Different numbers of threads: 2, 4.",
    )
    assert comparison.comparison(store, [runs[0], runs[2]]).unlike == ()  # an unknown value is no difference


def test_too_few_too_many_or_unknown_runs_are_refused(store):
    a = finished(store, "FP8_BLOCK")
    for ids, message in (
        ([a], "choose two to six"),
        ([a] * 7, "choose two to six"),
        ([a, "nope"], "There is no run nope"),
    ):
        with pytest.raises(InvalidChoice, match=message):
            comparison.comparison(store, ids)


@pytest.mark.parametrize(("changed", "what"), [("model_hash", "models"), ("corpus_hash", "corpora")])
def test_runs_of_one_path_whose_contents_differ_are_never_paired_nor_ranked_together(store, changed, what):
    a = finished(store, "FP8_BLOCK", windows=windows(0.02, kld=0.02), kld=0.02)
    b = finished(store, "INT8", windows=windows(0.05, kld=0.04), kld=0.04, **{changed: "other"})
    rows = {row.run: row for row in comparison.standings(store)}
    assert rows[a].group != rows[b].group and {row.rank for row in rows.values()} == {1}
    compared = comparison.comparison(store, [a, b])
    by_window = [v for v in compared.verdicts if v.metric.name in ("kld", "ln_ppl_diff", "ppl", "top1")]
    assert all(not verdict.best and verdict.why for verdict in by_window)
    (sentence,) = compared.unlike
    assert sentence.startswith(f"Different {what} under the same name") and "other" in sentence
    assert len({(group.model_hash, group.corpus_hash) for group in store.groups()}) == 2


def test_a_loss_of_less_than_nothing_leads_everywhere_and_stands_on_the_front(store):
    """A mean KLD of -1.2e-9 is a rounding error of zero: tied with all at the noise floor, and nobody's 0.00 times."""
    floor = {"kld_noise_floor": 1e-7}
    below = finished(store, "FP8_BLOCK", kld=-1.2e-9, windows=[(2.5, -1.2e-9)] * 8, gemm_speedup=1.4, **floor)
    above = finished(store, "MXFP8", kld=5e-8, windows=[(2.5, 5e-8)] * 8, gemm_speedup=1.5, **floor)
    far = finished(store, "INT8", kld=0.02, windows=windows(0.02, kld=0.02), gemm_speedup=1.6, **floor)
    ranks = {row.run: row.rank for row in comparison.standings(store)}
    assert ranks == {below: 1, above: 1, far: 3}
    front = store.front(Choice(states=("finished",), backends=("emulated",)), "gemm_speedup", "higher")
    assert {row.run for row in front} == {above, far}, "both are at the floor, and one of them is faster"
    verdict = next(v for v in comparison.comparison(store, [far, above, below]).verdicts if v.metric.name == "kld")
    judged = contest([row for row in comparison.standings(store)], store.windows([below, above, far]))
    assert judged.leader.run == below and set(verdict.best) == {1, 2}
    assert [rival.outcome for rival in judged.rivals] == ["tied", "apart"]
    assert "0.00×" not in headline(judged)


def test_recipes_twelve_times_apart_are_not_tied_for_want_of_windows(store):
    few = [(2.5, kld) for kld in (0.02, 0.05, 0.03, 0.116)], [(2.5, kld) for kld in (0.1, 1.9, 0.3, 0.42)]
    runs = [finished(store, name, kld=kld, windows=scores, scored_windows=4.0)
            for name, kld, scores in (("FP8_BLOCK", 0.054, few[0]), ("INT8", 0.68, few[1]))]  # fmt: skip
    verdict = next(v for v in comparison.comparison(store, runs).verdicts if v.metric.name == "kld")
    assert verdict.best == (0,) and verdict.open == (1,) and verdict.more > 0
    judged = contest(comparison.standings(store), store.windows(runs))
    assert "tied" not in headline(judged) and "4 windows are too few to tell it from INT8: about " in headline(judged)


def test_the_markdown_report_ranks_finished_runs_only_each_group_in_a_table_of_its_own(store):
    finished(store, "FP8_BLOCK", kld=0.02)
    finished(store, "INT8", kld=0.01, state="failed")
    text = export.to_markdown(comparison.standings(store, states=("finished", "failed")))
    assert "INT8" not in text and "Not in the table: 1 failed." in text
    finished(store, "MXFP8", kld=0.03, model_hash="other")
    text = export.to_markdown(comparison.standings(store))
    assert text.count("| Rank |") == 2 and "demo (other) on pydocs" in text


def test_a_run_whose_recipe_reached_a_part_of_the_model_has_no_rank(store):
    """Experts that nobody cast make a small loss; what a recipe itself leaves out is its own affair."""
    partly = finished(store, "INT8", kld=0.001, uncast_share=0.8)
    meant = finished(store, "w=int8/row skip=*.down_proj", kld=0.002, uncast_share=0.33)
    whole = finished(store, "FP8_BLOCK", kld=0.02, uncast_share=0.0)
    assert {row.run: row.rank for row in comparison.standings(store)} == {partly: None, meant: 1, whole: 2}
