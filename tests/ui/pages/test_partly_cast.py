"""A run that left more than a tenth of the blocks' weights as they were does not look good."""

from sqlalchemy import update

from db.store import Store
from db.tables import StandingTable
from tests.seed import fill
from tests.ui.drawn import opened, page_text


def test_a_run_that_was_cast_in_part_says_so_wherever_its_loss_stands(store: Store) -> None:
    ids = fill(store)
    with store.session() as session:
        session.execute(update(StandingTable).where(StandingTable.run_id == ids["MXFP8"]).values(uncast_share=0.8))
    app = opened("leaderboard", q="")
    assert "80% of the blocks’ weights left in BF16" in page_text(app).replace("\\", "")
    board = next(table.value for table in app.dataframe if "Standing" in table.value)
    assert board.set_index("Recipe").loc["MXFP8", "Standing"] == "80% left in BF16"
    assert "80% of the blocks’ matrix weights were left in BF16" in page_text(opened("runs", run=ids["MXFP8"]))
