"""Which recipes: as cards, part by part, or typed; each way starts from what the other left."""

import dataclasses
from collections.abc import Callable, Sequence

import streamlit as st

from fp8dash.choose.casts import KV_FORMATS, KV_SCALE_MEANINGS, KV_SHARES, Cast, KvCast, parse_cast
from fp8dash.choose.formats import FORMATS
from fp8dash.choose.presets import PRESETS, name_of, preset_of, recipe_from
from fp8dash.choose.recipe import GROUPS, Recipe, parse_recipe
from fp8dash.choose.scaling import DELAYED, DYNAMIC, FLOAT32, RULES, STATIC, TILES, When, tile_of, when_of
from fp8dash.errors import InvalidChoice
from fp8dash.ui.forms.fields import Names
from fp8dash.ui.frame import glyph, say_error
from fp8dash.ui.parts.recipe_words import ACTIVATIONS, ATTENTION, OPERANDS, WEIGHTS, shared
from fp8dash.ui.words import plain

CARDS, BUILDER, TYPED, STORED = "Presets", "Custom", "Typed", "A quantized checkpoint"
USUAL = ("e4m3fn/128x128", "e4m3fn/1x128", "e4m3fn/tensor")  # of each operand, when it is switched on
USUAL_WHENS = (DYNAMIC, STATIC, when_of("static:p99.9") or STATIC, when_of("static:mse") or STATIC, DELAYED)
CARD_WIDTH, CARD_HEIGHT = 165, 218  # pixels; wider where there is room
PICTURE = (
    "Squares from left to right: weights, activations and, if cast, the KV cache; divided into the tiles that share "
    "a scale. BF16 is the baseline."
)
GRAMMAR = (
    "A preset’s name, or w=format/tile[/rule] a=format/tile[/rule][/static] kv=format/share[/scale] "
    "attn=format/tile also=lm_head skip=pattern; w[pattern]= and a[pattern]= for some layers only."
)
ALSO = "The Linears of the blocks are always cast; the head, embeddings and norms only if chosen here."
SKIP = "Patterns of module names, separated by commas; * matches anything."
BESIDE = (
    "Weights, scales and casts are the checkpoint’s own. Choose above the BF16 model that it was made from: the KLD is "
    "against that one. Without it, give the checkpoint as the model too: then there is perplexity and no KLD."
)
WHEN = "Static and delayed scales are one per tensor. Both are made from calibration text, never from what is measured."


def recipes_of(start: Sequence[Recipe], key: Names) -> list[Recipe]:
    """The chosen recipes, without duplicates; none if the input is invalid, which is reported."""
    st.header("2  Recipe", anchor=False)
    way = st.segmented_control(
        "How to choose",
        [CARDS, BUILDER, TYPED, STORED],
        default=_way(start),
        required=True,
        key=key("way"),
        label_visibility="collapsed",
    )
    ways: dict[str, Callable[[], list[Recipe]]] = {
        CARDS: lambda: _cards([name for recipe in start if (name := preset_of(recipe))], key),
        BUILDER: lambda: _builder(next(filter(_buildable, start), PRESETS["FP8_BLOCK"].recipe), key),
        TYPED: lambda: _typed(start, key),
        STORED: lambda: _stored(start, key),
    }
    try:
        recipes = list(dict.fromkeys(ways[str(way)]()))
    except InvalidChoice as error:
        say_error(error)
        return []
    if way != CARDS:
        for recipe in recipes:
            preset = name_of(recipe)
            st.code(f"{recipe.text}{f'   # {preset}' if preset else ''}", language=None, wrap_lines=True)
    return recipes


def _way(recipes: Sequence[Recipe]) -> str:
    """Where recipes are shown as they are and in their order."""
    cards = [name for name, preset in PRESETS.items() if preset.everyday]
    names = [preset_of(recipe) or "" for recipe in recipes]
    if all(names) and names == sorted(names, key=lambda name: cards.index(name) if name in cards else len(cards)):
        return CARDS
    if len(recipes) == 1 and recipes[0].stored:
        return STORED
    return BUILDER if len(recipes) == 1 and _buildable(recipes[0]) else TYPED


def _buildable(recipe: Recipe) -> bool:
    """True if the builder has a widget for everything that is cast, or carries it along."""
    return not recipe.is_baseline and recipe.accumulator is None and not recipe.stored


def _cards(chosen: Sequence[str], key: Names) -> list[Recipe]:
    """The presets as cards; several may be ticked and are queued as one study."""
    picked = []
    with st.container(horizontal=True, gap="small", key="new_run_cards"):
        for name, preset in PRESETS.items():
            if preset.everyday:
                with st.container(border=True, width=CARD_WIDTH, height=CARD_HEIGHT, key=key(f"card_{name}")):
                    glyph(preset.recipe)
                    if st.checkbox(f"**{plain(name)}**", name in chosen, key=key(f"preset_{name}")):
                        picked.append(preset.recipe)
                    st.caption(plain(preset.summary), help=_spellings(name))
    st.caption(PICTURE)
    rarer = [name for name, preset in PRESETS.items() if not preset.everyday]
    more = st.multiselect(
        "More presets",
        rarer,
        [name for name in chosen if name in rarer],
        key=key("rarer"),
        format_func=lambda name: f"{name} · {PRESETS[name].summary}",
        placeholder="other rules, MXFP4, FP6 …",
    )
    return picked + [PRESETS[name].recipe for name in more]


def _spellings(name: str) -> str:
    """A preset's text, and what each library calls it."""
    preset = PRESETS[name]
    lines = [f"`{preset.text}`", *(f"{plain(library)}: {plain(theirs)}" for library, theirs in preset.called)]
    return "  \n".join(lines)


def _builder(start: Recipe, key: Names) -> list[Recipe]:
    """One recipe, part by part; what has no widget stays as it was."""
    weights, activations = st.columns(2)
    with weights, st.container(border=True):
        w = _cast(WEIGHTS, start.weights, key)
    with activations, st.container(border=True):
        a = _cast(ACTIVATIONS, start.activations, key)
    cache, path = st.columns(2)
    with cache, st.container(border=True):
        kv = _kv_cast(start.kv, key)
    with path, st.container(border=True):
        attention = _cast(ATTENTION, start.attention, key)
    also, skip = _parts(start, key)
    recipe = dataclasses.replace(start, weights=w, activations=a, kv=kv, attention=attention, also=also, skip=skip)
    if recipe.is_baseline:
        raise InvalidChoice("Nothing is cast: switch on one of the four, or choose the preset BF16.")
    glyph(recipe)
    if any(" " in pattern for pattern in skip):
        raise InvalidChoice(
            "A module pattern has no spaces: separate patterns by commas, as in *.down_proj, model.layers.0.*"
        )
    return [parse_recipe(recipe.text)]


def _parts(start: Recipe, key: Names) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The groups that are cast too, and the patterns of what is left out."""
    with st.container(horizontal=True):
        placeholder = "nothing: they stay in BF16"
        also = st.multiselect(
            "Also cast", GROUPS, list(start.also), key=key("also"), placeholder=placeholder, help=ALSO
        )
        first, placeholder = ", ".join(start.skip), "*.down_proj, model.layers.0.*"
        skip = st.text_input("Leave out", first, key=key("skip"), placeholder=placeholder, help=SKIP)
    return tuple(also), tuple(part.strip() for part in (skip or "").split(",") if part.strip())


def _cast(operand: int, start: Cast | None, key: Names) -> Cast | None:
    title = OPERANDS[operand]
    if not st.toggle(f"**{title}**", start is not None, key=key(f"{title}_on")):
        return None
    start = start or parse_cast(USUAL[operand])
    formats, tiles, rules = list(FORMATS), list(dict.fromkeys([*TILES, start.tile.name])), list(RULES)
    name = st.selectbox(
        f"{title}: format",
        formats,
        formats.index(start.format.name),
        key=key(f"{title}_format"),
        format_func=lambda f: f"{f} · largest value {FORMATS[f].max:g}",
    )
    tile = st.selectbox(
        f"{title}: tile",
        tiles,
        tiles.index(start.tile.name),
        key=key(f"{title}_tile"),
        format_func=lambda t: f"{t} · {shared(t, operand)}",
        help="Which elements share a scale.",
    )
    rule = st.selectbox(
        f"{title}: scale rule",
        rules,
        rules.index(start.rule.name),
        key=key(f"{title}_rule"),
        format_func=lambda r: f"{r} · {RULES[r].bits} bits per scale",
        help="  \n".join(f"{r.name}: {r.meaning}" for r in RULES.values()),
    )
    cast = dataclasses.replace(
        start, format=FORMATS[name], tile=tile_of(tile) or start.tile, rule=RULES.get(rule, FLOAT32), when=DYNAMIC
    )
    return dataclasses.replace(cast, when=_when(start.when, key)) if operand == ACTIVATIONS else cast


def _when(start: When, key: Names) -> When:
    """When the activations' scale is made; what a team is likely to want, and what the link brought."""
    offered = {when.text: when for when in (*USUAL_WHENS, start)}
    text = st.selectbox(
        "Activations: when the scale is made",
        list(offered),
        list(offered).index(start.text),
        key=key("when"),
        format_func=lambda t: f"{t} · {offered[t].meaning}",
        help=WHEN,
    )
    return offered[text]


def _kv_cast(start: KvCast | None, key: Names) -> KvCast | None:
    """What the KV cache holds; a scale of 1.0 is one for all."""
    if not st.toggle("**KV cache**", start is not None, key=key("kv_on")):
        return None
    start = start or KvCast(KV_FORMATS["e4m3fn"], "tensor")
    formats, shares, scales = list(KV_FORMATS), list(KV_SHARES), list(KV_SCALE_MEANINGS)
    name = st.selectbox(
        "KV cache: format",
        formats,
        formats.index(start.format.name),
        key=key("kv_format"),
        format_func=lambda f: f"{f} · largest value {KV_FORMATS[f].max:g}",
    )
    scale = st.selectbox(
        "KV cache: scale",
        scales,
        scales.index(start.scale),
        key=key("kv_scale"),
        help="  \n".join(f"{scale}: {meaning}" for scale, meaning in KV_SCALE_MEANINGS.items()),
    )
    if scale == "unit":
        return KvCast(KV_FORMATS[name], "tensor", scale)
    share = st.selectbox(
        "KV cache: scale shared by",
        shares,
        shares.index(start.share),
        key=key("kv_share"),
        format_func=lambda s: f"{s} · {KV_SHARES[s]}",
    )
    return KvCast(KV_FORMATS[name], share, scale)


def _typed(start: Sequence[Recipe], key: Names) -> list[Recipe]:
    """Recipes as text, one per line."""
    first = "\n".join(recipe.text for recipe in start)
    text = st.text_area("Recipes, one per line", first, key=key("typed"), help=GRAMMAR)
    return [recipe_from(line) for line in (text or "").splitlines() if line.strip()]


def _stored(start: Sequence[Recipe], key: Names) -> list[Recipe]:
    """What a quantized checkpoint stores."""
    first = next((recipe.stored for recipe in start if recipe.stored), "")
    placeholder = "/models/Name-FP8-dynamic, /models/name-Q4_K_M.gguf, org/name or org/name:file.gguf"
    text = st.text_input("Checkpoint", first, key=key("stored"), placeholder=placeholder, help=BESIDE)
    st.caption(BESIDE)
    return [Recipe(stored=text.strip())] if text and text.strip() else []
