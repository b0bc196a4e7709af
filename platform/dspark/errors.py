"""Errors that cross process borders: they survive pickling and say what, value and remedy."""


class DsparkError(Exception):
    """A failure the user can act on. One line: what was wrong, the value, what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[type["DsparkError"], tuple[str]]:
        return type(self), (self.message,)


class MissingInput(DsparkError):
    """An input of a job is absent; the message names the job that makes it."""


class Mismatch(DsparkError):
    """Two artefacts do not belong together; the message names the field and both values."""


class OutOfSpace(DsparkError):
    """A write would exceed a byte budget or the free space of the disk."""


class TrainingDiverged(DsparkError):
    """Too many non-finite losses, or nothing to learn from."""


def one_line(error: BaseException, *, max_chars: int = 500) -> str:
    """The message of an exception without its line breaks, cut at max_chars."""
    return " ".join(str(error).split())[:max_chars]
