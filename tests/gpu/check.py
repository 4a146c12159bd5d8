"""What an accelerator really does: `python -m tests.gpu.check [--small]`, about six minutes on one Hopper GPU.

Legality (does torch agree with `native_path`?), agreement with emulation, times of the products and of the casts, and
tokens a second while decoding. Random weights and data, no downloads; needs torch, transformers, numpy, safetensors.
Without CUDA, or with --small, the same code runs tiny shapes on the CPU: its times mean nothing. The last line is one
JSON document; what could not run says why in it.

A product's operands are laid out for its kernel beforehand; casting x, and laying it out, are timed apart. The cast is
eager torch: at a small M it lasts as long as the host takes to queue its kernels. Operands are never zeros, which draw
less power and can run faster.
"""

import argparse
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8dash.choose.casts import parse_cast
from fp8dash.choose.hardware import INT_MM, SCALED_MM, Device, native_path
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import NATIVE
from fp8dash.errors import KernelRefused
from fp8dash.model.load import find_device
from fp8dash.model.swap import cast_model
from fp8dash.quant.cast import codes_of, dequantize, quantize
from fp8dash.quant.matmul import activation_operand, multiply, scaled_mm, weight_operand
from tests.gpu.clock import sampled

BF16 = torch.bfloat16
SECTIONS_S = {"gemm": 200.0, "casts": 20.0}  # on a GPU; small runs take a twentieth
PEAKS = {  # dense TFLOPS in BF16 and in FP8, TB/s: NVIDIA's data sheets, under torch's names of the devices
    "NVIDIA H100 80GB HBM3": (989.4, 1978.9, 3.35),
    "NVIDIA H100 PCIe": (756.0, 1513.0, 2.0),
    "NVIDIA H200": (989.4, 1978.9, 4.8),
    "NVIDIA H800": (989.4, 1978.9, 3.35),
    "NVIDIA B200": (2250.0, 4500.0, 7.7),
    "NVIDIA GB200": (2500.0, 5000.0, 8.0),
    "NVIDIA L40S": (362.05, 733.0, 0.864),
    "NVIDIA L4": (121.0, 242.5, 0.3),
    "NVIDIA GeForce RTX 4090": (165.2, 330.3, 1.008),
    "NVIDIA GeForce RTX 5090": (209.5, 419.0, 1.792),
    "NVIDIA A100-SXM4-80GB": (312.0, None, 2.039),
}
RECIPES = {  # the columns of the GEMM table beside BF16
    "tensor": "w=e4m3fn/tensor a=e4m3fn/tensor",
    "row": "w=e4m3fn/row a=e4m3fn/row",
    "block": "w=e4m3fn/128x128 a=e4m3fn/1x128",
}
MX = "w=e4m3fn/1x32/rceil a=e4m3fn/1x32/rceil"
NATIVES = (
    *RECIPES.values(), "w=e4m3fn/1x128 a=e4m3fn/1x128", MX, "w=e5m2/row a=e4m3fn/row", "w=e4m3fn/row a=e5m2/row",
    "w=e4m3fn/tensor a=e5m2/tensor", "w=int8/tensor a=int8/tensor", "w=int8/row a=int8/row",
)  # fmt: skip
PROBES = (  # recipe, M, N, K: what some device refuses
    *((text, 5, 256, 512) for text in NATIVES),
    *((text, 1, 256, 512) for text in NATIVES),
    ("w=e5m2/row a=e5m2/row", 16, 256, 512),
    ("w=e5m2/128x128 a=e4m3fn/1x128", 16, 256, 512),
    ("w=e4m3fn/tensor a=e4m3fn/row", 16, 256, 512),
    ("w=e4m3fn/1x128 a=e4m3fn/128x128", 16, 256, 512),
    ("w=e5m2/1x32/rceil a=e4m3fn/1x32/rceil", 16, 256, 512),
    (RECIPES["row"], 16, 100, 512), (RECIPES["row"], 16, 256, 200), (RECIPES["block"], 16, 250, 512),
    (RECIPES["block"], 16, 576, 512), (RECIPES["block"], 16, 256, 576), (MX, 16, 576, 576), (MX, 16, 272, 240),
    ("w=int8/row a=int8/row", 32, 100, 512), ("w=int8/row a=int8/row", 32, 256, 204),
)  # fmt: skip
LLAMA3_8B = ((4096, 4096), (1024, 4096), (6144, 4096), (14336, 4096), (28672, 4096), (4096, 14336))  # N, K
DEEPSEEK_V3 = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
CASTS = ("e4m3fn/tensor", "e4m3fn/row", "e4m3fn/1x128", "e4m3fn/128x128", "e4m3fn/1x32/rceil", "int8/row")


@dataclass(frozen=True, slots=True)
class Bench:
    """Where things run, and how large they are."""

    device: Device
    where: torch.device
    small: bool

    @property
    def peaks(self) -> tuple[float | None, ...]:
        """Dense TFLOPS of BF16 and FP8 and TB/s of this device; None where they are not in the table."""
        return PEAKS.get(self.device.name, (None, None, None))

    def normal(self, rows: int, cols: int, dtype: torch.dtype = BF16) -> Tensor:
        """Gaussian [rows, cols]."""
        return torch.randn(rows, cols, device=self.where).to(dtype)


# Sections: each yields the rows of its table


def legality(bench: Bench) -> Iterator[dict[str, Any]]:
    """Each probe asked of `native_path` and of torch; "stricter" where only ours refuses, "wrong" where only torch."""
    for text, m, n, k in PROBES:
        recipe = parse_recipe(text)
        path = native_path(recipe, n, k, bench.device)
        refusal = _torch_says(bench, text, m, n, k)
        verdict = {(True, True): "agree", (False, False): "agree", (False, True): "stricter"}.get(
            (path.is_native, not refusal), "wrong"
        )
        yield {"recipe": text, "m": m, "n": n, "k": k, "native_path": path.is_native, "torch": not refusal,
               "verdict": verdict, "reason": path.reason, "torch_says": refusal}  # fmt: skip


def _torch_says(bench: Bench, text: str, m: int, n: int, k: int) -> str:
    """Why torch refuses a product, in its words; empty where it runs."""
    recipe = parse_recipe(text)
    x, w = codes_of(bench.normal(m, k), recipe.activations), quantize(bench.normal(n, k), recipe.weights)
    return _refusal(partial(multiply, x, w, INT_MM if text.startswith("w=int8") else SCALED_MM, BF16))


def _refusal(call: Callable[[], object]) -> str:
    """Why torch refuses a call, in the first line of its own words; empty where it runs."""
    try:
        call()
    except (KernelRefused, RuntimeError, ValueError) as error:
        return str(error.__cause__ or error).splitlines()[0][:300]
    return ""


def agreement(bench: Bench) -> Iterator[dict[str, Any]]:
    """Native products beside those of the decoded codes in float64, and GPU casts beside the CPU's, bit by bit."""
    for text in NATIVES:
        for m, n, k in ((5, 64, 256), (33, 256, 512)) if bench.small else ((1, 512, 4096), (257, 4096, 4096)):
            yield _product_agreement(bench, text, m, n, k)
    for text in CASTS:
        yield _cast_agreement(bench, text)
    yield from _accumulator(bench)


def _product_agreement(bench: Bench, text: str, m: int, n: int, k: int) -> dict[str, Any]:
    """Errors over the exact product's root mean square; and the share of values that are it, correctly rounded."""
    recipe = parse_recipe(text)
    path, row = native_path(recipe, n, k, bench.device), {"what": "product", "recipe": text, "m": m, "n": n, "k": k}
    if not path.kernel:
        return row | {"skipped": path.reason}
    x, w = codes_of(bench.normal(m, k), recipe.activations), quantize(bench.normal(n, k), recipe.weights)
    exact = dequantize(x).double() @ dequantize(w).double().T
    rms = exact.square().mean().sqrt()
    if path.kernel == INT_MM:  # its sums are exact, and what follows is IEEE float32
        sums = (x.codes.double() @ w.codes.double().T).float()
        same = multiply(x, w, INT_MM, torch.float32) == sums.mul_(x.scales).mul_(w.scales.view(1, -1))
        row["bits_equal"] = same.double().mean().item()
    for dtype, name in ((torch.float32, ""), (BF16, "bf16_")):
        if refused := _refusal(partial(multiply, x, w, path.kernel, dtype)):
            row[f"{name}refused"] = refused
            continue
        product = multiply(x, w, path.kernel, dtype)
        error = (product.double() - exact).abs()
        row[f"{name}rms_error"] = (error.square().mean().sqrt() / rms).item()
        row[f"{name}max_error"] = (error.max() / rms).item()
        row[f"{name}equal"] = (product == exact.to(dtype)).double().mean().item()
    return row


def _cast_agreement(bench: Bench, text: str) -> dict[str, Any]:
    """Codes and scales of the same tensor on this device and on the CPU: every bit should be equal."""
    cast, x = parse_cast(text), torch.randn(130, 330).mul_(torch.logspace(-6, 4, 330)).to(BF16)
    here, there = codes_of(x.to(bench.where), cast), codes_of(x, cast)
    codes = here.codes.cpu().view(torch.uint8) == there.codes.view(torch.uint8)
    return {"what": "cast", "cast": text, "codes_equal": codes.double().mean().item(),
            "scales_equal": (here.scales.cpu() == there.scales).double().mean().item()}  # fmt: skip


def _accumulator(bench: Bench) -> Iterator[dict[str, Any]]:
    """How many bits a sum keeps: 1 + 2^-14 is 1 in Hopper's 13 fraction bits, and kept by 25 bits or float32.

    Source: MMA-Sim (arXiv 2511.10909) and 2505.09343 section 3.1.1, one step of K = 32.
    """
    text = RECIPES["tensor"]
    path = native_path(parse_recipe(text), 16, 32, bench.device)
    if not path.kernel:
        yield {"what": "accumulator", "skipped": path.reason}
        return
    probes = {"1 + 2^-14": (1.0, 2.0**-7), "448^2 - 448^2 + 2^-9": (448.0, -448.0, 2.0**-9)}
    for name, first in probes.items():
        x, w = torch.zeros(16, 32), torch.zeros(16, 32)
        x[:, : len(first)] = torch.tensor(first)
        w[:, : len(first)] = torch.tensor(first).abs() if len(first) == 2 else torch.tensor((448.0, 448.0, 1.0))
        a, b = (t.to(bench.where, torch.float8_e4m3fn) for t in (x, w))
        one = torch.ones((), device=bench.where)
        kind = F.ScalingType.TensorWise
        out = F.scaled_mm(a, b.t(), one, kind, one, kind, output_dtype=torch.float32)
        yield {"what": "accumulator", "sum": name, "found": out[0, 0].item()}


def gemm(bench: Bench) -> Iterator[dict[str, Any]]:
    """For each model's shape and M: BF16, tensor, row and block products, and what casting x costs beside them."""
    shapes = (("tiny", 64, 256),) if bench.small else (
        *(("Llama-3-8B", *shape) for shape in LLAMA3_8B), *(("DeepSeek-V3", *shape) for shape in DEEPSEEK_V3)
    )  # fmt: skip
    ms = (1, 16, 64) if bench.small else (1, 16, 64, 128, 512, 2048, 8192)
    end = time.perf_counter() + SECTIONS_S["gemm"] / (20 if bench.small else 1)
    left = len(shapes) * len(ms)
    for model, n, k in shapes:
        w = bench.normal(n, k)
        weights = {kind: quantize(w, parse_recipe(text).weights) for kind, text in RECIPES.items()}
        for m in ms:
            budget = max(0.1, (end - time.perf_counter()) / left)
            yield from _gemm_rows(bench, model, m, w, weights, budget)
            left -= 1


def _gemm_rows(
    bench: Bench, model: str, m: int, w: Tensor, weights: dict[str, Any], budget_s: float
) -> Iterator[dict[str, Any]]:
    """A row for BF16 and for each recipe at one shape and M; one that has no kernel says why."""
    (n, k), x = w.shape, bench.normal(m, w.shape[1])
    paths = {kind: native_path(parse_recipe(text), n, k, bench.device) for kind, text in RECIPES.items()}
    calls: dict[str, Callable[[], object]] = {"bf16": lambda: F.linear(x, w)}
    reasons = {kind: path.reason for kind, path in paths.items()}
    for kind in (kind for kind, path in paths.items() if path.is_native):
        own = _gemm_calls(kind, x, parse_recipe(RECIPES[kind]).activations, weights[kind])
        reasons[kind] = _refusal(own[kind])
        calls |= {} if reasons[kind] else own
    times = sampled(calls, bench.where, budget_s)
    for kind in ("bf16", *RECIPES):
        row = {"model": model, "kind": kind, "m": m, "n": n, "k": k}
        yield row | ({"skipped": reasons[kind]} if kind not in times else _speed(bench, kind, m * n * k, times))


def _speed(bench: Bench, kind: str, products: int, times: dict[str, tuple[float, int]]) -> dict[str, Any]:
    """The figures of one kind: `products` multiply-adds are two operations each."""
    (us, samples), base = times[kind], times["bf16"][0]
    cast, layout = (times.get(f"{kind} {part}", (0.0, 0))[0] for part in ("cast", "layout"))
    tflops, peak = 2 * products / us / 1e6, bench.peaks[0 if kind == "bf16" else 1]
    return {
        "us": us, "samples": samples, "tflops": tflops, "share_of_peak": tflops / peak if peak else None,
        "x_bf16": base / us, "cast_us": cast, "layout_us": layout, "x_bf16_with_cast": base / (us + cast + layout),
    }  # fmt: skip


def _gemm_calls(kind: str, x: Tensor, cast: Any, weight: Any) -> dict[str, Callable[[], object]]:
    """The product on operands laid out for it, the cast of x and, where that moves data, laying x out."""
    codes = codes_of(x, cast)
    a, b = activation_operand(codes), weight_operand(weight)
    calls: dict[str, Callable[[], object]] = {
        kind: lambda: scaled_mm(a, b, BF16),
        f"{kind} cast": lambda: codes_of(x, cast),
    }
    return calls | ({f"{kind} layout": lambda: activation_operand(codes)} if kind == "block" else {})


def casts(bench: Bench) -> Iterator[dict[str, Any]]:
    """GB/s of each cast (2 bytes read and the codes and scales written), beside a copy of the same tensor."""
    x = bench.normal(64, 256) if bench.small else bench.normal(8192, 8192)
    into = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: into.copy_(x)}
    for text in CASTS:
        calls[text] = partial(codes_of, x, parse_cast(text))
    times = sampled(calls, bench.where, SECTIONS_S["casts"] / (20 if bench.small else 1))
    moved = {text: _bytes_moved(x, text) for text in CASTS} | {"copy": 4 * x.numel()}
    rates = {name: moved[name] / us / 1e3 for name, (us, _) in times.items()}
    for name, rate in rates.items():
        peak = bench.peaks[2]
        yield {
            "cast": name, "shape": list(x.shape), "us": times[name][0], "gb_per_s": rate,
            "share_of_copy": rate / rates["copy"], "share_of_peak": rate / (peak * 1e3) if peak else None,
        }  # fmt: skip


def _bytes_moved(x: Tensor, text: str) -> float:
    q = codes_of(x, parse_cast(text))
    return 2 * x.numel() + q.codes.numel() * q.codes.element_size() + q.scales.numel() * q.scales.element_size()


def decode(bench: Bench) -> Iterator[dict[str, Any]]:
    """Tokens a second of a random Llama in eager mode, BF16 and then row by row in FP8."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**_llama(bench.small), tie_word_embeddings=False)
    with bench.where:
        model = AutoModelForCausalLM.from_config(config, dtype=BF16).eval().requires_grad_(False)
    size = sum(p.numel() for p in model.parameters())
    batches = (1, 4) if bench.small else (1, 32)
    base = {batch: _tokens_per_s(bench, model, batch) for batch in batches}
    for batch, rate in base.items():
        yield {"kind": "bf16", "batch": batch, "parameters": size, "tokens_per_s": rate, "x_bf16": 1.0}
    recipe = parse_recipe(RECIPES["row"])
    kernels = [swap.backend for swap in cast_model(model, recipe, bench.device, "auto") if swap.part.in_blocks]
    for batch in batches:
        row = {"kind": "row", "batch": batch, "parameters": size, "native_linears": kernels.count(NATIVE)}
        if set(kernels) != {NATIVE}:
            path = native_path(recipe, config.hidden_size, config.hidden_size, bench.device)
            yield row | {"skipped": path.reason}
            continue
        rate = _tokens_per_s(bench, model, batch)
        yield row | {"tokens_per_s": rate, "x_bf16": rate / base[batch]}


def _llama(small: bool) -> dict[str, int]:
    """Llama-3.2-1B's widths, or tiny ones."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    widths = (64, 128, 2, 4, 2) if small else (2048, 8192, 16, 32, 8)
    vocabulary = 256 if small else 128_256
    return dict(zip(names, widths, strict=True)) | {"vocab_size": vocabulary, "max_position_embeddings": 2048}


@torch.no_grad()
def _tokens_per_s(bench: Bench, model: Any, batch: int) -> float:
    """Median over three runs of greedy steps after a prompt; the first run of all is not counted."""
    prompt, steps = (8, 4) if bench.small else (128, 48)
    vocabulary, rates = model.config.vocab_size, []
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # renamed in 5.2x
    for _ in range(4):
        ids = torch.randint(vocabulary, (batch, prompt), device=bench.where)
        out = model(ids, use_cache=True, logits_to_keep=1)
        _wait(bench)
        start = time.perf_counter()
        for _ in range(steps):
            ids = out.logits[:, -1:].argmax(-1)
            out = model(ids, use_cache=True, **{cache: out.past_key_values})
        _wait(bench)
        rates.append(batch * steps / (time.perf_counter() - start))
    return median(rates[1:])


def _wait(bench: Bench) -> None:
    if bench.where.type == "cuda":
        torch.cuda.synchronize()


# The whole


SECTIONS = {"legality": legality, "agreement": agreement, "gemm": gemm, "casts": casts, "decode": decode}


def bench_of(small: bool) -> Bench:
    """The GPU where there is one and it was asked for, else the CPU."""
    kind = "cpu" if small or not torch.cuda.is_available() else "cuda"
    return Bench(find_device(kind), torch.device(kind), kind == "cpu")


def check(bench: Bench) -> dict[str, Any]:
    """Every section's rows; a section that breaks keeps the rows it made, and says in "failed" what broke it."""
    torch.manual_seed(0)
    device = bench.device
    report: dict[str, Any] = {
        "device": device.name, "kind": device.kind, "capability": list(device.capability), "cuda": list(device.cuda),
        "torch": torch.__version__, "small": bench.small, "peaks": list(bench.peaks), "failed": {}, "seconds": {},
    }  # fmt: skip
    for name, section in SECTIONS.items():
        start, report[name] = time.perf_counter(), []
        try:
            for row in section(bench):
                report[name].append(row)
                print(name, *(f"{key}={_short(value)}" for key, value in row.items()), flush=True)
        except Exception as error:  # the other sections still tell something
            traceback.print_exc()
            report["failed"][name] = f"{type(error).__name__}: {error}"[:500]
        report["seconds"][name] = time.perf_counter() - start
    report["verdicts"] = {
        v: [row["verdict"] for row in report["legality"]].count(v) for v in ("agree", "stricter", "wrong")
    }
    return report


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Prints rows as they come and the report as the last line; fails where torch refuses what we call native."""
    parser = argparse.ArgumentParser(description="What an accelerator really does.")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU, as without CUDA")
    report = check(bench_of(parser.parse_args().small))
    print(json.dumps(_finite(report), allow_nan=False))
    return 1 if report["failed"] or report["verdicts"]["wrong"] else 0


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are null in it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


if __name__ == "__main__":
    sys.exit(main())
