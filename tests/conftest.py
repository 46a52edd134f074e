"""Tiny random-weight models of many families, small tokenizers and a toy data set, made once: no test needs a network."""

import atexit
import html
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CACHE = tempfile.mkdtemp(prefix="grasp-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=CACHE, HF_DATASETS_CACHE=f"{CACHE}/datasets", OMP_NUM_THREADS="1")
os.environ.update(TOKENIZERS_PARALLELISM="false", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers as tf  # noqa: E402

from grasp import GraspOptions  # noqa: E402

torch.set_num_threads(1)  # the models are too small for more to help
tf.utils.logging.set_verbosity_error()

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = CHATML[: -len("{% endif %}")] + (  # like Qwen3's: thinks unless told not to
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
NO_SYSTEM = (  # like Gemma-2's, with a BOS of its own
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
WORDS = "garden tea bread piano river winter budget novel bicycle cheese stamps hiking violin pottery chess soup".split()


def make_tokenizer(template=CHATML, bos=None):
    """Byte-level BPE. Id 0, which is also what the code pads with, is end of turn, EOS and pad at once, as in SmolLM2."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>"] + ([bos] if bos else [])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    rows = [f"{json.dumps(row)} Answer the user's question for this particular user" for row in toy_rows(40)]
    core.train_from_iterator(rows, trainer)
    if bos:  # this tokenizer adds it by itself, and so do templates
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    end = "<|im_end|>"
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token=end, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


def toy_rows(count, start=0):
    """LaMP-QA rows, each about two of the WORDS: the posts name them, the rubric asks for them."""
    rows = []
    for i in range(start, start + count):
        one, two = WORDS[i % 16], WORDS[(i * 5 + 3) % 16]
        aspects = [f"what it means for {one}", f"how {two} fits in"]
        rows.append(
            {
                "id": f"q{i}",
                "question": f"What should I do about {one} on day {i}?",
                "category": "toy",
                "narrative": f"I am asking since my {two} was lost in the move last year.",
                "rubric_aspects": [{"aspect": a, "reason": f"they love {one}", "evidence": f"{two} again"} for a in aspects],
                "profile": [{"id": f"p{i}-{j}", "text": f"Post {j} about {w}."} for j, w in enumerate((one, two))],
            }
        )
    return rows


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


SIZES = dict(
    vocab_size=400,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=0,
)
FAMILIES = {  # each with what a hand-made head would forget turned up
    "qwen2": (tf.Qwen2Config, {}),
    "qwen3": (tf.Qwen3Config, dict(head_dim=8)),
    "gemma2": (
        tf.Gemma2Config,
        dict(
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            tie_word_embeddings=True,
            attn_implementation="eager",
        ),
    ),
    "llama": (tf.LlamaConfig, {}),
    "granite": (tf.GraniteConfig, dict(logits_scaling=4.0, embedding_multiplier=2.0, residual_multiplier=0.5)),
    "cohere": (tf.CohereConfig, dict(logit_scale=0.25)),
    "tied": (tf.Qwen2Config, dict(tie_word_embeddings=True)),
    "phi": (tf.PhiConfig, dict(resid_pdrop=0.0)),  # a head with a bias
    "gpt2": (tf.GPT2Config, dict(n_inner=48, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),  # absolute positions
    "gpt_neox": (tf.GPTNeoXConfig, {}),
    "mixtral": (tf.MixtralConfig, dict(num_local_experts=4)),  # passes router logits on from decoder to head
}


def make_model(family="qwen2", seed=0, **settings):
    """A random-weight model in eval mode; biases and norms are random too, so that none can be forgotten unseen."""
    kind, own = FAMILIES[family]
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(kind(**{**SIZES, **own, **settings})).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    return model


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    """A whole tiny chat model on disk: a tied Llama, as SmolLM2 is one."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    make_model("llama", tie_word_embeddings=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_rows(folder / "train.jsonl", toy_rows(12))
    write_rows(folder / "validation.jsonl", toy_rows(6, start=100))
    return folder


@pytest.fixture
def options(model_folder, data_folder, tmp_path):
    """options(name=value, ...): a run of four small steps with these settings changed."""

    def make(**settings):
        small = dict(batch_size=4, max_new_tokens=6, max_steps=4, answer_format="text", save_steps=0, micro_batch_tokens=512)
        where = dict(model=str(model_folder), dataset=str(data_folder), output_dir=str(tmp_path / "out"))
        return GraspOptions(**{**where, **small, "divergence_cap": 0.0, **settings})

    return make


def kill_and_continue(main, options, kills, signals=(signal.SIGKILL,), seed=7):
    """Run main(options("undisturbed")), then main(options("killed")) in as many processes as it takes: `kills` of them are sent
    one of the signals at a random moment. Returns the moments, in seconds. The last process has to end well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([main.__module__])  # so that each run starts at once

    def start(name):
        process = context.Process(target=main, args=(options(name),))
        process.start()
        return process

    start("warm").join()
    began = time.monotonic()
    start("undisturbed").join()
    whole = time.monotonic() - began
    generator, moments = random.Random(seed), []
    while len(moments) < kills:
        process, moment = start("killed"), generator.uniform(0, 2.5 * whole / kills)
        process.join(moment)
        if process.is_alive():
            os.kill(process.pid, signals[len(moments) % len(signals)])
            moments.append(moment)
        process.join()
        assert process.exitcode != 0, f"it was done before it was killed {kills} times: make the run longer"
    process = start("killed")
    process.join()
    assert process.exitcode == 0
    return moments


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def found_by_browser(page):
    """Open a page from disk in headless Chromium; returns the text that its scripts left in <pre id="found">."""
    with tempfile.TemporaryDirectory() as profile:
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        flags += f" --disable-component-update --disable-sync --virtual-time-budget=5000 --user-data-dir={profile} --dump-dom"
        command = [BROWSER, *flags.split(), f"file://{page}"]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    return html.unescape(re.search('<pre id="found">(.*?)</pre>', dom, re.S)[1])
