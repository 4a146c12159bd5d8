"""What a number of a run is: its title, unit, direction and stage. The leaderboard's are listed here.

`measurements.py` lists all that a run measures, these included.
"""

from dataclasses import dataclass

from fp8dash.choose.records import HIGHER, LOWER, NEITHER, Better

KLD_HELP = "Kullback-Leibler divergence from the baseline: full vocabulary, mean over tokens."

SPEEDUP_HELP = "BF16 time over cast + product time of the model's Linears at the largest M: native kernels only."


@dataclass(frozen=True, slots=True)
class Metric:
    """What a number of this name is: title, unit, direction, the stage that measures it, and how it is written."""

    name: str
    title: str
    unit: str
    better: Better
    stage: str  # of STAGES: the one that measures it
    help: str
    digits: str = ""  # as in format(); empty for three significant digits
    per: float = 1.0  # the screen shows value / per
    signed: bool = False  # a difference: its sign is always written
    stored: str = ""  # the unit that is stored, where it is not the screen's
    method: str = ""  # whose method version it has, where that is not its stage's
    end_of: str = ""  # the metric of whose 95 % interval it is an end; empty where it is none

    @property
    def stored_unit(self) -> str:
        """The unit of the value as it is measured and stored."""
        return self.stored or self.unit

    @property
    def made_by(self) -> str:
        """Whose method version it has: a stage, or a part of one ("gemm, cold")."""
        return self.method or self.stage


METRICS = {
    metric.name: metric
    for metric in (
        Metric("kld", "KLD", "nats", LOWER, "perplexity", KLD_HELP),
        Metric("ln_ppl_diff", "Δ ln PPL", "nats", LOWER, "perplexity", "ln PPL minus the baseline's, same windows.",
               signed=True),
        Metric("top1", "Top-1", "share", HIGHER, "perplexity",
               "Share of tokens whose most likely successor is the baseline's.", ".3f"),
        Metric("ppl", "PPL", "", LOWER, "perplexity", "Token perplexity; its method says over which windows.", "#.4g"),
        Metric("needle", "Needle", "share", HIGHER, "needle", "Share of hidden numbers that were retrieved.", ".3f"),
        Metric("gemm_speedup", "GEMM speed-up", "× BF16", HIGHER, "gemm", SPEEDUP_HELP, ".2f"),
        Metric("bits_per_weight", "Bits/weight", "bits", LOWER, "quantize",
               "Bits per cast weight, scales included.", ".2f"),
        Metric("model_bytes", "Size", "MB", LOWER, "quantize", "Stored size of the whole model.", ".0f", 1e6,
               stored="bytes"),
        Metric("coverage", "Coverage", "share", NEITHER, "quantize", "Share of the parameters that were cast.", ".3f"),
        Metric("uncast_share", "Left uncast", "share", LOWER, "quantize",
               "Share of the blocks' matrix weights that were not cast, for whatever reason.", ".3f"),
        Metric("weight_sqnr_db", "Weight SQNR", "dB", HIGHER, "quantize",
               "Signal over error of all cast weights together."),
    )
}  # fmt: skip
