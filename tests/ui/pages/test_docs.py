"""The package's documents on the guide page."""

import re

import pytest

from fp8dash.ui.parts.documents import as_shown, documents
from tests.ui.drawn import opened, page_text

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # AppTest leaves its event loop to the collector


@pytest.mark.parametrize("name", documents())
def test_every_document_is_shown_under_its_first_heading(name: str) -> None:
    app = opened("guide", doc=name)
    assert not app.exception and not app.error and not app.warning
    assert app.title[0].value.replace("\\", "") == documents()[name].title
    longest = max(documents()[name].text.split("\n\n"), key=lambda part: len(re.findall(r"\w+", part)))
    assert re.findall(r"\w+", longest)[:5] and re.findall(r"\w{4,}", longest)[0] in page_text(app)


@pytest.mark.parametrize("name", documents())
def test_links_between_documents_lead_to_documents_that_exist(name: str) -> None:
    shown = as_shown(documents()[name].text, frozenset(documents()))
    targets = re.findall(r"\]\(guide\?doc=([\w-]+)", shown)
    assert set(targets) <= set(documents()) and ".md)" not in shown and ".md#" not in shown


def test_an_unknown_document_is_said_above_the_claims() -> None:
    app = opened("guide", doc="../../pyproject")
    assert "claims about FP8" in app.title[0].value and "which is not one of the choices" in app.warning[0].value


def test_the_guide_offers_the_documents() -> None:
    app = opened("guide")
    for name, document in documents().items():
        assert app.button(f"guide_doc_{name}").label.replace("\\", "") == document.title
    read = app.button("guide_doc_limits").click().run()
    assert read.query_params["doc"] in ("limits", ["limits"]) and read.title[0].value == documents()["limits"].title
    assert "claims" in read.button("guide_doc_").click().run().title[0].value


def test_no_markup_or_picture_of_a_document_reaches_the_browser() -> None:
    shown = as_shown("![x](https://example.com/a.png) <script>alert(1)</script> $a$ :red[b] `:c:`", frozenset())
    assert "example.com" not in shown and "\\$a\\$" in shown and "\\:red[b]" in shown and "`:c:`" in shown
    assert not opened("guide", doc="methods").get("html") or "script" not in page_text(opened("guide", doc="methods"))
