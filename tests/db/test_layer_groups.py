"""Each layer says where in the model it stands: also those that were stored before it was asked."""

import sqlite3

from sqlalchemy import insert

from db.records import ROW_TABLES, row_values
from db.store import Store
from fp8dash.choose.records import Layer
from fp8dash.choose.request import Request
from tests.db.test_store import _at_revision

NAMES = {
    "model.embed_tokens": "embedding", "model.layers.0.self_attn.q_proj": "attention", "lm_head": "head",
    "model.layers.0.mlp.down_proj": "mlp", "model.norm": "norm", "transformer.h.0.attn.c_attn": "attention",
    "backbone.mixer.in_proj": "other",
}  # fmt: skip


def test_layers_of_before_are_grouped_by_their_names_and_their_shapes_are_those_they_were(tmp_path):
    file = tmp_path / "a.sqlite"
    store = Store(f"sqlite:///{file}")
    run, _ = store.add_run(Request(), owner="ada")
    rows = [Layer(name, 1 if "norm" in name else 8, 16, "", "kept", "", 16.0) for name in NAMES]
    with store.session() as session:
        session.execute(insert(ROW_TABLES[Layer]), [row_values(run, "quantize", layer) for layer in rows])
    store.close()
    _at_revision(f"sqlite:///{file}", "0008")
    with sqlite3.connect(file) as connection:
        asked = "SELECT count(*) FROM layer WHERE rows > 1 AND name NOT LIKE '%embed%'"
        before = connection.execute(asked).fetchone()[0]
    store = Store(f"sqlite:///{file}")
    assert {layer.name: layer.group for layer in store.layers([run])[run]} == NAMES
    assert store.linear_shapes([run])[run] == {(8, 16): before}
    store.close()


def test_an_embedding_that_is_the_head_too_is_among_the_linears_once(store):
    run, _ = store.add_run(Request(), owner="ada")
    rows = [
        Layer("model.embed_tokens", 32, 8, "", "kept", "", 16.0, group="embedding", tied=True),
        Layer("model.vision.patch", 32, 8, "", "kept", "", 16.0, group="convolution"),
        Layer("model.embed_positions", 64, 8, "", "kept", "", 16.0, group="embedding"),
    ]
    with store.session() as session:
        session.execute(insert(ROW_TABLES[Layer]), [row_values(run, "quantize", layer) for layer in rows])
    assert store.linear_shapes([run])[run] == {(32, 8): 1}
