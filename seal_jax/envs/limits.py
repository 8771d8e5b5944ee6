"""Runs one tool call under a wall-clock limit, from any thread.

In the main thread an interval timer (SIGALRM) raises inside the call; it also interrupts sleeps and blocking reads.
Elsewhere Python has no signals, so the call runs on a short-lived thread into which the limit is raised as an
asynchronous exception, which takes effect at the next Python instruction.

What no limit in one process can do is stop a single long operation in C, such as `2 ** 10**9` or the JSON text of
lists that hold one another 2**60 times over, or a loop that swallows every exception. Tools that could be asked for the
former need a guard that looks at the arguments first (`InstanceWorld(guards=...)`).
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

#: How long a call on a thread of its own may take to unwind after the limit was raised in it, in seconds.
GRACE_S = 1.0


class TimeLimitExceeded(BaseException):
    """Raised inside the running call; a BaseException, so that a tool's `except Exception` does not swallow it."""


class CallStuck(Exception):
    """The call did not stop: its thread was abandoned, and its instances must not be used again."""


def run_limited(call: Callable[[], T], limit_s: float | None) -> T:
    """Returns `call()`; raises TimeLimitExceeded after `limit_s` seconds (None: no limit), CallStuck if it hangs on."""
    if limit_s is None:
        return call()
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        if signal.getsignal(signal.SIGALRM) is not None:  # None: a handler set in C, which could not be put back
            return _run_with_alarm(call, limit_s)
    return _run_on_thread(call, limit_s)


def _run_with_alarm(call: Callable[[], T], limit_s: float) -> T:
    armed, fired = True, False

    def on_alarm(signum: int, frame: object) -> None:
        nonlocal fired
        fired = True
        if armed:
            raise TimeLimitExceeded

    start = time.monotonic()
    old_handler = signal.signal(signal.SIGALRM, on_alarm)
    old_delay, old_interval = signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        try:
            return call()
        finally:
            armed = False
            if fired:  # also when the tool swallowed the exception and returned something
                raise TimeLimitExceeded
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
        if old_delay:  # someone else's timer (a test runner's): let it run on from where it would be
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, old_delay - (time.monotonic() - start)), old_interval)


def _run_on_thread(call: Callable[[], T], limit_s: float) -> T:
    outcome: dict[str, Any] = {}

    def target() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread below
            outcome["error"] = error

    thread = threading.Thread(target=target, name="seal-tool-call", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TimeLimitExceeded)
        )
        thread.join(GRACE_S)
        if thread.is_alive():
            raise CallStuck
        raise TimeLimitExceeded
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
