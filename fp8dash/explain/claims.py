"""Claims about FP8 and what is true of them: the field guide as values. No torch, no database.

Sources are named where each statement was read or computed; what this product's own runs say is in `findings.py`.
"""

from dataclasses import dataclass

HOLDS, PARTLY, FAILS, MEASURE = "holds", "holds in part", "does not hold", "must be measured"
VERDICTS = {
    HOLDS: "true as stated",
    PARTLY: "the direction is right, the number or the reason is not",
    FAILS: "wrong as it is usually stated",
    MEASURE: "depends on the model: measure it",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim, the verdict on it, what is known, and where from."""

    number: int
    statement: str
    verdict: str
    evidence: str
    source: str
    page: str = ""  # where to see it here: "formats" or "planner"
    view: str = ""  # of that page


OFP8, ARITHMETIC = "OCP OFP8 1.0; arXiv 2209.05433, Table 1", "arithmetic"
FORMATS_PAGE, FACTS_VIEW = "formats", "All formats"

_CLAIMS = (
    Claim(
        1,
        "E4M3 reaches 448 and E5M2 57,344; their smallest normal numbers are 2⁻⁶ and 2⁻¹⁴.",
        HOLDS,
        "And their smallest subnormal numbers are 2⁻⁹ and 2⁻¹⁶.",
        OFP8,
        FORMATS_PAGE,
        FACTS_VIEW,
    ),
    Claim(
        2,
        "E4M3 has only one NaN.",
        PARTLY,
        "One for each sign: 0x7F and 0xFF, and no infinity. E5M2 has six NaN codes and two infinities.",
        OFP8,
        FORMATS_PAGE,
        FACTS_VIEW,
    ),
    Claim(
        3,
        "An IEEE-style E4M3 would waste about 1 % of its codes.",
        FAILS,
        "It reserves 16 of 256, 6.25 %. E4M3FN reserves two, for NaN, and so gains the magnitudes 256 to 448.",
        "arXiv 2209.05433, section 3.1",
        FORMATS_PAGE,
        FACTS_VIEW,
    ),
    Claim(
        4,
        "E4M3 and E5M2 span 4.8 and 10.2 decades.",
        FAILS,
        "4.46 and 8.97 decades of normal numbers; 5.36 and 9.57 with subnormals.",
        ARITHMETIC,
        FORMATS_PAGE,
        FACTS_VIEW,
    ),
    Claim(
        5,
        "E5M2 has 256 times the dynamic range of E4M3.",
        PARTLY,
        "256 is the ratio of their smallest normal numbers. Their largest differ by 128, and their whole ranges by "
        "2¹⁵, or 2¹⁴ with subnormals.",
        ARITHMETIC,
        FORMATS_PAGE,
        FACTS_VIEW,
    ),
    Claim(
        6,
        "E4M3 has twice the precision of E5M2.",
        HOLDS,
        "Unit roundoff 2⁻⁴ against 2⁻³: about 6 dB of SQNR.",
        ARITHMETIC,
        FORMATS_PAGE,
    ),
    Claim(
        7,
        "To quantize, compute clip(round(x / s)).",
        FAILS,
        "Rounding to integers turns everything below 0.5 into zero, and above 16 keeps bits that E4M3 does not "
        "have. Clamp first, then round to the nearest code, ties to even.",
        "OCP OFP8 1.0, conversion; checked on every code",
        FORMATS_PAGE,
    ),
    Claim(
        8,
        "MX scales cost about 3 %, 2 bits per element.",
        PARTLY,
        "3.1 % is right: 8 bits for 32 elements are 0.25 bit per element, not 2.",
        "OCP MX 1.0",
    ),
    Claim(
        9,
        "Per-token scales cost about 0.4 %.",
        PARTLY,
        "32/K bits per element: 0.39 % at K = 1,024, but 0.10 % at 4,096.",
        ARITHMETIC,
    ),
    Claim(
        10,
        "The float32 scales of 1×128 activations cost little.",
        PARTLY,
        "3.1 %, as much as MX scales. The scales of 128×128 weight blocks cost 0.024 %.",
        ARITHMETIC,
    ),
    Claim(
        11,
        "Per-tensor FP8 handles outliers poorly; finer scales rescue it.",
        FAILS,
        "True of INT8. E4M3 keeps 31.5 dB on the other values until the outlier reaches some 10⁴ standard deviations; "
        "on ordinary data finer scales gain at most 0.6 dB.",
        "computed: Gaussian bulk with one outlier",
        FORMATS_PAGE,
        "Cast a few numbers",
    ),
    Claim(
        12,
        "Per-channel weights with per-tensor activations are vLLM’s default.",
        FAILS,
        'No library has that preset. vLLM’s quantization="fp8" has one scale per tensor for both, the activations’ '
        "made at run time; the usual checkpoint, FP8_DYNAMIC, has scales per channel and token.",
        "vLLM and compressed-tensors, quant_scheme.py",
    ),
    Claim(
        13,
        "Never quantize lm_head: it is small and very sensitive.",
        MEASURE,
        "It is 6.5 % of Llama-3.1-8B’s parameters but 28 % of Qwen2.5-0.5B’s: keeping it limits what small models "
        "gain.",
        "config.json of both models",
    ),
    Claim(
        14,
        "Embeddings and norms are extremely sensitive.",
        MEASURE,
        "Norms are not matrix products, so casting them gains no speed; embeddings are looked up, so casting them "
        "saves memory only.",
        "model structure",
    ),
    Claim(
        15,
        "Attention’s products must stay in BF16.",
        MEASURE,
        "vLLM’s FP8 cache with FlashAttention-3 casts queries too and multiplies in FP8.",
        "vLLM documentation, quantized KV cache",
    ),
    Claim(
        16,
        "DeepSeek-V3’s FP8 training matched BF16 at 671B.",
        FAILS,
        "The comparison was made at about 16B and 230B parameters: the loss differed by less than 0.25 %. There is no "
        "BF16 run at 671B.",
        "arXiv 2412.19437, section 3.3 and appendix B",
    ),
    Claim(
        17,
        "Hopper adds FP8 products in FP22.",
        HOLDS,
        "Each group of 32 products is aligned and truncated to 13 fraction bits. Promotion to FP32 every 128 products "
        "lowers the error tenfold on data of mixed signs, a hundredfold on data of one sign.",
        "arXiv 2505.09343; microsoft/MMA-Sim; simulated",
    ),
    Claim(
        18,
        "Delayed scaling risks overflow.",
        PARTLY,
        "Casts saturate, so the risk is clipping. It is a training recipe, with a history of 1,024 steps and a margin "
        "of 0.",
        "Transformer Engine, common/recipe",
    ),
    Claim(
        19,
        "FP8 is twice as fast.",
        PARTLY,
        "Two is the ratio of the tensor cores’ peak rates: an upper bound. With the casts included GEMMs reach 1.0 to "
        "1.7×; vLLM on an H100 serves Llama-3.1-8B 1.2× (decode) and 1.5× (prefill) as fast.",
        "FBGEMM pull request 2546; torchao inference.md",
        "planner",
    ),
    Claim(
        20,
        "M, N and K must be multiples of 16.",
        PARTLY,
        "K and N must; M may be any number.",
        "PyTorch ScaledBlas.cpp",
    ),
    Claim(
        21,
        "FP8 costs 0.02 to 0.05 perplexity.",
        MEASURE,
        "Llama-2-7B +0.04; Llama-3.1-8B +1.2 % of word perplexity; Qwen1.5-0.5B +5 %. Small models lose more.",
        "AMD Quark examples; torchao inference.md",
    ),
    Claim(
        22,
        "An FP8 KV cache halves its memory.",
        HOLDS,
        "Llama-3.1-8B: 131,072 to 65,536 bytes per token. Count KV heads, not query heads.",
        "config.json; arithmetic",
        "planner",
        "Requests by context",
    ),
    Claim(
        23,
        "An FP8 KV cache loses no needles.",
        MEASURE,
        "At 128k tokens on Hopper, 91 % fell to 13 %; with the accumulation fixed it was 89 %.",
        "vLLM blog, 22 April 2026",
    ),
    Claim(
        24,
        "MLA with an FP8 cache saves an order of magnitude.",
        PARTLY,
        "MLA alone saves nearly all of that; FP8 adds a factor of two.",
        "DeepSeek-V3’s config.json; arithmetic",
        "planner",
    ),
    Claim(
        25,
        "Ampere runs FP8 slower than BF16.",
        PARTLY,
        "It has no FP8 tensor cores: weights are decoded and multiplied in BF16, which still halves the bytes "
        "read. Ada and later have them.",
        "vLLM, Marlin kernels",
        "planner",
    ),
    Claim(
        26,
        "An MI300X runs the same E4M3.",
        FAILS,
        "It runs FNUZ: up to 240, with minus zero’s code as NaN. An OCP byte read as FNUZ has half its value.",
        "AMD CDNA3; computed",
        FORMATS_PAGE,
    ),
    Claim(
        27,
        "MXFP8 is one format.",
        FAILS,
        "Libraries round the shared exponent differently; OCP’s floor clips 17 % of Gaussian blocks and loses 0.9 "
        "dB to rounding up.",
        "torchao, Transformer Engine, compressed-tensors; computed",
        FORMATS_PAGE,
        "Scale rules",
    ),
    Claim(
        28,
        "Gradients need E5M2.",
        PARTLY,
        "True of its range, where scales are fixed or stale. Under dynamic per-tensor scales E4M3 kept 6 dB more than "
        "E5M2 in all 211 layers of the demo model.",
        "this product’s gradient measurement on SmolLM2-135M; arXiv 2209.05433",
    ),
    Claim(
        29,
        "Unit-variance initialisation makes scales unnecessary.",
        MEASURE,
        "µnit scaling trains 1B to 13B models with static scales; models trained otherwise still need theirs.",
        "arXiv 2502.05967, abstract",
    ),
    Claim(
        30,
        "Two-level microscaling beats one scale per group.",
        MEASURE,
        "36.0 against 32.9 dB in the paper, on its data.",
        "arXiv 2511.05811, second-hand",
    ),
    Claim(
        31,
        "FP8 is more accurate than INT8.",
        PARTLY,
        "On well-scaled data INT8 is the more accurate: 43.8 against 31.8 dB for Gaussian 1×128 blocks. It loses once "
        "outliers widen its steps.",
        "computed",
        FORMATS_PAGE,
        "Cast a few numbers",
    ),
    Claim(
        32,
        "MXFP8 is always better than coarser FP8 scales.",
        FAILS,
        "A float’s relative step does not depend on its scale, so fine tiles gain little, and power-of-two scales lose "
        "some of that again. On Llama-3.1-8B torchao reports word perplexity 7.60 for MXFP8, 7.42 for row scales.",
        "torchao inference.md; computed",
    ),
    Claim(
        33,
        "Power-of-two scales cost accuracy.",
        PARTLY,
        "Rounded up they cost almost nothing in E4M3; it is the floor rule that costs.",
        "computed",
        FORMATS_PAGE,
        "Scale rules",
    ),
    Claim(
        34,
        "A whole tensor’s SQNR tells how much a cast hurts.",
        PARTLY,
        "Not where outliers carry the energy: with 6 of 4,096 columns 60 times larger, E4M3 1×128 shows 39.8 dB "
        "overall and 31.7 dB in the other columns.",
        "computed",
        FORMATS_PAGE,
        "Cast a few numbers",
    ),
)

CLAIMS = {claim.number: claim for claim in _CLAIMS}
