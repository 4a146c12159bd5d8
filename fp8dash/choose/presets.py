"""Named recipes, by the ecosystem's names, with what each library calls them. Values only: no torch."""

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

    @property
    def recipe(self) -> Recipe:
        """The recipe this name stands for."""
        return parse_recipe(self.text)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("BF16", BASELINE_TEXT, "Nothing is cast: what every other run is compared with."),
        Preset(
            "FP8_TENSOR",
            "w=e4m3fn/tensor a=e4m3fn/tensor",
            "One scale per tensor, activations scaled as they come.",
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
            "W8A8 integers per channel and token: finer than FP8 until outliers come.",
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
            "Keys and values alone, kept in half the memory: longer contexts, larger batches.",
            (
                ("vLLM", "--kv-cache-dtype fp8"),
                ("compressed-tensors", "kv_cache_scheme"),
                ("SGLang", "--kv-cache-dtype fp8_e4m3"),
                ("ModelOpt", "FP8_KV_CFG"),
            ),
        ),
    )
}

DEMO_STUDY = (
    "BF16", "FP8_TENSOR", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "FP8_E5M2", "INT8", "INT8_TENSOR",
)  # fmt: skip


def preset_of(recipe: Recipe) -> str | None:
    """The preset's name for this recipe, or None where it is custom.

    >>> preset_of(parse_recipe("a=e4m3fn/token w=e4m3fn/channel"))
    'FP8_DYNAMIC'
    """
    return next((name for name, preset in PRESETS.items() if preset.recipe == recipe), None)


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
