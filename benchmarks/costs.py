"""The cost model beside measurements: chains through the library, through PyTorch eager and through Inductor.

Each chain is measured alone. What Inductor adds to a compiled graph for it is its host time less that of a compiled
function of the same inputs that computes nothing. In training the weights change before each call, as an optimizer
changes them, so that what is prepared from them is prepared anew.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .cases import Lab
from .cost_report import EAGER, FIGURE, HOST, INDUCTOR, NOTHING, OURS, PREDICTED
from .report import Case, Result
from .timing import Contest, describe


@dataclass(frozen=True)
class Options:
    """What to run: seconds that the whole may take, and GPU seconds for each figure."""

    seconds: float = 240.0
    quick: bool = False
    seed: int = 0
    plan: Any = None  # of `cost_chains`; its own by default

    @property
    def budget(self) -> float:
        return 0.01 if self.quick else 0.03


def cases(lab: Lab, options: Options) -> Iterator[Case]:
    """Run the chains beside eager, for at most half of the time, then beside Inductor, until it is over."""
    from . import cost_chains

    began = time.perf_counter()
    torch = lab.need_torch().torch
    shares = {EAGER: 1.0} if lab.compiling else {EAGER: 0.5, INDUCTOR: 1.0}
    for rival, share in shares.items():
        questions = cost_chains.questions(options.plan or cost_chains.PLAN)
        for question, training in itertools.product(questions, (False, True)):
            if time.perf_counter() - began >= share * options.seconds:
                break
            group = f"{'Training' if training else 'Inference'} beside {rival}"
            case = Case(group, question.name, question.shape, question.dtype)
            with torch.set_grad_enabled(training):
                _fill(lab, case, question, rival, training, options)
            if training:
                lab.release()
            print(f"{group}: {case.name}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            yield case


def _fill(lab: Lab, case: Case, question: Any, rival: str, training: bool, options: Options) -> None:
    """Measure a case and estimate it; what fails is entered as the failure of the rival that it is of."""
    rivals = {name: Result(name) for name in (OURS, rival, *([NOTHING] if rival == INDUCTOR else []))}
    case.results += rivals.values()
    try:
        chain = _Chain(lab, question, training, options.seed)
        case.facts = chain.predicted(rival == INDUCTOR)
    except Exception as error:  # out of memory, for one
        rivals[OURS].failure = describe(error)
        return
    calls: dict[str, Callable[[], Any]] = {}
    makers = {OURS: chain.ours, EAGER: chain.eager, INDUCTOR: chain.compiled, NOTHING: chain.nothing}
    for name, result in rivals.items():
        try:
            calls[name] = makers[name]()
            calls[name]()
        except Exception as error:  # one rival that fails must not end the run
            calls.pop(name, None)
            result.failure = describe(error)
    contest = Contest(lab.device, calls, options.budget)
    for figure, taken in ((FIGURE, contest.back_to_back()), (HOST, contest.host())):
        for name, summary in taken.items():
            rivals[name].times[figure] = summary
    for name, reason in contest.failures.items():
        rivals[name].failure = reason


class _Chain:
    """A chain with tensors to call it with."""

    def __init__(self, lab: Lab, question: Any, training: bool, seed: int):
        from .cost_chains import as_written

        self._rivals = lab.need_torch()
        self._torch = torch = self._rivals.torch
        self._question, self._training = question, training
        torch.manual_seed(seed)
        place = self._rivals.place()
        self._tensors = []
        for shape, dtype in question.metas:
            values = torch.rand(shape, device=place) + 0.5 if len(shape) == 1 else torch.randn(shape, device=place)
            scale = shape[-1] ** -0.5 if len(shape) > 1 and len(self._tensors) in question.chain.fixed else 1.0
            self._tensors.append((values * scale).to(getattr(torch, dtype)).requires_grad_(training and self._graded()))
        self._written = as_written(question.chain)

    def _graded(self) -> bool:
        """Whether the next input's gradient is wanted: not those of running statistics, inputs 3 and 4 of that head."""
        return not (self._question.name == "head_softmax" and len(self._tensors) in (3, 4))

    def predicted(self, compiled: bool) -> dict[str, float]:
        """What the model says, in microseconds; empty where it says nothing."""
        from cupyfuse.torch.chains.runtime import device_of
        from cupyfuse.torch.cost.estimate import estimate

        graded = [bool(t.requires_grad) for t in self._tensors]
        precision = self._torch.get_float32_matmul_precision()
        chain, metas = self._question.chain, self._question.metas
        device = device_of(self._tensors[0])
        found = estimate(chain, metas, graded=graded, precision=precision, device=device, compiled=compiled)
        if found.reason:
            return {}
        values = (found.ours.gpu, found.ours.host, found.theirs.gpu, found.theirs.host)
        return dict(zip(PREDICTED, (v * 1e6 for v in values), strict=True))

    def ours(self) -> Callable[[], Any]:
        from cupyfuse.torch.chains.runner import Runner

        runner = Runner(self._question.chain)
        runner(self._tensors)
        if runner.refusals:
            raise RuntimeError(f"left to PyTorch: {', '.join(runner.refusals)}")
        return self._whole(lambda: runner(self._tensors))

    def eager(self) -> Callable[[], Any]:
        return self._whole(lambda: self._written(*self._tensors))

    def compiled(self) -> Callable[[], Any]:
        self._rivals.forget()
        written = self._rivals.compiled(self._written)
        return self._whole(lambda: written(*self._tensors))

    def nothing(self) -> Callable[[], Any]:
        """A compiled function of the same inputs whose results are views."""

        def views(*tensors: Any) -> list[Any]:
            return [tensors[0].view_as(tensors[0])]

        compiled = self._rivals.compiled(views)
        return self._whole(lambda: compiled(*self._tensors), lambda: views(*self._tensors))

    def _whole(self, forward: Callable[[], Any], like: Callable[[], Any] | None = None) -> Callable[[], Any]:
        """The forward pass; in training also the change of the weights before it and the backward pass after it.

        `like` gives results of the same shapes, the chain's own by default.
        """
        if not self._training:
            return forward
        torch = self._torch
        wanted = [t for t in self._tensors if t.requires_grad]
        changed = [self._tensors[k] for k in self._question.chain.fixed if self._tensors[k].requires_grad]
        with torch.no_grad():
            cotangents = [torch.ones_like(o) for o in (like() if like else self._written(*self._tensors))]

        def step() -> None:
            torch.autograd.graph.increment_version(changed)
            torch.autograd.grad(list(forward()), wanted, cotangents, allow_unused=like is not None)

        return step
