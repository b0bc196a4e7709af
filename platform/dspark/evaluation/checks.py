"""Checks that run one after the other within a time limit, and the table that says how each of them ended."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dspark.errors import one_line

Status = Literal["pass", "fail", "not run", "-"]

log = logging.getLogger("dspark.checks")


@dataclass(frozen=True)
class Finding:
    """One line of the table. status: "-" for what cannot be checked here and need not be."""

    name: str
    status: Status
    said: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Check:
    """run yields (what was looked at, whether it is right, figures in words); None in the place of a yes or no means
    that there is nothing to check.
    """

    name: str
    run: Callable[[], Iterator[tuple[str, bool | None, str]]]


def run_checks(
    checks: Sequence[Check], *, limit_s: float, clock: Callable[[], float] = time.perf_counter
) -> list[Finding]:
    """All findings, as they are logged. A check that breaks has failed; one that is not begun in time too."""
    findings: list[Finding] = []
    started = clock()
    for check in checks:
        if clock() - started > limit_s:
            findings.append(Finding(check.name, "not run", f"the limit of {limit_s:g} s was reached"))
            continue
        for finding in _findings(check, clock):
            log.info("%s: %s (%s)", finding.name, finding.status, finding.said)
            findings.append(finding)
    return findings


def have_passed(findings: Sequence[Finding]) -> bool:
    return all(finding.status in ("pass", "-") for finding in findings)


def format_findings(findings: Sequence[Finding]) -> str:
    """A line each, and one for all."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{f.name:<{width}}  {f.status:<7} {f.seconds:>6.1f} s  {f.said}" for f in findings]
    failed = sum(finding.status in ("fail", "not run") for finding in findings)
    lines.append(f"{failed} of {len(findings)} failed" if failed else f"all of {len(findings)} passed")
    return "\n".join(lines)


def _findings(check: Check, clock: Callable[[], float]) -> Iterator[Finding]:
    began = clock()
    try:
        for detail, is_right, said in check.run():
            status: Status = "-" if is_right is None else "pass" if is_right else "fail"
            name = f"{check.name}, {detail}" if detail else check.name
            yield Finding(name, status, said, clock() - began)
            began = clock()
    except Exception as error:  # an edge: what breaks a check is its finding
        log.exception("check %s broke", check.name)
        yield Finding(check.name, "fail", f"{type(error).__name__}: {one_line(error, max_chars=160)}", clock() - began)
