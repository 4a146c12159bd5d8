"""The tables: what is kept, in a schema that Datasette can open. No behaviour; nothing that is SQLite's alone.

A stage's rows are written in one transaction with its (run, stage) row, so a run that is taken up again repeats
nothing. The columns of a stage's rows are those of the records.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from db.columns import CleanString, CleanText, Instant


class Base(DeclarativeBase):
    """Names constraints alike on every database, so that migrations can drop them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: Instant, dict[str, Any]: JSON, str: CleanText}


class StudyTable(Base):
    """Runs submitted together."""

    __tablename__ = "study"

    id: Mapped[str] = mapped_column(CleanString(16), primary_key=True)
    name: Mapped[str]
    owner: Mapped[str]
    created_at: Mapped[datetime]
    question: Mapped[str | None]  # what it asks, of choose/studies.py's QUESTIONS
    grid: Mapped[dict[str, Any] | None] = mapped_column(
        JSON(none_as_null=True)
    )  # a RecipeGrid's JSON, where it asks that


class RunTable(Base):
    """One recipe on one model: what was asked, how far it is, what it ran on."""

    __tablename__ = "run"
    __table_args__ = (
        Index(None, "state", "created_at"),
        Index(None, "created_at"),
        Index(None, "model", "started_at"),
        Index(None, "corpus", "started_at"),
    )

    id: Mapped[str] = mapped_column(CleanString(16), primary_key=True)
    study_id: Mapped[str | None] = mapped_column(ForeignKey("study.id"), index=True)
    owner: Mapped[str]
    model: Mapped[str]
    recipe: Mapped[str]  # the text form that reads back
    preset: Mapped[str | None]
    corpus: Mapped[str]
    request: Mapped[dict[str, Any]]
    request_key: Mapped[str | None] = mapped_column(CleanString(64), unique=True)  # held while queued or running
    request_hash: Mapped[str | None] = mapped_column(CleanString(64), index=True)  # kept: which runs asked for the same
    state: Mapped[str] = mapped_column(CleanString(16))
    attempt: Mapped[int] = mapped_column(default=0)
    deaths: Mapped[int] = mapped_column(default=0, server_default="0")  # of its own process, since its last stage
    starts: Mapped[int] = mapped_column(default=0, server_default="0")  # since its last stage
    stage: Mapped[str | None]
    stage_share: Mapped[float] = mapped_column(Float, default=0.0)  # 0 to 1
    message: Mapped[str] = mapped_column(CleanText, default="")
    error: Mapped[str | None]
    worker_id: Mapped[str | None] = mapped_column(ForeignKey("worker.id"), index=True)
    model_hash: Mapped[str | None]
    corpus_hash: Mapped[str | None]
    backend: Mapped[str | None]  # of the quality numbers: baseline, emulated, native or mixed
    device: Mapped[str | None]
    device_kind: Mapped[str | None] = mapped_column(CleanString(8))  # "cpu" or "cuda"
    facts: Mapped[dict[str, Any]]  # versions, seeds, sizes: provenance
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class StandingTable(Base):
    """A run as the leaderboard reads it: one narrow row, so that 100,000 are filtered, ranked and paged by indexes.

    Copied from the run and its measurements in the transaction that changes them (`db/standings.py`); pin and note
    are people's, and stand only here.
    """

    __tablename__ = "standing"
    __table_args__ = (
        Index(None, "group_key", "backend", "recipe", "finished_at"),
        Index(None, "group_key", "backend", "kld", "finished_at", "run_id"),
        Index(None, "group_key", "owner", "formats", "tiles"),
        Index(None, "created_at"),
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]  # none until the run is finished: only those with one are ranked
    model: Mapped[str]
    recipe: Mapped[str]
    preset: Mapped[str | None]
    owner: Mapped[str]
    study: Mapped[str]
    corpus: Mapped[str]
    formats: Mapped[str]  # " e4m3fn int8 ": every name between spaces
    tiles: Mapped[str]
    words: Mapped[str]  # what a search looks through, in lower case
    windows: Mapped[int]
    window_length: Mapped[int]
    method: Mapped[str]  # of the quality numbers
    backend: Mapped[str | None]
    device: Mapped[str | None]
    device_kind: Mapped[str | None] = mapped_column(CleanString(8))
    group_key: Mapped[str] = mapped_column(CleanString(16))  # the same where numbers may be ranked together
    ppl: Mapped[float | None] = mapped_column(Float)
    ln_ppl_diff: Mapped[float | None] = mapped_column(Float)
    ln_ppl_diff_low: Mapped[float | None] = mapped_column(Float)
    ln_ppl_diff_high: Mapped[float | None] = mapped_column(Float)
    kld: Mapped[float | None] = mapped_column(Float)
    kld_low: Mapped[float | None] = mapped_column(Float)  # the 95 % interval over windows
    kld_high: Mapped[float | None] = mapped_column(Float)
    kld_noise_floor: Mapped[float | None] = mapped_column(Float)
    top1: Mapped[float | None] = mapped_column(Float)
    needle: Mapped[float | None] = mapped_column(Float)
    gemm_speedup: Mapped[float | None] = mapped_column(Float)
    bits_per_weight: Mapped[float | None] = mapped_column(Float)
    coverage: Mapped[float | None] = mapped_column(Float)
    uncast_share: Mapped[float | None] = mapped_column(Float)  # of the blocks' matrix weights
    model_bytes: Mapped[float | None] = mapped_column(Float)
    weight_sqnr_db: Mapped[float | None] = mapped_column(Float)
    pinned: Mapped[bool] = mapped_column(Boolean, default=False)
    note: Mapped[str] = mapped_column(CleanText, default="")
    note_by: Mapped[str] = mapped_column(CleanText, default="")
    note_at: Mapped[datetime | None]


class StageTable(Base):
    """A finished stage of a run; its row is the proof that its numbers are complete."""

    __tablename__ = "stage"

    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    stage: Mapped[str] = mapped_column(CleanString(32), primary_key=True)
    seconds: Mapped[float] = mapped_column(Float)
    finished_at: Mapped[datetime]


class OfStage:
    """What every row of a stage carries."""

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), index=True)
    stage: Mapped[str] = mapped_column(CleanString(32))


class MeasurementTable(OfStage, Base):
    """One number. SQLite turns NaN into NULL, so what is not finite is spelled in `special`."""

    __tablename__ = "measurement"
    __table_args__ = (Index(None, "name", "run_id"),)

    name: Mapped[str] = mapped_column(CleanString(64))
    value: Mapped[float | None] = mapped_column(Float)
    special: Mapped[str | None] = mapped_column(CleanString(8))  # "nan", "inf" or "-inf"
    unit: Mapped[str]
    better: Mapped[str] = mapped_column(CleanString(8))
    method: Mapped[str]
    backend: Mapped[str]
    label: Mapped[str]
    note: Mapped[str]
    batch: Mapped[int | None]  # of decoding, as are the next three
    prompt_tokens: Mapped[int | None]
    output_tokens: Mapped[int | None]
    way: Mapped[str] = mapped_column(server_default="")


class WindowTable(OfStage, Base):
    """One window's scores."""

    __tablename__ = "window_score"

    index: Mapped[int]
    tokens: Mapped[int]
    nll: Mapped[float] = mapped_column(Float)
    baseline_nll: Mapped[float] = mapped_column(Float)
    kld: Mapped[float] = mapped_column(Float)
    top1: Mapped[float] = mapped_column(Float)


class LayerTable(OfStage, Base):
    """One weight: what was done to it and why."""

    __tablename__ = "layer"

    name: Mapped[str]
    rows: Mapped[int]
    cols: Mapped[int]
    cast: Mapped[str]
    backend: Mapped[str]
    reason: Mapped[str]
    bits_per_weight: Mapped[float] = mapped_column(Float)
    sqnr_db: Mapped[float | None] = mapped_column(Float)
    relative_error: Mapped[float | None] = mapped_column(Float)
    flushed: Mapped[float | None] = mapped_column(Float)
    clipped: Mapped[float | None] = mapped_column(Float)
    group: Mapped[str] = mapped_column(CleanString(16), server_default="other")
    tied: Mapped[bool] = mapped_column(Boolean, server_default=false())


class GemmPointTable(OfStage, Base):
    """Times of one Linear shape at one M, microseconds."""

    __tablename__ = "gemm_point"

    m: Mapped[int]
    n: Mapped[int]
    k: Mapped[int]
    count: Mapped[int]
    baseline_us: Mapped[float] = mapped_column(Float)
    cast_us: Mapped[float | None] = mapped_column(Float)
    matmul_us: Mapped[float | None] = mapped_column(Float)
    kernel: Mapped[str]
    reason: Mapped[str]
    baseline_iqr: Mapped[float | None] = mapped_column(Float)  # relative
    cast_iqr: Mapped[float | None] = mapped_column(Float)
    matmul_iqr: Mapped[float | None] = mapped_column(Float)
    baseline_cold_us: Mapped[float | None] = mapped_column(Float)
    cast_cold_us: Mapped[float | None] = mapped_column(Float)
    matmul_cold_us: Mapped[float | None] = mapped_column(Float)
    matmul_bytes: Mapped[float | None] = mapped_column(Float)


class NeedleCellTable(OfStage, Base):
    """One needle at one length and depth, and the unquantized model's grades on the same prompt."""

    __tablename__ = "needle_cell"

    length: Mapped[int]
    depth: Mapped[int]
    score: Mapped[float] = mapped_column(Float)
    prompt_tokens: Mapped[int]
    expected: Mapped[str]
    answer: Mapped[str]
    kind: Mapped[str] = mapped_column(server_default="single_1")
    repeat: Mapped[int] = mapped_column(server_default="0")
    logprob: Mapped[float | None] = mapped_column(Float)  # nats a token
    baseline_score: Mapped[float | None] = mapped_column(Float)
    baseline_logprob: Mapped[float | None] = mapped_column(Float)
    prompt: Mapped[str] = mapped_column(server_default="")  # hash of its tokens


class ArtefactTable(OfStage, Base):
    """Files that a run left on its worker."""

    __tablename__ = "artefact"

    kind: Mapped[str] = mapped_column(CleanString(32))
    path: Mapped[str]
    format: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(CleanString(64))


class TaskItemTable(OfStage, Base):
    """One document's score in one metric of an lm-eval task."""

    __tablename__ = "task_item"

    task: Mapped[str]
    metric: Mapped[str]
    index: Mapped[int]
    digest: Mapped[str] = mapped_column(CleanString(16))
    value: Mapped[float] = mapped_column(Float)
    weight: Mapped[float] = mapped_column(Float)
    unit: Mapped[str] = mapped_column(CleanString(8))


class SensitivityTable(OfStage, Base):
    """What casting some Linears costs, alone and by their absence: mean KLD, nats."""

    __tablename__ = "sensitivity"

    group: Mapped[str]
    pattern: Mapped[str]
    linears: Mapped[int]
    parameters: Mapped[int] = mapped_column(BigInteger)
    bits_per_weight: Mapped[float] = mapped_column(Float)
    alone_kld: Mapped[float] = mapped_column(Float)
    all_but_kld: Mapped[float] = mapped_column(Float)
    kept: Mapped[bool]


class TensorProfileTable(OfStage, Base):
    """How wide one Linear's weight or input is: counts by binade, and its largest channels."""

    __tablename__ = "tensor_profile"

    name: Mapped[str]
    kind: Mapped[str] = mapped_column(CleanString(16))
    rows: Mapped[int]
    cols: Mapped[int]
    amax: Mapped[float] = mapped_column(Float)
    rms: Mapped[float] = mapped_column(Float)
    zeros: Mapped[int] = mapped_column(BigInteger)
    outlier_channels: Mapped[int]
    histogram: Mapped[list[int]] = mapped_column(JSON)
    outliers: Mapped[list[tuple[int, float, float]]] = mapped_column(JSON)  # channel, amax, over the median channel's


class LadderPointTable(OfStage, Base):
    """What one cast does to one tensor, with and without its outlier channels in the sum."""

    __tablename__ = "ladder_point"

    tensor: Mapped[str]
    kind: Mapped[str] = mapped_column(CleanString(16))
    cast: Mapped[str]
    sqnr_db: Mapped[float | None] = mapped_column(Float)
    bulk_sqnr_db: Mapped[float | None] = mapped_column(Float)
    flushed: Mapped[float] = mapped_column(Float)
    clipped: Mapped[float] = mapped_column(Float)
    bits: Mapped[float] = mapped_column(Float)


class WorkerTable(Base):
    """A worker process, one row per boot."""

    __tablename__ = "worker"

    id: Mapped[str] = mapped_column(CleanString(32), primary_key=True)
    host: Mapped[str]
    slot: Mapped[int]
    slot_key: Mapped[str | None] = mapped_column(CleanString(128), unique=True)  # host and slot, held while alive
    pid: Mapped[int]
    process: Mapped[str] = mapped_column(server_default="")  # what tells it from another of its number
    state: Mapped[str] = mapped_column(CleanString(16))  # alive, left or dead
    device: Mapped[str | None]  # as the leaderboard names it
    device_kind: Mapped[str | None] = mapped_column(CleanString(8))
    device_facts: Mapped[dict[str, Any]]
    child_group: Mapped[int | None]  # process group of the running child, to end what a dead worker left behind
    started_at: Mapped[datetime]
    beats: Mapped[int] = mapped_column(default=0, server_default="0")  # rises while it is alive
    heartbeat_at: Mapped[datetime]  # the database's clock
