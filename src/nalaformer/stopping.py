"""What SIGTERM and Ctrl-C do: work that can be saved is saved first, everything else ends and cleans up."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def stop_requests(ask: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call `ask` inside the block, and the work stops when it can; a second Ctrl-C does not wait.

    Ctrl-C is KeyboardInterrupt as ever, at the end of the block.
    """
    by_keyboard = False

    def on_terminate(number: int, frame: FrameType | None) -> None:
        ask()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal by_keyboard
        if by_keyboard:
            raise KeyboardInterrupt
        by_keyboard = True
        ask()

    with handled({signal.SIGTERM: on_terminate, signal.SIGINT: on_interrupt}):
        yield
    if by_keyboard:
        raise KeyboardInterrupt


@contextmanager
def clean_exit() -> Iterator[None]:
    """Turns SIGTERM into an exception (SystemExit) inside the block, so that everything cleans up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with handled({signal.SIGTERM: leave}):
        yield


@contextmanager
def handled(handlers: dict[signal.Signals, Handler]) -> Iterator[None]:
    """Sends the signals to the handlers inside the block; signals that this process was started to ignore stay ignored."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    except ValueError:
        # only the main thread may listen
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
