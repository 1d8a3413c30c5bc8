"""A process that is killed at a record of its journal."""

from replanning.journal import Lease, MemoryStore, Record


class Killed(BaseException):
    """The process is gone."""


class MortalStore(MemoryStore):
    """A store whose process is killed at a record, before or after it is written; nothing more is written then.

    Attributes:
        left: the records until the kill; none is killed by it if it is negative.
        before: whether the last record is lost.
        is_dead: whether the process is gone.
    """

    left = -1
    before = False
    is_dead = False

    def append(self, lease: Lease, record: Record) -> None:
        """Write a record, or be killed."""
        if self.is_dead:
            raise Killed
        self.left -= 1
        if self.left == 0:
            self.is_dead = True
            if not self.before:
                super().append(lease, record)
            raise Killed
        super().append(lease, record)
