"""Tasks compared document by document: what is tied, what is not, and what is refused with the reason."""

import math
import re

import pytest

from fp8dash.choose.records import Measurement, TaskItem
from fp8dash.errors import InvalidChoice
from fp8dash.report.tasks import task_lines
from tests.report.test_comparison import finished

METHOD = "lm-eval 0.4.13, arc_easy version 1.0, 0-shot, plain prompt, one document at a time, v1"


def choices(hits, *, method=METHOD, digest="d{}"):
    """The rows of a task of right and wrong answers."""
    items = [TaskItem("arc_easy", "acc", i, digest.format(i), float(hit), 1.0, "") for i, hit in enumerate(hits)]
    value, note = sum(hits) / len(hits), f"{len(hits)} of 2,376 documents"
    number = Measurement("task_acc", value, "share", "higher", method, "emulated", "arc_easy", note)
    return [*items, number, Measurement("task_acc_stderr", 0.01, "share", "", method, "emulated", "arc_easy")]


def rolling(nats, words):
    """The rows of a rolling perplexity."""
    items = [
        TaskItem("wikitext", "word_perplexity", i, f"w{i}", *pair, "nats")
        for i, pair in enumerate(zip(nats, words, strict=True))
    ]
    value = math.exp(sum(n * w for n, w in zip(nats, words, strict=True)) / sum(words))
    return [*items, Measurement("task_word_perplexity", value, "", "lower", "m", "emulated", "wikitext", "all")]


def line_of(store, *runs, reference=0):
    ids = [
        finished(store, recipe, cells=rows)
        for recipe, rows in zip(("BF16", "FP8_BLOCK", "FP8_TENSOR"), runs, strict=False)
    ]
    return task_lines(store, ids, reference=reference)


def test_right_and_wrong_answers_are_tied_where_chance_alone_explains_them(store):
    right = [True] * 90 + [False] * 10
    one_less, many_less = [False] + right[1:], [False] * 20 + right[20:]
    (line,) = line_of(store, choices(right), choices(one_less), choices(many_less))
    assert (line.task, line.metric, line.better, line.unlike) == ("arc_easy", "acc", "higher", ())
    assert [score.value for score in line.scores] == [0.9, 0.89, 0.7] and line.scores[0].stderr == 0.01
    none, tied, apart = line.differences
    assert none is None and tied.is_tie and not apart.is_tie
    assert tied.mean == pytest.approx(-0.01) and apart.mean == pytest.approx(-0.2)
    assert apart.low < -0.2 < apart.high < 0


def test_perplexities_differ_by_their_logarithms_weighted_by_words(store):
    words, base_nats = [100.0, 300.0, 50.0, 80.0, 120.0, 90.0], [3.0, 3.2, 2.8, 3.1, 2.9, 3.3]
    recipe_nats = [n + 0.02 + 0.001 * (-1) ** i for i, n in enumerate(base_nats)]
    (line,) = line_of(store, rolling(base_nats, words), rolling(recipe_nats, words))
    difference = line.differences[1]
    ppl = [score.value for score in line.scores]
    assert difference.mean == pytest.approx(math.log(ppl[1] / ppl[0]))
    assert not difference.is_tie and line.unit == "nats"


@pytest.mark.parametrize(
    ("other", "pattern"),
    [
        (choices([True] * 8, method=METHOD.replace("0-shot", "5-shot")), "0-shot.*5-shot.*different methods"),
        (choices([True] * 6), "one run scored 8 documents, the other 6"),
        (choices([True] * 8, digest="e{}"), "8 of 8 documents, prompts or targets differ"),
        (choices([True] * 8)[-2:], "one run scored 8 documents, the other 0"),
    ],
)
def test_unlike_scores_are_shown_and_not_compared_and_the_difference_is_named(store, other, pattern):
    (line,) = line_of(store, choices([True] * 8), other)
    assert line.scores[1].value is not None and line.differences == (None, None)
    (sentence,) = line.unlike
    assert re.search(pattern, sentence) and sentence.startswith("arc_easy is not compared")


def test_a_number_that_is_no_mean_over_documents_is_not_compared(store):
    (line,) = line_of(store, choices([True])[-2:], choices([True])[-2:])
    assert line.differences == (None, None) and "stores no per-document score" in line.unlike[0]


def test_runs_without_the_task_are_blank_and_not_a_reason_for_anything(store):
    (line,) = line_of(store, choices([True] * 8), [], choices([True] * 8))
    assert line.scores[1] is None and line.differences[1] is None and line.differences[2].is_tie and not line.unlike
    assert line_of(store, [], []) == []


def test_the_reference_is_one_of_the_runs(store):
    first = choices([True] * 8)
    (line,) = line_of(store, first, choices([False] * 8), reference=1)
    assert line.differences[1] is None and line.differences[0].mean == 1.0
    with pytest.raises(InvalidChoice, match="no run number 3"):
        line_of(store, first, first, reference=2)
