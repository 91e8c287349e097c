"""SparseAdamW against torch.optim.AdamW (mask of ones) and a dense masked reference (any mask)."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from models import assert_equal, snapshot, tiny_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from dualsft.train.optimizer import SparseAdamW

Masks = dict[str, Tensor]


def tiny_llama(dtype: torch.dtype = torch.float32, tied: bool = False) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 24}
    return tiny_model("llama", dtype, vocab_size=37, tie_word_embeddings=tied, **sizes)


def batch(step: int) -> Tensor:
    return torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(1000 + step))


def backward(model: nn.Module, step: int, micro_batches: int = 1) -> None:
    for i in range(micro_batches):
        ids = batch(step * micro_batches + i)
        (model(input_ids=ids, labels=ids).loss / micro_batches).backward()


def attached(model: nn.Module, indices: Any = None, **settings: Any) -> SparseAdamW:
    lr = settings.pop("lr", 1e-3)
    return SparseAdamW(model.named_parameters(), indices, lr=lr, **settings)


def random_masks(model: nn.Module, share: float, seed: int = 0) -> Masks:
    """A mask over the block weights; some parameters are left out, one has a single entry."""
    draw = torch.Generator().manual_seed(seed)
    masks = {
        name: torch.rand(p.shape, generator=draw) < share
        for name, p in model.named_parameters()
        if ".layers." in name and "k_proj" not in name
    }
    single = "model.layers.1.mlp.up_proj.weight"
    masks[single] = torch.zeros_like(masks[single])
    masks[single][-1, -1] = True
    return masks


def indices_of(masks: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    return {name: mask.view(-1).nonzero().view(-1) for name, mask in masks.items()}


class DenseMaskedAdamW:
    """AdamW written out over whole tensors times a mask; the mask may move."""

    def __init__(self, model: nn.Module, masks: Masks, lr: float, decay: float) -> None:
        self.params = dict(model.named_parameters())
        self.lr, self.decay, self.masks = lr, decay, {}
        self.m: dict[str, Tensor] = {}
        self.v: dict[str, Tensor] = {}
        self.t: dict[str, int] = {}
        self.move(masks)

    def move(self, masks: Masks) -> None:
        for name, p in self.params.items():
            mask = masks.get(name, torch.zeros(p.shape, dtype=torch.bool))
            kept = mask & self.masks.get(name, torch.zeros_like(mask))
            zero = torch.zeros_like(p)
            self.m[name] = torch.where(kept, self.m.get(name, zero), 0.0)
            self.v[name] = torch.where(kept, self.v.get(name, zero), 0.0)
            if not self.masks.get(name, torch.zeros_like(mask)).any() or not mask.any():
                self.t[name] = 0
            self.masks[name] = mask

    @torch.no_grad()
    def step(self, max_norm: float) -> float:
        grads = {}
        for name, p in self.params.items():
            grads[name] = torch.zeros_like(p) if p.grad is None else p.grad * self.masks[name]
            p.grad = None
        norm = sum(float((g**2).sum()) for g in grads.values()) ** 0.5
        scale = min(1.0, max_norm / (norm + 1e-6))
        for name, p in self.params.items():
            g = grads[name] * scale
            self.t[name] += 1
            t, mask = self.t[name], self.masks[name]
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g * g
            m_hat, v_hat = self.m[name] / (1 - 0.9**t), self.v[name] / (1 - 0.999**t)
            update = self.lr * (m_hat / (v_hat.sqrt() + 1e-8) + self.decay * p)
            p -= torch.where(mask, update, 0.0)
        return norm


@pytest.fixture(autouse=True)
def plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and no oneDNN: its bf16 product faults on virtual machines with a broken AMX."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- Mask of ones, mask of zeros ---------------------------------------------------------------


def everything_as_indices(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: torch.arange(p.numel()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize(
    "select",
    [lambda _: None, lambda m: {n: None for n, _ in m.named_parameters()}, everything_as_indices],
    ids=["none", "none_each", "all_indices"],
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("free", [False, True])
def test_mask_of_ones_is_adamw_bit_for_bit(
    select: Callable[[nn.Module], Any],
    max_norm: float | None,
    micro_batches: int,
    tied: bool,
    free: bool,
) -> None:
    ours, theirs = tiny_llama(tied=tied), tiny_llama(tied=tied)
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1}
    sparse = SparseAdamW(ours.named_parameters(), select(ours), free_gradients=free, **settings)
    dense = torch.optim.AdamW(theirs.parameters(), **settings)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 5) * 0.95**s)
        for o in (sparse, dense)
    ]
    for step in range(20):
        sparse.zero_grad()
        dense.zero_grad()
        backward(ours, step, micro_batches)
        backward(theirs, step, micro_batches)
        if max_norm is not None:
            norm = sparse.clip_grad_norm(max_norm)
            assert norm > max_norm, "this test must clip"
            assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
        sparse.step()
        dense.step()
        for schedule in schedules:
            schedule.step()
        assert_equal(snapshot(ours), snapshot(theirs))
    for name, p in theirs.named_parameters():
        mine, reference = sparse.state[ours.get_parameter(name)], dense.state[p]
        assert mine["step"] == reference["step"] == 20
        assert torch.equal(mine["exp_avg"].view_as(p), reference["exp_avg"])
        assert torch.equal(mine["exp_avg_sq"].view_as(p), reference["exp_avg_sq"])
    assert sparse.num_selected == sum(p.numel() for p in ours.parameters())


@pytest.mark.parametrize("empty", [False, True])
def test_mask_of_zeros_changes_nothing(empty: bool) -> None:
    model = tiny_llama()
    before = snapshot(model)
    none = torch.empty(0, dtype=torch.int64)
    indices = {name: none for name in before} if empty else {}
    optimizer = attached(model, indices, lr=0.1, weight_decay=0.1)
    assert optimizer.num_selected == 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1.0)
    for step in range(3):
        inputs = model.get_input_embeddings()(batch(step)).requires_grad_()
        model(inputs_embeds=inputs, labels=batch(step)).loss.backward()
        assert inputs.grad is not None and inputs.grad.abs().sum() > 0
        assert all(p.grad is None for p in model.parameters())
        assert optimizer.clip_grad_norm(1.0) == 0
        optimizer.step()
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert_equal(snapshot(model), before)


# --- Any mask ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_frozen_entries_keep_their_bits_and_selected_ones_move(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype)
    before, masks = snapshot(model), random_masks(model, 0.2)
    optimizer = attached(model, indices_of(masks), lr=2e-2, weight_decay=0.1, eps=1e-6)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    num_moved = 0
    for name, p in model.named_parameters():
        same = p.detach().view(bits) == before[name].view(bits)
        mask = masks.get(name, torch.zeros(p.shape, dtype=torch.bool))
        assert same[~mask].all()
        num_moved += int((~same[mask]).sum())
        if name in masks:
            assert torch.equal(p.detach()[mask], optimizer.masters[name].to(dtype))
    assert num_moved > 0.98 * optimizer.num_selected  # a few may round to where they were


# --- Inside backward ---------------------------------------------------------------------------


def test_dense_gradients_are_freed_inside_backward() -> None:
    model = tiny_llama()
    optimizer = attached(model, indices_of(random_masks(model, 0.1)), free_gradients=True)
    seen: list[tuple[int, int]] = []

    def at_first_layer(_: Tensor) -> None:  # backward reaches layer 1 before the input of layer 0
        dense = [n for n, p in model.named_parameters() if p.grad is not None]
        taken = [n for n in optimizer.gradients if ".1." in n]
        expected = [n for n in optimizer.names if ".1." in n]
        seen.append((len(dense), len(expected) - len(taken)))

    def watch(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0].detach().requires_grad_()
        hidden.register_hook(at_first_layer)
        return (hidden, *args[1:])

    model.model.layers[0].register_forward_pre_hook(watch)
    backward(model, 0)
    assert seen == [(0, 0)]
    assert all(p.grad is None for p in model.parameters())
    sizes = {name: grad.numel() for name, grad in optimizer.gradients.items()}
    assert sizes == {name: master.numel() for name, master in optimizer.masters.items()}


def test_micro_batches_add_up_in_fp32_for_a_bf16_model() -> None:
    model = tiny_llama(torch.bfloat16)
    masks = random_masks(model, 0.2)
    expected: dict[str, Tensor] = {name: torch.zeros(int(m.sum())) for name, m in masks.items()}
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        for name in masks:
            grad = model.get_parameter(name).grad
            assert grad is not None
            expected[name] += grad[masks[name]].float()
    model.zero_grad()
    optimizer = attached(model, indices_of(masks), free_gradients=True)
    for step in range(3):
        backward(model, step)
    grads = optimizer.gradients
    assert_equal(grads, expected)
    assert any((g != g.bfloat16().float()).any() for g in grads.values())
    optimizer.zero_grad()
    assert not optimizer.gradients


@pytest.mark.parametrize("free", [False, True])
def test_a_gradient_that_is_already_there_counts(free: bool) -> None:
    ours, theirs = tiny_llama(), tiny_llama()
    backward(ours, 0)
    backward(theirs, 0)
    sparse = attached(ours, None, lr=1e-2, free_gradients=free)
    dense = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0)
    assert all((p.grad is None) == free for p in ours.parameters())
    sparse.step()
    dense.step()
    assert_equal(snapshot(ours), snapshot(theirs))
    sparse.close()
    backward(ours, 0)
    some = {"lm_head.weight": torch.tensor([5])}
    sparse = attached(ours, some, lr=1e-2, free_gradients=free)
    left = [p.grad for p in ours.parameters() if p.grad is not None]
    assert len(left) == (0 if free else 1), "nothing would ever free the others"
    assert all(int(grad.count_nonzero()) == 1 for grad in left)
    assert sparse.gradients["lm_head.weight"].numel() == 1


def test_only_parameters_with_selected_entries_ask_for_gradients() -> None:
    model = tiny_llama()
    model.model.norm.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    masks = random_masks(model, 0.2)
    with attached(model, indices_of(masks)) as optimizer:
        on = {name for name, p in model.named_parameters() if p.requires_grad}
        assert on == set(optimizer.masters) == {name for name, mask in masks.items() if mask.any()}
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    backward(model, 0)
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()


# --- bf16 --------------------------------------------------------------------------------------


def constant_gradient(p: Tensor) -> None:
    (p.float() * torch.linspace(1, 2, p.numel())).sum().backward()


@pytest.mark.parametrize("whole", [True, False])
def test_a_bf16_master_accumulates_steps_that_bf16_loses(whole: bool) -> None:
    ours, lost = (nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2))
    exact = nn.Parameter(torch.ones(8))
    index = None if whole else torch.arange(7)
    sparse = SparseAdamW([("w", ours)], {"w": index}, lr=1e-4)
    plain = torch.optim.AdamW([lost], lr=1e-4, weight_decay=0.0)
    reference = torch.optim.AdamW([exact], lr=1e-4, weight_decay=0.0)
    for step in range(100):
        for p, optimizer in ((ours, sparse), (lost, plain), (exact, reference)):
            optimizer.zero_grad()
            constant_gradient(p)
            if p is exact and p.grad is not None:
                p.grad = p.grad.bfloat16().float()  # as a bf16 model hands it over
            optimizer.step()
        if step == 0:
            assert torch.equal(ours.detach(), torch.ones(8, dtype=torch.bfloat16))
            assert (sparse.masters["w"] < 1).all()
    assert torch.equal(lost.detach(), torch.ones(8, dtype=torch.bfloat16)), "each step is lost"
    selected = exact.detach()[index] if index is not None else exact.detach()
    torch.testing.assert_close(sparse.masters["w"], selected, rtol=1e-6, atol=0)
    assert torch.equal(ours.detach()[: selected.numel()], sparse.masters["w"].bfloat16())
    assert (ours.detach()[: selected.numel()] < 1).all()


# --- state_dict --------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: SparseAdamW, schedule: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, 2)
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        schedule.step()


def made(model: nn.Module, indices: Any) -> tuple[SparseAdamW, Any]:
    optimizer = attached(model, indices, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.9**s)


def test_loading_does_not_tie_two_optimizers_together() -> None:
    one, two = tiny_llama(), tiny_llama()
    first, first_schedule = made(one, indices_of(random_masks(one, 0.3)))
    train(one, first, first_schedule, range(2))
    second, second_schedule = made(two, None)
    second.load_state_dict(first.state_dict())
    before = copy.deepcopy(first.state_dict())
    train(two, second, second_schedule, range(3))
    after = first.state_dict()
    for i, entry in before["state"].items():
        assert_equal(entry, after["state"][i])
    assert_equal(before["masters"], after["masters"])


def test_states_that_do_not_fit_are_refused() -> None:
    model = tiny_llama()
    optimizer, _ = made(model, indices_of(random_masks(model, 0.3)))
    plain = torch.optim.AdamW(tiny_llama().parameters(), lr=1e-3).state_dict()
    with pytest.raises(ValueError, match=r"\['indices', 'masters'\]: it is not the state"):
        optimizer.load_state_dict(plain)
    name = next(iter(optimizer.masters))
    for change, message in [
        (lambda s: s["masters"].pop(name), name),
        (lambda s: s["masters"].update({name: s["masters"][name].double()}), "torch.float64"),
        (lambda s: s["masters"].update({name: s["masters"][name][1:]}), f"'{name}' has"),
        (lambda s: s["indices"].update({"lm_hed.weight": None}), "lm_hed.weight"),
        (lambda s: s["indices"].update({name: s["indices"][name].flip(0)}), "increase strictly"),
    ]:
        state = copy.deepcopy(optimizer.state_dict())
        change(state)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)


# --- Masks that move ---------------------------------------------------------------------------


@pytest.mark.parametrize("free", [False, True])
def test_any_mask_that_moves_equals_the_dense_reference(free: bool) -> None:
    ours, theirs = tiny_llama(torch.float64), tiny_llama(torch.float64)
    start = snapshot(ours)
    whole = {name: torch.ones(p.shape, dtype=torch.bool) for name, p in ours.named_parameters()}
    path = [random_masks(ours, 0.3), random_masks(ours, 0.4, seed=1), whole]
    path += [random_masks(ours, 0.2, seed=2), {}, random_masks(ours, 0.2, seed=3)]
    settings = {"lr": 1e-2, "weight_decay": 0.1, "free_gradients": free}
    sparse = attached(ours, indices_of(path[0]), **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(sparse, lambda s: 0.9**s)
    dense = DenseMaskedAdamW(theirs, path[0], lr=1e-2, decay=0.1)
    step = 0
    for number, masks in enumerate(path):
        sparse.set_indices(indices_of(masks))
        dense.move(masks)
        assert sparse.num_selected == sum(int(mask.sum()) for mask in masks.values())
        for _ in range(5 if masks else 0):
            sparse.zero_grad()
            backward(ours, step, 2)
            backward(theirs, step, 2)
            dense.lr = 1e-2 * 0.9**step
            norm = sparse.clip_grad_norm(0.3)
            assert norm.item() == pytest.approx(dense.step(0.3), rel=1e-9)
            assert norm > 0.3, "this test must clip"
            sparse.step()
            schedule.step()
            step += 1
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)
            if number == 0:
                assert bool((p != start[name]).any()) == (name in masks)
        assert len(sparse.state) <= len(sparse.masters), "state of a dropped master is freed"


def test_an_unchanged_mask_keeps_the_same_vectors() -> None:
    model = tiny_llama()
    indices = indices_of(random_masks(model, 0.3))
    optimizer = attached(model, indices)
    backward(model, 0)
    optimizer.step()
    before = {p: dict(state) for p, state in optimizer.state.items()}
    optimizer.set_indices({name: i.clone() for name, i in indices.items() if i is not None})
    assert before and before.keys() == optimizer.state.keys()
    for p, state in before.items():
        assert all(optimizer.state[p][key] is value for key, value in state.items())
    assert not optimizer.gradients, "pending gradients are dropped"


# --- An ordinary optimizer, and its errors -----------------------------------------------------


def test_step_hooks_and_closures_work_once_per_step() -> None:
    model = tiny_llama()
    torch.optim.AdamW(tiny_llama().parameters(), lr=1e-3)  # torch patches AdamW.step here
    optimizer = SparseAdamW(model.named_parameters(), indices_of(random_masks(model, 0.3)), 1e-2)
    calls: list[str] = []
    written: list[bool] = []

    def after(*_: object) -> None:
        calls.append("after")
        written.append(not torch.equal(model.get_parameter(name).detach(), before[name]))

    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(after)
    before, name = snapshot(model), next(iter(optimizer.masters))

    def closure() -> float:
        optimizer.zero_grad()
        backward(model, 0)
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert calls == ["before", "after"]
    assert written == [True]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([3, 1]), "'w' must increase strictly, but position 0 holds 3 and .* holds 1"),
        (torch.tensor([0, 1, 1]), "'w' must increase strictly, but position 1 holds 1"),
        (torch.tensor([2, 12]), "'w' run from 2 to 12, outside 0 to 11"),
        (torch.tensor([-1, 2]), "'w' run from -1 to 2"),
        (torch.tensor([1], dtype=torch.int32), "'w' are torch.int32"),
        (torch.ones(12, dtype=torch.bool), "'w' are torch.bool of shape .* int64"),
        (torch.tensor([[1, 2]]), r"'w' are torch.int64 of shape \(1, 2\)"),
    ],
)
def test_bad_indices_are_refused_by_name(index: Tensor, message: str) -> None:
    p = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(ValueError, match=message):
        SparseAdamW([("w", p)], {"w": index}, lr=1e-3)
    optimizer = SparseAdamW([("w", p)], None, lr=1e-3)  # the failure left nothing behind
    with pytest.raises(ValueError, match=message):
        optimizer.set_indices({"w": index})
    assert optimizer.num_selected == 12


def test_unknown_names_are_refused_beside_the_nearest_known() -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"2 unknown .*'lm_head\.wieght'.*'lm_head\.weight'"):
        SparseAdamW(model.named_parameters(), {"lm_head.wieght": None, "x": None}, lr=1e-3)


def test_parameters_that_cannot_be_trained_are_refused_by_name() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(ValueError, match="'f' has selected entries but requires_grad is False"):
        SparseAdamW([("f", frozen)], None, lr=1e-3)
    integer = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"'i' is torch\.int8; only torch\.float64"):
        SparseAdamW([("i", integer)], {"i": None}, lr=1e-3)
    with pytest.raises(ValueError, match="'t' is not contiguous"):
        SparseAdamW([("t", nn.Parameter(torch.ones(3, 4).T))], None, lr=1e-3)
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="'b' is given twice .*'a'"):
        SparseAdamW([("a", p), ("b", p)], None, lr=1e-3)
    with pytest.raises(ValueError, match="learning rate"):
        SparseAdamW([("p", p)], None, lr=-1.0)
    SparseAdamW([("f", frozen), ("i", integer), ("p", p)], {"p": None}, lr=1e-3)


def test_one_optimizer_at_a_time() -> None:
    model = tiny_llama()
    first = attached(model)
    with pytest.raises(ValueError, match=r"'model\.embed_tokens\.weight' has a SparseAdamW"):
        attached(model)
    first.close()
    attached(model).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_dict_before_the_first_step(dtype: torch.dtype) -> None:
    """Nothing is held yet, and a parameter without a gradient never holds anything."""
    model = tiny_llama(dtype)
    before = snapshot(model)
    with attached(model) as optimizer:
        optimizer.load_state_dict(optimizer.state_dict())
        assert_equal(snapshot(model), before)
        assert all(optimizer.num_updates(name) == 0 for name in before)


@pytest.mark.parametrize("free", [False, True])
def test_a_forgotten_optimizer_is_not_kept_alive_by_its_hooks(free: bool) -> None:
    """Nor is the model; and its parameters are free for another."""
    model = tiny_llama()
    optimizer = attached(model, free_gradients=free)
    gone, weights = weakref.ref(optimizer), weakref.ref(model.lm_head.weight)
    del optimizer
    gc.collect()
    assert gone() is None
    attached(model).close()
    del model
    gc.collect()
    assert weights() is None


@pytest.mark.parametrize("free", [False, True])
def test_what_would_silently_go_wrong_is_refused(free: bool) -> None:
    model = tiny_llama()
    optimizer = attached(model, free_gradients=free)
    with pytest.raises(ValueError, match="one parameter group"):
        optimizer.add_param_group({"params": [torch.ones(2)]})
    group = optimizer.param_groups[0]
    for changed in ([group, {**group, "params": []}], [group | {"maximize": True}]):
        optimizer.param_groups = changed
        with pytest.raises(RuntimeError, match="one parameter group and minimizes"):
            optimizer.step()
    optimizer.param_groups = [group]
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    backward(model, 0)
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"storage of 'lm_head\.weight' was replaced"):
        optimizer.step()
    embedding = nn.Embedding(5, 3, sparse=True)
    other = attached(embedding, free_gradients=free)
    with pytest.raises(RuntimeError, match="'weight' is in layout torch.sparse_coo"):
        embedding(torch.tensor([1])).sum().backward()
    other.close()
