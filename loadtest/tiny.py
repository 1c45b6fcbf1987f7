"""A tiny Llama with random weights, for tests that need right tokens but no sense.

A random model easily says one token for ever, whatever its KV holds, and would then prove nothing
about a cache. This one is initialised so that each answer depends on every part of its prompt:
wide attention and value projections let the context outweigh the last token. Its tokenizer has
one token a byte and is made here, so nothing is downloaded.

    python -m loadtest.tiny DIR
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 64
POSITIONS = 4096
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")
SEED = 20
"""`tests/vllm/test_tiny_model.py` holds with it."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_model(to: Path) -> Path:
    """Make the model in the folder `to` if it is not there, and return `to`. Takes seconds.

    Two layers, `HEADS` heads and `KV_HEADS` KV heads of `HEAD_SIZE`, so that tensor parallelism
    of 2 divides them; 259 tokens (one a byte, and three special ones), `POSITIONS` positions.
    A folder at `to` is always complete: the model is made beside it and renamed.
    """
    if (to / "config.json").is_file():
        return to
    to.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".tiny-", dir=to.parent))
    try:
        _save_tokenizer(work / "model")
        _save_weights(work / "model")
        (work / "model").rename(to)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return to


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _save_weights(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(SPECIAL_TOKENS) + 256,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=2 * HEADS * HEAD_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=_spread(name))
    model.save_pretrained(folder)


def _spread(name: str) -> float:
    """Return the standard deviation of a weight matrix.

    Wide values and outputs against narrow embeddings let the context outweigh the last token;
    queries and keys are wide enough to tell positions apart, and narrow enough that every block
    of the prompt is read.
    """
    if "embed_tokens" in name:
        return 0.1
    if "v_proj" in name or "o_proj" in name:
        return 0.3
    if "q_proj" in name or "k_proj" in name:
        return 0.12
    return 0.08


if __name__ == "__main__":
    print(tiny_model(Path(sys.argv[1])))
