"""Fixtures of the tests of PyTorch's frontend."""

from __future__ import annotations

import pytest
import torch
from support import missing_gpu
from torch_quick import be_quick


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and missing_gpu():
        pytest.skip(missing_gpu())
    return str(request.param)


@pytest.fixture
def fresh_dynamo() -> None:
    """Nothing captured by earlier tests is found again."""
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def _quick() -> None:
    be_quick()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _every_chain(request: pytest.FixtureRequest) -> None:
    if "choice" not in request.keywords:
        request.getfixturevalue("every_chain")
