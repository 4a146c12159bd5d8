"""The field guide: what is said about FP8, what holds, and what the runs of this database say about it.

?doc=methods shows a document of the package instead.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import streamlit as st

from fp8dash.choose.metrics import METRICS
from fp8dash.explain.claims import CLAIMS, FAILS, HOLDS, MEASURE, PARTLY, VERDICTS, Claim
from fp8dash.report import comparison
from fp8dash.report.findings import EXTRAS, Extras, Finding, findings
from fp8dash.ui import linked
from fp8dash.ui.frame import Frame
from fp8dash.ui.parts.documents import Document, as_shown, documents
from fp8dash.ui.words import listed, many, plain

ALL, SEEN = "All", "Seen in this database"
BADGES = {HOLDS: "green", PARTLY: "orange", FAILS: "red", MEASURE: "blue"}
MOST_COMPARED = 6
READABLE = 900  # pixels: a document’s lines


def page(frame: Frame) -> None:
    """The claims, or the document that the address names."""
    docs = documents()
    name = linked.choice("doc", docs, "")
    if name:
        _document(docs, docs[name])
        return
    _claims(frame, docs)


def _document(docs: Mapping[str, Document], shown: Document) -> None:
    """One document, and the way to the others."""
    st.title(plain(shown.title), anchor=False)
    _docs(docs, shown.name)
    with st.container(key="guide_document", width=READABLE):
        st.markdown(as_shown(shown.text, frozenset(docs)))


def _docs(docs: Mapping[str, Document], shown: str = "") -> None:
    """A way to each document, and from a document back to the claims."""
    ways = {"": "Claims about FP8"} | {document.name: document.title for document in docs.values()}
    with st.container(horizontal=True, gap="medium", vertical_alignment="center", key="guide_docs"):
        st.caption("Docs", width="content")
        for name, title in ways.items():
            if name != shown:
                st.button(
                    plain(title), key=f"guide_doc_{name}", type="tertiary", on_click=linked.write, args=("doc", name)
                )


def _claims(frame: Frame, docs: Mapping[str, Document]) -> None:
    """The answer, two filters, then the claims."""
    seen = _findings(frame)
    head = st.container()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        choice = linked.segmented_control("Verdict", [ALL, *VERDICTS, SEEN], default=ALL, required=True, key="verdict")
        words = linked.text_input("Search the claims", key="claim", width=260)
    shown = [claim for claim in CLAIMS.values() if _passes(claim, str(choice), (words or "").strip(), seen)]
    with head:
        counts = Counter(claim.verdict for claim in CLAIMS.values())
        verdicts = listed([f"{counts[verdict]} {_plural(verdict)}" for verdict in VERDICTS])
        st.title(f"Of {len(CLAIMS)} claims about FP8, {verdicts}", anchor=False)
        st.markdown(_lead(seen))
        _docs(docs)
    if not shown:
        st.info("No claim matches these filters. Choose another verdict or clear the search.")
    for claim in shown:
        _card(frame, claim, seen.get(claim.number))
    _metrics()


def _plural(verdict: str) -> str:
    return {HOLDS: "hold", PARTLY: "hold in part", FAILS: "do not hold", MEASURE: "must be measured"}[verdict]


def _lead(seen: dict[int, Finding]) -> str:
    if not seen:
        return "No finished run is evidence on any of them yet. Once one is, its findings appear under the claim."
    return (
        f"Finished runs in this database are evidence on {many(len(seen), 'claim')}; their findings are shown under "
        "each."
    )


def _findings(frame: Frame) -> dict[int, Finding]:
    rows = comparison.standings(frame.store)
    measured = frame.store.measurements([row.run for row in rows], EXTRAS)
    extras: Extras = {
        run: {m.name: m.value for m in measurements if not m.label and m.value is not None}
        for run, measurements in measured.items()
    }
    return findings(rows, extras)


def _passes(claim: Claim, choice: str, words: str, seen: dict[int, Finding]) -> bool:
    text = f"{claim.statement} {claim.evidence}".lower()
    chosen = choice == ALL or choice == claim.verdict or (choice == SEEN and claim.number in seen)
    return chosen and all(word in text for word in words.lower().split())


def _card(frame: Frame, claim: Claim, finding: Finding | None) -> None:
    with st.container(border=True, gap="xsmall"):
        badge = f":{BADGES[claim.verdict]}-badge[{claim.verdict}]"
        st.markdown(f"{badge} **{claim.number}. “{plain(claim.statement)}”**  \n{plain(claim.evidence)}")
        if finding:
            st.markdown(f":blue-badge[measured here] {plain(finding.text)} :small[{plain(finding.where)}]")
        with st.container(horizontal=True, gap="medium", vertical_alignment="center"):
            st.caption(f"Source: {plain(claim.source)}.", width="content")
            _links(frame, claim, finding)


def _links(frame: Frame, claim: Claim, finding: Finding | None) -> None:
    if claim.page:
        query = {"figure" if claim.page == "planner" else "view": claim.view} if claim.view else {}
        frame.link(claim.page, f"See it: {claim.page} →", **query)
    if finding and len(finding.runs) > 1:
        frame.link("compare", "Compare these runs →", runs=",".join(finding.runs[:MOST_COMPARED]))
    elif finding:
        frame.link("runs", "Open the run →", run=finding.runs[0])


def _metrics() -> None:
    st.header("What the metrics mean", anchor=False)
    lines: Sequence[str] = [
        "| Metric | Unit | Better | What it is |",
        "|:--|:--|:--|:--|",
        *(f"| **{m.title}** | {m.unit or '—'} | {m.better} | {plain(m.help)} |" for m in METRICS.values()),
    ]
    st.markdown("\n".join(lines))
