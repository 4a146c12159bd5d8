"""How each weight was cast, as a tree of the model's modules. Rows to a plotly figure; no streamlit, no database."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from fp8dash.choose.casts import parse_cast
from fp8dash.choose.records import Layer
from fp8dash.errors import InvalidChoice
from fp8dash.report.numbers import three
from fp8dash.ui.charts.dress import INKS, dressed, html
from fp8dash.ui.charts.looks import GREY, tile_colour

ROOT = "model"
BRANCH = "rgba(127, 140, 150, 0.12)"  # what lies around the weights
PIXELS = 380


@dataclass(frozen=True, slots=True)
class TreeLeaf:
    """Weights of one name in any number of blocks that were treated alike."""

    path: tuple[str, ...]  # modules from the top, block numbers left out
    cast: str
    backend: str
    reason: str
    count: int
    parameters: int

    @property
    def label(self) -> str:
        """As the tree shows it."""
        what = self.cast or "kept"
        return f"{html(self.path[-1])}<br>{html(what)}{f' · {self.count}' if self.count > 1 else ''}"


def coverage_tree(layers: Sequence[Layer], *, dark: bool) -> go.Figure:
    """Areas are parameters; coloured by tile where they were cast, grey where they were kept. A click zooms in."""
    leaves, total = list(leaves_of(layers)), sum(layer.rows * layer.cols for layer in layers)
    ids, labels, parents, values, colours, hovers = ([ROOT], ["all weights"], [""], [total], [BRANCH], [""])
    for path in branches(leaves):
        inside = [leaf for leaf in leaves if leaf.path[: len(path)] == path]
        ids.append(html("/".join((ROOT, *path))))
        labels.append(html(path[-1]))
        parents.append(html("/".join((ROOT, *path[:-1]))))
        values.append(sum(leaf.parameters for leaf in inside))
        colours.append(BRANCH)
        hovers.append(f"{html('.'.join(path))}: {_amount(values[-1], total)}")
    for leaf in leaves:
        ids.append(html("/".join((ROOT, *leaf.path, leaf.cast, leaf.reason))))
        labels.append(leaf.label)
        parents.append(html("/".join((ROOT, *leaf.path[:-1]))))
        values.append(leaf.parameters)
        colours.append(_colour(leaf.cast))
        hovers.append(_hover(leaf, total))
    figure = go.Figure(
        go.Treemap(
            ids=ids,
            labels=labels,
            parents=parents,
            values=values,
            branchvalues="total",
            marker={"colors": colours},
            hovertext=hovers,
            hoverinfo="text",
            sort=False,
            tiling={"pad": 2},
            textfont={"size": 13, "color": [INKS[dark] if colour == BRANCH else _over(colour) for colour in colours]},
        )
    )
    return dressed(figure, PIXELS, top=10, bottom=10)


def stored(layers: Sequence[Layer], parameters: int) -> list[Layer]:
    """The layers without a tied head, which repeats the embedding: the others add up to `parameters`."""
    extra = sum(layer.rows * layer.cols for layer in layers) - parameters
    twins = [layer for layer in layers if not layer.cast and layer.rows * layer.cols == extra]
    return [layer for layer in layers if len(twins) < 2 or layer is not twins[-1]]


def leaves_of(layers: Sequence[Layer]) -> Iterator[TreeLeaf]:
    """Weights of the same name in several blocks, merged, in the model's order."""
    alike: dict[tuple[tuple[str, ...], str, str, str], list[Layer]] = {}
    for layer in layers:
        path = tuple(part for part in layer.name.split(".") if not part.isdigit())
        alike.setdefault((path, layer.cast, layer.backend, layer.reason), []).append(layer)
    for (path, cast, backend, reason), some in alike.items():
        yield TreeLeaf(path, cast, backend, reason, len(some), sum(layer.rows * layer.cols for layer in some))


def branches(leaves: Sequence[TreeLeaf]) -> list[tuple[str, ...]]:
    """The modules that contain others, each after its parent."""
    return list(dict.fromkeys(leaf.path[:depth] for leaf in leaves for depth in range(1, len(leaf.path))))


def _colour(cast: str) -> str:
    """By the cast's tile; grey where nothing was cast, or the cast is of a version that knows more."""
    try:
        return tile_colour(parse_cast(cast).tile.name) if cast else GREY
    except InvalidChoice:
        return GREY


def _over(colour: str) -> str:
    """Black or white, whichever reads better over a colour (WCAG 2.2's relative luminance)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def _amount(parameters: float, total: int) -> str:
    return f"{three(parameters / 1e6)} million parameters, {100 * parameters / total:.1f} %"


def _hover(leaf: TreeLeaf, total: int) -> str:
    what = f"{leaf.cast}, {leaf.backend}" if leaf.cast else f"kept: {leaf.reason}"
    return f"{html('.'.join(leaf.path))}: {leaf.count} × {html(what)}<br>{_amount(leaf.parameters, total)}"
