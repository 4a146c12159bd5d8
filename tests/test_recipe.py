"""Recipes: text that reads back, and clear sentences for what does not parse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8dash.choose.formats import FORMATS
from fp8dash.choose.presets import PRESETS, preset_of, recipe_from
from fp8dash.choose.recipe import GROUPS, Cast, Recipe, parse_cast, parse_recipe
from fp8dash.choose.scaling import RULES, TILES
from fp8dash.errors import InvalidChoice
from tests.reference import FORMATS as REFERENCE

casts = st.builds(
    Cast,
    st.sampled_from(list(FORMATS.values())),
    st.sampled_from(list(TILES.values())),
    st.sampled_from(list(RULES.values())),
)
recipes = st.builds(
    Recipe,
    st.none() | casts,
    st.none() | casts,
    st.lists(st.sampled_from(GROUPS), unique=True).map(tuple),
    st.lists(st.sampled_from(["*.down_proj", "model.layers.0.*", "lm_head"]), unique=True).map(tuple),
)


@given(recipes.filter(lambda recipe: not recipe.is_baseline))
def test_a_recipes_text_reads_back(recipe):
    assert parse_recipe(recipe.text) == recipe


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda p: p.name)
def test_a_preset_is_found_by_its_recipe_and_by_its_name(preset):
    assert preset_of(preset.recipe) == preset.name
    assert recipe_from(preset.name.lower()) == preset.recipe
    assert parse_recipe(preset.text).text == preset.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "casts nothing"),
        ("fp8", "not part of a recipe"),
        ("w=e4m3", "not a cast"),
        ("w=e4m4/row", "“e4m4” is not a format: choose one of e4m3fn, e5m2, e4m3fnuz"),
        ("w=e4m3fn/256", "not a tile"),
        ("w=e4m3fn/row/up", "not a scale rule"),
        ("w=e4m3fn/row w=int8/row", "given twice"),
        ("also=lm_head", "casts nothing"),
        ("w=int8/row also=head", "not a group"),
        ("w=int8/row skip=$(reboot)", "not a module pattern"),
        ("w=int8/row; drop table run", "not part of a recipe"),
    ],
)
def test_what_does_not_parse_is_said_with_an_example_or_the_choices(text, said):
    with pytest.raises(InvalidChoice, match="choose|write|use|give|as in") as caught:
        recipe_from(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_bits_per_element_are_the_reference():
    table = REFERENCE["bits_per_element"]
    for text, key, shape in (
        ("e4m3fn/1x32/rceil", "mxfp8 (E8M0/32)", (576, 576)),
        ("e4m3fn/1x128", "fp8 1x128 fp32 scale", (128, 128)),
        ("e4m3fn/1x128/rceil", "fp8 1x128 ue8m0 scale", (128, 128)),
        ("e4m3fn/128x128", "fp8 128x128 fp32 scale", (256, 256)),
        ("e4m3fn/row", "fp8 per-token fp32 scale K=576", (100, 576)),
    ):
        assert parse_cast(text).bits_per_element(*shape) == pytest.approx(table[key])
