"""A call with an idempotency key, and its row in the transaction of its change."""

import hashlib
from contextvars import ContextVar

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from charonia.platform.database.tables import CallRow

KEPT_S = 24 * 3600.0
"""How long a key is remembered."""

CALLS_MAX = 10_000
"""Keys that are remembered; the oldest are removed first."""


class KeyedCall:
    """A call with a key.

    Attributes:
        caller: The caller, "" while unknown.
        digest: Digest of caller and key, "" while the caller is unknown.
        is_unknown: Whether the transaction with its row may have failed.
    """

    def __init__(self, key: str, target: str) -> None:
        self.key = key
        self.caller = ""
        self.digest = ""
        self.is_recorded = False
        self.is_unknown = False
        self._content = hashlib.sha256(target.encode() + b"\0")

    @property
    def request(self) -> str:
        """Digest of method, address and body."""
        return self._content.hexdigest()

    def read(self, body: bytes) -> None:
        self._content.update(body)

    def name(self, caller: str) -> None:
        """Set who makes it."""
        self.caller = caller
        self.digest = hashlib.sha256(f"{caller}\0{self.key}".encode()).hexdigest()

    def record(self, session: Session, now_s: float) -> None:
        """Add its row to a transaction, and remove expired and surplus rows.

        Raises:
            IntegrityError: Another transaction has the row already.
        """
        session.add(CallRow(digest=self.digest, request=self.request, answer="", created=now_s))
        session.flush()
        session.execute(delete(CallRow).where(CallRow.created <= now_s - KEPT_S))
        count = session.scalar(select(func.count()).select_from(CallRow)) or 0
        if count > CALLS_MAX:
            oldest = select(CallRow.id).order_by(CallRow.id).limit(count - CALLS_MAX)
            session.execute(delete(CallRow).where(CallRow.id.in_(oldest)))


current_call: ContextVar[KeyedCall | None] = ContextVar("current_call", default=None)
"""The call that is being handled, None for one without a key."""
