"""A reader who follows extend.md to the letter, in a copy of the project, gets what it promises."""

import pytest

from tests.docs.follow import copied, follow, run, sections

PROMISED = ("a format", "a tile", "a scale rule", "a preset", "a metric", "a measure", "a page", "an engine")


@pytest.mark.parametrize("title", sections())
def test_every_step_of_a_checklist_can_be_done(title, tmp_path):
    assert follow(sections()[title], copied(tmp_path / "copy"))


def test_what_the_checklists_add_works(tmp_path):
    """All of them in one copy: what one adds must not keep another from working."""
    folder = copied(tmp_path / "copy")
    commands = [words for section in sections().values() for words in follow(section, folder)]
    run([words for words in commands if words[0] != "pytest"][:1], folder)
    run([words for words in commands if words[0] == "pytest"], folder)


def test_there_is_a_checklist_for_all_that_is_promised():
    assert {f"Add {what}" for what in PROMISED} <= set(sections())
