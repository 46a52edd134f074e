"""memory.py: what is counted from shapes equals the bytes really there; peaks follow what decides them; advice helps."""

import dataclasses

import pytest
import torch
import transformers as tf
from conftest import FAMILIES, SIZES

import grasp
import memory
from checkpoint import load_model
from grasp import GraspOptions, build_optimizer, load_student, load_teacher, trainable, update
from memory import advice, as_table, available_memory, peak, predict

SMALL = dict(batch_size=4, generation_batch_size=2, max_new_tokens=8, micro_batch_tokens=120)
ROOMY = SIZES | dict(hidden_size=64, intermediate_size=160)  # widths that bitsandbytes packs without a rest, and one with


def config_of(family="qwen2", **settings):
    kind, own = FAMILIES[family]
    return kind(**{**ROOMY, **own, **settings})


def bytes_of(tensors) -> int:
    """Of the storages behind these tensors, each counted once."""
    return sum({storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}.values())


def tensors_of(model):
    """Parameters, buffers, and what bitsandbytes hangs on a parameter."""
    for tensor in [*model.parameters(), *model.buffers()]:
        yield tensor
        for thing in (tensor, getattr(tensor, "quant_state", None)):
            yield from (value for value in getattr(thing, "__dict__", {}).values() if isinstance(value, torch.Tensor))


def saved(config, folder, dtype="bfloat16"):
    torch.manual_seed(0)
    tf.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    return str(folder)


def state_after_an_update(model, options):
    optimizer, slices = build_optimizer(model, options)
    for weight in trainable(model).values():
        weight.grad = torch.ones_like(weight)
    update(optimizer, slices, 1e-3, 0)
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adamw"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_gradients_and_optimizer_state_are_exact(family, dtype, optimizer):
    if (family, dtype) == ("mixtral", "float32"):
        pytest.skip("torch multiplies the experts of a model without data in bfloat16 only")
    options = GraspOptions(**SMALL, dtype=dtype, optimizer=optimizer)
    parts = predict(config_of(family), options, 40, 50, "cpu")
    model = tf.AutoModelForCausalLM.from_config(config_of(family), dtype=getattr(torch, dtype))
    assert parts["student weights"] == parts["teacher"] == bytes_of(tensors_of(model))
    assert parts["gradients"] == bytes_of(model.parameters())
    assert parts["optimizer state"] == bytes_of(state_after_an_update(model, options))


def test_state_is_exact_where_a_weight_is_several_slices(monkeypatch):
    for module in (grasp, memory):
        monkeypatch.setattr(module, "SLICE", 5000)  # the last slice of many weights is then under 4,096 elements: float32 state
    options = GraspOptions(**SMALL)
    model = tf.AutoModelForCausalLM.from_config(config_of(), dtype=torch.bfloat16)
    state = state_after_an_update(model, options)
    assert {value.dtype for value in state} == {torch.uint8, torch.float32}
    assert predict(config_of(), options, 40, 50, "cpu")["optimizer state"] == bytes_of(state)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["qwen2", "tied", "gemma2", "phi", "gpt2"])
def test_a_teacher_in_8_or_4_bits_is_exact(family, bits, tmp_path):
    options = GraspOptions(**SMALL, teacher_bits=bits)
    teacher = load_model(saved(config_of(family), tmp_path), "bfloat16", "cpu", bits)
    parts = predict(config_of(family), options, 40, 50, "cpu")
    assert parts["teacher"] == bytes_of(tensors_of(teacher)) < parts["student weights"]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_adapters_and_their_base_are_exact(bits, tmp_path):
    pytest.importorskip("peft")
    options = GraspOptions(**SMALL, model=saved(config_of(), tmp_path), lora_rank=4, base_bits=bits)
    student = load_student(options, None, "cpu")
    parts = predict(config_of(), options, 40, 50, "cpu")
    assert parts["student weights"] == bytes_of(tensors_of(student))
    assert parts["gradients"] == bytes_of(trainable(student).values())
    assert parts["optimizer state"] == bytes_of(state_after_an_update(student, options))
    assert parts["teacher"] == 0 and load_teacher(options, student, None, "cpu") is student


def test_only_a_teacher_with_weights_of_its_own_takes_memory():
    teachers = {
        kind: predict(config_of(), GraspOptions(**SMALL, teacher=kind), 40, 50, "cpu") for kind in ("frozen", "live", "ema")
    }
    assert teachers["live"]["teacher"] == 0
    assert teachers["frozen"]["teacher"] == teachers["ema"]["teacher"] == teachers["frozen"]["student weights"]


def test_the_cache_is_what_the_rollouts_keep():
    """Keys and values of every layer, two rows, for each position that was fed: all but the last token."""
    parts = predict(config_of(), GraspOptions(**SMALL), 40, 50, "cpu")
    config, fed = config_of(), 40 + SMALL["max_new_tokens"] - 2
    per_position = 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 2
    assert parts["rollout cache"] == pytest.approx(config.num_hidden_layers * 2 * fed * per_position, rel=0.01)


def test_what_a_student_keeps_for_the_backward_pass_is_counted_as_autograd_counts_it():
    """Against the tensors that a real forward pass saves, without checkpointing."""
    config, options = config_of(), GraspOptions(**SMALL | dict(micro_batch_tokens=1), gradient_checkpointing=False)
    model, kept = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), {}
    weights = {weight.untyped_storage().data_ptr() for weight in [*model.parameters(), *model.buffers()]}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros(1, 40 + 8 - 1, dtype=torch.long), use_cache=False)
    expected = bytes_of(tensor for place, tensor in kept.items() if place not in weights)
    assert predict(config, options, 40, 50, "cpu")["activations"] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    "part, less, more",
    [
        ("activations", dict(gradient_checkpointing=True), dict(gradient_checkpointing=False)),
        ("activations", dict(micro_batch_tokens=60), dict(micro_batch_tokens=120)),
        ("teacher activations", dict(micro_batch_tokens=60), dict(micro_batch_tokens=120)),
        ("rollout cache", dict(generation_batch_size=1), dict(generation_batch_size=4)),
        ("rollout activations", dict(generation_batch_size=1), dict(generation_batch_size=4)),
        ("rollout logits", dict(generation_batch_size=1), dict(generation_batch_size=4)),
        ("optimizer state", dict(optimizer="adamw_8bit"), dict(optimizer="adamw")),
        ("gradients", dict(dtype="bfloat16"), dict(dtype="float32")),
        ("rollout looked at", dict(sample_steps=0), dict(sample_steps=1)),
        ("loss chunk", dict(dtype="bfloat16"), dict(dtype="float32")),
    ],
)
def test_each_part_grows_with_what_decides_it(part, less, more):
    few, many = (predict(config_of(), GraspOptions(**SMALL | settings), 40, 50, "cpu") for settings in (less, more))
    assert few[part] < many[part]


def test_parts_are_counted_together_only_if_they_are_alive_together():
    parts = dict.fromkeys(predict(config_of(), GraspOptions(**SMALL), 40, 50, "cpu"), 0)
    assert set(parts) == set(memory.STAYS) | {name for names in memory.PHASES.values() for name in names}
    parts |= {"student weights": 10, "rollout cache": 5, "rollout logits": 2, "activations": 3, "gradients": 3, "loss chunk": 2}
    assert peak(parts) == (18, "the divergence")
    assert peak(parts | {"rollout logits": 4}) == (19, "sampling")


def test_the_table_shows_every_part_the_peak_and_whether_it_fits():
    parts = predict(config_of(), GraspOptions(**SMALL), 40, 50, "cuda")
    total, phase = peak(parts)
    table = as_table(parts, total)
    assert all((f"| {name} |" in table) == (size > 0) for name, size in parts.items())
    assert phase in table.splitlines()[-1] and "it fits" in table and "more than" in as_table(parts, total - 1)


def test_advice_is_a_chain_of_flags_least_painful_first_that_ends_where_it_fits():
    where, config = (40, 50, "cpu"), config_of(vocab_size=2000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    first = options = GraspOptions(**SMALL | dict(micro_batch_tokens=4000), gradient_checkpointing=False)
    peaks = [peak(predict(config, options, *where))[0]]
    for change in (dict(micro_batch_tokens=58), dict(gradient_checkpointing=True), dict(teacher_bits=4)):
        options = dataclasses.replace(options, **change)
        peaks.append(peak(predict(config, options, *where))[0])
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4
    lines = advice(config, first, *where, peaks[-1])
    flags = ["--micro-batch-tokens 58", "--gradient-checkpointing true", "--teacher-bits 4"]
    assert [line.split(":")[0] for line in lines] == [*flags, f"so it fits in {memory.gb(peaks[-1])}"]
    assert all(memory.gb(size) in line for size, line in zip(peaks[1:], lines))
    assert len(advice(config, first, *where, peaks[1])) == 2 and advice(config, first, *where, peaks[0]) == []


def test_advice_makes_rollouts_smaller_if_the_peak_is_there():
    options = GraspOptions(**SMALL | dict(micro_batch_tokens=1, batch_size=64, generation_batch_size=64))
    lines = advice(config_of(), options, 900, 50, "cpu", 200 * 2**20)
    assert lines[0].startswith("--generation-batch-size 16: ")


def test_advice_says_what_is_missing_if_nothing_helps():
    lines = advice(config_of(), GraspOptions(**SMALL), 40, 50, "cpu", 1000)
    assert "does not fit" in lines[-1]


def test_the_machines_memory_is_known():
    assert 2**28 < available_memory("cpu") < 2**45
