"""Several processes: the step's gradient, the weights and what is written are those of one process."""

import dataclasses
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from conftest import ROOT
from safetensors.torch import load_file
from test_training import metrics

from grasp import micro_batches
from sharding import launched_to_split

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
UNEQUAL = """
import os
import sys
sys.path.insert(0, {root!r})
import torch
import grasp
from command_line import parse_options

real, first = grasp.sample_completions, {first}

def sample(model, prompts, stop, max_new_tokens, seeds, **settings):  # completions of very unequal lengths, by their seeds
    completions = real(model, prompts, [0], max_new_tokens, seeds, **settings)
    return [c[: 1 if seed % 3 < first else max_new_tokens] for c, seed in zip(completions, seeds)]

real_clip = grasp.clip_gradients

def clip(weights, max_norm):
    gradients = [w.grad.full_tensor() if hasattr(w.grad, "full_tensor") else w.grad for w in weights]
    torch.save(gradients, {gradients!r} + os.environ.get("RANK", "0") + ".pt")
    before = torch.nn.utils.get_total_norm(gradients)
    norm = real_clip(weights, max_norm)
    assert abs(norm - before) < (1e-4 if before.dtype == torch.float32 else 1e-2) * norm
    return norm

grasp.sample_completions, grasp.clip_gradients = sample, clip
grasp.train(parse_options(grasp.GraspOptions, [{config!r}]))
"""


def launch(settings, folder, world, first=2):
    folder.mkdir()
    config, script = folder / "config.yaml", folder / "script.py"
    config.write_text(yaml.safe_dump(dataclasses.asdict(settings)))
    names = dict(root=str(ROOT), first=first, gradients=str(folder / "gradients"), config=str(config))
    script.write_text(UNEQUAL.format(**names))
    command = [*LAUNCH, str(script)] if world == 2 else [sys.executable, str(script)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}  # what `accelerate launch` sets and starts where there are GPUs
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-5000:]
    return torch.load(folder / "gradients0.pt", weights_only=True), result.stdout


def settings_for(options, folder, **more):
    return options(
        dtype="float32",
        optimizer="adamw",
        max_new_tokens=12,
        micro_batch_tokens=200,
        learning_rate=1e-2,
        batch_size=8,
        eval_steps=2,
        eval_rows=3,  # not as many for each process
        sample_steps=2,
        output_dir=str(folder),
        **more,
    )


@pytest.mark.parametrize("first, steps, more", [(2, 5, {}), (3, 1, {}), (2, 2, {"lora_rank": 2}), (2, 2, {"teacher": "ema"})])
def test_two_processes_give_the_gradient_and_the_weights_of_one(first, steps, more, options, tmp_path):
    """Two thirds or all of the completions have one token alone; the others have twelve."""
    ways = {"one": (1, False), "two": (2, False), "split": (2, True)}
    if more:
        del ways["two"]
    gradients, said = {}, {}
    for way, (world, shard) in ways.items():
        settings = settings_for(options, tmp_path / f"out-{way}", max_steps=steps, shard=shard, **more)
        found, said[way] = launch(settings, tmp_path / way, world, first)
        gradients[way] = torch.cat([gradient.flatten() for gradient in found])
    one = gradients.pop("one")
    for way, gradient in gradients.items():
        assert (one - gradient).norm() < 1e-5 * one.norm() and one.norm() > 0
        for place in ("model", "best") if steps > 1 else ("model",):
            weights, same = (load_file(tmp_path / f"out-{w}" / place / "model.safetensors") for w in ("one", way))
            assert weights.keys() == same.keys()
            for name, weight in weights.items():
                torch.testing.assert_close(same[name], weight, rtol=1e-4, atol=1e-5 if steps == 1 else 1e-4)
        for a, b in zip(metrics(tmp_path / "out-one"), metrics(tmp_path / f"out-{way}"), strict=True):
            assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
        assert said[way].count("the trained model is in") == 1  # said once


def test_a_split_run_is_resumed_to_the_bit(options, tmp_path):
    more = {"dtype": "bfloat16", "optimizer": "adamw_8bit", "teacher": "ema"}
    settings = settings_for(options, tmp_path / "out", max_steps=4, save_steps=2, save_limit=0, shard=True)
    settings = dataclasses.replace(settings, **more)
    launch(settings, tmp_path / "first", 2)
    whole, lines = (tmp_path / "out" / "model" / "model.safetensors").read_bytes(), metrics(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "model")
    (tmp_path / "out" / "checkpoint-4" / "files.json").unlink()
    launch(dataclasses.replace(settings, resume=True), tmp_path / "second", 2)
    assert (tmp_path / "out" / "model" / "model.safetensors").read_bytes() == whole
    assert metrics(tmp_path / "out") == lines


@pytest.mark.parametrize("before, after", [((2, False), (1, False)), ((2, True), (1, False)), ((1, False), (2, True))])
def test_a_run_is_resumed_on_another_number_of_processes(before, after, options, tmp_path):
    more = {"dtype": "float32", "optimizer": "adamw", "learning_rate": 1e-2}
    settings = options(max_steps=4, save_steps=2, save_limit=0, output_dir=str(tmp_path / "out"), shard=before[1], **more)
    launch(settings, tmp_path / "before", before[0])
    whole = load_file(tmp_path / "out" / "model" / "model.safetensors")
    lines = metrics(tmp_path / "out")
    for name in ("model/model.safetensors", "checkpoint-4/files.json"):
        (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / "model").rename(tmp_path / "old")
    launch(dataclasses.replace(settings, resume=True, shard=after[1]), tmp_path / "after", after[0])
    for name, weight in load_file(tmp_path / "out" / "model" / "model.safetensors").items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-4, atol=1e-4)
    for a, b in zip(metrics(tmp_path / "out"), lines, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


def test_processes_have_as_many_micro_batches():
    """The budget makes two; more are asked for, up to one for each row."""
    lengths = [5, 5, 5, 5, 20]
    assert [len(micro_batches(lengths, 20, least)) for least in (1, 3, 5, 9)] == [2, 3, 5, 5]
    for least in range(6):
        assert sorted(row for batch in micro_batches(lengths, 20, least) for row in batch) == list(range(5))


@pytest.mark.parametrize("name, kind", [("ddp", "MULTI_GPU"), ("fsdp", "FSDP"), ("zero3", "DEEPSPEED")])
def test_accelerate_reads_the_launch_files(name, kind):
    config = load_config_from_file(str(ROOT / "configs" / "accelerate" / f"{name}.yaml"))
    assert config.distributed_type == kind and config.num_processes == 2 and config.mixed_precision == "no"


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MULTI_CPU])
def test_a_launch_that_splits_is_seen_and_kept_from_transformers(kind, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    assert launched_to_split(SimpleNamespace(distributed_type=kind)) == (kind != DistributedType.MULTI_CPU)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
