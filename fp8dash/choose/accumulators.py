"""How a tensor core adds up FP8 products: the running sum's width and when it is promoted. Values only: no torch.

What quant/accumulate.py does with them is a simulation: no kernel is run. Parameters: MMA-Sim (arXiv 2511.10909),
found independently in arXiv 2512.07004.
"""

from dataclasses import dataclass

from fp8dash.errors import InvalidChoice


@dataclass(frozen=True, slots=True)
class Accumulator:
    """The products added in one step, the bits kept of them and of their sum, and the promotion to float32."""

    name: str
    group: int  # products along K aligned and added at once; 0 spans K: the exact sum, rounded once
    fraction_bits: int  # kept of each aligned product and of the running sum; the rest is cut off, toward zero
    result: int  # fraction bits the running sum is stored with; the rest is cut off, toward zero
    promote: int  # K after which the running sum is added to a float32 register and starts anew; 0 is never
    meaning: str


FP32 = Accumulator("fp32", 0, 52, 23, 0, "simulated exact sum, rounded once to float32: the reference")
HOPPER = Accumulator(
    "hopper", 32, 13, 13, 0, "simulated Hopper wgmma, FP22 throughout (use_fast_accum): arXiv 2505.09343 section 3.1.1"
)
HOPPER_512 = Accumulator("hopper-512", 32, 13, 13, 512, "simulated Hopper wgmma, to float32 every 512 of K")
HOPPER_128 = Accumulator(
    "hopper-128", 32, 13, 13, 128, "simulated Hopper wgmma, to float32 every 128 of K: arXiv 2412.19437 section 3.3.2"
)
HOPPER_64 = Accumulator("hopper-64", 32, 13, 13, 64, "simulated Hopper wgmma, to float32 every 64 of K")
ADA = Accumulator("ada", 16, 13, 13, 0, "simulated Ada mma, FP22 throughout: arXiv 2411.10958 section 3.4, 2511.10909")
BLACKWELL = Accumulator(
    "blackwell", 32, 25, 23, 0, "simulated Blackwell tcgen05, 25 bits aligned, float32 kept: arXiv 2511.10909"
)

ACCUMULATORS = {a.name: a for a in (FP32, HOPPER, HOPPER_512, HOPPER_128, HOPPER_64, ADA, BLACKWELL)}


def parse_accumulator(text: str) -> Accumulator:
    """The accumulator of a name; raises InvalidChoice.

    >>> parse_accumulator("hopper-128").promote
    128
    """
    if text not in ACCUMULATORS:
        raise InvalidChoice(f"“{text}” is not an accumulator: choose one of {', '.join(ACCUMULATORS)}.")
    return ACCUMULATORS[text]
