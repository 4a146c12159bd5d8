"""What the form says of a request before it runs."""

from fp8dash.choose.advice import advise_request
from fp8dash.choose.catalog import shape_of
from fp8dash.choose.hardware import Device
from fp8dash.choose.request import Request


def test_a_model_that_does_not_fit_is_said_to_pass_block_by_block():
    shape, request = shape_of("demo"), Request()
    small, large = Device("cuda", "small", (9, 0), 1 << 30), Device("cpu", "CPU", (0, 0), 8 << 30)
    assert not [remark for remark in advise_request(request, shape, large) if "block by block" in remark.text]
    (warning,) = [remark for remark in advise_request(request, shape, small) if "block by block" in remark.text]
    assert warning.level == "warning"
    assert warning.text.startswith("Whole it takes about 1.3 GiB, and small") and warning.text.endswith(
        "gemm, needle out."
    )
    asked = request.but(loading="blocks", measures=("perplexity",))
    (note,) = [remark for remark in advise_request(asked, shape, large) if "block by block" in remark.text]
    assert note.level == "note"
