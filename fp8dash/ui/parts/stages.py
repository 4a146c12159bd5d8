"""A run's progress: its stages with their times, and what it is doing."""

from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st

from db.rows import CANCELLED, FAILED, FINISHED, QUEUED, RUNNING, Run, Stage
from fp8dash.choose.records import STAGES
from fp8dash.choose.request import MEASURES
from fp8dash.ui.words import lasted, plain

BADGES = {QUEUED: "gray", RUNNING: "blue", FINISHED: "green", FAILED: "red", CANCELLED: "orange"}


def progress(run: Run, stages: Sequence[Stage]) -> None:
    """The stages in a row, and a line on the run as a whole."""
    st.markdown(_strip(run, stages))
    _how(run)


def _strip(run: Run, stages: Sequence[Stage]) -> str:
    """Each stage with its time: done, going on, ended here, or still to come."""
    done = {stage.stage: stage.seconds for stage in stages}
    wanted = [stage for stage in STAGES if stage in done or _asked(run, stage)]
    badges = []
    for stage in wanted:
        if stage in done:
            badges.append(f":green-badge[{stage} {lasted(done[stage])}]")
        elif stage == run.stage and run.state == RUNNING:
            badges.append(f":blue-badge[**{stage} {run.stage_share * 100:.0f} %**]")
        elif stage == run.stage and run.state in (FAILED, CANCELLED):
            badges.append(f":{BADGES[run.state]}-badge[{stage} {run.state}]")
        else:
            badges.append(f":gray-badge[{stage}]")
    return " ".join(badges)


def _asked(run: Run, stage: str) -> bool:
    return stage not in MEASURES or stage in run.request.measures


def _how(run: Run) -> None:
    if run.state == RUNNING:
        done = min(1.0, max(0.0, run.stage_share))
        doing = f": {plain(run.message)}" if run.message else ""
        st.progress(done, text=f"{done * 100:.0f} % of {run.stage or 'starting'}{doing}")
        return
    ends = {QUEUED: "waiting for a worker", FINISHED: "finished", FAILED: "failed", CANCELLED: "cancelled"}
    end = run.finished_at or datetime.now(UTC)
    took = f" after {lasted((end - run.started_at).total_seconds())}" if run.started_at and run.finished_at else ""
    where = f", {plain(run.backend)}" if run.backend else ""
    device = f" on {plain(run.device)}" if run.device else ""
    st.caption(f"{ends[run.state]}{took}{where}{device}")
