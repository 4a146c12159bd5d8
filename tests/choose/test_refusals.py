"""Every refused combination names the rule, whose it is, and the nearest choice, which is then accepted: all walked."""

import re
from itertools import islice, product

import pytest

from fp8dash.choose.casts import KV_FORMATS, KV_SCALES, KV_SHARES, Cast, parse_cast, parse_kv
from fp8dash.choose.formats import FORMATS
from fp8dash.choose.hardware import native_path
from fp8dash.choose.models.checkpoint import refuse_no_checkpoint
from fp8dash.choose.presets import recipe_from
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.choose.scaling import DELAYED, DYNAMIC, RULES, STATIC, TENSOR, TILES, WHENS
from fp8dash.errors import InvalidChoice
from tests.quant.test_matmul import DEVICES

FORM = re.compile(r"(?P<rule>.+) \((?P<whose>[^()]+)\); closest alternative: (?P<nearest>[^;]+?)\.?")
WHOSE = ("torch", "cuBLASLt", "hardware", "fp8dash", "compressed-tensors", "transformers")
NOTHING = "skip this layer or emulate it"
NATIVE = ("e4m3fn", "e5m2", "int8")  # formats that some kernel multiplies


def nearest_of(reason):
    """What a refusal recommends, its form checked."""
    match = FORM.fullmatch(str(reason))
    assert match, reason
    assert match["whose"].startswith(WHOSE), reason
    return match["nearest"]


def refusal(read, *args):
    """What is said where a choice is refused, else None."""
    try:
        read(*args)
    except InvalidChoice as error:
        return error
    return None


def alike():
    """Both operands in one cast, whatever it is."""
    for fmt, tile, rule in product(FORMATS.values(), TILES.values(), RULES.values()):
        cast = Cast(fmt, tile, rule)
        yield Recipe(weights=cast, activations=cast)


def unlike():
    """Operands in tiles and formats of their own, one alone, none, and scales made beforehand."""
    casts = [Cast(FORMATS[name], tile) for name, tile in product(NATIVE, TILES.values())]
    made = [Cast(FORMATS[name], TENSOR, when=when) for name, when in product(NATIVE, (STATIC, DELAYED))]
    yield from (Recipe(weights=w, activations=a) for w, a in product([None, *casts], [None, *casts, *made]))


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: f"{d.label}-{d.cuda[0]}.{d.cuda[1]}")
@pytest.mark.parametrize(("shape", "every"), [((512, 512), 5), ((576, 200), 13), ((100, 208), 13)], ids=str)
def test_the_nearest_recipe_to_one_without_a_kernel_has_one(device, shape, every):
    refused = 0
    for recipe in islice((*unlike(), *alike()), 0, None, every):  # prime to the lengths of the tables: all are met
        path = native_path(recipe, *shape, device)
        if not path.is_native:
            refused += 1
            nearest = nearest_of(path.reason)
            if nearest == NOTHING:
                assert shape == (100, 208) and device.kind == "cuda", recipe.text  # no multiples of 8
            else:
                assert native_path(parse_recipe(nearest), *shape, device).is_native, (recipe.text, nearest)
    assert refused


@pytest.mark.parametrize("when", [when for when in WHENS if when != DYNAMIC.name])
def test_the_nearest_cast_to_one_that_cannot_be_made_beforehand_can_be(when):
    texts = ["/".join(names) for names in product(FORMATS, TILES, RULES, [when])]
    refused = [error for error in (refusal(parse_cast, text) for text in texts) if error]
    assert 0 < len(refused) < len(texts)
    for error in refused:
        assert parse_cast(nearest_of(error)).is_observed


def test_the_nearest_kv_cast_to_one_refused_is_read():
    texts = ["/".join(names) for names in product(KV_FORMATS, KV_SHARES, KV_SCALES)]
    refused = [error for error in (refusal(parse_kv, text) for text in texts) if error]
    assert 0 < len(refused) < len(texts)
    for error in refused:
        parse_kv(nearest_of(error))


@pytest.mark.parametrize("more", ["", " w[*.down_proj]=int8/row"])
def test_the_nearest_recipe_to_an_accumulator_that_does_not_fit_is_read(more):
    texts = [f"w={w}/row a={a}/row acc=ada{more}" for w, a in product(FORMATS, FORMATS)]
    texts += [f"{operand}={fmt}/row acc=ada{more}" for operand, fmt in product("wa", FORMATS)]
    refused = [error for error in (refusal(parse_recipe, text) for text in texts) if error]
    assert len(refused) == len(texts) - (0 if more else 4)  # e4m3fn and e5m2 on either side
    for error in refused:
        assert parse_recipe(nearest_of(error)).accumulator


def test_the_nearest_recipe_to_one_that_no_checkpoint_holds_is_held():
    for recipe in alike():
        for weights_only in (False, True):
            asked = Recipe(weights=recipe.weights) if weights_only else recipe
            error = refusal(refuse_no_checkpoint, asked)
            if error:
                refuse_no_checkpoint(with_nearest(asked, nearest_of(error)))


def with_nearest(recipe, nearest):
    """The recipe with the operand that was named in place of its own."""
    if nearest.startswith("weights alone, "):
        return parse_recipe(nearest.removeprefix("weights alone, "))
    if nearest.startswith("a="):
        return parse_recipe(f"w={recipe.weights.text} {nearest}")
    return recipe_from(nearest)
