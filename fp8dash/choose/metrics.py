"""The leaderboard's metrics: what each is, its unit and direction, and how many digits it is written with."""

from dataclasses import dataclass

from fp8dash.choose.records import HIGHER, LOWER, NEITHER, Better

KLD_HELP = "Kullback-Leibler divergence from the baseline: full vocabulary, mean over tokens."

SPEEDUP_HELP = "BF16 time over cast + product time of the model's Linears at the largest M: native kernels only."


@dataclass(frozen=True, slots=True)
class Metric:
    """A column: what it is called on the screen, its unit, which way is better, and how to write it."""

    name: str
    title: str
    unit: str
    better: Better
    help: str
    digits: str = ""  # as in format(); empty for three significant digits
    per: float = 1.0  # the screen shows value / per
    signed: bool = False  # a difference: its sign is always written


METRICS = {
    metric.name: metric
    for metric in (
        Metric("kld", "KLD", "nats", LOWER, KLD_HELP),
        Metric("ln_ppl_diff", "Δ ln PPL", "nats", LOWER, "ln PPL minus the baseline's, same windows.", signed=True),
        Metric("top1", "Top-1", "share", HIGHER, "Share of tokens whose likeliest successor is the baseline's.", ".3f"),
        Metric("ppl", "PPL", "", LOWER, "Token perplexity; its method says over which windows.", "#.4g"),
        Metric("needle", "Needle", "share", HIGHER, "Share of hidden numbers that came back.", ".3f"),
        Metric("gemm_speedup", "GEMM speed-up", "× BF16", HIGHER, SPEEDUP_HELP, ".2f"),
        Metric("bits_per_weight", "Bits/weight", "bits", LOWER, "Bits of a cast weight, scales included.", ".2f"),
        Metric("model_bytes", "Size", "MB", LOWER, "Stored size of the whole model.", ".0f", 1e6),
        Metric("coverage", "Coverage", "share", NEITHER, "Share of the parameters that were cast.", ".3f"),
        Metric(
            "uncast_share", "Left uncast", "share", LOWER,
            "Share of the blocks' matrix weights that the recipe left as they were, for whatever reason.", ".3f",
        ),
        Metric("weight_sqnr_db", "Weight SQNR", "dB", HIGHER, "Signal over error of all cast weights together."),
    )
}  # fmt: skip
