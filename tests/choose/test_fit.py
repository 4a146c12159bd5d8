"""What does not fit a model that is known beforehand is refused when it is submitted."""

import pytest

from fp8dash.choose.request import Request
from fp8dash.errors import InvalidChoice

FP8 = "w=e4m3fn/row a=e4m3fn/row"
LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize("model", ["demo", LLAMA])
def test_a_pattern_that_matches_nothing_is_refused_at_submit(model):
    with pytest.raises(
        InvalidChoice, match=r"“skip=down_proj” matches no module .*closest alternative: skip=\*\.down_proj\."
    ):
        Request(model=model, recipe=f"{FP8} skip=down_proj").checked()
    with pytest.raises(InvalidChoice, match=r"“w\[\*\.nosuch\]=” matches no module"):
        Request(model=model, recipe=f"{FP8} w[*.nosuch]=bf16").checked()
    assert Request(model=model, recipe=f"{FP8} skip=*.down_proj,lm_head,*norm").checked()
    assert Request(model="an/unknown", recipe=f"{FP8} skip=down_proj").checked(), "its names are not known yet"


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("FP8_BLOCK", "its 576 columns are not a multiple of 128"),
        ("w=int4/1x128/ct", "its 576 columns are not a multiple of 128"),
        (f"{FP8} also=lm_head", "its head is tied to the embedding"),
    ],
)
def test_a_checkpoint_that_nobody_could_load_is_refused_at_submit(recipe, why):
    with pytest.raises(InvalidChoice, match=f"A checkpoint cannot hold .*{why}.*closest alternative: "):
        Request(recipe=recipe, measures=("export",)).checked()
    assert Request(recipe=recipe, measures=("gemm",)).checked()
    assert Request(model=LLAMA, recipe=recipe, measures=("export",)).checked()
