"""Language models of transformers with labels: eager's losses and gradients, without logits where nobody reads them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cupyfuse.torch as ct
from cupyfuse.torch.chains import custom_op

transformers = pytest.importorskip("transformers")

VOCABULARY, ROWS = 503, 120
SMALL = 60_000  # bytes: a quarter of the float32 logits
# Losses near 6, gradients below 1: some hundred roundings in float32.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else a warning at the first call breaks the graph
    return model


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


class Loss(nn.Module):
    """A model of which the loss alone is read."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Any, labels: Any) -> Any:
        return self.model(ids, labels=labels, use_cache=False).loss


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (3, ROWS // 3))
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


def trained(module: Any, ids: Any, labels: Any) -> tuple[Any, list[Any]]:
    """The loss of a step, and the gradients of the parameters."""
    result = module(ids, labels=labels)
    loss = result if isinstance(result, torch.Tensor) else result.loss
    loss.backward()
    return loss.detach(), [p.grad for p in module.parameters()]


@pytest.fixture
def no_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch without CUDA raises an error where transformers asks whether a CUDA graph is being captured."""
    monkeypatch.setattr(transformers.utils.import_utils, "is_cuda_stream_capturing", lambda: False)


@pytest.mark.rotates
@pytest.mark.usefixtures("fresh_dynamo", "no_capturing")
@pytest.mark.parametrize("reads_logits", [False, True])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_compiled_step(make: Any, reads_logits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_op, "_compiled", {})
    plain, (ids, labels) = make(), tokens()
    expected, gradients = trained(copy.deepcopy(plain), ids, labels)
    module = plain if reads_logits else Loss(plain)
    options = {"cupyfuse.max_workspace": SMALL, "cupyfuse.only_gains": False}
    loss, found = trained(torch.compile(module, backend="cupyfuse", options=options), ids, labels)
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(found, gradients, **CLOSE)
    chains = [c for c in custom_op._compiled.values() if "cross_entropy" in c.traced.chain.operations and c.is_loaded]
    (chain,) = chains
    assert {"linear", "to", "cross_entropy"} <= set(chain.traced.chain.operations)
    assert chain.plan.workspace <= SMALL
    assert chain.plan.blocks is not None or reads_logits  # logits that are returned are no workspace
    logits = [o for o in chain.plan.outputs[: len(chain.traced.outputs)] if o.shape == (ROWS, VOCABULARY)]
    assert bool(logits) == reads_logits
    assert any(n.shape == (ROWS, VOCABULARY) for n in chain.saving.nodes) == reads_logits


@pytest.mark.usefixtures("fresh_dynamo", "no_capturing")
@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_fused_step(make: Any) -> None:
    """The model returns its logits beside the loss, so they are computed; the loss reads them where they are made."""
    plain, (ids, labels) = make(), tokens()
    expected, gradients = trained(copy.deepcopy(plain), ids, labels)
    module = ct.fuse(plain, max_workspace=SMALL, only_gains=False)
    loss, found = trained(module, ids, labels)
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(found, gradients, **CLOSE)
    operations = {name for part in module.explain().fused for name in part.operations}
    assert "cross_entropy" in operations
