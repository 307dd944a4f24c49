"""The master: keeps the directory of actors and the policy version, grants permits, and chooses the batches to train.

The master never handles a token or a weight. It writes every change to the journal on disk before it answers a request
or publishes an event that depends on the change. So a restarted master knows everything that other actors were told. A
request without an answer yet is parked until an answer exists, or until shortly before the deadline.

| loop | waits for | unblocks |
|---|---|---|
| handlers | `AskPermits`: room in the ledger | rollout managers |
| | `AskBatch`: the commit of the step before, B ready groups, rule 3 | the trainer |
| | `AskEvaluation`: a version that is due, and its holder | the evaluator |
| journal | changes that are not on disk yet | every answer and event that depends on them |
| announce | an event in the outbox, then the journal | the events loop of every actor |
| look for the dead | 5 s | removes silent members if nobody listens at their address |
| watch | 1 s | fences silent and hanging members, ends leases, remedies a stalled run |
"""

import asyncio
import signal
from collections.abc import Awaitable, Sequence

import structlog

from actors.master.attempt_requests import AttemptRequests
from actors.master.farewell import Farewell
from actors.master.group_requests import GroupRequests
from actors.master.hangs import Hangs
from actors.master.membership_requests import MembershipRequests
from actors.master.run_control import Records, RunControl, repeat_records, take_over
from actors.master.run_watch import RunWatch
from actors.master.status_requests import StatusRequests
from actors.master.training_requests import TrainingRequests
from actors.runtime.actor import Ending, HandlesRequests, first_error
from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.base.processes import stop_signals
from areal.config import Config
from areal.data.prompt_sources import PromptSource
from areal.devices import CORES, settle
from areal.staleness.ledger import Ledger
from areal.staleness.ledger_state import LedgerError
from areal.storage.disk import DiskShortageError
from areal.storage.journal import Journal
from protocols.addresses import host_of
from protocols.bus import Bus
from protocols.bus_errors import ForgedError, PreparingError, RefusedError
from protocols.membership_messages import AskStatus
from protocols.messages import Message, Permits
from protocols.transport import Request, fingerprint

# Size of the range of a master's event numbers. A restarted master uses the next range.
EVENTS_OF_ONE_MASTER = 1 << 32
log = structlog.get_logger()


class Master:
    """The only master of a run. `config.model` has to be a folder. The run ends when the last step is trained, its
    checkpoint is saved and the last version is evaluated. If `journal` holds events of an earlier master of the run,
    this master continues from the events. `source`: the rows, needed by every `data.sampler` but shuffle. `supervised`:
    only SIGINT stops the master."""

    def __init__(
        self,
        bus: Bus,
        config: Config,
        *,
        journal: Journal,
        folder: Records,
        source: PromptSource | None = None,
        supervised: bool = False,
    ) -> None:
        if source is None and config.steps and config.data.sampler != "shuffle":
            raise ValueError(f"data.sampler={config.data.sampler} chooses from rows, and the master was given none")
        self._run = run = RunControl(config, journal, folder, source)
        self.config, self.journal, self.folder = config, journal, folder
        self.state, self.members = run.state, run.members
        self._supervised = supervised
        self.bus = bus
        self._farewell, hangs = Farewell(run), Hangs(self.members, config.master.hang_seconds)
        self._membership = MembershipRequests(run, hangs, self._farewell, bus.network)
        self._watch = RunWatch(run, hangs, self._membership.remove)
        status = StatusRequests(run, self._watch.alerts)
        own = self._membership, status, GroupRequests(run), AttemptRequests(run), TrainingRequests(run)
        of_extensions = (requests(run) for requests in extensions.find_own("requests"))
        self._parts: Sequence[HandlesRequests] = [*own, *of_extensions]

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    async def run(self) -> Ending:
        """Serve until the run has ended. Returns the ending. Raises UserError if the address is already in use."""
        loop = asyncio.get_running_loop()
        stop = self._farewell.stop_run
        if self._supervised:
            loop.add_signal_handler(signal.SIGINT, stop, "the supervisor")
            loop.add_signal_handler(signal.SIGTERM, _ignore_signal, signal.SIGTERM.name)
        else:
            for sign in stop_signals():
                loop.add_signal_handler(sign, stop, sign.name)
        try:
            take_over(self._run)
            self._open()
            settle(CORES)
            async with asyncio.TaskGroup() as tasks:
                works = {"records": repeat_records(self._run), "watch": self._watch.repeat()}
                works["announce"] = self._run.announcements.repeat()
                works["look for the dead"] = self._membership.look_for_the_dead()
                helpers = [tasks.create_task(work, name=name) for name, work in works.items()]
                await self._run.end_if_complete()
                ending = await self._run.end
                await self._farewell.say(ending)
                for helper in helpers:
                    helper.cancel()
            return ending
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            await self.bus.close()
            self.journal.close()

    def _open(self) -> None:
        address = self.config.master.address
        first = self.state.masters * EVENTS_OF_ONE_MASTER
        try:
            self.bus.serve(address, self.dispatch, self._on_crash)
            events = f"tcp://{host_of(address)}:{self.config.network.ports_text}"
            self._run.announcements.publisher = self.bus.publisher(events, first)
        except OSError as error:
            raise UserError(
                f"The master cannot listen at {error.filename} ({error.strerror}): stop the process that uses the "
                f"port, or choose another port with master.address=tcp://HOST:PORT or network.ports."
            ) from None
        if self.config.observe.prometheus_port:
            serve = extensions.need("prometheus", "serve", "observe.prometheus_port").load()
            serve(self.config.observe, "master", 0, lambda: self._watch.numbers)
        log.info("master ready", address=address, run=str(self.folder.path))

    def dispatch(self, request: Request[Message]) -> Awaitable[Message]:
        """The answer to a request, returned after all changes behind the answer are on disk. Raises ForgedError if the
        sender is a member but the request comes from another process."""
        if request.sender in self.state.members and not request.sender.endswith(f"#{fingerprint(request.token)}"):
            log.warning("a request in the name of another was refused", kind=request.message.kind, name=request.sender)
            raise ForgedError(f"this {request.message.kind!r} is not from {request.sender}, whom it names as sender")
        part = next((part for part in self._parts if part.answers(request.message)), None)
        if part is None:
            raise RefusedError(f"the master does not answer {request.message.kind!r}")
        answer = part.dispatch(request)
        return answer if isinstance(request.message, AskStatus) else self._durably(request.sender, answer)

    async def _durably(self, sender: str, answer: Awaitable[Message]) -> Message:
        """Raises PreparingError while the journal waits for the disk."""
        # The request was invalid, and the ledger is unchanged.
        with explain(LedgerError, "{why}", RefusedError):
            result = await answer
        try:
            await self.journal.durable(wait_for_room=False)
        except DiskShortageError as error:
            if isinstance(result, Permits):
                self.ledger.leases.withdraw(sender, [permit.group for permit in result.permits])
            raise PreparingError(str(error)) from None
        return result

    def _on_crash(self, error: BaseException) -> None:
        log.error("handler failed", exc_info=error)
        self._run.end_if(f"the master failed: {type(error).__name__}: {error}")


def _ignore_signal(sign: str) -> None:
    """Log a signal that did not come from the supervisor, perhaps a signal to all processes of the run."""
    log.warning(f"the master ignores {sign}: what stops the run is a signal to its supervisor")
