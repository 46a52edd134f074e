"""The benchmarks' logic at tiny sizes: equal work on all sides, right arithmetic. TRL and Liger take part where they are."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, make_model
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(ROOT / "benchmarks"))  # behind the rest: memory.py is there, too

import loss  # noqa: E402
import step  # noqa: E402

import grasp  # noqa: E402


@pytest.mark.parametrize("form", list(loss.FORMS)[1:])
def test_every_form_of_the_loss_leaves_the_gradient_of_the_plain_one(form):
    if reason := loss.cannot_run(form):
        pytest.skip(reason)
    found = []
    for name in ("plain", form):
        student, teacher = loss.two_heads(300, 16)
        before = student.lm_head.weight.grad.clone()
        torch.manual_seed(1)
        hidden, teacher_hidden = 30 * torch.randn(2, 7, 16, device=student.device)
        hidden.requires_grad_()
        loss.FORMS[name](student, hidden * 1.0, teacher, teacher_hidden)
        found.append((hidden.grad, student.lm_head.weight.grad - before))
    for plain, other in zip(*found):
        assert plain.norm() > 1e-3
        torch.testing.assert_close(other, plain, rtol=1e-3, atol=1e-5 * plain.norm().item())


def test_training_flops_are_those_that_torch_counts():
    model = make_model("qwen2", attn_implementation="eager")  # whose two products are the only batched ones
    new, steps = 5, [[{"student": [1] * 11, "teacher": [1] * 17}, {"student": [1] * 8, "teacher": [1] * 30}]] * 2
    expected = 0
    for example in steps[0]:
        for kind, passes in (("teacher", 1), ("student", 3)):
            ids = torch.ones(1, len(example[kind]) + new - 1, dtype=torch.long)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(ids, use_cache=False, logits_to_keep=new)
            counts = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
            expected += passes * (sum(counts.values()) - counts["aten.bmm"] / 2)  # torch does not count that it is causal
    assert step.training_flops(model.config, steps, new) == pytest.approx(expected, rel=1e-6)


def test_the_table_has_medians_the_highest_peak_and_ratios_to_the_better_of_trls_like_rows():
    found = {
        "grasp.py": [[1.0, 2.0, 1.5], [1.0, 3.0, 1.6], [4.0, 2.5, 1.5]],
        "TRL": [[3.0, 5.0, 4.0]],
        "TRL, micro-batches": [[3.0, 7.0, 3.2]],
        "grasp.py as it comes": [[1.0, 2.0, 1.5]],
        "TRL as it comes": [[2.0, 2.0, 1.0]],
    }
    head, _, ours, whole, _, alone, _ = step.table(found, 512, 1e12, 2.0).splitlines()
    assert ours == "| grasp.py | 1.00 | 2.50 | 4.00 | 1.60 | 0.50 | 0.50 | 128 | 0.200 |"
    assert whole == "| TRL | 3.00 | 5.00 | 8.00 | 4.00 | 1.00 | 1.25 | 64 | 0.100 |"
    assert alone == "| grasp.py as it comes | 1.00 | 2.00 | 3.00 | 1.50 | 0.75 | 1.50 | 171 | 0.250 |"
    assert head.endswith("| share of peak in the rest |")
    assert "share" not in step.table(found, 512, 1e12, 0)


def test_a_side_with_another_number_of_new_tokens_is_refused():
    _, rollout, _ = step.turns(3)
    with pytest.raises(RuntimeError, match=r"completions of 3 tokens, found \[3, 2\]"):
        rollout(lambda: [[1, 2, 3], [1, 2]])()


def test_a_side_that_fails_is_named_with_its_reason_and_does_not_keep_the_others_from_running(monkeypatch, tmp_path):
    script = tmp_path / "sides.py"
    script.write_text(
        "import sys\nif sys.argv[-1] == 'bad': sys.exit('out of memory')\n"
        f"for line in sys.stdin: print('noise'); print({step.MARK!r} + '[1.0, 2.0, 3.0]', flush=True)\n"
    )
    monkeypatch.setattr(step, "__file__", str(script))
    found, failed = step.take_turns(SimpleNamespace(argv=[], rounds=2), ["good", "bad"])
    assert found == {"good": [[1.0, 2.0, 3.0]] * 2} and failed == {"bad": "out of memory"}


def test_every_side_takes_the_same_batches_in_micro_batches_of_as_many_rows_as_was_asked(tmp_path):
    step.random_model("tiny", tmp_path)
    settings = dict(model=str(tmp_path), batch_size=4, new_tokens=3, dtype="float32", rounds=1, gradient_checkpointing=False)
    examples, batches = step.batches(SimpleNamespace(**settings))
    assert [len(batch) for batch in batches] == [4, 4, 4]
    longest = [max(len(example["student"]), len(example["teacher"])) + 3 for example in examples]
    sizes = [len(rows) for rows in grasp.micro_batches(longest, step.micro_batch_tokens(examples, 2, 3))]
    assert min(sizes[:-1]) == 2 and sum(sizes) == len(examples)


def test_gpu_sh_prints_its_tables_without_a_gpu():
    environment = os.environ | {"PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--small"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = done.stdout.split("\n## ")[1:]
    assert [part.split()[1].split("/")[1] for part in parts] == ["loss.py", "step.py", "memory.py"]
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in parts[1].splitlines() if line.count("|") > 8}
    wanted = {side for side in step.SIDES if not side.startswith("TRL") or step.has_trl()}
    assert wanted <= rows.keys()
    assert all(float(rows[side][i]) > 0 for side in wanted for i in (3, 7)), rows  # peak memory and the share of peak
    assert ("TRL is not installed" in parts[1]) != step.has_trl()
    assert "| grasp.py |" in parts[0] and "| plain |" in parts[0]
