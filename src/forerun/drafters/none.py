"""No draft: plain decoding, the baseline of every report."""

from __future__ import annotations

from forerun.core.roles import Drafter


class Plain(Drafter):
    """The empty tree at every step."""
