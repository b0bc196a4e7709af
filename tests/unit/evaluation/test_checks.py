"""Checks in a row: what breaks has failed, what comes too late has not run, and the table says so."""

from collections.abc import Iterator

from dspark.evaluation.checks import Check, Finding, format_findings, have_passed, run_checks


def right() -> Iterator[tuple[str, bool | None, str]]:
    yield "one", True, "fine"
    yield "two", None, "not installed"


def broken() -> Iterator[tuple[str, bool | None, str]]:
    yield "before", True, "fine"
    raise RuntimeError("no kernel\nimage")


def wrong() -> Iterator[tuple[str, bool | None, str]]:
    yield "", False, "off by 3"


def test_every_finding_is_a_line_and_what_breaks_has_failed():
    findings = run_checks([Check("a", right), Check("b", broken), Check("c", wrong)], limit_s=60)
    assert [(f.name, f.status) for f in findings] == [
        ("a, one", "pass"),
        ("a, two", "-"),
        ("b, before", "pass"),
        ("b", "fail"),
        ("c", "fail"),
    ]
    assert findings[3].said == "RuntimeError: no kernel image"
    table = format_findings(findings).splitlines()
    assert len(table) == 6
    assert table[-1] == "2 of 5 failed"
    assert not have_passed(findings)


def test_what_is_not_begun_in_time_has_not_passed():
    times = iter(range(0, 1000, 10))
    findings = run_checks([Check("a", right), Check("b", right)], limit_s=15, clock=lambda: float(next(times)))
    assert findings[-1] == Finding("b", "not run", "the limit of 15 s was reached")
    assert not have_passed(findings)


def test_all_that_passes_or_cannot_be_checked_has_passed():
    findings = run_checks([Check("a", right)], limit_s=60)
    assert have_passed(findings)
    assert format_findings(findings).splitlines()[-1] == "all of 2 passed"
