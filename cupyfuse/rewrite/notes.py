"""Notes: the applied rewrites that a plan reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """One applied rewrite, as text: the identity, what it was applied to, what it saves."""

    identity: str
    what: str
    saved: str
