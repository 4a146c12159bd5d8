"""Under which names libraries store the scales of activations and of the KV cache. No torch."""

from fp8dash.choose.models.quantized import INVERSE, NIBBLES
from fp8dash.model.xray.matrices import StoredMatrix
from fp8dash.model.xray.tensors import Opened

INPUT_SCALES = {NIBBLES: ("input_global_scale",), INVERSE: ("activation_scale", "input_scale")}  # else input_scale


def input_scale_of(checkpoint: Opened, matrix: StoredMatrix) -> tuple[str, bool]:
    """The name of the stored scale of a matrix's inputs, or the usual one, and whether it is there."""
    names = [f"{matrix.module}.{part}" for part in INPUT_SCALES.get(matrix.packing, ("input_scale",))]
    stored = next((name for name in names if name in checkpoint.tensors), None)
    return stored or names[-1], stored is not None


def kv_scale_of(name: str) -> tuple[str, str] | None:
    """Of which attention a tensor scales the keys, "k", or the values, "v", in the cache; None for any other tensor.

    >>> kv_scale_of("layers.0.self_attn.k_scale"), kv_scale_of("layers.0.self_attn.v_proj.output_scale")
    (('layers.0.self_attn', 'k'), ('layers.0.self_attn', 'v'))
    """
    for part in "kv":
        projection = f".{part}_proj"  # output_scale: older compressed-tensors
        for end in (
            f"{projection}.{part}_scale",
            f"{projection}.output_scale",
            f".attn.{part}_scale",
            f".{part}_scale",
        ):
            if name.endswith(end):
                return name.removesuffix(end), part
    return None
