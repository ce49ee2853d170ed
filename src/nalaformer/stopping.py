"""Signal handlers: save what can be saved on SIGTERM and Ctrl-C, and clean up."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def stop_requests(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` on SIGTERM and Ctrl-C inside the block, so that the work stops when it can; a second Ctrl-C does not wait.

    After the block, Ctrl-C raises KeyboardInterrupt as usual.
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

    with install_handlers({signal.SIGTERM: on_terminate, signal.SIGINT: on_interrupt}):
        yield
    if by_keyboard:
        raise KeyboardInterrupt


@contextmanager
def clean_exit() -> Iterator[None]:
    """Raise SystemExit on SIGTERM inside the block, so that everything cleans up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with install_handlers({signal.SIGTERM: leave}):
        yield


@contextmanager
def install_handlers(handlers: dict[signal.Signals, Handler]) -> Iterator[None]:
    """Install signal handlers inside the block; signals that this process was started to ignore stay ignored."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    except ValueError:
        # only the main thread may install handlers
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
