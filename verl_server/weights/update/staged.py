"""Updates through the arena: all tensors are staged and checked on all ranks before any server is paused.

A dict or a list is checked completely on each rank before that rank stages its first tensor. A refusal then leaves the
published weights in the arena, so they can still be replayed into a server that was started again. Tensors of a
generator are checked as they come.

With several nodes, rank 0 sees the reports of the TP ranks on its own node only. After the load, the first rank of each
node checks the reports of that node. Rank 0 publishes the update and resumes generation when all of them are good.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from verl_server.config import PauseMode
from verl_server.errors import (
    BadInputError,
    ServerDiedError,
    ShutDownError,
    TornWeightsError,
    UnsupportedError,
    VerlServerError,
    WeightManifestError,
)
from verl_server.types import Json, ServerInfo, WeightUpdateResult
from verl_server.weights.arena import Arena, Layout, ReceivedReport, Report, shares_are_complete
from verl_server.weights.device import StagingCopies, accelerator, as_current
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports.base import ReceivingRank, Sender, UpdateAttempt, receiving_ranks
from verl_server.weights.update.options import (
    ReplayFn,
    Servers,
    UpdateOptions,
    UpdateOutcome,
    ValidatedUpdate,
    torn_error,
)
from verl_server.weights.update.source import (
    NamedTensors,
    ShardWriter,
    StagedChecksums,
    TensorSource,
    contribution_of,
)
from verl_server.weights.update.updater import (
    EngineRanks,
    WeightUpdater,
    leave_out_failed,
    open_session,
    resume_unchanged,
)

logger = logging.getLogger(__name__)


# -- Report checks ----------------------------------------------------------------------------------


def verify_reports(
    reports: Mapping[str, ReceivedReport | None],
    attempt: UpdateAttempt,
    checksums: Sequence[int],
    *,
    is_whole: bool,
    optional: Collection[str] = (),
) -> None:
    """Check that every TP rank has loaded this attempt and has read what was staged.

    Raises VerlServerError, with the names of all servers that failed as `details["servers"]`.

    `reports`: report of each TP rank by its label. `checksums`: checksum of each staged tensor. `is_whole`: this is
    an update of the whole model. `optional`: names of tensors that a server need not read. `details["unread"]` of the
    error has the names of tensors that a server did not read; nothing else is wrong then.
    """
    servers = {rank.label: rank.server for rank in receiving_ranks(attempt.members)}
    errors: dict[str, VerlServerError] = {}
    by_server = defaultdict[str, dict[str, Report]](dict)
    for label, received in reports.items():
        try:
            report = _verified_report(label, received, attempt, checksums, is_whole=is_whole)
            by_server[servers.get(label, "")][label] = report
        except VerlServerError as error:
            errors[label] = error
    if attempt.verify and not errors:
        errors = _unverified_servers(by_server.values()) or _servers_with_unread(by_server.values(), optional, is_whole)
    if errors:
        first = next(iter(errors.values()))
        first.details["servers"] = sorted({servers[label] for label in errors if label in servers})
        raise first


def require_opened(transport: str, reports: Iterable[tuple[ReceivingRank, ReceivedReport | None]]) -> None:
    """Raise UnsupportedError unless every TP rank has opened what the transport needs, after a message `opens_only`."""
    errors: list[VerlServerError] = []
    for rank, received in reports:
        if received is None or not received.report.ok:
            reason = "it did not report; see the server's log" if received is None else received.report.error
            errors.append(
                UnsupportedError(
                    f"{rank.label} cannot open the staging memory of the transport {transport!r}: {reason}. The server "
                    "keeps its weights",
                    servers=[rank.server],
                )
            )
    if errors:
        raise first_error(errors)


def first_error(errors: Sequence[VerlServerError]) -> VerlServerError:
    """The first error of several checks, with the names of the servers that failed in any of them."""
    errors[0].details["servers"] = sorted({name for error in errors for name in error.details.get("servers", ())})
    return errors[0]


def _verified_report(
    label: str, received: ReceivedReport | None, attempt: UpdateAttempt, checksums: Sequence[int], *, is_whole: bool
) -> Report:
    """The report of one TP rank. Raises VerlServerError if it is missing or bad."""
    if received is None:
        raise VerlServerError(
            f"{label} did not report on the update: it could not reach the staged weights. See the server's log"
        )
    report = received.report
    if not report.ok:
        raise VerlServerError(f"{label} could not load the weights: {report.error}", log_tail=report.trace)
    if report.num_tensors != len(attempt.names):
        raise VerlServerError(f"{label} took {report.num_tensors} of the update's {len(attempt.names)} tensors")
    if not attempt.verify:
        return report
    first, step = report.share
    expected = zip(attempt.names[first::step], checksums[first::step], received.checksums, strict=True)
    if different := [name for name, staged, read in expected if staged != read]:
        raise VerlServerError(
            f"{label} read {len(different)} tensors that differ from what was staged, {different[0]!r} first: "
            "do not write to the staged tensors during an update"
        )
    if report.num_unwritten and is_whole:
        raise VerlServerError(
            f"{label} did not write {report.num_unwritten} of its parameters in an update of the whole model, for "
            f"example {report.unwritten[0]!r}: the update lacks their tensors, or the model class of the server "
            "ignores them (verify=False skips this check)"
        )
    return report


def _unverified_servers(by_server: Iterable[Mapping[str, Report]]) -> dict[str, VerlServerError]:
    """An error for each server whose TP ranks have not verified all tensors together."""
    errors: dict[str, VerlServerError] = {}
    for reports in by_server:
        if not shares_are_complete([report.share for report in reports.values()]):
            label = next(iter(reports))
            errors[label] = VerlServerError(
                f"{label} and the other TP ranks of its server have not verified all tensors together"
            )
    return errors


def _servers_with_unread(
    by_server: Iterable[Mapping[str, Report]], optional: Collection[str], is_whole: bool
) -> dict[str, VerlServerError]:
    """An error for each server of which no TP rank has read some tensors that are not `optional`."""
    errors: dict[str, VerlServerError] = {}
    for reports in by_server:
        label = next(iter(reports))
        names = set[str].intersection(*(set(report.unread) for report in reports.values()))
        if skipped := sorted(names.intersection(optional)):
            logger.info("%s does not use %d pushed tensors, for example %s", label, len(skipped), skipped[0])
        if ignored := sorted(names.difference(optional)):
            errors[label] = VerlServerError(
                f"{label} did not read {len(ignored)} of the pushed tensors, for example {ignored[0]!r}: the model "
                "class of the inference engine ignores them, or takes them only together with others. Push all "
                "tensors; if these are still ignored, the engine computes without them. Unless the trainer's model "
                "does not use them either, the policy that it serves is another one (verify=False skips this check)",
                unread=ignored,
                is_whole=is_whole,
            )
    return errors


# -- Commit -----------------------------------------------------------------------------------------
# The steps of one staged weight update on trainer rank 0, after all ranks have written their tensors.
#
#     prepare          the transport does what can be done before generation is paused
#     stage            transports to other machines: the tensors arrive there and are verified, while the servers serve
#     pause            every server pauses generation
#     begin            every server opens a weight update session
#     open             new servers of other transports: every TP rank opens what the transport needs, such as the arena
#     load             every server's TP ranks load, and `distributed_buckets` delivers the tensors meanwhile
#     end              every server closes the session
#     verify reports   every TP rank has loaded all tensors and has read the bytes that are staged
#     publish          the new weight version and its checksums are recorded
#     resume           every server continues generation
#
# With several nodes, the last two steps wait until the other nodes have verified their reports, see `staged`.
#
# A failure up to `open` has no effect. One of `stage` is tried again, without the servers that fail repeatedly. After a
# failure up to `verify reports` the served weights are torn, and the update is tried once more with the staged tensors;
# a third time if servers that fail repeatedly are left out. If that fails too, generation stays paused until an update
# of all tensors succeeds. When `resume` fails, the servers hold the new weights, and their version counts.


@dataclass
class StagedUpdate:
    """Tensors that are staged in the sender's arena, and the servers that have to load them."""

    servers: Servers
    sender: Sender
    validated: ValidatedUpdate
    names: Sequence[str]
    """Names of the tensors, in the order of the layout."""
    checksums: Sequence[int]
    """Checksum of each staged tensor. Empty without verification."""
    manifest: Manifest
    """The model. An update of the whole model must write every parameter of the servers."""
    may_have_loaded: bool = False
    """Whether a server may hold a part of the update."""
    paused_at: float = math.nan
    """Time of `time.monotonic` just before the servers were paused."""

    def commit(self, weights_are_torn: bool, *, may_serve: bool) -> UpdateAttempt:
        """The steps until the reports are verified. Returns the successful attempt; the update can be published then.

        `weights_are_torn`: the servers held torn weights before the update. `may_serve`: they hold whole weights of
        this trainer, and may serve while the tensors travel. Others may be paused, because an earlier trainer has left
        torn weights, and must not continue before they are loaded.

        Raises TornWeightsError when a server may hold a part of the update. An exception that is not of this library,
        for example KeyboardInterrupt, is raised unchanged: the weights are torn if `may_have_loaded` is true.
        Generation continues only with whole weights: after an error if nothing was loaded and the weights were whole
        before.
        """
        self.paused_at, stages = time.monotonic(), self.sender.stages
        try:
            attempt = self._staged_attempt(is_serving=may_serve) if stages else self._new_attempt()
            if attempt.members:  # else all servers of a fleet are started again, and then get the weights by `replay`
                with self._prepared(attempt, is_staged=stages):
                    if may_serve or not stages:
                        self.paused_at = time.monotonic()
                        self.servers.pause(self.validated.pause_mode)
                    self._load_and_verify(attempt)
        except TornWeightsError as error:
            leave_out_failed(self.servers, error)
            logger.warning("%s The update is tried once more.", error.message)
            return self._retry()
        except (ServerDiedError, ShutDownError):
            raise
        except BaseException as error:
            if not weights_are_torn and not self.may_have_loaded:
                resume_unchanged(self.servers)
            elif isinstance(error, VerlServerError):
                raise torn_error(error, self.validated) from error
            raise
        return attempt

    def _retry(self) -> UpdateAttempt:
        """Repeat an update that left torn weights, on the servers that are left. They are still paused.

        If a part of the servers fails again, and these servers are left out, the update is repeated once more. Raises
        TornWeightsError if it fails.
        """
        try:
            return self._repeat()
        except TornWeightsError as error:
            if not leave_out_failed(self.servers, error):
                raise
            logger.warning("%s The update is tried without the servers %s.", error.message, error.details["servers"])
        return self._repeat()

    def _repeat(self) -> UpdateAttempt:
        """One more attempt at an update that left torn weights. Raises TornWeightsError if it fails."""
        attempt = self._new_attempt()
        if not attempt.members:
            return attempt
        try:
            with self._prepared(attempt):
                if self.sender.stages:
                    self._stage(attempt)
                self._load_and_verify(attempt)
        except (TornWeightsError, ServerDiedError, ShutDownError):
            raise
        except VerlServerError as error:
            raise torn_error(error, self.validated) from error
        return attempt

    def replay(self) -> None:
        """Load published weights into servers that missed their update, if the same weights are still staged.

        Raises VerlServerError; the servers then hold no whole weights.
        """
        attempt = self._new_attempt()
        with self._prepared(attempt):
            self.servers.pause(self.validated.pause_mode)
            if self.sender.stages:
                self._stage(attempt)
            self._load_and_verify(attempt)
            # A trainer rank may stage the next update in the meantime, perhaps just behind the reader.
            staged = StagedChecksums(self.sender.arena.tensor, self.sender.settings.checksum)
            if staged.values(self.names) != self.checksums:
                raise VerlServerError("the staged weights have changed while a server loaded the published weights")
            self.servers.resume()

    def _new_attempt(self) -> UpdateAttempt:
        """An attempt at this update, on the servers that take part now."""
        return UpdateAttempt(uuid.uuid4().hex, self.names, self.validated.verify, self.servers.members)

    @contextmanager
    def _prepared(self, attempt: UpdateAttempt, *, is_staged: bool = False) -> Iterator[None]:
        """Prepare the transport before the body, and finish the attempt after the body in any case.

        `is_staged`: the attempt is one of `_staged_attempt`, which has prepared the transport.
        """
        try:
            if not is_staged:
                self.sender.prepare(attempt)
            yield
        except BaseException:
            self.sender.finish(attempt, succeeded=False)
            raise
        self.sender.finish(attempt, succeeded=True)

    def _staged_attempt(self, *, is_serving: bool) -> UpdateAttempt:
        """An attempt whose tensors are on the machines of all its servers.

        `is_serving`: the servers serve the earlier weights meanwhile. Otherwise they are paused from here on. A failure
        is tried again as often as one of a load: once, and without the servers that fail repeatedly. Raises
        VerlServerError; then the weights of the servers have not changed.
        """
        servers, num_failures = self.servers, 0
        while True:
            attempt = self._new_attempt()
            if not attempt.members:
                return attempt
            try:
                self.sender.prepare(attempt)
                if not is_serving:
                    servers.pause(self.validated.pause_mode)
                self._stage(attempt, is_serving=is_serving)
            except VerlServerError as error:
                self.sender.finish(attempt, succeeded=False)
                num_failures += 1
                left_out = leave_out_failed(servers, error)
                is_final = isinstance(error, UnsupportedError) and not servers.can_leave_out
                if isinstance(error, (ServerDiedError, ShutDownError)) or is_final or num_failures == 3:
                    raise
                if num_failures == 2 and not left_out:
                    raise
                logger.warning("%s The weights are sent again.", error.message)
            except BaseException:
                self.sender.finish(attempt, succeeded=False)
                raise
            else:
                return attempt

    def _stage(self, attempt: UpdateAttempt, *, is_serving: bool = False) -> None:
        """Bring the tensors to the servers' machines. `is_serving`: pause generation only while a request starts it.

        SGLang takes no request about weights between the steps of a generation unless it is paused.
        """
        servers = self.servers
        try:
            try:
                if is_serving:
                    servers.pause(PauseMode.IN_PLACE)
                with open_session(servers):
                    messages = [{**message, "opens_only": True} for message in self._messages(attempt)]
                    servers.load(messages, None, flush_cache=False)
            finally:
                if is_serving:
                    resume_unchanged(servers)
            self.sender.deliver(attempt, self.checksums, is_wanted=self._watch_members())
        except BaseException as error:
            self.sender.abandon(error)
            if isinstance(error, VerlServerError) and (lost := servers.find_lost()):
                error.details["servers"] = sorted(lost)
            raise

    def _watch_members(self) -> Callable[[], bool]:
        """A function that says whether all members still run. It asks once a second."""
        until, are_running = 0.0, True

        def all_run() -> bool:
            nonlocal until, are_running
            if time.monotonic() > until:
                are_running, until = not self.servers.find_lost(), time.monotonic() + 1.0
            return are_running

        return all_run

    def _messages(self, attempt: UpdateAttempt) -> list[Json]:
        """The message for the loaders of each member."""
        sender = self.sender
        return [
            {
                "transport": sender.name,
                "update_id": attempt.id,
                "verify": attempt.verify,
                "checksum": sender.settings.checksum,
                **sender.loader_message(attempt, member_index),
            }
            for member_index in range(len(attempt.members))
        ]

    def _load_and_verify(self, attempt: UpdateAttempt) -> None:
        """The steps begin, open, load, end and verify reports. Raises TornWeightsError for any failure after `open`.

        With several servers of which some can be left out, for any failure after `begin`.
        """
        servers, sender = self.servers, self.sender
        messages = self._messages(attempt)
        try:
            with open_session(servers):
                if servers.can_leave_out and len(attempt.members) > 1:  # it is repeated, without those that fail again
                    self.may_have_loaded = True
                if attempt.members != sender.opened_members and not sender.stages:
                    servers.load([{**message, "opens_only": True} for message in messages], None, flush_cache=False)
                    opening = replace(attempt, verify=False)
                    ranks = sender.receiving_ranks(opening)
                    require_opened(sender.name, [(rank, sender.read_report(opening, rank.receiver)) for rank in ranks])
                    sender.opened_members = attempt.members
                self.may_have_loaded = True
                self._load_and_deliver(attempt, messages)
            verify_reports(
                sender.reports(attempt),
                attempt,
                self.checksums,
                is_whole=self.manifest.is_whole(self.names),
                optional=self.manifest.not_required,
            )
        except (ServerDiedError, ShutDownError):
            raise  # no server is left whose weights could be torn
        except VerlServerError as error:
            if not self.may_have_loaded:
                raise
            raise torn_error(error, self.validated) from error

    def _load_and_deliver(self, attempt: UpdateAttempt, messages: Sequence[Json]) -> None:
        """Make the servers load while the transport delivers, and wait for both.

        The servers' error is raised rather than that of the transport, because it says more than an error that follows
        from it. An interrupt such as KeyboardInterrupt is raised unchanged. Whenever it comes, the servers learn of it
        before anything waits for them.
        """
        version, flushes = self.validated.weight_version, self.validated.flush_cache
        loading: Future[None] | None = None
        pool = ThreadPoolExecutor(1, thread_name_prefix="verl-server-load")
        try:
            loading = started = pool.submit(self.servers.load, messages, version, flushes)
            if not self.sender.stages:
                self.sender.deliver(attempt, self.checksums, is_wanted=lambda: not started.done())
            loading.result()
        except BaseException as error:
            self.sender.abandon(error)
            if loading is not None and isinstance(error, Exception):
                loading.result()
            raise
        finally:
            pool.shutdown()


# -- Whole modules ----------------------------------------------------------------------------------
# Partial updates of engines that load a module only with all of its tensors.
#
# vLLM fuses some modules of a checkpoint into one, for example `q_proj`, `k_proj` and `v_proj`, and would fill the
# missing part with uninitialised memory. The missing tensors are taken from the arena, which has those of the last
# update.


def complete_modules(
    names: Sequence[str],
    members: Iterable[ServerInfo],
    manifest: Manifest,
    published: Mapping[str, int],
    compute_checksums: Callable[[Sequence[str]], Sequence[int]],
) -> list[str]:
    """`names`, and the tensors without which a server of `members` cannot load them, in the order of the manifest.

    `published`: checksum of each tensor of the last updates. `compute_checksums` returns those of tensors as they are
    staged now. Raises WeightManifestError if a tensor that must be added was not published or has changed since.
    """
    given = set(names)
    added: set[str] = set()
    for fused in {member.fused_modules for member in members if member.fused_modules is not None}:
        added |= _missing_tensors(given, fused, manifest, published)
    if not added:
        return list(names)
    missing = sorted(added)
    changed = missing
    if all(name in published for name in missing):
        checksums = compute_checksums(missing)
        changed = [name for name, value in zip(missing, checksums, strict=True) if published[name] != value]
    if changed:
        raise WeightManifestError(
            f"the update has a part of a module that vLLM loads only as a whole, and lacks {', '.join(changed[:6])}"
            f"{' and others' if len(changed) > 6 else ''}. Push these tensors as well, or push all tensors once with "
            "verify=True: later updates take the missing tensors from it",
            name=changed[0],
        )
    return [name for name in manifest.tensors if name in given or name in added]


def _missing_tensors(
    given: set[str], fused: Sequence[Sequence[str]], manifest: Manifest, published: Collection[str]
) -> set[str]:
    """The tensors of the modules of `given` that are not in `given`. Optional ones only if they were published."""
    known = [name for name in manifest.tensors if name in manifest.required or name in published]
    missing = set[str]()
    if given.issuperset(known):
        return missing
    for tails in fused:
        endings = "|".join(re.escape(tail).replace(r"\*", r"\d+") for tail in tails)
        pattern, groups = re.compile(rf"(?:(.*)\.)?(?:{endings})"), defaultdict[str | None, set[str]](set)
        for name in known:
            if (match := pattern.fullmatch(name)) is not None:
                groups[match[1]].add(name)
        missing.update(*(group - given for group in groups.values() if not group.isdisjoint(given)))
    return missing


# -- Staged -----------------------------------------------------------------------------------------


class StagedUpdater(WeightUpdater):
    """The weight updater for transports that send what is staged in an arena.

    `arena`: the arena that this rank writes. `writer_ranks`: global ranks that map the same arena as this rank.
    `sender`: the trainer's end of the transport, on the first rank of each node; None on other ranks. `checksum`: name
    of the algorithm of all updates.
    """

    def __init__(
        self,
        ranks: EngineRanks,
        manifest: Manifest,
        weight_version: int,
        layout: Layout,
        arena: Arena,
        writer_ranks: frozenset[int],
        sender: Sender | None,
        checksum: str,
    ) -> None:
        super().__init__(ranks, manifest, weight_version)
        self._layout, self._arena, self._writer_ranks, self._sender = layout, arena, writer_ranks, sender
        self._checksum = checksum
        self._is_node_leader = ranks.placement.is_node_leader
        self._sender_lock = threading.Lock()
        """Held while the sender is used: by an update, or by the replay of an update into another server."""
        self._has_published = False
        """Whether the servers have got whole weights by an update of this trainer."""
        self._published_checksums: dict[str, int] = {}
        """Checksum of each published tensor, on rank 0."""
        self._unpublished: StagedUpdate | None = None
        """On rank 0 of several nodes: the update that all servers have loaded last."""

    def _update(
        self, named_tensors: NamedTensors, options: UpdateOptions, refusal: VerlServerError | None
    ) -> WeightUpdateResult:
        started = time.monotonic()
        call_id = self.coordinator.next_call_id("update_weights_from_tensor")
        checksums = StagedChecksums(self._arena.tensor, self._checksum)
        writer = ShardWriter(
            self._arena.tensor,
            self.manifest,
            self._writer_ranks,
            self.coordinator,
            call_id,
            gather_timeout_s=self.ranks.timeout_s,
            check_finite=options.check_finite and not isinstance(named_tensors, Sized),
            writes_whole_tensors=self._is_node_leader,
            copies=StagingCopies(self._arena.pin),
            checksums=checksums if options.verify else None,
            shared=self.shared,
        )

        def check_and_write() -> list[str]:
            if refusal is not None:
                raise refusal
            if not isinstance(named_tensors, Sized):
                return writer.write(named_tensors)
            try:
                source = TensorSource(named_tensors, self.manifest, options.check_finite)
            except BadInputError as error:
                writer.refuse(named_tensors, error)  # the other ranks do not wait for this rank to arrive
                raise
            return writer.write(source.pairs)

        written, error = self.run_writing(writer, check_and_write)
        names = written or []
        gather_s = time.monotonic() - started
        if self._is_node_leader and self.coordinator.rank != 0 and names:  # the arena of another node
            self._arena.write_table(self._layout.in_order(names))
        message = self.coordinator.agree(
            call_id,
            lambda contributions: self._commit(contributions, names, options, checksums).to_message(),
            contribution=contribution_of(names, writer.has_shards),
            error=error,
            action_timeout_s=4 * self.ranks.timeout_s,
        )
        outcome = UpdateOutcome.from_message(message)
        if outcome.result is None and outcome.torn is None:
            outcome = self._confirm_on_all_nodes(outcome, names, checksums, f"{call_id}/confirm")
        self.adopt(outcome)
        return outcome.result_of_rank(gather_s)

    # -- rank 0 -------------------------------------------------------------------------------------

    def _commit(
        self, contributions: list[Json], names: list[str], options: UpdateOptions, staged_checksums: StagedChecksums
    ) -> UpdateOutcome:
        """On rank 0: check that all ranks pushed the same tensors, then make the servers load them.

        With one node, the update is published and generation continues. With several nodes, `_confirm_on_all_nodes`
        does both later.
        """
        servers, sender, nnodes = self.servers, self._sender, self.ranks.placement.nnodes
        node_leaders = range(0, len(contributions), len(contributions) // nnodes)
        validated = self.begin(contributions, names, options, node_leaders)
        assert sender is not None
        now_staged = StagedChecksums(self._arena.tensor, self._checksum)
        completed = complete_modules(
            names, servers.members, self.manifest, self._published_checksums, now_staged.values
        )
        ordered_names = self._layout.in_order(completed)
        values = staged_checksums.values(ordered_names) if validated.verify else []
        update = StagedUpdate(servers, sender, validated, ordered_names, values, self.manifest)
        try:
            with self._sender_lock:
                self._arena.write_table(ordered_names)
                is_torn = self.find_torn() is not None
                attempt = update.commit(is_torn, may_serve=self._has_published and not is_torn)
                if nnodes == 1:
                    return self._publish_and_resume(update)
        except TornWeightsError as error:
            return UpdateOutcome(validated.weight_version, torn=error)
        except VerlServerError:
            raise
        except BaseException as failure:
            if update.may_have_loaded:
                self.torn = torn_error(failure, validated)
            raise
        self._unpublished = update
        self.torn = TornWeightsError("the weight update was loaded, but not all nodes have confirmed it")
        return UpdateOutcome(validated.weight_version, update_id=attempt.id, verify=validated.verify)

    @property
    def keeps_published(self) -> bool:
        return self._lacking.issubset(self._published_checksums)

    def _publish_and_resume(self, update: StagedUpdate) -> UpdateOutcome:
        """Record the checksums of the new weights, tell the servers' owner of the new version, and resume generation.

        Without verification there are no checksums. Then the weights cannot be replayed until the next update of all
        tensors with verification.
        """
        new = dict(zip(update.names, update.checksums, strict=True)) if update.checksums else {}
        published = {**self._published_checksums, **new} if new else {}
        keeps_all = self._lacking.union(update.names).issubset(published)
        replay = self._replay_of(update.validated, published) if keeps_all else None
        missing_from = self.publish(update.validated, update.names, replay)
        self._published_checksums, self._has_published = published, True
        return self.resume_with(
            update.validated,
            update.names,
            missing_from,
            transport=update.sender.name,
            staging_bytes=self._layout.size_bytes,
            sent_bytes=update.sender.sent_bytes,
            paused_at=update.paused_at,
        )

    def _replay_of(self, validated: ValidatedUpdate, checksums: Mapping[str, int]) -> ReplayFn:
        """A function that loads the weights published now into other servers, while the weights are still staged.

        `checksums`: checksum of each published tensor. Another thread may call the function. It uses the device that is
        current in the present thread.
        """
        device = accelerator()
        names = self._layout.in_order(list(checksums))

        def load_published(servers: Servers) -> None:
            assert self._sender is not None
            values = [checksums[name] for name in names]
            with self._sender_lock, as_current(device):
                self._arena.write_table(names)
                StagedUpdate(servers, self._sender, validated, names, values, self.manifest).replay()

        return load_published

    # -- several nodes ------------------------------------------------------------------------------

    def _confirm_on_all_nodes(
        self, loaded: UpdateOutcome, names: list[str], checksums: StagedChecksums, call_id: str
    ) -> UpdateOutcome:
        """With several nodes, the first rank of each node checks the reports of the TP ranks on its node.

        If all are good, rank 0 publishes the update and resumes generation. Returns the outcome of the update.
        """
        error = None
        if self._is_node_leader and self.coordinator.rank != 0:  # `commit` has checked the reports of the first node
            error = self._report_error(loaded, names, checksums)

        def publish_and_resume(_: list[Json]) -> Json:
            assert self._unpublished is not None
            return self._publish_and_resume(self._unpublished).to_message()

        try:
            message = self.coordinator.agree(
                call_id, publish_and_resume, error=error, action_timeout_s=2 * self.ranks.timeout_s
            )
        except (ServerDiedError, ShutDownError):
            raise  # no server is left whose weights could be torn
        except VerlServerError as failure:
            torn = TornWeightsError(f"the weight update failed on a node: {failure.message}", **failure.details)
            return replace(loaded, torn=torn)
        return UpdateOutcome.from_message(message)

    def _report_error(
        self, loaded: UpdateOutcome, names: list[str], checksums: StagedChecksums
    ) -> VerlServerError | None:
        """On the first rank of a node: the error that a TP rank of this node reported, or None."""
        assert self._sender is not None
        verify = loaded.verify
        attempt = UpdateAttempt(loaded.update_id, self._layout.in_order(names), verify, self.servers.members)
        try:
            values = checksums.values(attempt.names) if verify else []
            verify_reports(
                self._sender.reports(attempt),
                attempt,
                values,
                is_whole=self.manifest.is_whole(attempt.names),
                optional=self.manifest.not_required,
            )
        except VerlServerError as error:
            return error
        except Exception as failure:  # noqa: BLE001 - raised on all ranks: this rank has to take part in the call
            return VerlServerError(f"the reports could not be checked: {type(failure).__name__}: {failure}")
        return None

    # -- memory -------------------------------------------------------------------------------------

    def staging_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self._arena.tensor(name) for name in self._layout.slots}

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._arena.close()
