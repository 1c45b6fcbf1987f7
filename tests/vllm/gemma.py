"""Makes a tiny Gemma 3 with random weights: layers with sliding windows beside full attention.

python gemma.py DIR
"""

import sys

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig


def main():
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=259,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        dtype="float32",
    )
    Gemma3ForCausalLM(config).save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
