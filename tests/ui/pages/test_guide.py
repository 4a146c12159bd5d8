"""The guide without a browser: verdicts first, filters, and what the seeded runs say beneath the claims."""

import pytest

from fp8dash.explain.claims import CLAIMS, VERDICTS
from fp8dash.ui.pages.guide import SEEN
from fp8dash.ui.words import plain
from tests.ui.drawn import opened, page_text

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def test_the_verdicts_come_first_and_every_claim_follows():
    app = opened("guide")
    counts = [sum(claim.verdict == verdict for claim in CLAIMS.values()) for verdict in VERDICTS]
    assert app.title[0].value.startswith(
        f"Of {len(CLAIMS)} claims about FP8, {counts[0]} hold, {counts[1]} hold in part"
    )
    assert all(plain(claim.statement) in page_text(app) for claim in CLAIMS.values())
    assert "No finished run is evidence on any of them yet" in page_text(app)


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_verdict_filters(verdict):
    text = page_text(opened("guide", verdict=verdict))
    assert all((plain(claim.statement) in text) == (claim.verdict == verdict) for claim in CLAIMS.values())


def test_a_search_filters_and_a_search_without_a_hit_says_how_to_go_on():
    text = page_text(opened("guide", claim="FP22 hopper"))
    assert plain(CLAIMS[17].statement) in text and plain(CLAIMS[1].statement) not in text
    assert "clear the search" in page_text(opened("guide", claim="nothing like it"))


def test_what_the_runs_say_stands_beneath_the_claim(ids):
    app = opened("guide", verdict=SEEN)
    assert "FP8\\_E5M2 loses 0\\.101 nats" in page_text(app)
    assert "measured here" in page_text(app) and plain(CLAIMS[1].statement) not in page_text(app)
    assert not app.exception and not app.error
