"""How the screen writes numbers, times and what users typed. No streamlit, no database."""

import math
import re
from datetime import datetime, tzinfo
from pathlib import PurePath

from fp8dash.choose.records import Request
from fp8dash.report import Metric, Standing

DASH = "—"
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MARKDOWN = re.compile(r"([!-/:-@\[-`{-~])")
APART = re.compile(r"(?<=:)(?=[\w+/])|(?<=[-<>~=])(?=[-<>=])|(?<=\w)(?=@)|(?<=www)(?=\.)")  # shortcodes, arrows, links
JOINER = "\u2060"  # zero wide


def plain(text: str) -> str:
    r"""Text that Markdown shows letter for letter: nothing in it becomes bold, a link, a colour, a formula or HTML.

    >>> plain("**x**")
    '\\*\\*x\\*\\*'
    """
    text = " ".join(text.split())
    text = APART.sub(JOINER, text)
    return MARKDOWN.sub(r"\\\1", text)


def three(value: float | None) -> str:
    """Three significant digits, zeros kept, a proper minus sign.

    >>> three(0.0172), three(-0.5), three(162.9), three(1234.0), three(None), three(0.0), three(1.837e-6)
    ('0.0172', '−0.500', '163', '1,230', '—', '0', '1.84×10⁻⁶')
    """
    if value is None or math.isnan(value):
        return DASH
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    text = f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:#.3g}".rstrip(".")
    return powers(text).replace("-", "−")


def powers(text: str) -> str:
    """A number's text with its exponent as a power of ten.

    >>> powers("2e-05"), powers("0.5")
    ('2×10⁻⁵', '0.5')
    """
    return re.sub(r"e([+-]\d+)", lambda found: "×10" + str(int(found[1])).translate(RAISED), text)


def signed(value: float | None) -> str:
    """Three significant digits with their sign.

    >>> signed(0.0124), signed(-0.0124)
    ('+0.0124', '−0.0124')
    """
    return f"+{three(value)}" if value is not None and value > 0 else three(value)


def shown(metric: Metric, value: float | None) -> str:
    """A metric's value without its unit, alike in every row of a column.

    >>> from fp8dash.report import METRICS
    >>> shown(METRICS["top1"], 0.91), shown(METRICS["model_bytes"], 162.9e6), shown(METRICS["kld"], 0.03)
    ('0.910', '163', '0.0300')
    """
    if value is None or not math.isfinite(value):
        return three(value)
    if metric.name == "model_bytes":
        return three(value / 1e6)
    if metric.name in ("top1", "needle", "coverage"):
        return f"{value:.3f}"
    if metric.name in ("gemm_speedup", "bits_per_weight"):
        return f"{value:.2f}"
    if metric.name == "ppl":  # three digits hide what quantization changes
        return f"{value:#.4g}".rstrip(".")
    return signed(value) if metric.name == "ln_ppl_diff" else three(value)


def heading(metric: Metric) -> str:
    """A column's title with its unit.

    >>> from fp8dash.report import METRICS
    >>> heading(METRICS["kld"]), heading(METRICS["model_bytes"])
    ('KLD (nats)', 'Size (MB)')
    """
    unit = {"model_bytes": "MB", "bits_per_weight": ""}.get(metric.name, "" if metric.unit == "share" else metric.unit)
    return f"{metric.title} ({unit})" if unit else metric.title


def interval(row: Standing) -> str:
    """The 95 % interval of Δ ln PPL, or nothing."""
    if row.ln_ppl_diff_low is None or row.ln_ppl_diff_high is None:
        return ""
    return f"[{signed(row.ln_ppl_diff_low)}, {signed(row.ln_ppl_diff_high)}]"


def lasted(seconds: float | None) -> str:
    """A duration.

    >>> lasted(4.84), lasted(31.4), lasted(98.0), lasted(4000), lasted(None)
    ('4.8 s', '31 s', '1 min 38 s', '1 h 06 min', '—')
    """
    if seconds is None:
        return DASH
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def moment(when: datetime | str | None, zone: tzinfo | None = None) -> str:
    """A moment in the reader's zone.

    >>> from datetime import UTC
    >>> moment("2026-05-04T09:08:07+00:00", UTC)
    '2026-05-04 09:08'
    """
    if not when:
        return DASH
    found = datetime.fromisoformat(when) if isinstance(when, str) else when
    return found.astimezone(zone).strftime("%Y-%m-%d %H:%M")


def short(name: str) -> str:
    """A path's last part; any other name as it is.

    >>> short("/data/wikitext2.txt"), short("org/model"), short("demo")
    ('wikitext2.txt', 'org/model', 'demo')
    """
    return PurePath(name).name if name.startswith(("/", "~", ".")) or PurePath(name).is_absolute() else name


def setting(request: Request) -> str:
    """How a request measures, in a few words."""
    return f"{request.windows} windows of {request.window_length} tokens"


def listed(names: list[str]) -> str:
    """Names as people say them.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def many(count: int, noun: str) -> str:
    """A count with its noun.

    >>> many(1, "run"), many(3, "run")
    ('1 run', '3 runs')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
