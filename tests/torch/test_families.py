"""Models of many families: what they compute, and learn, fused and compiled, beside PyTorch's own and float64.

The rule for every tensor: its error against the same model in float64 is at most `FACTOR` times that of the same model
run eagerly in the same dtype. Both errors are norms relative to the tensor's, so no constant of a model's enters. Two
floors keep luck and cancellation out:

- Eager's error counts as `FLOOR` at least. Single tensors of eager's are off by less than a rounding or
  two by chance (a classifier's ten numbers); a sum of 64 terms, the longest sums here, in another order is not.
- A tensor that cancels to nothing, as the gradient of a key's bias does, is measured against the largest tensor of its
  kind times 2^-8. With the other two constants that allows it half a rounding of the largest tensor: what is left of
  it is roundings of terms, which are smaller than that tensor.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES, Family, padded, pretrained, spread, tensors
from torch import nn
from transformers.activations import ACT2FN

import cupyfuse.torch as ct

# Errors of two orders of summation are alike in size, and seldom differ more. In bfloat16 it is what is rounded between
# operations that counts, and fusing rounds less.
FACTOR = {torch.float32: 4.0, torch.bfloat16: 2.0}
# float32: sqrt(64) roundings in a sum, and sixteen or so operations one after the other, sqrt(16). bfloat16 is summed
# in float32: the rounding of a result, and one before it.
FLOOR = {torch.float32: 32 * 2.0**-24, torch.bfloat16: 2 * 2.0**-9}
CANCELLED = 2.0**-8
COMPILED = ("MLP with BatchNorm", "MLP-Mixer", "GPT-2")  # with the Inductor, which takes its time on a CPU
STEPS = {True: 2, False: 1}  # by whether the model is in training
# Families whose gradients are taken in evaluation as well: where it is another computation (statistics), and some where
# it is the same one, as no model here drops out.
EVALUATED = ("ResNet", "MLP with BatchNorm", "LSTM", "DistilBERT", "GPT-2", "ViT", "MLP-Mixer")

Found = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    """What models read of a library stays as it was; else the test that changed it fails, and no other."""
    before = dict(dict.items(ACT2FN))
    yield
    after = dict(dict.items(ACT2FN))
    ACT2FN.clear()
    ACT2FN.update(before)
    assert after == before


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more gain nothing for tensors this small
    yield
    torch.set_num_threads(threads)


def made(family: Family, place: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and its inputs on a device, the same ones each time."""
    torch.manual_seed(0)
    model, inputs = family.build(), family.inputs()
    spread(model)
    given = {k: v.to(place, dtype) if v.is_floating_point() else v.to(place) for k, v in inputs.items()}
    return model.to(place, dtype), given


def named(pairs: Any) -> list[tuple[str, Any]]:
    """Without what `torch.compile` puts before a name."""
    return [(name.removeprefix("_orig_mod."), value) for name, value in pairs]


def learned(model: Any, inputs: dict[str, torch.Tensor], seed: int | None = None) -> Found:
    """Results, gradients and buffers of some steps of training in whatever mode the model is, by name.

    From the second step on the weights are others: nothing prepared from the first ones may be used.
    """
    found: Found = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS[model.training]):
        given = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in inputs.items()}
        optimizer.zero_grad()
        if seed is not None:
            torch.manual_seed(seed)
        results = tensors(model(**given))
        generator = torch.Generator().manual_seed(step)
        weights = [torch.randn(y.shape, generator=generator).to(y) for y in results]
        torch.stack([(y * w).sum() for y, w in zip(results, weights, strict=True)]).sum().backward()
        found |= {f"result {k}, step {step}": y.detach().clone() for k, y in enumerate(results)}
        leaves = [*given.items(), *named(model.named_parameters())]
        found |= {f"gradient of {k}, step {step}": v.grad.clone() for k, v in leaves if v.grad is not None}
        optimizer.step()
    found |= {f"buffer {k}": v.clone() for k, v in named(model.named_buffers()) if v.is_floating_point()}
    return found


def inferred(model: Any, inputs: dict[str, torch.Tensor]) -> Found:
    """Results without gradients."""
    with torch.no_grad():
        return {f"result {k}": y for k, y in enumerate(tensors(model.eval()(**inputs)))}


def widened(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model and its inputs in float64."""
    exact: Any = copy.deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # PyTorch's grouped product takes no float64
    return exact, {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@functools.cache
def oracle(name: str, place: str, training: bool | None, dtype: torch.dtype = torch.float32) -> tuple[Found, Found]:
    """What a family computes eagerly: in a dtype, and in float64. `training` is None where nothing is learned."""
    model, inputs = made(FAMILIES[name], place, dtype)
    exact, wide = widened(model, inputs)
    if training is None:
        return inferred(model, inputs), inferred(exact, wide)
    return learned(model.train(training), inputs), learned(exact.train(training), wide)


def judge(found: Found, eager: Found, exact: Found, dtype: torch.dtype = torch.float32) -> None:
    """Hold what was found to eager's own errors."""
    assert set(found) >= set(exact), sorted(set(exact) - set(found))
    for name in set(found) - set(exact):  # a chain gives zeros for what nothing depends on
        assert not found[name].any(), name
    largest: dict[str, float] = {}
    for name, value in exact.items():
        kind = name.split()[0]
        largest[kind] = max(largest.get(kind, 0.0), float(value.norm()))
    wrong = []
    for name, value in exact.items():
        assert found[name].dtype == eager[name].dtype and found[name].shape == value.shape, name
        size = max(float(value.norm()), CANCELLED * largest[name.split()[0]], torch.finfo(torch.float64).tiny)
        errors = [float((v[name].double() - value).norm()) / size for v in (found, eager)]
        if not errors[0] <= FACTOR[dtype] * max(errors[1], FLOOR[dtype]):
            wrong.append(f"{name}: error {errors[0]:.2e}, eager's {errors[1]:.2e}")
    assert not wrong, "\n".join(wrong)


# The same module, fused ---------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("name", "training"),
    [*((name, True) for name in FAMILIES), *((name, False) for name in EVALUATED)],
    ids=lambda value: value if isinstance(value, str) else ("train" if value else "eval"),
)
def test_fused_models_learn_the_same(name: str, training: bool, device: str) -> None:
    if name == "LSTM" and device == "cuda" and not training:
        pytest.skip("cuDNN has no gradients of recurrent layers in evaluation")
    model, inputs = made(FAMILIES[name], device)
    fused = ct.fuse(model)
    judge(learned(fused.train(training), inputs), *oracle(name, device, training))
    assert str(ct.explain(fused))


@pytest.mark.rotates
@pytest.mark.parametrize("name", FAMILIES)
def test_fused_models_infer_the_same(name: str, device: str) -> None:
    model, inputs = made(FAMILIES[name], device)
    fused = ct.fuse(model)
    for _ in range(2):  # the second call may find weights prepared
        judge(inferred(fused, inputs), *oracle(name, device, None))


@pytest.mark.rotates
@pytest.mark.parametrize("name", ["BERT", "Llama", "ViT", "MLP-Mixer"])
def test_fused_models_in_bfloat16(name: str, device: str) -> None:
    model, inputs = made(FAMILIES[name], device, torch.bfloat16)
    judge(inferred(ct.fuse(model), inputs), *oracle(name, device, None, torch.bfloat16), torch.bfloat16)


@pytest.mark.rotates
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "MLP-Mixer"])
def test_sizes_may_change_from_call_to_call(name: str, device: str) -> None:
    model, inputs = made(FAMILIES[name], device)
    fused = ct.fuse(copy.deepcopy(model))
    for rows in (2, 1, 2):
        given = {k: v[:rows] for k, v in inputs.items()}
        judge(inferred(fused, given), inferred(model, given), inferred(*widened(model, given)))


def test_dropout_draws_what_pytorch_draws(device: str) -> None:
    """With the same seed the same elements are dropped: else every result is another."""
    settings: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    settings |= {"intermediate_size": 40, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    model, inputs = made(Family(pretrained("BertForSequenceClassification", "BertConfig", **settings), padded), device)
    fused = ct.fuse(copy.deepcopy(model))
    found, eager = learned(fused.train(), inputs, seed=1), learned(model.train(), inputs, seed=1)
    # A float64 run need not draw the same numbers: eager itself is the reference, and its error the floor. The results
    # of the second step tell of the first one's gradients.
    results = {name: value for name, value in eager.items() if name.startswith("result")}
    judge({name: found[name] for name in results}, results, results)


# Compiled -----------------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_models_learn_and_infer_the_same(name: str, device: str) -> None:
    model, inputs = made(FAMILIES[name], device)
    compiled = torch.compile(copy.deepcopy(model), backend="cupyfuse")
    judge(learned(compiled.train(), inputs), *oracle(name, device, True))
    compiled = torch.compile(model, backend="cupyfuse")
    judge(inferred(compiled, inputs), *oracle(name, device, None))
