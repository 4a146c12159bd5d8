"""The usual way to the same answer, beside ours: what does this recipe cost this model?

Usual: lm-eval's rolling log-likelihood of the baseline and of the model as compressed-tensors fake-quantizes it, each
evaluated anew. Ours: the perplexity stage, KLD and top-1 included, against a baseline that is kept. One recipe, FP8
dynamic by channel and token; one text, cut into the same windows. Loading and casting are left out of both.
"""

from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor, nn

from fp8dash.choose.presets import PRESETS
from fp8dash.measure.baseline import Baseline, baseline_file, baseline_of
from fp8dash.measure.corpora import Windows, cut_windows, load_corpus
from fp8dash.measure.perplexity import perplexity
from fp8dash.model.head import full_head
from fp8dash.model.load import LoadedModel, find_device, load, locate, torch_device
from fp8dash.model.swap import cast_model
from fp8dash.places import cache_dir

PRESET = "FP8_DYNAMIC"  # of this name here and there
WINDOWS, LENGTH = 8, 512


def usual_and_ours() -> tuple[Callable[[], object], Callable[[], object]]:
    """Both ways, ready to be timed, over the same tokens."""
    where = torch_device("auto")
    plain, cast, peer = (load(locate("demo", cache_dir()), where) for _ in range(3))
    corpus = load_corpus("pydocs")
    windows = cut_windows(plain.tokenizer, corpus, WINDOWS, LENGTH, plain.context)
    usual, quick = _usual(plain, peer, windows.ids), _ours(plain, cast, corpus.content_hash, windows)
    return usual, quick


def _usual(plain: LoadedModel, peer: LoadedModel, windows: Tensor) -> Callable[[], object]:
    _fake_quantize(peer.model)
    text = plain.tokenizer.decode(windows.flatten())
    count = len(plain.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    assert count == windows.numel(), f"{count} tokens came back of {windows.numel()}"
    models = [
        HFLM(pretrained=of.model, tokenizer=of.tokenizer, max_length=LENGTH, batch_size=1) for of in (plain, peer)
    ]
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    return lambda: [model.loglikelihood_rolling([request], disable_tqdm=True) for model in models]


def _ours(plain: LoadedModel, cast: LoadedModel, corpus_hash: str, windows: Windows) -> Callable[[], object]:
    head, model_hash = full_head(plain.model), plain.content_hash
    file = baseline_file(cache_dir(), model_hash=model_hash, corpus_hash=corpus_hash, windows=windows, device="bench")
    *_, baseline = baseline_of(plain.model, head, windows, file)
    assert isinstance(baseline, Baseline)
    for _swap in cast_model(cast.model, PRESETS[PRESET].recipe, find_device(), "emulated"):
        pass
    return lambda: list(perplexity(cast.model, head, windows, baseline, "emulated", 0))


@torch.no_grad()
def _fake_quantize(model: Any) -> None:
    """Every Linear but the head, with scales from its largest weights: what a round-to-nearest recipe leaves behind."""
    scheme = preset_name_to_scheme(PRESET, targets=["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if isinstance(module, nn.Linear) and hasattr(module, "weight_scale"):
            low, high = module.weight.aminmax(dim=1, keepdim=True)
            scale, _zero = calculate_qparams(low, high, scheme.weights)
            module.weight_scale.copy_(scale)
