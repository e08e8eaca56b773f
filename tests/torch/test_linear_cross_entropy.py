"""From features to the loss: PyTorch's values and gradients in every option, with and without logits in memory."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import pytest
import torch
from cross_entropies import OPTIONS, REDUCTIONS, draw, reference
from support import HOST
from torch_support import OnHost

import cupyfuse.torch as ct
from cupyfuse import devices
from cupyfuse.plan import block_choice
from cupyfuse.plan.schedule import products
from cupyfuse.settings import Settings
from cupyfuse.torch.chains import backward, compiled, saving
from cupyfuse.torch.chains import executor as executors
from cupyfuse.torch.chains.executor import Executor
from cupyfuse.torch.chains.options import Options
from cupyfuse.torch.chains.runner import Runner
from cupyfuse.torch.functions import Step, build_chain
from cupyfuse.torch.losses import _Options, _runner
from cupyfuse.torch.rules.symbols import Ref

F = torch.nn.functional
INF = math.inf
ROWS, FEATURES, CLASSES = 26, 5, 40
SMALL = 6000  # bytes: a block of a few rows of float64 logits and their gradient
WORKSPACES = (1 << 28, SMALL)
DEFAULTS = _Options(-100, "mean", 0.0, 0.0, None, None)


def operands(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    x, w, b = (
        draw(rows, FEATURES, dtype=dtype),
        draw(CLASSES, FEATURES, dtype=dtype, seed=1),
        draw(CLASSES, dtype=dtype),
    )
    target = torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(2))
    target[3] = -100
    return tuple(t.requires_grad_() for t in (x, w, b)) + (target,)


def executor_of(names: tuple[str, ...], workspace: int, **options: Any) -> Executor:
    """The latest executor of calls with these operands and options."""
    defaults = dict(ct.linear_cross_entropy.__kwdefaults__ or {})
    del defaults["class_weight"], defaults["max_workspace"]
    chosen = {**defaults, **options}
    order = ("ignore_index", "reduction", "label_smoothing", "z_loss", "soft_cap", "temperature")
    return _runner(names, False, tuple(chosen[name] for name in order), workspace).executors[-1]


@pytest.mark.rotates
@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_values_and_gradients(reduction: str, options: dict[str, Any], workspace: int) -> None:
    options = {**options, "reduction": reduction}
    if "class_weight" in options:
        options["class_weight"] = draw(CLASSES, seed=4).abs()
    for biased, probabilities in itertools.product((False, True), (False, True)):
        x, w, b, target = operands()
        if options.get("ignore_index") == 7:
            target = torch.where(target == -100, 7, target)
        if probabilities and "ignore_index" in options:
            continue
        target = torch.softmax(draw(ROWS, CLASSES, seed=5), 1) if probabilities else target
        bias = b if biased else None
        ours = ct.linear_cross_entropy(x, w, target, bias, max_workspace=workspace, **options)
        theirs = reference(x, w, target, bias, **options)
        torch.testing.assert_close(ours, theirs)
        cotangent = draw(*theirs.shape, seed=6)
        wanted = [t for t in (x, w, bias) if t is not None]
        found = torch.autograd.grad(ours, wanted, cotangent)
        expected = torch.autograd.grad(theirs, wanted, cotangent)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("reduction", "made"), [("mean", True), ("sum", True), ("none", False)])
def test_what_is_saved_beside_a_bound(reduction: str, made: bool) -> None:
    """One number scales the gradients of a mean or a sum; else products are computed again. No logits are saved."""
    _runner.cache_clear()  # of other tests' executors
    x, w, b, target = operands()
    ct.linear_cross_entropy(x, w, target, b, reduction=reduction, max_workspace=SMALL).sum().backward()
    executor = executor_of(("input", "weight", "target", "bias"), SMALL, reduction=reduction)
    assert executor.backward is not None
    saving = executor.backward.saving
    assert bool(saving.gradients) == made
    assert ("the forward pass makes the gradients" if made else "recomputed by the backward pass") in saving.note
    assert f"for the backward pass: {saving.note}" in str(executor.plan)
    assert executor.plan.blocks is not None and executor.plan.workspace <= SMALL + ROWS * 8 * 4
    assert all(n.shape != (ROWS, CLASSES) for n in saving.nodes)
    *_, loaded = (p for p in executor.backward._plans.values() if p.execute is not None)
    plan = loaded.plan
    assert plan.blocks is not None or made
    assert plan.workspace <= SMALL + CLASSES * 8 * 4  # the sums of the bias's gradient, and their addends
    wide, *_ = operands()
    ct.linear_cross_entropy(wide, w, target, b, reduction=reduction).sum().backward()
    stored = executor_of(("input", "weight", "target", "bias"), 1 << 28, reduction=reduction).backward
    assert stored is not None and [n.shape for n in stored.saving.nodes] == [(ROWS, CLASSES)] and not stored.saving.note


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics_of_long_rows_are_saved_beside_them(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The backward pass reads the logits once; their probabilities are as exact as those of logits alone."""
    x, w, _, target = operands(dtype)
    found = []
    for most in (CLASSES, CLASSES - 1):
        monkeypatch.setattr(saving, "_RESIDENT", most)
        _runner.cache_clear()
        executors._compiled.clear()
        loss = ct.linear_cross_entropy(x, w, target)
        found.append(torch.autograd.grad(loss, (x, w)))
        (executor,) = _runner(("input", "weight", "target"), dtype is torch.bfloat16, DEFAULTS, 1 << 28).executors
        assert executor.backward is not None
        assert len(executor.backward.saving.nodes) == 1 + 2 * (most < CLASSES)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.rotates
@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck(reduction: str, workspace: int) -> None:
    x, w, b, target = operands(rows=9)
    options: dict[str, Any] = {"reduction": reduction, "z_loss": 0.1, "soft_cap": 3.0, "label_smoothing": 0.1}

    def loss(x: Any, w: Any, b: Any) -> Any:
        return ct.linear_cross_entropy(x, w, target, b, max_workspace=workspace // 4, **options)

    assert torch.autograd.gradcheck(loss, (x, w, b))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_of_some_operands(reduction: str, wanted: tuple[int, ...]) -> None:
    x, w, b, target = operands()
    given = [t.detach().requires_grad_(k in wanted) for k, t in enumerate((x, w, b))]
    ours = ct.linear_cross_entropy(given[0], given[1], target, given[2], reduction=reduction, max_workspace=SMALL)
    theirs = reference(given[0], given[1], target, given[2], reduction=reduction)
    leaves = [given[k] for k in wanted]
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves))


def test_gradients_again_and_of_gradients() -> None:
    """The graph may be kept, the loss scaled, and gradients differentiated."""
    x, w, b, target = operands()
    loss = ct.linear_cross_entropy(x, w, target, b, max_workspace=SMALL)
    expected = torch.autograd.grad(reference(x, w, target, b), (x, w, b))
    for scale in (1.0, 3.0, 0.0):
        found = torch.autograd.grad(loss * scale, (x, w, b), retain_graph=True)
        torch.testing.assert_close(found, tuple(scale * g for g in expected))
    second = []
    for value in (loss, reference(x, w, target, b)):
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        second.append(torch.autograd.grad(gradient.square().sum(), (x, w)))
    torch.testing.assert_close(*second)


@pytest.mark.rotates
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("scale", [INF, -INF, math.nan])
def test_an_infinite_scale_of_gradients(scale: float, workspace: int, reduction: str) -> None:
    """Rows of labels that do not count have gradients of 0; in the others the scale shows."""
    x, w, b, target = operands()
    ignored = target == -100
    for options in OPTIONS:
        if "class_weight" in options or "ignore_index" in options:
            continue
        loss = ct.linear_cross_entropy(x, w, target, b, **options, reduction=reduction, max_workspace=workspace)
        (found,) = torch.autograd.grad(loss, x, torch.full_like(loss, scale))
        assert (found[ignored] == 0).all() and not found[~ignored].isfinite().any()
        if "z_loss" not in options:  # which the reference masks by a factor
            eager = reference(x, w, target, b, **options, reduction=reduction)
            (expected,) = torch.autograd.grad(eager, x, torch.full_like(eager, scale))
            assert (expected[ignored] == 0).all() and not expected[~ignored].isfinite().any()


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_special_rows(workspace: int) -> None:
    """Nothing to count, large common offsets, infinite logits: as PyTorch has them, in losses and gradients."""
    x, w, b, target = operands()
    cases = [(torch.full_like(target, -100), b), (target, b.detach() + 1e6)]
    infinite = b.detach().clone()
    infinite[5] = -INF
    cases.append((target.clamp(min=6), infinite))
    for (labels, bias), reduction, smoothing in itertools.product(cases, REDUCTIONS, (0.0, 0.25)):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        ours = ct.linear_cross_entropy(x, w, labels, bias, max_workspace=workspace, **options)
        theirs = reference(x, w, labels, bias, **options)
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-9, atol=1e-9)
        found, expected = (torch.autograd.grad(loss.sum(), (x, w)) for loss in (ours, theirs))
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("workspace", [1 << 28, 1500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_no_further_from_float64_than_eager(reduction: str, dtype: torch.dtype, workspace: int) -> None:
    """Eager with float32 logits of 16-bit operands. Twice its error allows for another order of sums."""
    x, w, b, target = operands(dtype)
    ours = ct.linear_cross_entropy(x, w, target, b, reduction=reduction, max_workspace=workspace)
    eager = F.cross_entropy(F.linear(x, w, b).float(), target, reduction=reduction)
    assert ours.dtype == torch.float32
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    right = F.cross_entropy(F.linear(*exact), target, reduction=reduction)
    errors = []
    for loss, leaves in ((ours, (x, w, b)), (eager, (x, w, b))):
        found = (loss, *torch.autograd.grad(loss.sum(), leaves))
        expected = (right, *torch.autograd.grad(right.sum(), exact, retain_graph=True))
        errors.append(
            [float((f.double() - e).abs().max() / e.abs().max()) for f, e in zip(found, expected, strict=True)]
        )
    unit = torch.finfo(dtype).eps / 2  # gradients are rounded to the operands' dtype
    for mine, theirs in zip(*errors, strict=True):
        assert mine <= 2 * theirs + 2 * unit, errors


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_no_logits_in_memory(reduction: str) -> None:
    """The peak beside operands and gradients stays near the bound, a twentieth of the logits."""
    rows, features, classes = 2048, 16, 8192
    x, w = draw(rows, features, dtype=torch.float32).requires_grad_(), draw(classes, features, dtype=torch.float32)
    w.requires_grad_()
    target = torch.randint(classes, (rows,))
    most = 3 << 20

    def step() -> None:
        ct.linear_cross_entropy(x, w, target, reduction=reduction, max_workspace=most).sum().backward()

    step()
    x.grad = w.grad = None
    tracemalloc.start()
    try:
        step()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    logits, gradients = 4 * rows * classes, 4 * (rows + classes) * features
    # NumPy's engine has further temporaries for blocks of the rows of one step: those of 2 ** 18 elements.
    assert peak < most + 3 * gradients + 16 * (4 << 18) < logits / 2


def test_any_rank_and_modules() -> None:
    x, w, b, target = operands(rows=24)
    cube, labels = x.detach().view(2, 3, 4, FEATURES).requires_grad_(), target.view(2, 3, 4)
    for reduction in REDUCTIONS:
        found = ct.linear_cross_entropy(cube, w, labels, b, reduction=reduction)
        expected = reference(x, w, target, b, reduction=reduction)
        torch.testing.assert_close(found, expected.view(2, 3, 4) if reduction == "none" else expected)
    alone = ct.linear_cross_entropy(x[0], w, target[0], b)
    torch.testing.assert_close(alone, F.cross_entropy(F.linear(x[0], w, b), target[0]))
    module = ct.LinearCrossEntropy(FEATURES, CLASSES, dtype=torch.float64, class_weight=b.detach().abs(), z_loss=0.1)
    found = module(x, target)
    weight = module.class_weight
    torch.testing.assert_close(found, reference(x, module.weight, target, module.bias, class_weight=weight, z_loss=0.1))
    assert set(module.state_dict()) == {"weight", "bias", "class_weight"}
    with pytest.raises(TypeError, match="z_los: no such option of linear_cross_entropy"):
        ct.LinearCrossEntropy(2, 3, z_los=0.1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_labels_of_eight_bits(reduction: str) -> None:
    """PyTorch's `cross_entropy` takes them; an index of them would be a mask."""
    x, w, b, target = operands()
    counted = target.clamp(min=0)
    options: dict[str, Any] = {"class_weight": b.detach().abs(), "z_loss": 0.1, "reduction": reduction}
    found = ct.linear_cross_entropy(x, w, counted.to(torch.uint8), b, ignore_index=0, **options)
    torch.testing.assert_close(found, reference(x, w, counted, b, ignore_index=0, **options))


def test_within_a_compiled_graph_and_autocast() -> None:
    x, w, b, target = operands(torch.float32)
    options: dict[str, Any] = {"z_loss": 0.1, "soft_cap": 3.0}
    expected = reference(x, w, target, b, **options)

    def loss(x: Any, w: Any, b: Any) -> Any:
        return ct.linear_cross_entropy(x, w, target, b, **options)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, w, b), expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss(x, w, b), expected, rtol=0.02, atol=0.02)


def test_options_that_are_symbols_of_a_compiled_graph() -> None:
    """Those that change become symbols, as sizes do."""
    x, w, b, target = operands(torch.float32)
    target = target.clamp(min=0)

    def loss(x: Any, smoothing: float, ignored: int) -> Any:
        return ct.linear_cross_entropy(
            x, w, target, b, label_smoothing=smoothing, ignore_index=ignored, z_loss=smoothing
        )

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="eager", fullgraph=True, dynamic=True)
    for smoothing, ignored in ((0.0, -100), (0.1, 0), (0.3, 2)):
        torch.testing.assert_close(compiled(x, smoothing, ignored), loss(x, smoothing, ignored))


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reduction": "other"}, ValueError, "reduction: expected one of 'none', 'mean', 'sum', got 'other'"),
    ({"soft_cap": 0.0}, ValueError, "soft_cap: expected a positive number or None, got 0.0"),
    ({"temperature": -1.0}, ValueError, "temperature: expected a positive number"),
    ({"bias": 3}, TypeError, "bias: expected a torch.Tensor, got int"),
    ({"target": None}, TypeError, "target: expected a torch.Tensor, got NoneType"),
    ({"max_workspace": 0}, ValueError, "max_workspace: expected a positive number of bytes"),
    ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an int, got float"),
    ({"label_smoothing": "0.1"}, TypeError, "label_smoothing: expected a number, got str"),
    ({"z_loss": None}, TypeError, "z_loss: expected a number, got NoneType"),
    ({"soft_cap": "30"}, TypeError, "soft_cap: expected a number or None, got str"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_what_does_not_fit_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    x, w, _, target = operands()
    with pytest.raises(error, match=message):
        ct.linear_cross_entropy(**{"input": x, "weight": w, "target": target, **options})


def test_targets_of_other_shapes_are_refused() -> None:
    """Also of as many elements, such as labels of sequences x batch beside features of batch x sequences."""
    x, w, _, target = operands(rows=24)
    cube, probabilities = x.view(4, 6, FEATURES), torch.softmax(draw(24, CLASSES), 1)
    wrong = [(x, t) for t in (target[:3], target[:, None], target.view(4, 6), probabilities.view(4, 6, CLASSES))]
    wrong += [(cube, t) for t in (target, target.view(6, 4), probabilities, probabilities.view(6, 4, CLASSES))]
    wrong += [(x, probabilities[:, 1:]), (x[0], target[:1]), (cube, target.view(4, 6, 1).double())]
    for features, other in wrong:
        with pytest.raises(RuntimeError, match=r"target: expected (labels|probabilities) of shape .*, got torch"):
            ct.linear_cross_entropy(features, w, other)


def test_operands_that_do_not_fit() -> None:
    x, w, _, target = operands()
    with pytest.raises(RuntimeError):
        ct.linear_cross_entropy(x, w[:, :3], target)
    for features, weight in ((x[0, 0], w), (x, w[0]), (x, w[None])):
        with pytest.raises(RuntimeError, match=r"input, weight: expected shapes \(\.\.\., in_features\) and"):
            ct.linear_cross_entropy(features, weight, target)


def test_class_weights_have_no_gradient_beside_labels() -> None:
    """PyTorch raises an error too; beside probabilities there is one."""
    x, w, b, target = operands()
    weight = draw(CLASSES, seed=4).abs().requires_grad_()
    with pytest.raises(RuntimeError, match="class_weight: has no gradient beside labels"):
        ct.linear_cross_entropy(x, w, target, b, class_weight=weight, label_smoothing=0.1)
    with torch.no_grad():
        ct.linear_cross_entropy(x, w, target, b, class_weight=weight)
    probabilities = torch.softmax(draw(ROWS, CLASSES, seed=5), 1)
    found, expected = (
        torch.autograd.grad(loss(x, w, probabilities, b, class_weight=weight), weight)
        for loss in (ct.linear_cross_entropy, reference)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_features(reduction: str) -> None:
    """All logits are the bias, or 0."""
    x, w, b, target = operands()
    x, w = x[:, :0], w[:, :0]
    for bias in (b, None):
        found = ct.linear_cross_entropy(x, w, target, bias, reduction=reduction)
        torch.testing.assert_close(found, reference(x, w, target, bias, reduction=reduction))


# Chains of other losses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize(
    "steps",
    [
        (Step("log_softmax", (-1,)), Step("nll_loss", (Ref(2),), (("ignore_index", -100),))),
        (Step("log_softmax", (-1,)), Step("kl_div", (Ref(2),))),
        (Step("binary_cross_entropy_with_logits", (Ref(2),)),),
        (Step("mse_loss", (Ref(2),)),),
    ],
    ids=lambda steps: steps[-1].name,
)
def test_other_losses_without_their_logits(steps: Any, workspace: int, reduction: str) -> None:
    *first, last = steps
    last = last._replace(options=(*last.options, ("reduction", reduction)))
    chain = build_chain((Step("linear", (Ref(1),)), *first, last), ("x", "w", "target"))
    x, w, _, labels = operands()
    target = labels if last.name == "nll_loss" else torch.softmax(draw(ROWS, CLASSES, seed=5), 1)
    runner = Runner(chain, Options(max_workspace=workspace))
    ours = runner((x, w, target))[0]
    (theirs,) = chain.eager((x, w, target))
    torch.testing.assert_close(ours, theirs)
    cotangent = draw(*theirs.shape, seed=6)
    found, expected = (torch.autograd.grad(loss, (x, w), cotangent) for loss in (ours, theirs))
    torch.testing.assert_close(found, expected)
    (executor,) = runner.executors
    assert executor.backward is not None
    kept = [n for n in executor.backward.saving.nodes if n.shape == (ROWS, CLASSES)]
    # Targets of the logits' shape are no smaller than these: computing them again would not pay.
    expected_kept = workspace != SMALL or (reduction == "none" and target.shape == (ROWS, CLASSES))
    assert bool(kept) == expected_kept
    assert ("take no more than" in executor.plan.saving) == (expected_kept and workspace == SMALL)


@pytest.mark.rotates
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_the_cpu(dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, forward and backward, by the kernels of a GPU; blocks keep labels in 32 bits."""
    loaded = []

    def load(plan: Any, arrays: Any) -> Any:
        loaded.append(plan)
        return OnHost().load(plan, arrays)

    for module in (backward, compiled):
        monkeypatch.setattr(module, "load", load)
    x, w = (draw(n, 16, dtype=dtype, seed=seed).requires_grad_() for seed, n in ((1, 24), (2, 96)))
    target = torch.randint(96, (24,), generator=torch.Generator().manual_seed(2))
    target[3] = -100
    loss = ct.linear_cross_entropy(x, w, target, max_workspace=4096, **options)
    exact = reference(x.double(), w.double(), target, **options)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    found, expected = (torch.autograd.grad(value.sum(), (x, w)) for value in (loss, exact))
    for gradient, right in zip(found, expected, strict=True):
        error = (gradient.double() - right).norm() / right.norm()
        assert error < (1e-6 if dtype is torch.float32 else 2**-7)
    assert len(loaded) == 2 and all(plan.blocks is not None for plan in loaded)
    kept = [plan.blocks.before for plan in loaded if plan.blocks.before is not None]
    assert dtype is torch.float32 or [o.node.dtype for plan in kept for o in plan.outputs] == ["int32"]


@pytest.mark.rotates
@pytest.mark.parametrize("by_classes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_our_own_on_the_cpu(dtype: torch.dtype, by_classes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200: hi/lo splits, and 16-bit products whose epilogues make losses and gradients of logits."""
    h200, loaded = devices.DEVICES["H200"], []

    def load(plan: Any, arrays: Any) -> Any:
        loaded.append(plan)
        with HOST.active():
            return OnHost().load(plan, arrays)

    def settings_on(options: Options, _: Any) -> Settings:
        return Settings(options.current_precision(), h200, options.max_workspace, epilogues="always")

    for module in (backward, compiled):
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(HOST.runtime, "device", h200)
    monkeypatch.setattr(Options, "settings_on", settings_on)
    monkeypatch.setattr(products, "LEAST_DEPTH", 1)
    monkeypatch.setattr(products, "split_time", lambda *_: 0.0)
    monkeypatch.setattr(saving, "_gradients_scale_with_one_number", lambda *_: False)
    monkeypatch.setattr(block_choice, "_cost", lambda planned: (planned[0].transposed != by_classes, 0.0))
    x, w = (draw(n, 64, dtype=dtype, seed=seed).requires_grad_() for seed, n in ((1, 264), (2, 520)))
    target = torch.randint(520, (264,), generator=torch.Generator().manual_seed(2))
    target[3] = -100
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "sum"}
    most = 240_000 + by_classes  # compiled chains are shared
    loss = ct.linear_cross_entropy(x, w, target, max_workspace=most, **options)
    exact = reference(x.double(), w.double(), target, **options)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    found, expected = (torch.autograd.grad(value, (x, w)) for value in (loss, exact))
    for gradient, right in zip(found, expected, strict=True):
        error = (gradient.double() - right).norm() / right.norm()
        assert error < (4e-6 if dtype is torch.float32 else 2**-7)
    _, plan = loaded
    assert plan.blocks is not None and plan.blocks.transposed == by_classes
    gemms = [s for one in loaded for part in one.parts for s in part.steps if s.kind == "Gemm"]
    own = [s for s in gemms if s.how.startswith("fp16 hi/lo" if dtype is torch.float32 else "own")]
    assert any(s.epilogue is not None for s in own) or by_classes
    assert len(own) > 1
