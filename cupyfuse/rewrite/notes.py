"""What a plan tells of the rewrites that were applied."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """One rewrite that was applied: which identity, to what, and what it saves."""

    identity: str
    what: str
    saved: str
