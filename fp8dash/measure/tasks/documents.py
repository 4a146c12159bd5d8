"""The documents of our own lm-eval tasks, made without a network, and the score of a needle's answer.

lm-eval finds this file beside the tasks' YAML and calls it with their metadata. Knows no model.
"""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer

from fp8dash.errors import CorpusError
from fp8dash.measure.corpora import pydocs_pages
from fp8dash.measure.needles.essay import NOISE
from fp8dash.measure.needles.prompts import NeedleGrid, build_prompt


def needles(
    *, lengths: Sequence[int], depths: Sequence[int], samples: int, seed: int = 0, **metadata: Any
) -> dict[str, Dataset]:
    """`samples` needles in noise for each length (tokens of the model under test) and depth (per cent).

    A length is that of the prompt without a chat template. Raises CorpusError where no tokenizer is named.
    """
    tokenizer = _tokenizer(metadata)
    grid = [(n, d, s) for n in lengths for d in depths for s in range(seed, seed + samples)]
    return {"test": Dataset.from_list([_needle(tokenizer, *cell) for cell in grid])}


def pages(**_metadata: Any) -> dict[str, Dataset]:
    """CPython's help topics, one document each."""
    return {"test": Dataset.from_list([{"page": page} for page in pydocs_pages()])}


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1.0 where the number is contained in the answer."""
    return {"needle": float(doc["expected"] in results[0])}


def _needle(tokenizer: Any, length: int, depth: int, seed: int) -> dict[str, Any]:
    """A prompt cut where the model's own turn begins, were there a chat template."""
    prompt = build_prompt(tokenizer, NeedleGrid((length,), (depth,), (NOISE,), seed=seed), length, depth, 0, "off")
    return {
        "question": prompt.task,
        "answer_prefix": prompt.prefix.strip(),
        "expected": prompt.expected[0],
        "length": length,
        "depth": depth,
    }


def _tokenizer(metadata: dict[str, Any]) -> Any:
    """That of the model under test, by the names under which lm-eval passes it on."""
    named = (metadata.get(key) for key in ("tokenizer", "pretrained", "model"))
    name = next((name for name in named if isinstance(name, str) and name), None)
    if name is None:
        raise CorpusError(
            "fp8dash_needle measures its prompts in the model's tokens, and no tokenizer is named: give lm-eval "
            "--model_args pretrained=FOLDER, or tokenizer=FOLDER in --metadata."
        )
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    tokenizer.chat_template = None  # lm-eval applies it, where asked to
    return tokenizer
