"""Tells people of a run of planning mode where they follow it: in comments that are there once, and one checklist."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from typing import ClassVar, Final

import anyio

from replanning import Environment
from replanning.errors import UnknownRun
from replanning.events import Record
from replanning.exporters._account import RunNotices
from replanning.exporters._board import CommentIndex
from replanning.exporters._checklist import CHECKLIST_KIND
from replanning.exporters._forge import Forge, ForgeError
from replanning.exporters._marks import Marker
from replanning.interfaces import Clock, Exporter, ExporterContext, RunId
from replanning.planning import RunJournals

EDIT_INTERVAL: Final = 3.0
"""Seconds between edits of a checklist: what finishes meanwhile becomes one edit."""

_POLL_INTERVAL: Final = 0.5
"""Seconds between looks at what has happened meanwhile."""

_INITIAL_BACKOFF: Final = 10.0
_MAX_BACKOFF: Final = 300.0
"""Seconds for which a forge that failed is left alone at first, and at most."""

_FINAL_RETRY_DELAYS: Final = (0.0, 0.5, 1.0)
"""Seconds before each of the last tries."""

_FINAL_RESPONSE_TIMEOUT: Final = 3.0
"""Seconds after which a forge that has not answered when the run ends is not asked again."""

_TEXT_REJECTED_STATUSES: Final = (400, 413, 422)
"""Refusals that are about one text, or for GitHub about too many in a short time, and not about the place."""

_log: Final = logging.getLogger(__name__)


class Notifier(Exporter):
    """Posts what is decided about replans, what people are asked, and the plan as a checklist that is ticked.

    ::

        notifier = Notifier(GitHubIssue("owner/repo#12"))
        planning = PlanningCoordinator(settings, model, tools, task, store=store, exporters=[notifier])

    Every notice is posted once, also when the run is resumed elsewhere: comments carry a mark that nobody sees, and are
    read before anything is written. The checklist is one comment, edited in place. A forge that fails harms nobody: it
    is reported once, and what it did not take is posted later, at the latest when this is closed or the run is resumed.
    One that does not answer at all when the run ends is not waited for a second time.

    Args:
        forge: where to.
        every: seconds between edits of the checklist.
        hint: how people answer what they are asked, in Markdown.

    Attributes:
        endpoint: where people find the comments.
    """

    name: ClassVar[str] = "notices"

    def __init__(self, forge: Forge, *, edit_interval: float = EDIT_INTERVAL, hint: str = "") -> None:
        self._index = CommentIndex(forge)
        self.endpoint = str(getattr(forge, "id", forge.name))
        self._journals = RunJournals()
        self._clock: Clock = Environment().clock
        self._edit_interval, self.hint = edit_interval, hint
        self._runs: dict[RunId, RunNotices] = {}
        self._last_edit = -math.inf
        self._failures = 0
        self._backoff_until = (
            self._blocked_until
        ) = -math.inf  # until when the forge is left alone: by ourselves, as it has said
        self._problem = ""
        self._request_started = math.inf  # since when it owes an answer
        self._unresponsive = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.forge.name!r} runs={len(self._runs)}>"

    @property
    def forge(self) -> Forge:
        """Where the comments are."""
        return self._index.forge

    @property
    def problem(self) -> str:
        """What is not posted, and why; empty when everything is."""
        unsent, why = self._unsent_summary(), self._problem or "it did not answer in time"
        return f"{unsent} could not be posted to {self.endpoint}: {why}" if unsent else ""

    def write_error(self) -> str:
        """Why nothing can be posted there, as far as that is known before anything is; empty where it can be."""
        asked = getattr(self.forge, "write_error", None)
        return str(asked()) if asked is not None else ""

    def attach(self, exporter_context: ExporterContext) -> None:
        """Read the past of resumed runs from this store, and take the time from this clock."""
        self._journals.add_store(exporter_context.store)
        self._clock = exporter_context.clock

    async def export(self, run: RunId, record: Record) -> None:
        """Post what follows from a record.

        Raises:
            ForgeError: the forge has ceased to take anything; it is tried again later.
            StoreError: the beginning of the run cannot be read.
        """
        account = self._runs.setdefault(run, RunNotices(run))
        if record.seq > account.seq + 1:  # the run is resumed
            self._read_ahead(account)
        account.fold(record)
        while (account.pending or account.checklist_changed) and self._clock.now() >= max(
            self._backoff_until, self._blocked_until
        ):
            self._read_ahead(account)
            await self._send(account)
            await self._wait_for_edit(account)
        if account.is_finished:
            self._runs.pop(run, None)  # if it goes on all the same, everything is read again

    async def aclose(self) -> None:
        """Post what is left, and let go of connections.

        Raises:
            ForgeError: something is left that could not be posted.
            StoreError: the rest of a run cannot be read.
        """
        self._last_edit = -math.inf  # nothing comes after this
        try:
            for account in list(self._runs.values()):
                if not account.end_status:  # it was not told everything
                    self._read_ahead(account)
                account.pending.extend(account.rejected)
                account.rejected.clear()
                if not self._unresponsive:
                    await self._flush(account)
        except anyio.get_cancelled_exc_class():
            if unsent := self._unsent_summary():
                _log.warning("%s could not be posted to %s in time", unsent, self.endpoint)
            raise
        finally:
            await self.forge.aclose()
        if self.problem:
            raise ForgeError(self.problem)

    async def _flush(self, account: RunNotices) -> None:
        """Send what is left, with as many tries as there is time for."""
        for wait in _FINAL_RETRY_DELAYS:
            barred = self._blocked_until - self._clock.now()
            if not (account.pending or account.checklist_changed) or barred > _POLL_INTERVAL:
                return
            await self._clock.sleep(max(wait, barred))
            with suppress(Exception):  # whoever closes this is told of everything that is left
                await self._send(account)

    def _unsent_summary(self) -> str:
        """What is not posted, in words; empty when everything is."""
        notices = sum(len(account.pending) + len(account.rejected) for account in self._runs.values())
        what = [f"{notices} notice{'s' * (notices != 1)}"] if notices else []
        what += ["the latest checklist"] if any(account.checklist_changed for account in self._runs.values()) else []
        return " and ".join(what)

    async def _wait_for_edit(self, account: RunNotices) -> None:
        """Wait until the checklist may be edited again, unless something else is to be told, or the run ends."""
        while (
            account.checklist_changed
            and not (account.pending or account.end_status)
            and (left := self._seconds_until_edit()) > 0
        ):
            await self._clock.sleep(min(left, _POLL_INTERVAL))
            self._read_ahead(account)

    def _seconds_until_edit(self) -> float:
        """Seconds before the checklist may be edited again."""
        return self._last_edit + self._edit_interval - self._clock.now()

    def _index_for(self, run: RunId) -> CommentIndex:
        """Where the comments about a run are."""
        return self._index

    def _read_ahead(self, account: RunNotices) -> None:
        """Take in what was recorded meanwhile: then a burst is told of at once."""
        with suppress(UnknownRun):
            for one in self._journals.records_after(account.run, account.seq):
                account.fold(one)

    async def _send(self, account: RunNotices) -> None:
        try:
            await self._post_pending(account)
        except anyio.get_cancelled_exc_class():
            self._unresponsive = self._clock.now() - self._request_started >= _FINAL_RESPONSE_TIMEOUT
            raise
        except Exception as error:  # law 7: whatever a forge raises, the rest is tried later
            known = bool(self._problem)
            self._back_off(error)
            if not known:  # what goes on is not reported again
                raise
        else:
            self._failures, self._unresponsive = 0, False
            if not account.rejected:
                self._problem = ""

    async def _post_pending(self, account: RunNotices) -> None:
        if account.end_status:  # there may be little time: the last state goes first
            await self._update_checklist(account)
        while account.pending:
            notice = account.pending[0]
            self._request_started = self._clock.now()
            try:
                await self._index_for(account.run).post(notice.marker(account.run), notice.body(account.run, self.hint))
            except ForgeError as error:
                if error.status in _TEXT_REJECTED_STATUSES:
                    account.rejected.append(account.pending.popleft())  # it keeps no other away
                raise
            if account.pending and account.pending[0] is notice:
                account.pending.popleft()
        if self._seconds_until_edit() <= 0:
            await self._update_checklist(account)

    async def _update_checklist(self, account: RunNotices) -> None:
        """Bring the checklist up to date."""
        if not account.checklist_changed:
            return
        account.checklist_changed = False
        self._request_started = self._clock.now()
        try:
            text = account.checklist()
            if text is not None and await self._index_for(account.run).upsert(
                Marker(CHECKLIST_KIND, account.run), text
            ):
                self._last_edit = self._clock.now()
        except BaseException:
            account.checklist_changed = True
            raise

    def _back_off(self, error: Exception) -> None:
        """Leave the forge alone for a while: as long as it says, else longer each time."""
        self._problem = str(error) or repr(error)
        said, now = getattr(error, "retry_after", None), self._clock.now()
        if getattr(error, "final", False) and getattr(error, "status", None) not in _TEXT_REJECTED_STATUSES:
            self._blocked_until = math.inf
        elif said is not None:
            self._blocked_until = now + max(said, _POLL_INTERVAL)
        else:
            self._backoff_until = now + min(_INITIAL_BACKOFF * 2**self._failures, _MAX_BACKOFF)
            self._failures += 1
