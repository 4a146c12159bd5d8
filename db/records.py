"""Rows to records and back."""

import dataclasses
import math
from typing import Any

from db.tables import (
    ArtefactTable,
    Base,
    GemmPointTable,
    LadderPointTable,
    LayerTable,
    MeasurementTable,
    NeedleCellTable,
    RunTable,
    SensitivityTable,
    TaskItemTable,
    TensorProfileTable,
    WindowTable,
)
from fp8dash.choose.records import (
    Artefact,
    GemmPoint,
    LadderPoint,
    Layer,
    Measurement,
    NeedleCell,
    Row,
    Sensitivity,
    TaskItem,
    TensorProfile,
    Window,
)
from fp8dash.choose.request import Request
from fp8dash.errors import InvalidChoice

ROW_TABLES: dict[type[Row], type[Base]] = {
    Measurement: MeasurementTable,
    Window: WindowTable,
    Layer: LayerTable,
    GemmPoint: GemmPointTable,
    NeedleCell: NeedleCellTable,
    Artefact: ArtefactTable,
    TaskItem: TaskItemTable,
    Sensitivity: SensitivityTable,
    TensorProfile: TensorProfileTable,
    LadderPoint: LadderPointTable,
}


def row_values(run_id: str, stage: str, row: Row) -> dict[str, Any]:
    """A record as the columns of its table."""
    values = dataclasses.asdict(row)
    if isinstance(row, Measurement):
        finite = row.value is None or math.isfinite(row.value)
        values |= {"value": row.value if finite else None, "special": None if finite else repr(row.value)}
    return {"run_id": run_id, "stage": stage, **values}


def request_of(row: RunTable) -> tuple[Request, str]:
    """A run's request, and why it is incomplete; empty if it is complete."""
    try:
        return Request.from_json(row.request), ""
    except (InvalidChoice, TypeError, ValueError, AttributeError) as error:
        why = f"This run's request cannot be read, since another version of fp8dash wrote it ({error}): update fp8dash."
        return Request(model=row.model, recipe=row.recipe, corpus=row.corpus), why


def record_of(kind: type[Any], row: Any) -> Any:
    values = {f.name: getattr(row, f.name) for f in dataclasses.fields(kind)}
    if kind is Measurement and row.special:
        values["value"] = float(row.special)
    return kind(**values)
