"""Errors cross process borders and fit on one line."""

import pickle

import pytest

from dspark import errors

CLASSES = [errors.DsparkError, *errors.DsparkError.__subclasses__()]


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda c: c.__name__)
def test_errors_survive_pickling_with_class_and_message(error_class: type[errors.DsparkError]) -> None:
    error = error_class("page pool exhausted: 37 pages needed, 12 free; lower max_running_requests")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_class
    assert str(copy) == copy.message == error.message


def test_one_line_has_no_breaks_and_a_bounded_length() -> None:
    assert errors.one_line(ValueError("first\n  second")) == "first second"
    assert len(errors.one_line(ValueError("x" * 1000), max_chars=80)) == 80
