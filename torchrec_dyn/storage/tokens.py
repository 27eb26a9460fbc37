"""Tokens of the arrays of all tables: a list of arrays is valid as long as the token is the same.

Ops take the arrays of all tables of a group. To list the arrays of a thousand tables, or to ask each table
whether it has changed, takes as long as an op. So a change renews a token, and a group compares one token.

Tokens are shared by all tables of the process: a change of one table makes every group list its arrays again.
"""

from __future__ import annotations


class Token:
    """A token.

    Attributes:
        now: the present token, compared by identity.
    """

    def __init__(self) -> None:
        self.now = object()

    def renew(self) -> None:
        """Replaces the token. Call it before the change: an interrupt may come between the two."""
        self.now = object()


SLOTS = Token()  # renewed before an id map gets other slots, or moves slots
BLOCKS = Token()  # renewed before a store gets other blocks
TABLES = Token()  # renewed before a table gets other contents or settings
CLOCKS = Token()  # renewed before the clock of a table is set
