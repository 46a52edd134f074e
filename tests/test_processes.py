"""Several processes: the step's gradient, the weights and what is written are those of one process."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import ROOT
from safetensors.torch import load_file
from test_training import metrics

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
UNEQUAL = """
import sys
sys.path.insert(0, {root!r})
import torch
import grasp
from command_line import parse_options

real, first = grasp.sample_completions, {first}

def sample(model, prompts, stop, max_new_tokens, seeds, **settings):  # completions of very unequal lengths, by their seeds
    completions = real(model, prompts, [0], max_new_tokens, seeds, **settings)
    return [c[: 1 if seed % 3 < first else max_new_tokens] for c, seed in zip(completions, seeds)]

real_update = grasp.update

def update(optimizer, slices, rate, seed):
    weights = [w for group in optimizer.param_groups for w in group["params"]]
    torch.save([w.grad for w in weights], {gradients!r} + ".pt")
    real_update(optimizer, slices, rate, seed)

grasp.sample_completions, grasp.update = sample, update
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
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(folder / "gradients.pt", weights_only=True), result.stdout


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 5])
def test_two_processes_give_the_gradient_and_the_weights_of_one(first, steps, options, tmp_path):
    """A third, two thirds or all of the completions have one token alone; the others have twelve."""
    if steps == 5 and first != 2:
        pytest.skip("once is enough")
    found = {}
    for world in (1, 2):
        settings = options(
            dtype="float32",
            optimizer="adamw",
            max_steps=steps,
            max_new_tokens=12,
            micro_batch_tokens=200,
            learning_rate=1e-2,
            batch_size=8,
            output_dir=str(tmp_path / f"out-{world}"),
        )
        found[world] = launch(settings, tmp_path / str(world), world, first)
    one, two = (torch.cat([g.flatten() for g in found[world][0]]) for world in (1, 2))
    assert (one - two).norm() < 1e-5 * one.norm() and one.norm() > 0
    weights = [load_file(tmp_path / f"out-{world}" / "model" / "model.safetensors") for world in (1, 2)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-5 if steps == 1 else 1e-4)
    for a, b in zip(metrics(tmp_path / "out-1"), metrics(tmp_path / "out-2"), strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
    assert found[2][1].count("the trained model is in") == 1  # said once


def test_a_run_saved_on_two_processes_is_resumed_on_one(options, tmp_path):
    settings = options(dtype="float32", max_steps=4, save_steps=2, save_limit=0, output_dir=str(tmp_path / "out"))
    launch(settings, tmp_path / "two", 2)
    whole = load_file(tmp_path / "out" / "model" / "model.safetensors")
    lines = metrics(tmp_path / "out")
    for name in ("model/model.safetensors", "checkpoint-4/files.json"):
        (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / "model").rename(tmp_path / "old")
    settings = dataclasses.replace(settings, resume=True)
    launch(settings, tmp_path / "one", 1)
    for name, weight in load_file(tmp_path / "out" / "model" / "model.safetensors").items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-4, atol=1e-4)
    for a, b in zip(metrics(tmp_path / "out"), lines, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
