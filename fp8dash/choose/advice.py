"""What an engineer would say about a recipe before it runs. Values only: no torch."""

from dataclasses import dataclass

from fp8dash.choose.casts import KvCast
from fp8dash.choose.catalog import ModelShape
from fp8dash.choose.formats import E5M2, INT8
from fp8dash.choose.hardware import Device, native_path
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.request import Request
from fp8dash.choose.scaling import TENSOR

FEW_WINDOWS = 8
BESIDE_WEIGHTS = 1 << 30  # bytes that a run takes beside a model's weights


@dataclass(frozen=True, slots=True)
class Advice:
    """One remark; `warning` if the run will disappoint, `note` if it is worth knowing."""

    level: str
    text: str


def advise(
    recipe: Recipe, shape: ModelShape | None, device: Device | None, backend: str = "auto"
) -> tuple[Advice, ...]:
    """Remarks on a recipe for a model, a device, either of which may be unknown, and the backend asked for.

    >>> from fp8dash.choose.recipe import parse_recipe
    >>> [a.level for a in advise(parse_recipe("w=int8/tensor a=int8/tensor"), None, None)]
    ['warning']
    """
    remarks = [*_on_casts(recipe), *_on_attention(recipe), *(_on_shape(recipe, shape) if shape else ())]
    if device and recipe.casts_linears and backend != "emulated":  # else nothing is said of kernels: none is asked for
        path = native_path(recipe, 16, 16, device)  # 16: legal for every alignment rule
        if not path.is_native:
            remarks.append(
                Advice(
                    "note",
                    f"On {device.label} this is emulated: {path.reason}. Quality is exact, speed is not.",
                )
            )
        elif device.kind == "cpu" and recipe.weights and recipe.weights.format != INT8:
            remarks.append(
                Advice(
                    "note", "CPU kernels convert FP8 to wider numbers first: expect this to be slower than BF16 here."
                )
            )
    return tuple(remarks)


def advise_request(request: Request, shape: ModelShape | None, device: Device | None = None) -> tuple[Advice, ...]:
    """Remarks on how a request measures."""
    remarks = [*_on_memory(request, shape, device)] if shape and device else []
    if request.windows.count < FEW_WINDOWS and "perplexity" in request.measures:
        remarks.append(
            Advice("warning", f"{request.windows.count} windows are few: the interval of ln PPL will be wide.")
        )
    if shape and shape.context and request.windows.length > shape.context:
        remarks.append(
            Advice(
                "warning",
                f"Windows of {request.windows.length:,} tokens exceed the model's context of {shape.context:,}.",
            )
        )
    return tuple(remarks)


def _on_memory(request: Request, shape: ModelShape, device: Device) -> list[Advice]:
    """Which way a model goes: whole into memory, or block by block."""
    needed, memory = 2 * shape.parameters + BESIDE_WEIGHTS, device.memory_bytes
    if request.loading == "whole" or (request.loading == "auto" and (not memory or needed <= memory)):
        return []
    size = f"Whole it takes about {needed / 2**30:.1f} GiB"
    why = f"{size}, and {device.label} has {memory / 2**30:.1f}" if needed > memory > 0 else size
    others = [name for name in request.measures if name != "perplexity"]
    left_out = f", which measures perplexity alone: leave {', '.join(others)} out" if others else ""
    return [Advice("warning" if others else "note", f"{why}: the model passes block by block{left_out}.")]


def _on_casts(recipe: Recipe) -> list[Advice]:
    remarks = []
    casts = [cast for cast in (recipe.weights, recipe.activations, recipe.kv, recipe.attention) if cast]
    if recipe.activations and recipe.activations.format == INT8 and recipe.activations.tile == TENSOR:
        remarks.append(
            Advice(
                "warning",
                "INT8 with one scale per activation tensor collapses once outliers appear: use it as a control, not "
                "a candidate.",
            )
        )
    if any(cast.format == E5M2 for cast in casts):
        remarks.append(Advice("note", "E5M2 rounds twice as coarsely as E4M3: its range is meant for gradients."))
    if recipe.weights and not recipe.activations:
        remarks.append(
            Advice("note", "Weights only: memory shrinks, but the products stay in BF16, so GEMMs do not get faster.")
        )
    if recipe.accumulator:
        text = f"acc={recipe.accumulator.name} is simulated bit by bit and very slow: use few, short windows."
        remarks.append(Advice("warning", text))
    if recipe.activations and recipe.activations.when.name == "static":
        remarks.append(
            Advice(
                "note",
                "Static scales save the amax at run time, but text unlike the calibration text is clipped. The run "
                "reports how much.",
            )
        )
    if recipe.activations and recipe.activations.when.name == "delayed":
        remarks.append(
            Advice(
                "note",
                "Delayed scales come from earlier passes; a pass is one window or one decoded token. They are meant "
                "for training; the history starts with the calibration text.",
            )
        )
    if recipe.activations and not recipe.weights:
        remarks.append(
            Advice(
                "note",
                "Activations only: nothing gets smaller or faster, but it shows where the loss comes from.",
            )
        )
    return remarks


def _on_attention(recipe: Recipe) -> list[Advice]:
    remarks = []
    if recipe.casts_attention:
        remarks.append(
            Advice(
                "note",
                "The KV cache and attention are emulated on any device: quality is exact, speed is not measured.",
            )
        )
    if recipe.kv:
        remarks.append(_on_kv(recipe.kv))
    if recipe.attention:
        remarks.append(
            Advice(
                "warning",
                "Attention's own products are cast too: this loses more than the KV cache alone and pays off only "
                "in fused kernels. Sums are float32 here: losses of narrow accumulators over long contexts come on "
                "top.",
            )
        )
    return remarks


def _on_kv(kv: KvCast) -> Advice:
    if kv.scale == "unit" and kv.format == INT8:
        return Advice("warning", "Every KV scale is 1.0: INT8 then rounds keys and values to whole numbers.")
    if kv.scale == "unit":
        return Advice(
            "warning",
            "Every KV scale is 1.0, as in vLLM when a checkpoint holds none: keys and values beyond "
            f"{kv.format.max:,.0f} are clipped. Compare with kv={kv.format.name}/{kv.share}.",
        )
    if kv.scale == "static":
        return Advice(
            "note", "KV scales are calibrated once per layer, as serving engines read them from a checkpoint."
        )
    return Advice(
        "note",
        "KV scales are dynamic: each prompt and each decoded token has its own amax. Engines with one static scale "
        f"per layer may lose more: kv={kv.format.name}/tensor/static shows how much, and /unit shows scale 1.0.",
    )


def _on_shape(recipe: Recipe, shape: ModelShape) -> list[Advice]:
    remarks = []
    if recipe.weights and recipe.weights.tile.cols:
        width = recipe.weights.tile.cols
        ragged = sorted({w.k for w in shape.weights if w.in_blocks and w.k % width})
        if ragged:
            widths = ", ".join(str(k) for k in ragged)
            remarks.append(
                Advice(
                    "note",
                    f"K = {widths} is not a multiple of {width}: each row's last tile is padded with zeros.",
                )
            )
    if shape.tied and "lm_head" in recipe.also and "embeddings" not in recipe.also:
        remarks.append(Advice("note", "The head is tied to the embedding: casting only the head stores it twice."))
    return remarks
