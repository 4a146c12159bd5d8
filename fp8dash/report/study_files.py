"""A write-up as a document: Markdown, self-contained HTML, CSV. What people typed is escaped here."""

import html
import math
import re
from collections.abc import Callable

from fp8dash.report import export
from fp8dash.report.numbers import three
from fp8dash.report.study import Bar, WriteUp

SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$&@]|:(?=[/\w])|(?<=www)\.)")  # what Markdown or GitHub would take for more
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title} · fp8dash</title>
<style>
:root {{color-scheme: light dark; --ink: light-dark(#2b3b43, #d3dee1); --accent: light-dark(#0f6b6b, #45b5aa);}}
body {{font: 16px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1200px; margin: 2rem auto; padding: 0 1rem;}}
h1 {{font-size: 1.5rem;}} h2 {{font-size: 1.1rem;}} .asked {{font-size: 1.1rem;}} footer {{font-size: 0.85rem;}}
table {{border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto;
  font-size: 0.85rem;}}
th, td {{padding: 0.3rem 0.7rem; border-bottom: 1px solid #8888; text-align: right; white-space: nowrap;}}
th:first-child, td:first-child {{text-align: left;}}
svg {{max-width: 800px; font-size: 13px;}} svg text {{fill: var(--ink);}} svg circle {{fill: var(--accent);}}
svg path {{stroke: var(--accent); stroke-width: 1.5; fill: none;}}
</style></head><body>
{body}
</body></html>
"""


def to_markdown(study: WriteUp) -> str:
    """A document to paste into a review: nothing that users typed becomes markup."""
    lines = [f"# {_marked(study.title)}", "", f"**{_marked(study.headline)}.**", ""]
    lines += [_marked(study.why), ""] if study.why else []
    lines.append("| " + " | ".join(map(_marked, study.table.titles)) + " |")
    lines.append("|:--|" + "--:|" * (len(study.table.titles) - 1))
    lines += ["| " + " | ".join(map(_marked, row)) + " |" for row in study.table.rows]
    for title, sentences in (("Why", study.reasons), ("What cannot be said", study.limits)):
        if sentences:
            lines += ["", f"## {title}", "", *(f"- {_marked(sentence)}" for sentence in sentences)]
    return "\n".join([*lines, "", _marked(study.method), ""])


def to_html(study: WriteUp) -> str:
    """One self-contained page: no script, no request, its figure drawn in it."""
    head = "".join(f"<th>{_safe(title)}</th>" for title in study.table.titles)
    body = "".join("<tr>" + "".join(f"<td>{_safe(cell)}</td>" for cell in row) + "</tr>" for row in study.table.rows)
    parts = [f"<h1>{_safe(study.headline)}</h1>", f'<p class="asked">{_safe(study.title)} {_safe(study.why)}</p>']
    parts += [_svg(study)] if study.bars else []
    parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    for title, sentences in (("Why", study.reasons), ("What cannot be said", study.limits)):
        if sentences:
            items = "".join(f"<li>{_safe(sentence)}</li>" for sentence in sentences)
            parts.append(f"<h2>{title}</h2><ul>{items}</ul>")
    parts.append(f"<footer>{_safe(study.method)}</footer>")
    return PAGE.format(title=_safe(study.title), body="\n".join(parts))


def to_csv(study: WriteUp) -> str:
    """The runs with every number, as the leaderboard's CSV has them."""
    return export.to_csv(study.runs)


def _marked(text: str) -> str:
    r"""Text that Markdown shows as it is.

    >>> _marked("*.down_proj | <b>")
    '\\*.down\\_proj \\| \\<b\\>'
    """
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _safe(text: str) -> str:
    return html.escape(" ".join(text.split()))


def _svg(study: WriteUp) -> str:
    """The numbers as dots on a log axis, each with its interval, its name to the left and its value to the right."""
    bars = [bar for bar in study.bars if bar.value > 0]
    ends = [end for bar in bars for end in (bar.value, bar.low, bar.high) if end is not None and end > 0]
    if not ends:
        return ""
    first, span = math.log(min(ends)), math.log(max(ends)) - math.log(min(ends)) or 1.0

    def place(value: float) -> float:
        return 300 + 400 * (math.log(max(value, min(ends))) - first) / span

    height = 26 * len(bars) + 30
    lines = [_mark(bar, 26 * index + 13, place) for index, bar in enumerate(bars)]
    axis = f'<text x="300" y="{height - 4}">{_safe(study.axis)}, log, lower is better</text>'
    return f'<svg viewBox="0 0 800 {height}" role="img" aria-label="{_safe(study.axis)}">{"".join(lines)}{axis}</svg>'


def _mark(bar: Bar, y: int, place: Callable[[float], float]) -> str:
    """One dot with its name, interval and value."""
    x = end = place(bar.value)
    line = ""
    if bar.low is not None and bar.high is not None:
        low, end = place(bar.low), place(bar.high)
        line = f'<path d="M{low:.1f} {y}H{end:.1f}M{low:.1f} {y - 5}V{y + 5}M{end:.1f} {y - 5}V{y + 5}"/>'
    name = f'<text x="280" y="{y + 4}" text-anchor="end">{_safe(_short(bar.label))}</text>'
    value = f'<text x="{end + 10:.1f}" y="{y + 4}">{three(bar.value)}</text>'
    return f'{name}{line}<circle cx="{x:.1f}" cy="{y}" r="5"/>{value}'


def _short(label: str) -> str:
    return label if len(label) <= 40 else f"{label[:39]}…"
