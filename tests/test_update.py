"""The optimizer step: bfloat16 weights move as float32 ones do, in the mean; matrices alone decay; the rate's course."""

import math

import pytest
import torch
from conftest import make_model
from torch import nn

import grasp
from grasp import GraspOptions, build_optimizer, learning_rate_at, stochastic_round_, update
from sharding import recut

OPTIMIZERS = ["adamw_8bit", "paged_adamw_8bit", "adamw"]
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")  # there, pages are plain memory


def one_weight(values, dtype):
    """A "model" that is a single weight."""
    weight = nn.Parameter(values.to(dtype))
    return weight, nn.ParameterList([weight])


def movement(optimizer, dtype, count=2**17, steps=200, rate=5e-6):
    """How far each weight of standard deviation 0.02 goes against a gradient that stays the same, in `steps` updates."""
    draw = torch.Generator().manual_seed(0)
    start = (torch.randn(count, generator=draw) * 0.02).bfloat16()
    gradient = torch.randn(count, generator=draw).sign() * 0.01
    weight, model = one_weight(start.view(256, -1).clone(), dtype)
    adam, slices = build_optimizer(model, GraspOptions(optimizer=optimizer, learning_rate=rate, weight_decay=0.0))
    for step in range(steps):
        weight.grad = gradient.view(256, -1).to(dtype)
        update(adam, slices, rate, seed=step)
    return (weight.detach().float().flatten() - start.float()) * -gradient.sign()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bfloat16_weights_move_by_the_float32_amount(optimizer, monkeypatch):
    """Trap 13: rounding to nearest loses nine tenths of it at this learning rate, without an error."""
    expected = movement(optimizer, torch.float32)
    assert expected.mean().item() == pytest.approx(200 * 5e-6, rel=0.01)
    found = movement(optimizer, torch.bfloat16)
    assert found.mean().item() == pytest.approx(expected.mean().item(), rel=0.01)
    monkeypatch.setattr(grasp, "stochastic_round_", lambda target, values, generator: target.copy_(values))
    assert movement(optimizer, torch.bfloat16).mean().item() < 0.1 * expected.mean().item()


def test_large_and_small_gradients_move_the_weights_alike_in_both_dtypes():
    """Through the gradient's own spread too: 8-bit state and rounding keep what AdamW makes of it."""
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        draw = torch.Generator().manual_seed(1)
        weight, model = one_weight(torch.randn(256, 256, generator=draw) * 0.02, dtype)
        start = weight.detach().clone().float()
        adam, slices = build_optimizer(model, GraspOptions(weight_decay=0.0))
        for step in range(100):
            weight.grad = torch.randn(256, 256, generator=draw).add_(0.3).to(dtype)
            update(adam, slices, 1e-5, seed=step)
        moved[dtype] = (weight.detach().float() - start).mean().item()
    assert moved[torch.bfloat16] == pytest.approx(moved[torch.float32], rel=0.02)


def neighbours(values):
    """The bfloat16 values next below and above in size: the float32 bits with the lower half cut off, and one more."""
    bits = values.view(torch.int32) & -(2**16)
    return bits.view(torch.float32), (bits + 2**16).view(torch.float32)


def rounded(values, seed=0):
    """`values` in bfloat16, left as they are themselves."""
    target = torch.empty(values.shape, dtype=torch.bfloat16)
    stochastic_round_(target, values.clone(), torch.Generator().manual_seed(seed))
    return target


@pytest.mark.parametrize("value", [1.001, -1.001, 0.0199, -3.3e-5, 1.0039, 7e30, -2e-38])
def test_rounding_lands_on_a_neighbour_and_is_unbiased(value):
    values = torch.full((200_000,), value)
    found, (below, above) = rounded(values).float(), neighbours(values)
    assert ((found == below) | (found == above)).all()
    share = ((values[0].double() - below[0].double()) / (above[0].double() - below[0].double())).item()
    spread = math.sqrt(share * (1 - share) / len(values))
    assert (found == above).double().mean().item() == pytest.approx(share, abs=4 * spread)


def test_rounding_keeps_what_bfloat16_holds():
    held = torch.randn(10_003, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    held[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-40, 1.0]).bfloat16().float()
    for seed in range(5):
        assert torch.equal(rounded(held, seed).float().view(torch.int32), held.view(torch.int32))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001])
def test_rounding_turns_no_nan_into_a_number(bits):
    """0x7FFFFFFF is the NaN that a GPU makes: bits added to it must not carry it over to a weight that looks fine."""
    assert not rounded(torch.full((1000,), bits, dtype=torch.int32).view(torch.float32)).isfinite().any()


def test_rounding_depends_on_the_seed_alone():
    values = torch.randn(1000)
    assert torch.equal(rounded(values, 1), rounded(values, 1)) and not torch.equal(rounded(values, 1), rounded(values, 2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_weight_updated_in_slices_goes_where_one_updated_whole_goes(optimizer, monkeypatch):
    monkeypatch.setattr(grasp, "stochastic_round_", lambda target, values, generator: target.copy_(values))
    results = []
    for size in (2**24, 4096 * 4):  # a multiple of the 8-bit state's blocks, and large enough to have 8-bit state
        monkeypatch.setattr(grasp, "SLICE", size)
        draw = torch.Generator().manual_seed(0)
        weight, model = one_weight(torch.randn(300, 200, generator=draw), torch.bfloat16)
        adam, slices = build_optimizer(model, GraspOptions(optimizer=optimizer))
        assert len(slices) == math.ceil(60_000 / size)
        for step in range(20):
            weight.grad = torch.randn(300, 200, generator=draw).bfloat16()
            update(adam, slices, 1e-2, seed=step)
        results.append(weight.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("before, after", [(2**24, 10_000), (10_000, 2**24), (10_000, 7_000), (2**24, 1_000), (1_000, 2**24)])
def test_the_optimizers_state_is_cut_anew_for_other_pieces_of_a_weight(optimizer, before, after, monkeypatch):
    """As when another number of processes goes on: some pieces span two old ones, some are too small for 8-bit state."""
    found, new_states = {}, {}
    for way in (before, after):
        monkeypatch.setattr(grasp, "SLICE", before)
        draw = torch.Generator().manual_seed(0)
        weight, model = one_weight(torch.randn(300, 100, generator=draw), torch.float32)
        adam, slices = build_optimizer(model, GraspOptions(optimizer=optimizer))
        for step in range(8):
            if step == 4 and way == after:
                state = adam.state_dict()
                monkeypatch.setattr(grasp, "SLICE", after)
                adam, slices = build_optimizer(model, GraspOptions(optimizer=optimizer))
                adam.load_state_dict(recut([state, state], adam))  # as two processes that hold the weight whole
                assert len(adam.state) == math.ceil(30_000 / after)
            weight.grad = torch.randn(300, 100, generator=draw)
            update(adam, slices, 1e-2, seed=step)
        found[way], new_states[way] = weight.detach().clone(), adam.state
    moved = (found[before] - torch.randn(300, 100, generator=torch.Generator().manual_seed(0))).norm()
    error = (found[before] - found[after]).norm() / moved
    assert error == 0 if optimizer == "adamw" else error < 0.02
    sizes = [(state["state1"].numel(), state["state1"].dtype) for state in new_states[after].values() if "state1" in state]
    assert all((dtype == torch.uint8) == (size >= 4096) for size, dtype in sizes)


def test_float32_weights_are_updated_by_plain_adamw():
    """Against torch's own, made by hand."""
    mine, same = make_model(), make_model()
    decayed = [p for p in same.parameters() if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [p for p in same.parameters() if p.ndim == 1], "weight_decay": 0},
    ]
    plain = torch.optim.AdamW(groups, lr=1e-3)
    adam, slices = build_optimizer(mine, GraspOptions(optimizer="adamw", weight_decay=0.1))
    for step in range(3):
        for model in (mine, same):
            draw = torch.Generator().manual_seed(step)
            for weight in model.parameters():
                weight.grad = torch.randn(weight.shape, generator=draw)
        plain.step()
        update(adam, slices, 1e-3, seed=step)
    assert all(weight.grad is None for weight in mine.parameters())
    for weight, other in zip(mine.parameters(), same.parameters()):
        torch.testing.assert_close(weight, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_decay_in_matrices_and_not_in_norms_and_biases(optimizer, dtype):
    model = make_model().to(dtype)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    adam, slices = build_optimizer(model, GraspOptions(optimizer=optimizer, weight_decay=0.5))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    update(adam, slices, 0.5, seed=0)
    kinds = set()
    for name, weight in model.named_parameters():
        kept = 1.0 if name.endswith(("norm.weight", "bias")) else 0.75
        kinds.add(kept)
        torch.testing.assert_close(weight.float(), before[name].float() * kept, rtol=2**-7, atol=0)
        assert kept < 1 or torch.equal(weight, before[name])
    assert kinds == {1.0, 0.75}


def test_only_one_slices_float32_copy_exists_and_gradients_are_freed(monkeypatch):
    monkeypatch.setattr(grasp, "SLICE", 256)
    weight, model = one_weight(torch.randn(64, 64), torch.bfloat16)
    adam, slices = build_optimizer(model, GraspOptions())
    assert len(slices) == 16 and [s for _, s, _ in slices] == [slice(i, i + 256) for i in range(0, 4096, 256)]
    alive, real = [], grasp.stochastic_round_

    def spy(*args):
        alive.append(sum(stand_in.numel() for _, _, stand_in in slices))
        real(*args)

    monkeypatch.setattr(grasp, "stochastic_round_", spy)
    weight.grad = torch.randn(64, 64).bfloat16()
    update(adam, slices, 1e-3, seed=0)
    assert alive == [256] * 16 and weight.grad is None
    assert all(stand_in.numel() == 0 and stand_in.grad is None for _, _, stand_in in slices)


def test_the_rate_warms_up_in_a_line_and_falls_along_a_cosine_to_zero():
    options = GraspOptions(learning_rate=2.0, warmup_ratio=0.1)
    rates = [learning_rate_at(step, 100, options) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * n for n in range(1, 11)]) and rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0) and rates[100] == pytest.approx(0.0, abs=1e-12)
    assert all(a > b > 0 for a, b in zip(rates[10:], rates[11:100]))
    assert rates[32] == pytest.approx(1 + math.cos(math.pi * 22 / 90))


@pytest.mark.parametrize("ratio, total", [(0.0, 1), (0.1, 1), (1.0, 5), (0.5, 3), (0.0, 7)])
def test_the_rate_of_short_runs_is_never_zero_nor_above_the_peak(ratio, total):
    rates = [learning_rate_at(step, total, GraspOptions(learning_rate=1.0, warmup_ratio=ratio)) for step in range(total)]
    assert all(0 < rate <= 1 for rate in rates) and max(rates) == 1
