"""The formats page without a browser: what it says, computes and keeps in the URL."""

from itertools import cycle

import pytest

from fp8dash.choose.formats import FORMATS
from fp8dash.choose.scaling import RULES
from fp8dash.ui.words import plain
from tests.ui.drawn import opened, page_text, table_with

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
CAST, SCALES, FACTS = "Cast a few numbers", "Scale rules", "All formats"
XS = ("-0.3", "nan", "-inf", "0", "3e38")


def test_a_tenth_is_told_in_e4m3_and_e5m2_with_its_errors():
    app = opened("formats")
    assert app.title[0].value == plain("0.1 becomes 0.1015625 in E4M3FN (0x1D): off by +1.56 %")
    assert plain("E5M2 has 0.09375 (0x2E), off by −6.25 %") in page_text(app)
    assert "up with probability 80.0 %" in page_text(app)


def test_a_clicked_bit_writes_the_code_and_says_its_class():
    app = opened("formats", number="0x7E")
    assert app.metric[0].value == "448" and app.metric[0].label == "0x7E · normal"
    app.button("formats_bit_mantissa_7").click().run()
    assert app.text_input("number").value == "0x7F"
    assert app.title[0].value == plain("0x7F is NaN in E4M3FN")
    app.button("formats_bit_exponent_1").click().run()
    assert app.text_input("number").value == "0x3F" and app.metric[0].value == "1.875"


def test_a_byte_read_as_fnuz_is_worth_half():
    assert opened("formats", number="0x7E", format="E4M3FNUZ").metric[0].value == "224"


@pytest.mark.parametrize(("name", "x"), list(zip(FORMATS, cycle(XS), strict=False)))
def test_every_format_shows_every_sort_of_number(name, x):
    app = opened("formats", number=x, format=name.upper())
    assert not app.exception and not app.error
    assert len(app.button) == FORMATS[name].bits


@pytest.mark.parametrize(
    ("view", "query"),
    [("One number", {"number": "<b>"}), ("One number", {"number": "0x1ff"}), (CAST, {"numbers": "1 two"}),
     (CAST, {"numbers": "1 inf"}), (CAST, {"numbers": "1 " * 300}), (CAST, {"tile": "0x3"}), (SCALES, {"amax": "-1"}),
     (SCALES, {"amax": "1e40"})],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(view, query):
    app = opened("formats", view=view, **query)
    assert len(app.error) == 1 and not app.exception
    assert app.title[0].value == "This input cannot be cast"


def test_numbers_are_cast_by_the_tile_rule_and_format_of_the_link():
    app = opened("formats", view=CAST, numbers="1 2 3 100\n-4 5 6 7", f="INT8", tile="1x4", rule="float32")
    cast = table_with(app, "What happened")
    assert list(cast["Code"][:4]) == ["0x01", "0x03", "0x04", "0x7F"]
    assert cast["Scale"].nunique() == 2 and cast["Becomes"][3] == pytest.approx(100)
    assert app.title[0].value.startswith(plain("INT8 by 1x4: "))
    assert "2 scales" in page_text(app) and "**INT8**" in page_text(app)


def test_clipped_and_flushed_numbers_are_counted():
    app = opened("formats", view=CAST, numbers="500 0.0001 0 1", f="E4M3FN", tile="tensor", rule="unit")
    assert "1 clipped and 1 flushed to zero of 4 numbers" in app.title[0].value
    assert list(table_with(app, "What happened")["What happened"]) == ["clipped", "flushed to zero", "exact", "exact"]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_casts_in_every_format(rule):
    app = opened("formats", view=CAST, rule=rule)
    assert not app.exception and not app.error


@pytest.mark.parametrize(
    ("amax", "sentence"),
    [("448", "no MX rule clips it, ceil and onebit leave half the range unused"), ("500", "floor clips it"),
     ("470", "floor and even clip it")],
)  # fmt: skip
def test_the_mx_rules_are_compared_on_an_amax(amax, sentence):
    app = opened("formats", view=SCALES, amax=amax)
    assert sentence in app.title[0].value


def test_the_facts_of_every_format_are_listed():
    app = opened("formats", view=FACTS)
    table = app.markdown[1].value if "Format" in app.markdown[1].value else app.markdown[0].value
    assert all(f"**{name.upper()}**" in table for name in FORMATS)
    assert "| 448 | 2⁻⁶ | 2⁻⁹ | 253 | 2⁻⁴ | 4.46 | 5.36 | 0x7F, 0xFF | none |" in table
    assert "| 57,344 | 2⁻¹⁴ | 2⁻¹⁶ | 247 | 2⁻³ | 8.97 | 9.57 | 0x7D–0x7F, 0xFD–0xFF | 0x7C, 0xFC |" in table
