"""How a recipe is served: what to type for each engine, or why the engine lacks it. Values only: no torch."""

from dataclasses import dataclass
from shlex import quote

from fp8dash.choose.casts import KvCast
from fp8dash.choose.formats import E4M3FN, E5M2
from fp8dash.choose.models.checkpoint import refuse_no_checkpoint
from fp8dash.choose.models.hub_id import HubId, hub_id
from fp8dash.choose.presets import PRESETS, preset_of
from fp8dash.choose.recipe import Recipe
from fp8dash.errors import InvalidChoice

CHECKPOINT = "CHECKPOINT"  # placeholder for the exported folder until there is one
SCHEMES = {  # presets as llm-compressor names them; names that hide another scheme are left out
    "FP8": "FP8", "FP8_DYNAMIC": "FP8_DYNAMIC", "FP8_BLOCK": "FP8_BLOCK", "INT8": "INT8", "W4A16": "W4A16",
    "MXFP8_ONEBIT": "MXFP8", "NVFP4": "NVFP4", "MXFP4": "MXFP4",
}  # fmt: skip
QFORMATS = {"FP8": "fp8", "FP8_DYNAMIC": "fp8_per_channel_per_token", "NVFP4": "nvfp4", "W4A16": "int4_awq"}  # ModelOpt


@dataclass(frozen=True, slots=True)
class Deployment:
    """One way to serve a recipe: shell or Python text to copy; empty where `note` says why there is none."""

    engine: str
    text: str
    language: str = "bash"
    note: str = ""


def deployments(recipe: Recipe, model: str, checkpoint: str | None) -> tuple[Deployment, ...]:
    """What to type for vLLM, SGLang, llm-compressor and TensorRT-LLM, for a model and its exported checkpoint.

    >>> from fp8dash.choose.recipe import parse_recipe
    >>> deployments(parse_recipe("kv=e4m3fn/tensor"), "org/name", None)[0].text
    'vllm serve org/name --kv-cache-dtype fp8_e4m3'
    >>> deployments(parse_recipe("kv=e4m3fn/tensor"), "org/name@v1", None)[0].text
    'vllm serve org/name --revision v1 --kv-cache-dtype fp8_e4m3'
    >>> deployments(parse_recipe("stored=org/name-FP8"), "org/name", None)[0].text
    'vllm serve org/name-FP8'
    """
    if recipe.stored:
        served = _original(recipe.stored)
        engines = (("vLLM", "vllm serve"), ("SGLang", "python -m sglang.launch_server --model-path"))
        return tuple(_served(engine, command, served, recipe.kv, "") for engine, command in engines)
    why = _why_no_checkpoint(recipe)
    served = _original(model) if not recipe.casts_linears else quote(checkpoint or CHECKPOINT)
    return (
        _served("vLLM", "vllm serve", served, recipe.kv, why),
        _served("SGLang", "python -m sglang.launch_server --model-path", served, recipe.kv, why),
        _llm_compressor(recipe, model),
        _tensorrt_llm(recipe, model),
    )


def _original(model: str) -> str:
    """The model as engines take it: a revision of the Hub is an option of its own."""
    named = hub_id(model)
    return f"{named.name} --revision {named.revision}" if named and named.revision else quote(model)


def _why_no_checkpoint(recipe: Recipe) -> str:
    """Why no checkpoint can hold the recipe; empty where one can, or where none is needed."""
    if not recipe.casts_linears and not recipe.attention:
        return ""
    try:
        refuse_no_checkpoint(recipe)
    except InvalidChoice as error:
        return str(error)
    return ""


def _served(engine: str, command: str, served: str, kv: KvCast | None, why: str) -> Deployment:
    if why:
        return Deployment(engine, "", note=why)
    if kv and kv.format not in (E4M3FN, E5M2):
        return Deployment(
            engine, "", note=f"{engine}'s cache takes FP8, not {kv.format.name}; closest alternative: kv=e4m3fn/tensor."
        )
    flag = f" --kv-cache-dtype {'fp8_e4m3' if kv.format == E4M3FN else 'fp8_e5m2'}" if kv else ""
    return Deployment(engine, f"{command} {served}{flag}", note=_on_kv(kv))


def _on_kv(kv: KvCast | None) -> str:
    if kv is None or kv.scale == "static":
        return ""
    return "The engine's cache has one static scale per layer, 1.0 if the checkpoint has none: measure kv=…/static."


def _llm_compressor(recipe: Recipe, model: str) -> Deployment:
    name = next((n for n in SCHEMES if PRESETS[n].recipe == recipe), None)
    if name is None:
        note = "None of its presets has these bits and rules; the exported checkpoint is in its format anyway."
        return Deployment("llm-compressor", "", "python", note)
    named = hub_id(model) or HubId(model)
    name_and_revision = f"{named.name!r}" + (f", model_revision={named.revision!r}" if named.revision else "")
    data = ", dataset=CALIBRATION_DATA" if name in ("FP8", "NVFP4") else ""
    text = (
        "from llmcompressor import oneshot\n"
        "from llmcompressor.modifiers.quantization import QuantizationModifier\n\n"
        f'recipe = QuantizationModifier(targets="Linear", scheme="{SCHEMES[name]}", ignore=["lm_head"])\n'
        f"oneshot(model={name_and_revision}, recipe=recipe{data})\n"
    )
    return Deployment("llm-compressor", text, "python")


def _tensorrt_llm(recipe: Recipe, model: str) -> Deployment:
    name = preset_of(recipe)
    if name not in QFORMATS or name is None:
        note = "Reads ModelOpt checkpoints, but ModelOpt's command line has no name for this recipe."
        return Deployment("TensorRT-LLM", "", note=note)
    named = hub_id(model)
    if named and named.revision:
        return Deployment(
            "TensorRT-LLM", "", note=f"hf_ptq.py takes no revision: download {model}, and give its folder."
        )
    text = f"python hf_ptq.py --pyt_ckpt_path {quote(model)} --qformat {QFORMATS[name]} --export_path {CHECKPOINT}"
    note = "AWQ instead of round to nearest: its weights differ from those measured here." if name == "W4A16" else ""
    return Deployment("TensorRT-LLM", f"{text}\ntrtllm-serve {CHECKPOINT}", note=note)
