"""Samples that cannot be used."""

from pathlib import Path


class BadSample(ValueError):
    """A sample that cannot be used; the message names its file and the reason, which may name a field.

    A loader leaves it out and counts it, or stops, as the run's `on_corrupt` says.
    """

    rule = "cannot be used"

    def __init__(self, path: str | Path, reason: str) -> None:
        message = f"{path} {self.rule}: {' '.join(reason.split())}"
        # a name may hold bytes that are no text, and no file of text would take them
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
        self.path = str(path)
        self.reason = reason

    # a loader's worker hands the error to the main process
    def __reduce__(self) -> tuple[type["BadSample"], tuple[str, str]]:
        return type(self), (self.path, self.reason)
