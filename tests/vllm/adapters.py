"""Makes LoRA adapters with random weights for the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from loadtest import tiny

RANK = 8
SPREAD = 0.3
"""Of the weights: enough that every adapter answers in its own way."""
WIDTHS = {
    "q_proj": tiny.HEADS * tiny.HEAD_SIZE,
    "k_proj": tiny.KV_HEADS * tiny.HEAD_SIZE,
    "v_proj": tiny.KV_HEADS * tiny.HEAD_SIZE,
}


def make_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter into `folder`, over one that is there; equal seeds give equal ones."""
    folder.mkdir(exist_ok=True)
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(WIDTHS),
        "base_model_name_or_path": "tiny",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    dice = np.random.default_rng(seed)
    weights = {}
    for layer in range(tiny.LAYERS):
        for name, width in WIDTHS.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            wide = (RANK, tiny.HEADS * tiny.HEAD_SIZE)
            for half, shape in (("lora_A", wide), ("lora_B", (width, RANK))):
                drawn = dice.normal(0, SPREAD, shape).astype(np.float32)
                weights[f"{place}.{half}.weight"] = drawn
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
