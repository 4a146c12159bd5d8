"""Write-ups: who wins, who is tied, what cannot be said; and that nothing a user typed becomes markup."""

import csv
import io
import re
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
from sqlalchemy import update

from db.store import Store
from db.tables import RunTable
from fp8dash.choose.records import Sensitivity
from fp8dash.choose.request import Request
from fp8dash.choose.studies import QUESTIONS, Question, RecipeGrid
from fp8dash.errors import StoreError
from fp8dash.report import comparison
from fp8dash.report.study import written
from fp8dash.report.study_evidence import Content, of_runs, of_study, plan
from fp8dash.report.study_files import to_csv, to_html, to_markdown
from tests.report.test_comparison import finished
from tests.seed import HOSTILE, fill

ASKED = Question("own", "Which?", "Because.", ())
NOISE = (0.001, -0.002, 0.0015, -0.0005, 0.002, -0.001, 0.0005, -0.0015)


def run(store, recipe, kld, *, windows=8, jitter=1.0, **more):
    """A finished run whose windows scatter about a KLD."""
    scores = [(2.5 + kld / 2, kld + jitter * noise) for noise in NOISE[:windows]]
    return finished(store, recipe, windows=scores, kld=kld, **more)


def write_up_of(store, *run_ids, question=ASKED):
    return written(of_runs(store, question, run_ids))


def test_a_winner_is_named_with_the_paired_interval_to_the_next(store):
    write_up = write_up_of(
        store, run(store, "FP8_BLOCK", 0.020), run(store, "INT8", 0.030), run(store, "FP8_TENSOR", 0.040)
    )
    assert write_up.headline == (
        "FP8_BLOCK loses least: KLD 0.0200 nats; next is INT8, +0.0100 [+0.0100, +0.0100] nats"
    )
    assert [row[0] for row in write_up.table.rows] == ["FP8_BLOCK", "INT8", "FP8_TENSOR"]
    assert any(reason == "FP8_TENSOR loses most: KLD 0.0400 nats (2.00× as much)." for reason in write_up.reasons)


def test_a_tie_is_called_a_tie_and_the_next_is_beyond_it(store):
    a, b = run(store, "FP8_BLOCK", 0.0200), run(store, "INT8", 0.0201, jitter=-1.0)
    both = write_up_of(store, a, b)
    assert both.headline.startswith(
        "FP8_BLOCK and INT8 are tied: KLD 0.0200 to 0.0201 nats; they differ by at most +0.000100 [−"
    )
    three = write_up_of(store, a, b, run(store, "FP8_TENSOR", 0.05))
    assert three.headline.startswith("FP8_BLOCK and INT8 are tied for the least loss: KLD 0.0200 to 0.0201 nats")
    assert "next is FP8_TENSOR, +0.0300 [" in three.headline
    all_tied = write_up_of(store, a, b, run(store, "MXFP8", 0.0202, jitter=-1.0))
    assert all_tied.headline.startswith("FP8_BLOCK, INT8 and MXFP8 are tied: KLD")
    assert not any("loses most" in reason for reason in all_tied.reasons)
    assert three.table.rows[1][2].endswith(", tied") and not three.table.rows[2][2].endswith("tied")


def test_ties_are_those_of_the_comparison_page(store):
    recipes = {"FP8_BLOCK": (0.02, 1), "INT8": (0.0235, -1), "MXFP8": (0.021, 1), "FP8_E5M2": (0.03, -1)}
    ids = [run(store, recipe, kld, jitter=jitter) for recipe, (kld, jitter) in recipes.items()]
    verdict = next(v for v in comparison.comparison(store, ids).verdicts if v.metric.name == "kld")
    tied = {list(recipes)[i] for i in verdict.best}
    assert tied == {"FP8_BLOCK", "INT8"}, "INT8 alone, p = 0.03, would not be: four runs make six pairs"
    assert {row[0] for row in write_up_of(store, *ids).table.rows if "lowest" in row or row[2].endswith("tied")} == tied


def test_too_few_windows_make_no_winner(store):
    write_up = write_up_of(store, run(store, "FP8_BLOCK", 0.02, windows=3), run(store, "INT8", 0.09, windows=3))
    assert write_up.headline.startswith("FP8_BLOCK has the lowest KLD 0.0200 nats, but ")
    assert "windows are too few to tell it from INT8" in write_up.headline
    assert any("windows give no interval: at least 4 are needed" in limit for limit in write_up.limits)


def test_nothing_finished_is_no_answer_and_what_is_on_the_way_is_said(store):
    queued = [store.add_run(Request.of(recipe=recipe), owner="me")[0] for recipe in ("MXFP8", "INT8")]
    write_up = write_up_of(store, *queued)
    assert write_up.headline == "No answer yet: 0 of 2 runs have finished" and not write_up.bars
    failed = finished(store, "FP8_BLOCK", state="failed")
    with store.session() as session:
        session.execute(update(RunTable).where(RunTable.id == failed).values(error="Out of memory: shorter windows."))
    write_up = write_up_of(store, *queued, failed, run(store, "FP8_TENSOR", 0.03), run(store, "FP8_DYNAMIC", 0.02))
    assert write_up.headline.startswith("So far, FP8_DYNAMIC loses least")
    limits = "\n".join(write_up.limits)
    assert "MXFP8 (queued)" in limits and "FP8_BLOCK failed: Out of memory: shorter windows." in limits


def test_recipes_of_the_question_without_a_run_are_named(store):
    write_up = write_up_of(
        store, run(store, "FP8_DYNAMIC", 0.02), run(store, "FP8_E5M2", 0.1), question=QUESTIONS["e4m3-e5m2"]
    )
    limit = next(limit for limit in write_up.limits if limit.startswith("Not measured"))
    assert "BF16" in limit and "FP8_TENSOR" in limit and "FP8_E5M2" not in limit


def test_backends_are_not_ranked_together(store):
    ids = [run(store, "FP8_BLOCK", 0.02), run(store, "INT8", 0.03), run(store, "FP8_TENSOR", 0.001, backend="native")]
    write_up = write_up_of(store, *ids)
    assert write_up.headline.startswith("FP8_BLOCK loses least")
    assert "Not ranked with the rest: FP8_TENSOR. The backend “emulated” takes every recipe." in write_up.limits
    assert any(limit.startswith("Different backends: emulated, native") for limit in write_up.limits)


def test_a_divergence_that_is_no_number_never_wins(store):
    write_up = write_up_of(store, run(store, "FP8_BLOCK", 0.02), finished(store, "INT8", kld=float("nan")))
    assert write_up.headline.startswith("FP8_BLOCK costs KLD 0.0200 nats; no other recipe")
    assert "INT8: KLD is missing or not a number." in write_up.limits


def test_a_study_takes_in_identical_runs_of_other_studies_and_nothing_else(store):
    ids = fill(store)
    question = QUESTIONS["mx-rules"]
    base = Request.of(backend="emulated")
    study_plan = plan(store, question.requests(base))
    assert {r.id for r in study_plan.answered} == {ids["BF16"], ids["MXFP8"]} and len(study_plan.missing) == 5
    new = store.add_runs(study_plan.missing, owner="me", study="As I call it", question=question)
    evidence = of_study(store, store.run(new[0]).study_id)
    assert evidence.reused == {ids["BF16"], ids["MXFP8"]} and not evidence.missing
    assert {row.run for row in evidence.rows} == {*new, ids["BF16"], ids["MXFP8"]}
    assert plan(store, question.requests(base)).missing == ()
    assert len(plan(store, question.requests(Request.of(backend="auto"))).answered) == 0


@pytest.mark.parametrize(
    "question", [QUESTIONS["mx-rules"], RecipeGrid(("int8",), ("row", "tensor"), ("float32",)).question]
)
def test_a_study_asks_what_it_was_queued_with_whatever_it_is_called(store, question):
    requests = question.requests(Request.of(backend="emulated"))
    typed = store.add_runs(requests[:2], owner="me", study="Mine", question=question)
    other = store.add_runs([Request(recipe="w=e5m2/row")], owner="me", study="E4M3 or E5M2?")  # somebody's own
    assert of_study(store, store.run(typed[0]).study_id).question == question
    assert of_study(store, store.run(other[0]).study_id).question.name == "own"


def test_the_seeded_study_is_answered(store):
    ids = fill(store)
    write_up = written(of_study(store, store.run(ids["MXFP8"]).study_id))
    assert write_up.headline.startswith("MXFP8 loses least: KLD 0.0172 nats; next is FP8_BLOCK, +0.00600 [+0.00")
    assert any(reason.startswith("Perplexity cannot tell it from FP8_BLOCK") for reason in write_up.reasons)


def test_sensitive_parts_are_ranked_by_what_they_cost_alone(store):
    parts = [Sensitivity("down", "*.down_proj", 30, 100, 8.0, 0.02, 0.01, True),
             Sensitivity("q", "*.q_proj", 30, 100, 8.0, 0.005, 0.03, False)]  # fmt: skip
    ids = [finished(store, recipe, cells=parts) for recipe in ("FP8_DYNAMIC", "INT8")]
    write_up = write_up_of(store, *ids, question=QUESTIONS["sensitivity"])
    assert write_up.headline == "down costs most in all 2 recipes: 0.0200 nats cast alone"
    assert write_up.reasons[0] == "FP8_DYNAMIC: down 0.0200 nats, 80 % of the sum over parts; q costs least, 0.00500."
    assert any("no interval" in limit for limit in write_up.limits)


def test_a_study_whose_model_changed_shows_one_content_and_says_so(store):
    """Old and new weights of one path never stand in one table."""
    old = [run(store, name, kld, model_hash="old") for name, kld in (("FP8_BLOCK", 0.02), ("INT8", 0.03))]
    new = run(store, "FP8_TENSOR", 0.0001, model_hash="new")
    write_up = write_up_of(store, *old, new)
    assert [row[0] for row in write_up.table.rows] == ["FP8_TENSOR"] and [row.run for row in write_up.runs] == [new]
    (limit,) = [limit for limit in write_up.limits if limit.startswith("Left out")]
    assert "SHA-256 old" in limit and old[0] in limit and "Queue them again" in limit


def test_runs_of_changed_contents_are_not_there_already(store):
    question = QUESTIONS["e4m3-e5m2"]
    asked = question.requests(Request(backend="emulated"))
    own = {"model_hash": "m", "corpus_hash": "c"}
    for request in asked:
        run_id, _ = store.add_run(request, owner="me")
        change = {"state": "finished", "finished_at": datetime.now(UTC), "request_key": None, **own}
        with store.session() as session:
            session.execute(update(RunTable).where(RunTable.id == run_id).values(**change))
    assert len(plan(store, asked).answered) == len(asked)
    now = plan(store, asked, Content(model="other"))
    assert not now.answered and len(now.missing) == len(now.stale) == len(asked)
    finished(store, "MXFP8", model_hash="other")  # measured since: the web process learns of the change by it
    assert len(plan(store, asked).stale) == len(asked)


class Tags(HTMLParser):
    """All elements of a page, and its text."""

    def __init__(self):
        super().__init__()
        self.elements, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def hostile(store):
    """A write-up whose study and whose failed run's error bear markup."""
    study = store.add_study(HOSTILE, "me")
    request = Request(model="/models/own", recipe="w=e4m3fn/row skip=*.down_proj,*_x_")
    made = store.add_run(request, owner="=1+1", study_id=study)[0]
    with store.session() as session:
        bad = '<img src=x onerror="alert(1)">\n# heading | cell'
        session.execute(update(RunTable).where(RunTable.id == made).values(state="failed", error=bad, request_key=None))
    return written(of_study(store, study))


def test_html_shows_what_was_typed_letter_for_letter_and_asks_for_nothing(hostile):
    page = Tags()
    page.feed(to_html(hostile))
    assert {tag for tag, _ in page.elements} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td",
        "ul", "li", "footer", "svg", "text", "circle", "path",
    }  # fmt: skip
    assert not any(name in attrs for _, attrs in page.elements for name in ("src", "href", "onerror", "onload"))
    assert HOSTILE in "".join(page.text) and "default-src 'none'" in to_html(hostile)


def test_a_page_of_numbers_draws_a_dot_a_recipe_on_a_log_axis(store):
    page = Tags()
    recipes = {"FP8_BLOCK": 0.02, "INT8": 0.04, "FP8_E5M2": 0.08}
    page.feed(to_html(write_up_of(store, *(run(store, recipe, kld) for recipe, kld in recipes.items()))))
    places = [float(attrs["cx"]) for tag, attrs in page.elements if tag == "circle"]
    assert places == sorted(places) and len(places) == 3
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)  # written in tenths
    assert sum(tag == "path" for tag, _ in page.elements) == 3


def test_markdown_has_no_markup_of_its_users(hostile):
    text = to_markdown(hostile)
    typed = text.splitlines()[0].removeprefix("# ")
    assert re.sub(r"\\(?=[^a-z\s])", "", typed) == HOSTILE
    assert not re.search(r"(?<!\\)[<>`$~_]", typed) and "\\*.down\\_proj" in text
    assert len([line for line in text.splitlines() if line.startswith("#")]) == 2  # title, and what cannot be said


def test_the_csv_is_the_leaderboards_and_runs_no_formula(hostile):
    (row,) = csv.DictReader(io.StringIO(to_csv(hostile)))
    assert row["owner"] == "'=1+1" and row["study"] == HOSTILE


def test_an_unknown_study_is_a_sentence(store: Store) -> None:
    with pytest.raises(StoreError, match="There is no study nope"):
        of_study(store, "nope")
