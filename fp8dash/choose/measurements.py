"""The catalogue of measurements: every name that a run's stages give a number, with title, unit, direction and stage.

A test runs every stage and holds its numbers to this list. Only lm-eval's have names that are not listed: a TaskNumber
makes and reads those.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fp8dash.choose.metrics import METRICS, Metric
from fp8dash.choose.records import HIGHER, LOWER, NEITHER, Better, Measurement

COUNT = ",.0f"  # how whole numbers are written
MEGA = 1e6
_PERPLEXITY = (
    Metric("baseline_ppl", "Baseline PPL", "", LOWER, "perplexity", "The baseline's perplexity over the same windows.",
           "#.4g"),
    Metric("ppl_ratio", "PPL over baseline PPL", "", LOWER, "perplexity", "exp(Δ ln PPL)."),
    Metric("ppl_diff", "PPL minus baseline PPL", "", LOWER, "perplexity", "Difference of the two perplexities.",
           signed=True),
    Metric("ln_ppl_correlation", "Correlation of token ln p", "", HIGHER, "perplexity",
           "Pearson's, between the run's and the baseline's ln p of the true tokens."),
    Metric("word_ppl", "Word PPL", "", LOWER, "perplexity", "exp(NLL / words): words between white space."),
    Metric("byte_ppl", "Byte PPL", "", LOWER, "perplexity", "exp(NLL / bytes of the text)."),
    Metric("bits_per_byte", "Bits per byte", "bits", LOWER, "perplexity", "NLL / bytes of the text / ln 2."),
    Metric("kld_noise_floor", "KLD of BF16 against float32", "nats", NEITHER, "perplexity",
           "KLD of the unquantized weights run in float32: the cost of rounding alone."),
    Metric("kld_reverse", "KLD, reversed", "nats", LOWER, "perplexity", "KLD of the baseline from the run."),
    Metric("top5", "Top-5", "share", HIGHER, "perplexity",
           "Share of the baseline's five most likely tokens that the run ranks as high."),
    Metric("delta_p", "Δp of the true token, mean", "share", NEITHER, "perplexity",
           "Probability of the true token, run minus baseline.", signed=True),
    Metric("delta_p_rms", "Δp of the true token, RMS", "share", LOWER, "perplexity",
           "Root of the mean square of Δp over tokens."),
    Metric("kld_tokens", "KLD, BF16 to run", "nats", LOWER, "perplexity", "Percentiles of KLD over tokens."),
    Metric("kld_reverse_tokens", "KLD, run to BF16", "nats", LOWER, "perplexity",
           "Percentiles of the reversed KLD over tokens."),
    Metric("delta_p_tokens", "Δp of the true token", "share", NEITHER, "perplexity", "Percentiles of Δp over tokens.",
           signed=True),
    Metric("scored_tokens", "Scored tokens", "tokens", NEITHER, "perplexity", "Tokens that the means are over.", COUNT),
    Metric("scored_windows", "Scored windows", "windows", NEITHER, "perplexity",
           "Windows read; fewer than requested if the run stopped early.", COUNT),
    Metric("activation_clipped", "Activations clipped", "share", LOWER, "perplexity",
           "Share of the activations beyond the largest code, if scales were made beforehand.",
           method="calibrated scales"),
)  # fmt: skip
_QUANTIZE = (
    Metric("model_bits_per_weight", "Bits/weight, whole model", "bits", LOWER, "quantize",
           "Bits of all parameters over their count."),
    Metric("gemm_coverage", "GEMM coverage", "share", NEITHER, "quantize",
           "Share of the products' FLOPs whose weights or inputs are cast."),
    Metric("weight_flushed", "Weights flushed to zero", "share", LOWER, "quantize",
           "Share of the non-zero weights that became zero."),
    Metric("weight_clipped", "Weights clipped", "share", LOWER, "quantize",
           "Share of the weights beyond the largest code."),
    Metric("activation_scale", "Activation scale", "", NEITHER, "quantize", "The scale of each Linear's input.",
           method="calibrated scales"),
    Metric("kv_scale", "KV cache: scale", "", NEITHER, "quantize", "The largest scale of each layer's keys and values.",
           method="calibrated scales"),
    Metric("kv_bytes_per_token", "KV cache, bytes per token", "bytes", LOWER, "quantize",
           "Keys, values and scales of all layers.", method="KV cache, bytes per token"),
)  # fmt: skip
_KV = (
    Metric("kv_ppl", "KV cache: PPL", "", LOWER, "kv", "Perplexity when read through the cast cache."),
    Metric("kv_baseline_ppl", "KV cache: baseline PPL", "", LOWER, "kv",
           "The baseline's, read in the same chunks through its own cache."),
    Metric("kv_ln_ppl_diff", "KV cache: Δ ln PPL", "nats", LOWER, "kv", "ln PPL minus the baseline's, same cuts.",
           signed=True),
    Metric("kv_kld", "KV cache: KLD", "nats", LOWER, "kv", "KLD from the baseline, same cuts."),
    Metric("kv_top1", "KV cache: top-1", "share", HIGHER, "kv",
           "Share of tokens whose most likely successor is the baseline's."),
    Metric("kv_scale_lowest", "KV cache: lowest scale", "", NEITHER, "kv", "Of all keys' or values' scales."),
    Metric("kv_scale_highest", "KV cache: highest scale", "", NEITHER, "kv", "Of all keys' or values' scales."),
    Metric("kv_scales_at_one", "KV cache: scales at 1.0", "share", NEITHER, "kv",
           "1 if nothing was calibrated and engines fall back to 1.0."),
)  # fmt: skip
_NEEDLE = (
    Metric("baseline_needle", "Baseline needle", "share", HIGHER, "needle",
           "Share of the hidden numbers that the baseline retrieved.", ".3f"),
    Metric("needle_logprob", "Needle ln p", "nats a token", HIGHER, "needle",
           "Mean ln p of the values' own tokens, teacher-forced after the prompt; 0 is certainty."),
    Metric("baseline_needle_logprob", "Baseline needle ln p", "nats a token", HIGHER, "needle", "The baseline's."),
    Metric("needle_logprob_diff", "Δ needle ln p", "nats a token", HIGHER, "needle",
           "Run minus baseline, paired by prompt.", signed=True),
)  # fmt: skip
_SPEED = (
    Metric("gemm_speedup_cold", "GEMM speed-up, cold", "× BF16", HIGHER, "gemm",
           "The same with caches overwritten before each sample.", ".2f", method="gemm, cold"),
    Metric("gemm_crossover_m", "Faster than BF16 from M =", "tokens", LOWER, "gemm",
           "The smallest M of the sweep from which casting pays off.", COUNT),
    Metric("peak_tflops", "Peak, measured", "TFLOPS", HIGHER, "gemm", "Rate of one large product.",
           method="gemm, peaks"),
    Metric("peak_gb_per_s", "Memory rate, measured", "GB/s", HIGHER, "gemm", "Rate of one large copy.",
           method="gemm, peaks"),
    Metric("prefill_tokens_per_s", "Prefill", "tokens/s", HIGHER, "decode", "Prompt tokens over time to first token."),
    Metric("ttft_ms", "Time to first token", "ms", LOWER, "decode", "Of the whole prompt; median over passes."),
    Metric("decode_tokens_per_s", "Decode", "tokens/s", HIGHER, "decode", "New tokens over the time of all steps."),
    Metric("itl_ms", "Time between tokens, median", "ms", LOWER, "decode", "Over steps and passes."),
    Metric("itl_ms_p90", "Time between tokens, p90", "ms", LOWER, "decode", "Over steps and passes."),
    Metric("itl_ms_p99", "Time between tokens, p99", "ms", LOWER, "decode", "Over steps and passes."),
    Metric("decode_joules_per_token", "Energy per token", "J", LOWER, "decode", "Of the whole GPU while decoding."),
    Metric("resident_memory_bytes", "Resident memory", "MB", LOWER, "decode", "Before the first prompt.", per=MEGA,
           stored="bytes"),
    Metric("peak_memory_bytes", "Peak memory", "MB", LOWER, "decode", "The most that the run has used so far.",
           per=MEGA, stored="bytes"),
)  # fmt: skip
_EXPERTS = (
    Metric("routing_changed", "Routing changed", "share", LOWER, "experts",
           "Share of tokens for which the router chooses other experts than the baseline's."),
    Metric("experts_unreached", "Experts that no token reached", "experts", NEITHER, "experts",
           "Over all layers, in the windows read.", COUNT),
    Metric("routed_sqnr_db", "Weight SQNR of experts, by tokens", "dB", HIGHER, "experts",
           "Signal over error of the experts' weights, each counted by its share of tokens."),
    Metric("expert_tokens", "Tokens by expert", "share", NEITHER, "experts",
           "Share of the tokens for which the expert was chosen."),
)  # fmt: skip
_BEFORE_CASTING = (
    Metric("sensitivity_kld", "KLD of the whole recipe", "nats", LOWER, "sensitivity",
           "Linears alone, over the first two windows."),
    Metric("sensitivity_kld_sum", "Sum of its parts’ KLDs", "nats", LOWER, "sensitivity", "Each part cast alone."),
    Metric("mixed_kld", "KLD of the mixed recipe", "nats", LOWER, "sensitivity", "The note is the recipe."),
    Metric("mixed_kld_predicted", "KLD of the mixed recipe, predicted", "nats", LOWER, "sensitivity",
           "From its cast parts' KLDs, scaled so that all parts give the whole recipe's."),
    Metric("mixed_bits_per_weight", "Bits/weight, mixed recipe", "bits", LOWER, "sensitivity",
           "Over the weights that the whole recipe casts.", ".2f"),
    Metric("weight_amax_over_rms", "Weights: amax over RMS", "× RMS", NEITHER, "profile", "Median over Linears."),
    Metric("activation_amax_over_rms", "Activations: amax over RMS", "× RMS", NEITHER, "profile",
           "Median over Linears."),
)  # fmt: skip

GRADIENT_FORMATS = ("e4m3fn", "e5m2")  # of training: what gradients are cast to
_OF_EACH_FORMAT: tuple[tuple[str, str, str, Better, str], ...] = (
    ("sqnr_db", "SQNR", "dB", HIGHER, "Signal over error of the cast output gradients."),
    ("flushed", "flushed", "share", LOWER, "Share of the non-zero elements that became zero."),
    ("clipped", "clipped", "share", LOWER, "Share of the elements beyond the largest code."),
)
BY_EXPERT = "expert_tokens"  # one row per expert
PERCENTILES = ("kld_tokens", "kld_reverse_tokens", "delta_p_tokens")  # over tokens: one row per label
INTERVALS = ("kld", "ln_ppl_diff", "kv_ln_ppl_diff", "needle_logprob_diff")  # have a 95 % interval
LOW, HIGH = "low", "high"  # its ends


def end_name(name: str, end: str) -> str:
    """What the end of a metric's interval is measured as.

    >>> end_name("kld", LOW), end_name("kld", HIGH)
    ('kld_low', 'kld_high')
    """
    return f"{name}_{end}"


def gradient_name(what: str, fmt: str = "") -> str:
    """What a layer's output gradient is measured as; with a format, cast to it.

    >>> gradient_name("rms"), gradient_name("sqnr_db", "e5m2")
    ('gradient_rms', 'gradient_sqnr_db_e5m2')
    """
    return f"gradient_{what}_{fmt}" if fmt else f"gradient_{what}"


def _gradients() -> Iterator[Metric]:
    for what, title, unit, better, explained in _OF_EACH_FORMAT:
        for fmt in GRADIENT_FORMATS:
            shown = f"Gradient: {title} in {fmt.removesuffix('fn').upper()}"
            yield Metric(gradient_name(what, fmt), shown, unit, better, "gradients", explained)
    for what, title in (("amax", "largest"), ("rms", "RMS")):
        help_ = "Of the gradient of a window's mean loss by a Linear's output."
        yield Metric(gradient_name(what), f"Gradient: {title}", "nats", NEITHER, "gradients", help_)


def _ends(metrics: Iterable[Metric]) -> Iterator[Metric]:
    for m in metrics:
        if m.name in INTERVALS:
            for end, word in ((LOW, "lower"), (HIGH, "upper")):
                yield Metric(
                    end_name(m.name, end),
                    f"{m.title}, {word} end",
                    m.unit,
                    NEITHER,
                    m.stage,
                    "Of the paired 95 % interval; none where units are too few.",
                    m.digits,
                    m.per,
                    m.signed,
                    end_of=m.name,
                )


_WITHOUT_ENDS = (
    *METRICS.values(), *_PERPLEXITY, *_QUANTIZE, *_KV, *_NEEDLE, *_SPEED, *_EXPERTS, *_BEFORE_CASTING, *_gradients(),
)  # fmt: skip
MEASUREMENTS = {metric.name: metric for metric in (*_WITHOUT_ENDS, *_ends(_WITHOUT_ENDS))}


@dataclass(frozen=True, slots=True)
class TaskNumber:
    """What a number of the stage tasks is: a metric of the task in its label, or that metric's standard error."""

    metric: str  # lm-eval's: "acc", or "exact_match,strict-match" after one of several filters
    is_stderr: bool = False

    @property
    def name(self) -> str:
        """What it is measured as.

        >>> TaskNumber("acc").name, TaskNumber("acc", is_stderr=True).name
        ('task_acc', 'task_acc_stderr')
        """
        return f"task_{self.metric}{'_stderr' if self.is_stderr else ''}"

    @property
    def unit(self) -> str:
        """Of the metric, whatever its filter."""
        return TASK_UNITS.get(self.metric.partition(",")[0], "")

    @classmethod
    def read(cls, name: str) -> "TaskNumber | None":
        """The number that is measured so; None for what is no task's.

        >>> TaskNumber.read("task_exact_match,strict_stderr"), TaskNumber.read("kld")
        (TaskNumber(metric='exact_match,strict', is_stderr=True), None)
        """
        if not name.startswith("task_"):
            return None
        metric = name.removeprefix("task_")
        return cls(metric.removesuffix("_stderr"), metric.endswith("_stderr"))


TASK_UNITS = {  # of lm-eval's metrics; its own tables say which direction is better
    "acc": "share", "acc_norm": "share", "acc_bytes": "share", "exact_match": "share", "needle": "share",
    "bits_per_byte": "bits",
}  # fmt: skip


def metric_of(row: Measurement) -> Metric:
    """What a stored number is; of a name that this version does not know, as much as the row says itself.

    >>> metric_of(Measurement("task_acc", 0.5, "share", "higher", "", "", "hellaswag")).title
    'acc'
    >>> metric_of(Measurement("entropy", 1.0, "nats", "", "", "")).title
    'Entropy'
    """
    if row.name in MEASUREMENTS:
        return MEASUREMENTS[row.name]
    if task := TaskNumber.read(row.name):
        title = f"{task.metric}, standard error" if task.is_stderr else task.metric
        return Metric(row.name, title, task.unit, row.better, "tasks", "As lm-eval makes it.")
    return Metric(row.name, row.name.replace("_", " ").capitalize(), row.unit, row.better, "", "")
