"""What a choice costs, by arithmetic, and what an engineer would say about it."""

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from fp8dash.choose.advice import Advice, advise, advise_request
from fp8dash.choose.catalog import MODELS, ModelShape, estimate
from fp8dash.choose.hardware import Device
from fp8dash.choose.presets import name_of
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.request import Request
from fp8dash.report.numbers import three
from fp8dash.ui.words import listed, plain

BADGES = {"warning": ":orange-badge[warning]", "note": ":gray-badge[note]"}


def headline(recipes: Sequence[Recipe], model: str, shape: ModelShape | None) -> str:
    """What is about to be queued, and the model's size with it."""
    name = MODELS[model].title if model in MODELS else Path(model).name or "no model yet"
    if not recipes:
        return f"Choose a recipe for {plain(name)}"
    who = name_of(recipes[0]) or "A custom recipe" if len(recipes) == 1 else f"{len(recipes)} recipes"
    if shape is None or recipes[0].stored:
        return f"{plain(who)} on {plain(name)}"
    estimates = [estimate(recipe, shape) for recipe in recipes]
    sizes, base = sorted(e.size_bytes for e in estimates), estimates[0].baseline_bytes
    size = (
        f"{three(sizes[0] / 1e6)} MB"
        if sizes[0] == sizes[-1]
        else f"{three(sizes[0] / 1e6)} to {three(sizes[-1] / 1e6)} MB"
    )
    return f"{plain(who)} on {plain(name)}: {size} instead of {three(base / 1e6)} MB"


def panel(recipes: Sequence[Recipe], shape: ModelShape | None, request: Request, devices: Sequence[Device]) -> None:
    """Bits, size and coverage by arithmetic, and what an engineer would say."""
    st.header("What it costs", anchor=False)
    if not recipes:
        st.caption("Choose at least one recipe.")
        return
    if shape is None:
        st.caption(
            "Size and coverage are known after this model’s first run that casts weights: only workers read the model."
        )
    elif any(recipe.stored for recipe in recipes):
        st.caption("Size and coverage are known once a worker has read the checkpoint.")
    else:
        lines = ["| Recipe | Bits | MB | of BF16 | Cast |", "|:--|--:|--:|--:|--:|"]
        for recipe in recipes:
            e = estimate(recipe, shape)
            share = e.size_bytes / e.baseline_bytes
            lines.append(
                f"| {plain(name_of(recipe) or 'Custom')} | {e.bits_per_weight:.2f} | "
                f"{three(e.size_bytes / 1e6)} | "
                f"{share:.0%} | {e.coverage:.0%} |".replace("%", "\u00a0%")
            )
        st.markdown("\n".join(lines))
        st.caption("Bits per cast weight and model size, computed, scales included.")
    _advice(recipes, shape, request, devices)


def _advice(recipes: Sequence[Recipe], shape: ModelShape | None, request: Request, devices: Sequence[Device]) -> None:
    """Each remark once, with the recipes that it is about."""
    about: dict[Advice, list[str]] = {}
    device = devices[0] if devices else None
    for recipe in recipes:
        for remark in advise(recipe, shape, device, request.backend):
            about.setdefault(remark, []).append(name_of(recipe) or "Custom")
    for remark in advise_request(request, shape, device):
        about.setdefault(remark, [])
    for remark, names in sorted(about.items(), key=lambda pair: pair[0].level != "warning"):
        who = f"**{plain(listed(names))}**: " if names and len(recipes) > 1 else ""
        st.markdown(f"{BADGES[remark.level]} {who}{plain(remark.text)}")
