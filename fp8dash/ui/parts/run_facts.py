"""Where a run’s numbers come from, its stages and log, and how its recipe is served."""

import pandas as pd
import streamlit as st

from db.rows import Run
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Artefact
from fp8dash.report.deploy import CHECKPOINT, deployments
from fp8dash.report.numbers import DASH, three
from fp8dash.ui.frame import Frame, zone
from fp8dash.ui.words import lasted, moment, plain

LOG_LINES = 400
SHOWN_ELSEWHERE = ("recipe", "castings")
PLURALS = {"versions": "Version of {}", "methods": "Method of {}"}
FACTS = {"peak_rss_bytes": "Peak memory", "clocks_mhz": "Clocks (MHz)", "kv_scales_missing": "Layers without KV scales"}


def how_to_serve(run: Run, left: list[Artefact]) -> None:
    """What to type to serve the recipe, and the checkpoint where the run left one."""
    st.header("Serve it", anchor=False)
    for artefact in left:
        st.markdown(
            f"The run wrote a {artefact.format} checkpoint of {three(artefact.size_bytes / 1e6)} MB on its worker:"
        )
        st.code(artefact.path, language=None)
        st.caption(f"SHA-256 {artefact.sha256}")
    ways = deployments(parse_recipe(run.recipe), run.model, left[-1].path if left else None)
    if not left and any(CHECKPOINT in way.text for way in ways):
        st.caption(
            f"{CHECKPOINT} stands for the folder that a run writes if “Checkpoint” is chosen under what to measure."
        )
    for way, tab in zip(ways, st.tabs([way.engine for way in ways]), strict=True):
        if way.text:
            tab.code(way.text, language=way.language)
        if way.note:
            tab.caption(plain(way.note))


def provenance(frame: Frame, run: Run) -> None:
    st.header("Provenance", anchor=False)
    here = zone()
    facts = {
        "Run": run.id,
        "Study": run.study or DASH,
        "Owner": run.owner,
        "State": run.state,
        "Attempt": str(run.attempt),
        "Created": moment(run.created_at, here),
        "Started": moment(run.started_at, here),
        "Finished": moment(run.finished_at, here),
        "Recipe": run.recipe,
        "Model": run.model,
        "Corpus": run.corpus,
        "Backend": run.backend or DASH,
        "Device": run.device or DASH,
        "Worker": run.worker_id or DASH,
        "Model hash": run.model_hash or DASH,
        "Corpus hash": run.corpus_hash or DASH,
    }
    for key, value in run.facts.items():
        if key not in SHOWN_ELSEWHERE:
            facts |= _fact_rows(key, value)
    left, right = st.columns(2, gap="large")
    left.dataframe(
        pd.DataFrame({"Fact": list(facts), "Value": list(facts.values())}),
        hide_index=True,
        key="run_facts",
        height="content",
    )
    stages = frame.store.stages([run.id])[run.id]
    table = pd.DataFrame(
        {
            "Stage": [s.stage for s in stages],
            "Time": [lasted(s.seconds) for s in stages],
            "Finished": [moment(s.finished_at, here) for s in stages],
        }
    )
    right.dataframe(table, hide_index=True, key="run_stages", height="content")
    with right.expander("Request"):
        st.json(run.request.to_json())
    with st.expander("Log"):
        st.code(frame.queue.log_tail(run.id, LOG_LINES) or "The log is empty.", language=None, height=320)


def _fact_rows(key: str, value: object) -> dict[str, str]:
    """A fact as rows: each version and each method gets its own."""
    if key in PLURALS and isinstance(value, dict):
        return {PLURALS[key].format(name): str(one) for name, one in value.items()}
    return {FACTS.get(key, key.replace("_", " ").capitalize()): _fact(key, value)}


def _fact(key: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    if key.endswith("_bytes") and isinstance(value, int | float):
        return f"{three(value / 1e6)} MB"
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)
