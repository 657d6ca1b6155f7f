"""Checks of the reports of TP ranks on an update: all have loaded all tensors, and have read what was staged."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from verl_server.errors import UnsupportedError, VerlServerError
from verl_server.weights.checksum import shares_are_complete
from verl_server.weights.reports import ReceivedReport
from verl_server.weights.transports.base import ReceivingRank, UpdateAttempt, receiving_ranks

logger = logging.getLogger(__name__)


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
    for label, received in reports.items():
        try:
            _verify_report(label, received, attempt, checksums, is_whole=is_whole)
        except VerlServerError as error:
            errors[label] = error
    if attempt.verify and not errors:
        errors = _unverified_servers(reports, servers) or _servers_with_unread(reports, servers, optional, is_whole)
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


def _verify_report(
    label: str, received: ReceivedReport | None, attempt: UpdateAttempt, checksums: Sequence[int], *, is_whole: bool
) -> None:
    if received is None:
        raise VerlServerError(
            f"{label} did not report on the update: it could not reach the staged weights. See the server's log"
        )
    report = received.report
    if not report.ok:
        raise VerlServerError(f"{label} could not load the weights: {report.error}", log_tail=report.trace)
    if report.num_tensors != len(attempt.names):
        raise VerlServerError(f"{label} took {report.num_tensors} of the update's {len(attempt.names)} tensors")
    if attempt.verify:
        _verify_checksums(label, received, attempt, checksums)
        _verify_coverage(label, received, is_whole)


def _unverified_servers(
    reports: Mapping[str, ReceivedReport | None], servers: Mapping[str, str]
) -> dict[str, VerlServerError]:
    """An error for each server whose TP ranks have not verified all tensors together."""
    shares: dict[str, dict[str, tuple[int, int]]] = {}
    for label, received in reports.items():
        assert received is not None
        shares.setdefault(servers.get(label, ""), {})[label] = received.report.share
    return {
        label: VerlServerError(f"{label} and the other TP ranks of its server have not verified all tensors together")
        for server_shares in shares.values()
        if not shares_are_complete([*server_shares.values()])
        for label in [next(iter(server_shares))]
    }


def _servers_with_unread(
    reports: Mapping[str, ReceivedReport | None],
    servers: Mapping[str, str],
    optional: Collection[str],
    is_whole: bool,
) -> dict[str, VerlServerError]:
    """An error for each server of which no TP rank has read some tensors that are not `optional`."""
    unread: dict[str, tuple[str, set[str]]] = {}
    for label, received in reports.items():
        assert received is not None
        unread.setdefault(servers.get(label, ""), (label, set(received.report.unread)))[1].intersection_update(
            received.report.unread
        )
    errors: dict[str, VerlServerError] = {}
    for label, names in unread.values():
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


def _verify_checksums(label: str, received: ReceivedReport, attempt: UpdateAttempt, checksums: Sequence[int]) -> None:
    """Compare the checksums of a TP rank's share of the tensors."""
    first, step = received.report.share
    expected = zip(attempt.names[first::step], checksums[first::step], received.checksums, strict=True)
    different = [name for name, staged, read in expected if staged != read]
    if different:
        raise VerlServerError(
            f"{label} read {len(different)} tensors that differ from what was staged, {different[0]!r} first: "
            "do not write to the staged tensors during an update"
        )


def _verify_coverage(label: str, received: ReceivedReport, is_whole: bool) -> None:
    report = received.report
    if report.num_unwritten and is_whole:
        raise VerlServerError(
            f"{label} did not write {report.num_unwritten} of its parameters in an update of the whole model, for "
            f"example {report.unwritten[0]!r}: the update lacks their tensors, or the model class of the server "
            "ignores them (verify=False skips this check)"
        )
