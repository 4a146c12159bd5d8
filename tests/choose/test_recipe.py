"""Recipes: text that reads back, and clear sentences for what does not parse."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8dash.choose.accumulators import ACCUMULATORS
from fp8dash.choose.advice import advise
from fp8dash.choose.casts import KV_FORMATS, KV_SHARES, Cast, KvCast, parse_cast, parse_kv
from fp8dash.choose.formats import FORMATS
from fp8dash.choose.hardware import Device
from fp8dash.choose.mixed import Part, mixed_recipe
from fp8dash.choose.presets import PRESETS, preset_of, recipe_from
from fp8dash.choose.recipe import GROUPS, Override, Recipe, parse_recipe
from fp8dash.choose.request import BACKENDS
from fp8dash.choose.scaling import DELAYED, EXACT, FLOAT32, RULES, STATIC, TENSOR, TILES, when_of
from fp8dash.errors import InvalidChoice
from fp8dash.report.findings import _without_head
from fp8dash.ui.pages.planner import KV, _with_kv
from tests.reference import FORMATS as REFERENCE

casts = st.builds(
    Cast,
    st.sampled_from(list(FORMATS.values())),
    st.sampled_from(list(TILES.values())),
    st.sampled_from(list(RULES.values())),
)
kv_casts = st.builds(
    KvCast, st.sampled_from(list(KV_FORMATS.values())), st.sampled_from(list(KV_SHARES))
) | st.sampled_from(
    [
        KvCast(fmt, *kept)
        for fmt in KV_FORMATS.values()
        for kept in (("tensor", "unit"), ("tensor", "static"), ("head", "static"))
    ]
)
whens = st.sampled_from([STATIC, DELAYED, *map(when_of, ("static:p99.9", "static:mse", "delayed:16:recent:1"))])
observed = st.builds(
    Cast, st.sampled_from(list(FORMATS.values())), st.just(TENSOR), st.just(FLOAT32), st.just(EXACT), whens
)
patterns = st.sampled_from(["*.o_proj", "model.layers.[01].*"])
overrides = st.builds(Override, st.just("w"), patterns, st.none() | casts) | st.builds(
    Override, st.just("a"), patterns, st.none() | observed
)
FIELDS = {
    "weights": st.none() | casts,
    "activations": st.none() | casts | observed,
    "also": st.lists(st.sampled_from(GROUPS), unique=True).map(tuple),
    "skip": st.lists(st.sampled_from(["*.down_proj", "model.layers.0.*", "lm_head"]), unique=True).map(tuple),
    "kv": st.none() | kv_casts,
    "attention": st.none() | casts,
    "accumulator": st.none(),
    "overrides": st.lists(overrides, max_size=3, unique_by=lambda o: (o.key, o.pattern)).map(tuple),
    "stored": st.sampled_from(["", "/models/a b%20c", "org/name@v1", "/modèles/名\u00a0字"]),
}
recipes = st.builds(Recipe, **FIELDS)
full = st.builds(Recipe, **FIELDS | {"accumulator": st.none() | st.sampled_from(list(ACCUMULATORS.values()))})
PART = Part("o", "*.o_proj", 10, 8.0, 16.0, 0.1)
ROUTES = {  # every way in which one recipe is made of another, and the fields that it may change
    "mixed": (lambda recipe: mixed_recipe(recipe, [PART]), {"skip"}),
    "what a module sees": (lambda recipe: recipe.of("model.layers.0.o_proj"), {"weights", "activations", "overrides"}),
    "planner": (lambda recipe: _with_kv(recipe, list(KV)[-1]), {"kv"}),
    "findings": (_without_head, {"also"}),
    "text": (lambda recipe: parse_recipe(recipe.text), set()),
}


def fields_of(recipe):
    """A recipe's values by their fields."""
    return {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}


def test_a_recipe_is_built_by_keyword_alone():
    with pytest.raises(TypeError):
        Recipe(parse_cast("e4m3fn/row"))
    assert set(FIELDS) == {field.name for field in dataclasses.fields(Recipe)}


@given(full, st.data())
def test_changing_one_field_of_a_recipe_keeps_all_others(recipe, data):
    name = data.draw(st.sampled_from(list(FIELDS)))
    value = data.draw(FIELDS[name])
    assert fields_of(dataclasses.replace(recipe, **{name: value})) == fields_of(recipe) | {name: value}


@pytest.mark.parametrize("route", ROUTES)
@given(recipe=full.filter(lambda recipe: not recipe.is_baseline))
def test_every_way_to_make_a_recipe_of_another_keeps_what_it_does_not_change(route, recipe):
    made, may_change = ROUTES[route]
    try:
        changed = fields_of(made(recipe))
    except InvalidChoice:  # a text is checked as well: acc= wants two FP8 operands and no overrides
        assert route == "text" and recipe.accumulator
        return
    assert {name for name, value in fields_of(recipe).items() if changed[name] != value} <= may_change


@given(recipes.filter(lambda recipe: not recipe.is_baseline))
def test_a_recipes_text_reads_back(recipe):
    assert parse_recipe(recipe.text) == recipe


@given(kv_casts)
def test_a_kv_casts_text_reads_back(kv):
    assert parse_kv(kv.text) == kv and parse_kv(f" {kv.text.upper()} ") == kv


def test_the_kv_cache_and_the_attention_path_are_casts_of_their_own():
    recipe = parse_recipe("attn=e4m3fn/tensor kv=e5m2/tensor/unit")
    assert recipe.text == "kv=e5m2/tensor/unit attn=e4m3fn/tensor"
    assert not recipe.is_baseline and not recipe.casts_linears and recipe.casts_attention
    assert Recipe(also=("lm_head",)).is_baseline


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda p: p.name)
def test_a_preset_is_found_by_its_recipe_and_by_its_name(preset):
    assert preset_of(preset.recipe) == preset.name
    assert recipe_from(preset.name.lower()) == preset.recipe
    assert parse_recipe(preset.text).text == preset.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "casts nothing"),
        ("fp9", "not part of a recipe"),
        ("w=e4m3", "not a cast"),
        ("w=e4m4/row", "“e4m4” is not a format: choose one of e4m3fn, e5m2, e4m3fnuz"),
        ("w=e4m3fn/256", "not a tile"),
        ("w=e4m3fn/row/up", "not a scale rule"),
        ("w=e4m3fn/row w=int8/row", "given twice"),
        ("also=lm_head", "casts nothing"),
        ("w=int8/row also=head", "not a group"),
        ("w=int8/row skip=$(reboot)", "not a module pattern"),
        ("w=int8/row; drop table run", "not part of a recipe"),
        ("kv=e4m3fn", "not a KV cache cast"),
        ("kv=e4m3fn/tensor/unit/exact", "not a KV cache cast"),
        ("kv=int4/tensor", "“int4” is not a KV cache format: choose one of e4m3fn, e5m2, int8"),
        ("kv=e4m3fn/row", "“row” is not a share of the KV cache: choose one of tensor, head, token"),
        ("kv=e4m3fn/tensor/fixed", "“fixed” is not a KV cache scale: choose one of dynamic, static, unit"),
        ("kv=e4m3fn/token/static", "closest alternative: e4m3fn/head/static"),
        ("a=e4m3fn/row/static", "closest alternative: e4m3fn/tensor/static"),
        ("a=e4m3fn/tensor/nvfp4/static", "closest alternative: e4m3fn/tensor/static"),
        ("a=e4m3fn/tensor/mse/delayed", "closest alternative: e4m3fn/tensor/static:mse"),
        ("a=e4m3fn/tensor/static:p100", "does not say when a scale is made: write static"),
        ("a=e4m3fn/tensor/delayed:0", "does not say when a scale is made: write static"),
        ("w=e4m3fn/tensor/static", "closest alternative: e4m3fn/tensor"),
        ("w=int8/row w[*.o_proj]=int8/tensor/delayed", "closest alternative: int8/tensor"),
        ("w[*.o_proj]=bf16", "casts nothing"),
        ("w=int8/row w[rm -rf]=bf16", "not part of a recipe"),
        ("w=int8/row w[$x]=bf16", "not a module pattern"),
        (
            "w=e5m2/row a=e5m2/row acc=hopper-128 w[*.o_proj]=bf16",
            "closest alternative: w=e5m2/row a=e5m2/row acc=hopper-128",
        ),
        ("kv=e4m3fn/token/unit", "closest alternative: e4m3fn/tensor/unit"),
        ("attn=e4m3fn", "not a cast"),
    ],
)
def test_what_does_not_parse_is_said_with_an_example_or_the_choices(text, message):
    with pytest.raises(InvalidChoice, match="choose|write|use|give|as in") as caught:
        recipe_from(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


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


def test_the_first_override_that_names_a_module_holds_and_its_other_operand_stays():
    recipe = parse_recipe("w=e4m3fn/row a=e4m3fn/row w[*.layers.0.*]=int8/row w[*.down_proj]=bf16")
    assert recipe.of("model.layers.0.mlp.down_proj").text == "w=int8/row a=e4m3fn/row"
    assert recipe.of("model.layers.1.mlp.down_proj").text == "a=e4m3fn/row"
    assert recipe.of("model.layers.1.mlp.up_proj").text == "w=e4m3fn/row a=e4m3fn/row"


def test_the_cpu_is_called_slow_only_where_a_kernel_is_asked_for():
    cpu, recipe = Device("cpu", "CPU"), parse_recipe("w=e4m3fn/row a=e4m3fn/row")
    advice = {backend: " ".join(a.text for a in advise(recipe, None, cpu, backend)) for backend in BACKENDS}
    assert "slower than BF16" in advice["auto"] and "slower than BF16" in advice["native"]
    assert advice["emulated"] == ""


def test_twelve_presets_are_everyday_ones():
    everyday = [name for name, preset in PRESETS.items() if preset.everyday]
    assert len(everyday) == 12 and {"W4A16", "NVFP4", "FP8_W8A16"} <= set(everyday)
