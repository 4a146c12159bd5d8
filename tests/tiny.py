"""A model and a corpus small enough for a test: real files, read by the real loader."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaConfig

SEED = 7
CONTEXT = 2048
END = "<end>"


def write_tiny_model(folder: Path) -> Path:
    """A folder with a random two-layer Llama and a byte-level tokenizer without a chat template."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(SEED)
    LlamaForCausalLM(tiny_config()).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def tiny_config(**others: int) -> LlamaConfig:
    """Widths are multiples of 16, as CUDA's kernels want, and 160 is ragged for tiles of 128; or those given."""
    from transformers import LlamaConfig

    shape = {
        "vocab_size": 272,  # 256 bytes and the end, rounded up to a multiple of 16
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(
        **shape | others, max_position_embeddings=CONTEXT, tie_word_embeddings=False, bos_token_id=256, eos_token_id=256
    )


def write_corpus(folder: Path) -> Path:
    """A text file of 120 KB: sentences that repeat with a counter, so that no two windows are alike."""
    file = folder / "corpus.txt"
    sentence = "the lock keeper counted {} boats before noon and wrote them down."
    lines = (f"Line {n}: {sentence.format(n * n % 997)}\n" for n in range(1_500))
    file.write_text("".join(lines), "utf-8")
    return file


def write_tokenizer(folder: Path) -> None:
    """One token a byte, and the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
    fast.model_max_length = CONTEXT
    fast.save_pretrained(folder)
