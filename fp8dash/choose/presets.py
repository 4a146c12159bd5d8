"""Recipes named as llm-compressor, torchao or vLLM name them. Values only: no torch.

Two libraries may use one name for different schemes: a preset's text says which tile, rule and guard is meant.
"""

from dataclasses import dataclass

from fp8dash.choose.recipe import BASELINE_TEXT, Recipe, parse_recipe
from fp8dash.errors import InvalidChoice


@dataclass(frozen=True, slots=True)
class Preset:
    """A recipe with a name, a line on what it is for, and its spelling elsewhere."""

    name: str
    text: str
    summary: str
    called: tuple[tuple[str, str], ...] = ()  # (library, its name for it)
    everyday: bool = True  # offered first

    @property
    def recipe(self) -> Recipe:
        """The recipe this name stands for."""
        return parse_recipe(self.text)


_RARER: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "FP8",
        "w=e4m3fn/tensor a=e4m3fn/tensor/static",
        "One scale per tensor, the activations' from calibration text: no amax at run time.",
        (
            ("llm-compressor", "FP8"),
            ("torchao", "Float8StaticActivationFloat8WeightConfig"),
            ("ModelOpt", "FP8_DEFAULT_CFG"),
        ),
    ),
    (
        "FP8_CHANNEL_TENSOR",
        "w=e4m3fn/row a=e4m3fn/tensor",
        "A scale per output channel, one for the activations: often called vLLM's default, but no library's preset.",
        (),
    ),
    (
        "FP8_BLOCK_UE8M0",
        "w=e4m3fn/128x128/pow2 a=e4m3fn/1x128/pow2",
        "FP8_BLOCK with power-of-two scales, as Blackwell kernels expect them.",
        (("Transformer Engine", "Float8BlockScaling"), ("DeepGEMM", "SM100, UE8M0"), ("DeepSeek", "V3.1")),
    ),
    (
        "DEEPSEEK_V3",
        "w=e4m3fn/128x128/deepgemm a=e4m3fn/1x128/deepgemm",
        "FP8_BLOCK with DeepSeek's floor of 1e-4 under every amax.",
        (("DeepSeek-V3", "act_quant, weight_scale_inv"), ("DeepGEMM", "per_token_cast_to_fp8")),
    ),
    (
        "TE_CURRENT",
        "w=e4m3fn/tensor/te a=e4m3fn/tensor/te",
        "Transformer Engine's current scaling, forward.",
        (("Transformer Engine", "Float8CurrentScaling"),),
    ),
    (
        "TE_DELAYED",
        "w=e4m3fn/tensor/te a=e4m3fn/tensor/te/delayed",
        "Transformer Engine's delayed scaling, forward: scales from the largest amax of 1,024 earlier passes.",
        (("Transformer Engine", "DelayedScaling"),),
    ),
    (
        "FP8_FNUZ",
        "w=e4m3fnuz/row a=e4m3fnuz/row",
        "What an MI300X multiplies: E4M3 up to 240, one NaN, no minus zero.",
        (("Quark", "ptpc_fp8 on MI300"),),
    ),
    (
        "FP8_UNIT",
        "w=e4m3fn/tensor/unit a=e4m3fn/tensor/unit",
        "No scales at all: for models trained at unit variance.",
        (),
    ),
    *(
        (
            f"MXFP8_{rule.upper()}",
            f"w=e4m3fn/1x32/{rule} a=e4m3fn/1x32/{rule}",
            f"MXFP8 with {whose}.",
            ((library, theirs),),
        )
        for rule, whose, library, theirs in (
            ("floor", "OCP's own rule, which clips the largest values of a sixth of the blocks", "torchao", "FLOOR"),
            ("ceil", "exponents rounded up", "torchao", "CEIL"),
            ("even", "exponents rounded to even", "torchao", "EVEN"),
            ("onebit", "amax rounded at one mantissa bit", "compressed-tensors", "MXFP8"),
        )
    ),
    (
        "MXFP6_E2M3",
        "w=e2m3/1x32/even a=e2m3/1x32/even",
        "Six bits: the MXFP6 format with more precision.",
        (("Quark", "mxfp6_e2m3"), ("ModelOpt", "MXFP6_DEFAULT_CFG")),
    ),
    (
        "MXFP6_E3M2",
        "w=e3m2/1x32/even a=e3m2/1x32/even",
        "Six bits: the MXFP6 format with more range.",
        (("Quark", "mxfp6_e3m2"),),
    ),
    (
        "MXFP4",
        "w=e2m1/1x32/even a=e2m1/1x32/even",
        "Four bits, a power-of-two scale per 32 elements.",
        (("llm-compressor", "MXFP4"), ("Quark", "mxfp4")),
    ),
    (
        "KV_FP8_STATIC",
        "kv=e4m3fn/tensor/static",
        "The KV cache with one calibrated scale per layer, as FP8 checkpoints store it.",
        (
            ("compressed-tensors", "kv_cache_scheme, dynamic false"),
            ("vLLM", "--kv-cache-dtype fp8 with k_scale, v_scale"),
        ),
    ),
    (
        "MOSS",
        "w=e4m3fn/1x32/moss a=e4m3fn/1x32/moss",
        "Two levels of scales: a power of two per 32 elements, one float32 per tensor (arXiv 2511.05811).",
        (),
    ),
)

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("BF16", BASELINE_TEXT, "Nothing is cast: the baseline for every other run."),
        Preset(
            "FP8_TENSOR",
            "w=e4m3fn/tensor a=e4m3fn/tensor",
            "One scale per tensor; the activations' are made at run time.",
            (
                ("vLLM", 'quantization="fp8"'),
                ("torchao", "PerTensor()"),
                ("Transformer Engine", "Float8CurrentScaling"),
            ),
        ),
        Preset(
            "FP8_DYNAMIC",
            "w=e4m3fn/row a=e4m3fn/row",
            "A scale per output channel and per token: the usual FP8 checkpoint.",
            (("llm-compressor", "FP8_DYNAMIC"), ("torchao", "PerRow()"), ("Quark", "ptpc_fp8")),
        ),
        Preset(
            "FP8_BLOCK",
            "w=e4m3fn/128x128 a=e4m3fn/1x128",
            "DeepSeek-V3's tiles: 128×128 weight blocks, 1×128 activation groups, float32 scales.",
            (
                ("llm-compressor", "FP8_BLOCK"),
                ("transformers", "FineGrainedFP8Config"),
                ("DeepGEMM", "fp8_gemm_nt"),
            ),
        ),
        Preset(
            "MXFP8",
            "w=e4m3fn/1x32/rceil a=e4m3fn/1x32/rceil",
            "A power-of-two scale per 32 elements, rounded up; tensor cores from Blackwell on.",
            (("llm-compressor", "MXFP8"), ("Transformer Engine", "MXFP8BlockScaling"), ("torchao", "RCEIL")),
        ),
        Preset(
            "FP8_E5M2",
            "w=e5m2/row a=e5m2/row",
            "More range, half the precision: E5M2 per channel and token.",
            (("cuBLASLt", "refused: E5M2 × E5M2"),),
        ),
        Preset(
            "INT8",
            "w=int8/row a=int8/row",
            "W8A8 integers per channel and token: more accurate than FP8 unless there are outliers.",
            (("llm-compressor", "W8A8"), ("torchao", "Int8DynamicActivationInt8WeightConfig")),
        ),
        Preset(
            "INT8_TENSOR",
            "w=int8/tensor a=int8/tensor",
            "A control: one INT8 scale per tensor, which outliers ruin.",
        ),
        Preset(
            "KV_FP8",
            "kv=e4m3fn/tensor",
            "The KV cache alone, in half the memory: longer contexts, larger batches.",
            (
                ("vLLM", "--kv-cache-dtype fp8"),
                ("compressed-tensors", "kv_cache_scheme"),
                ("SGLang", "--kv-cache-dtype fp8_e4m3"),
                ("ModelOpt", "FP8_KV_CFG"),
            ),
        ),
        Preset(
            "FP8_W8A16",
            "w=e4m3fn/row",
            "Weights only: for cards without FP8 tensor cores.",
            (("torchao", "Float8WeightOnlyConfig"), ("vLLM", "Marlin on Ampere")),
        ),
        Preset(
            "W4A16",
            "w=int4/1x128/ct",
            "Four-bit weights in groups of 128, rounded to nearest.",
            (("llm-compressor", "W4A16"), ("Quark", "int4_wo_128")),
        ),
        Preset(
            "NVFP4",
            "w=e2m1/1x16/nvfp4 a=e2m1/1x16/nvfp4",
            "Four bits, an E4M3 scale per 16 elements: Blackwell.",
            (("llm-compressor", "NVFP4"), ("Transformer Engine", "NVFP4BlockScaling")),
        ),
        *(Preset(*fields, everyday=False) for fields in _RARER),
    )
}

DEMO_STUDY = (
    "BF16",
    "FP8_TENSOR",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "MXFP8",
    "FP8_E5M2",
    "INT8",
    "INT8_TENSOR",
)


def preset_of(recipe: Recipe) -> str | None:
    """The preset's name for this recipe, or None where it is custom.

    >>> preset_of(parse_recipe("a=e4m3fn/token w=e4m3fn/channel"))
    'FP8_DYNAMIC'
    """
    return next((name for name, preset in PRESETS.items() if preset.recipe == recipe), None)


def name_of(recipe: Recipe) -> str | None:
    """What people call a recipe: its preset, or the checkpoint that stores it; None where only its text says it.

    >>> name_of(Recipe(stored="/models/Qwen3-8B-FP8")), name_of(Recipe(stored="org/name@v1"))
    ('Qwen3-8B-FP8 as stored', 'name@v1 as stored')
    """
    last = recipe.stored.rstrip("/").rpartition("/")[2]
    return f"{last} as stored" if last else preset_of(recipe)


def recipe_from(text: str) -> Recipe:
    """A recipe from a preset's name or from the text form; raises InvalidChoice.

    >>> recipe_from("fp8_block").text
    'w=e4m3fn/128x128 a=e4m3fn/1x128'
    """
    preset = PRESETS.get(text.strip().upper())
    if preset:
        return preset.recipe
    try:
        return parse_recipe(text)
    except InvalidChoice as error:
        raise InvalidChoice(f"{error} Presets: {', '.join(PRESETS)}.") from None
