"""The filled form of the page “New run” as that page's address, and back. Values only: no streamlit, no database.

?recipe=FP8_BLOCK&windows=32&window_length=512&backend=auto   what differs from the form as it first opens
?from=RUN&windows=32                                          what differs from an old run's request
"""

import dataclasses
from typing import Any

from fp8dash.choose.limits import LONGEST_OWNER, LONGEST_STUDY
from fp8dash.choose.presets import preset_of, recipe_from
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.request import LEAVES, Request
from fp8dash.errors import InvalidChoice

Address = dict[str, list[str]]  # values by name, in order

FROM, RECIPE, STUDY, OWNER = "from", "recipe", "study", "owner"
FIELDS = {name: leaf.limits for name, leaf in LEAVES.items() if name != RECIPE}
NAMES = (FROM, RECIPE, STUDY, OWNER, *FIELDS)  # what the form owns of an address
BY_WORKERS = ("window_length", "backend")  # see usual_request
LONGEST = {STUDY: LONGEST_STUDY, OWNER: LONGEST_OWNER}  # characters
NUMBERS = {int: "a whole number", float: "a number"}


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """What the form holds: how a run is measured, the recipes, each a run, and which run it was filled in from."""

    request: Request  # its own recipe is none of the form's, and stays as it is
    recipes: tuple[Recipe, ...]
    source: str = ""
    study: str = ""  # empty: named after the recipes
    owner: str = ""


def written(form: Form, start: Form) -> Address:
    """What of a form differs from the one that it started as.

    What a new form starts with is for the workers alive: an address that says anything says that, too.

    >>> from fp8dash.choose.recipe import parse_recipe
    >>> start = Form(Request(), (parse_recipe("w=e4m3fn/row a=e4m3fn/row"),))
    >>> written(start, start)
    {}
    >>> written(Form(Request.of(gemm_m=(8, 32)), (parse_recipe("w=int8/row"),)), start)
    {'gemm_m': ['8', '32'], 'recipe': ['w=int8/row'], 'window_length': ['512'], 'backend': ['auto']}
    """
    values, usual = form.request.flat, start.request.flat
    changed = {name: _texts(values[name]) for name in FIELDS if values[name] != usual[name]}
    if form.recipes != start.recipes:
        changed[RECIPE] = [preset_of(recipe) or recipe.text for recipe in form.recipes]
    if form.study:
        changed[STUDY] = [form.study]
    owner = {OWNER: [form.owner]} if form.owner else {}
    if start.source:
        return {FROM: [start.source], **changed, **owner}
    usual_here = {name: _texts(values[name]) for name in BY_WORKERS} if changed else {}
    return {**changed, **usual_here, **owner}


def read(address: Address, start: Form) -> Form:
    """The form that an address stands for; raises InvalidChoice. Names that are not the form's are left alone.

    >>> read({"windows": ["4"], "recipe": ["fp8_block"], "utm": ["x"]}, Form(Request(), ())).recipes[0].text
    'w=e4m3fn/128x128 a=e4m3fn/1x128'
    """
    values = {name: _value(name, texts) for name, texts in address.items() if name in FIELDS}
    request = start.request.but(**values)
    request.checked()
    recipes = tuple(dict.fromkeys(recipe_from(text) for text in address.get(RECIPE, ())))
    study, owner = (_name(name, address) for name in (STUDY, OWNER))
    return Form(request, recipes or start.recipes, start.source, study, owner or start.owner)


def _name(name: str, address: Address) -> str:
    given = address.get(name, [""])[-1]
    if len(given) > LONGEST[name]:
        raise InvalidChoice(
            f"“{given[:20]} …” is longer than {LONGEST[name]} characters: shorten {name}=, or leave it out."
        )
    return given


def _texts(value: Any) -> list[str]:
    return [str(part) for part in value] or [""] if isinstance(value, tuple) else [str(value)]


def _value(name: str, texts: list[str]) -> Any:
    """A field's value; of several for a field that has one, the last."""
    limits = FIELDS[name]
    try:
        return tuple(limits.kind(text) for text in texts if text) if limits.several else limits.kind(texts[-1])
    except ValueError:
        number = NUMBERS[limits.kind]
        raise InvalidChoice(
            f"“{', '.join(texts)[:80]}” is not {number}: correct {name}= in this page’s address, or leave it out."
        ) from None
