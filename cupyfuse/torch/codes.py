"""The codes that the calls of a fused module meet: which Dynamo goes on capturing, and which are given up."""

from __future__ import annotations

import os
import types
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

_MOST_IN_A_ROW = 32  # calls that all capture a code anew, after which it is no longer captured
_FAILURES = 8  # calls that leave a frame uncaptured, until its code is given up


class Uncaptured(NamedTuple):
    """A frame that a call ran in eager: its code, what Dynamo would do with its frames, and the error in a line."""

    code: types.CodeType
    strategy: Any
    reason: str


@dataclass
class _Record:
    """What happened to a code.

    Attributes
    ----------
    captured : bool
        Whether captures of it are in use.
    failures : int
        How many calls left a frame of it uncaptured.
    last, in_a_row : int
        The last call that captured it, and how many calls up to that one did so, without one between that did not.
    """

    captured: bool = False
    failures: int = 0
    last: int = 0
    in_a_row: int = 0


class Codes:
    """The codes that the calls of a module meet, each of which is new, captured or given up.

    =========  ====================================  =====================================================
    a code     a call                                then it is
    =========  ====================================  =====================================================
    new        captures it                           captured
    new        leaves it uncaptured, and returns     given up
    new        leaves it uncaptured, and raises      new; given up after `_FAILURES` such calls
    captured   leaves a frame of it uncaptured       captured; given up after `_FAILURES` such calls
    captured   captures it anew                      captured; given up after `_MOST_IN_A_ROW` calls in a row
    any        captures all codes as one (`renew`)   new, without failures
    =========  ====================================  =====================================================

    What Dynamo cannot capture runs in eager, and Dynamo would never look at its code again. But code that raises an
    error for its arguments cannot be captured for these either, nor can an operation that refuses them; and other
    arguments, such as sparse tensors, may be more than Dynamo knows. So one failure gives up only what was never
    captured. Dynamo remembers which codes are given up; what was captured of them stays in use.

    Parameters
    ----------
    call : types.CodeType
        The code of the module's call itself.

    Attributes
    ----------
    failures : dict
        The frames that run in eager because of an error, and the error in a line; "" for the module's call itself.
    """

    def __init__(self, call: types.CodeType):
        self._call = call
        self._records: defaultdict[types.CodeType, _Record] = defaultdict(_Record)
        self.failures: dict[str, str] = {}

    def name(self, code: types.CodeType) -> str:
        if code is self._call:
            return ""
        return f"{code.co_name} ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"

    def note_captured(self, code: types.CodeType, call: int) -> bool:
        """Note that the call of a number captured a code; return whether the code is given up.

        It is where every call captures it anew, such as code that appends to a list of its own.
        """
        record = self._records[code]
        record.captured = True
        self.failures.pop(self.name(code), None)
        if record.last != call:
            record.in_a_row = record.in_a_row + 1 if record.last == call - 1 else 1
            record.last = call
        if record.in_a_row < _MOST_IN_A_ROW:
            return False
        self.failures[self.name(code)] = f"{_MOST_IN_A_ROW} calls in a row captured it anew: they change what it reads"
        return True

    def note_uncaptured(self, frame: Uncaptured, returned: bool) -> None:
        """Note that a call, which returned or raised, left a frame uncaptured; give its code up, or not."""
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        code, strategy, reason = frame
        record = self._records[code]
        record.failures += 1
        if record.failures < _FAILURES and (record.captured or not returned):
            return
        skipped = strategy.cur_action == _FrameAction.SKIP
        action = _FrameAction.RUN_ONLY if skipped else strategy.cur_action
        set_code_exec_strategy(code, _FrameExecStrategy(action, strategy.recursive_action))
        if reason:
            self.failures[self.name(code)] = reason

    def renew(self) -> None:
        """Forget, once the module's call is captured whole, what was captured of its parts and which are given up."""
        from torch._C._dynamo.eval_frame import reset_code

        for code in list(self._records):  # other threads may add to them
            if code is not self._call:
                reset_code(code)
            self._records[code] = _Record()
        self.failures.clear()

    def release(self, backend: Any) -> None:
        """Drop, once the capture is no more, what was captured of all codes for its backend.

        Dynamo keeps that, and with it the weights, for as long as a code lives, and never forgets a code.
        """
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        reset_code(self._call)
        for code in list(self._records):  # other modules may share one, such as what follows a graph break
            for entry in _debug_get_cache_entry_list(code):
                if entry.backend is backend:
                    gone = DeletedGuardManagerWrapper("the capture is no more")
                    entry.guard_manager.extra_state.invalidate(entry, gone)
