"""What macOS says of sleep: a program registers with IOKit, hears in a run loop, and answers. It has not run on a Mac.

`PowerPort` is the part that calls into the system; everything that is decided is in `MacSleepNotice`, and is tested
with another port. Every message that asks for an answer gets one, whatever happens here: without one the system waits
for 30 seconds.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import structlog

_log = structlog.get_logger(__name__)

# IOKit/IOMessage.h: iokit_common_msg(x) is 0xe0000000 | x.
CAN_SYSTEM_SLEEP: Final = 0xE0000270
SYSTEM_WILL_SLEEP: Final = 0xE0000280
SYSTEM_HAS_POWERED_ON: Final = 0xE0000300

STOP_S: Final = 3.0
STOP_AGAIN_S: Final = 0.05

OnMessage = Callable[[int, int], None]
"""Told a message's type and the id to answer it with; in the thread that listens."""


class Port(Protocol):
    """One registration with the system's power management."""

    def listen(self, on_message: OnMessage) -> None:
        """Register, and hand on messages until `stop`. Blocks. Raises OSError where that is not to be had."""

    def allow(self, answer_to: int) -> None:
        """Let the system go on with what a message said."""

    def stop(self) -> None:
        """Have `listen` return, if it runs yet; callable from another thread, and more than once."""


class MacSleepNotice:
    """Hears that macOS sleeps and wakes; see `SleepNotice`.

    Args:
        port: the system's.
    """

    def __init__(self, port: Port | None = None) -> None:
        self._port = port or PowerPort()
        self._thread: threading.Thread | None = None

    def start(self, falls_asleep: Callable[[], None], is_awake: Callable[[], None]) -> None:
        """See `SleepNotice.start`."""

        def on_message(kind: int, answer_to: int) -> None:
            if kind == SYSTEM_WILL_SLEEP:
                try:
                    falls_asleep()
                finally:
                    self._port.allow(answer_to)
            elif kind == CAN_SYSTEM_SLEEP:
                # The system asks whether it may sleep for being idle. That is `AwakeHolder`'s to say, not ours.
                self._port.allow(answer_to)
            elif kind == SYSTEM_HAS_POWERED_ON:
                is_awake()

        def listen() -> None:
            try:
                self._port.listen(on_message)
            except (OSError, AttributeError) as error:
                _log.warning("sleep is noticed after it, not before: no word from the system", reason=str(error))

        # Nothing may wait for this thread at the end: it sits in the system's code.
        self._thread = threading.Thread(target=listen, name="kvnet sleep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """See `SleepNotice.stop`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        # A stop that comes before the run loop runs is forgotten by it, so it is said until it was heard.
        for _ in range(int(STOP_S / STOP_AGAIN_S)):
            self._port.stop()
            thread.join(STOP_AGAIN_S)
            if not thread.is_alive():
                return


class PowerPort:
    """The system's own, through IOKit and CoreFoundation."""

    def __init__(self) -> None:
        self._iokit: Any = None
        self._core: Any = None
        self._root = 0
        self._loop: int | None = None

    def listen(self, on_message: OnMessage) -> None:
        """See `Port.listen`."""
        iokit, core = self._load()

        def called(_refcon: int | None, _service: int, kind: int, argument: int | None) -> None:
            on_message(kind, argument or 0)

        # Kept in a local until the registration is gone: the system calls it as long as that lasts.
        callback = _CALLBACK(called)
        port, notifier = ctypes.c_void_p(), ctypes.c_uint32()
        self._root = iokit.IORegisterForSystemPower(None, ctypes.byref(port), callback, ctypes.byref(notifier))
        if not self._root:
            raise OSError("expected IOKit to register this program for sleep, found that it does not")
        mode = ctypes.c_void_p.in_dll(core, "kCFRunLoopDefaultMode")
        source = iokit.IONotificationPortGetRunLoopSource(port)
        self._loop = core.CFRunLoopGetCurrent()
        core.CFRunLoopAddSource(self._loop, source, mode)
        try:
            core.CFRunLoopRun()
        finally:
            core.CFRunLoopRemoveSource(self._loop, source, mode)
            self._loop = None
            iokit.IODeregisterForSystemPower(ctypes.byref(notifier))
            iokit.IOServiceClose(self._root)
            iokit.IONotificationPortDestroy(port)

    def allow(self, answer_to: int) -> None:
        """See `Port.allow`."""
        self._iokit.IOAllowPowerChange(self._root, answer_to)

    def stop(self) -> None:
        """See `Port.stop`."""
        loop = self._loop
        if loop is not None:
            self._core.CFRunLoopStop(loop)

    def _load(self) -> tuple[Any, Any]:
        """Both libraries, with what their functions take and give: pointers would be cut to 32 bits otherwise."""
        frameworks = "/System/Library/Frameworks"
        iokit = ctypes.CDLL(f"{frameworks}/IOKit.framework/IOKit")
        core = ctypes.CDLL(f"{frameworks}/CoreFoundation.framework/CoreFoundation")
        for library, name, gives, takes in (
            (iokit, "IORegisterForSystemPower", _u32, (_pointer, _to_pointer, _CALLBACK, _to_u32)),
            (iokit, "IODeregisterForSystemPower", ctypes.c_int, (_to_u32,)),
            (iokit, "IOAllowPowerChange", ctypes.c_int, (_u32, ctypes.c_ssize_t)),
            (iokit, "IOServiceClose", ctypes.c_int, (_u32,)),
            (iokit, "IONotificationPortGetRunLoopSource", _pointer, (_pointer,)),
            (iokit, "IONotificationPortDestroy", None, (_pointer,)),
            (core, "CFRunLoopGetCurrent", _pointer, ()),
            (core, "CFRunLoopAddSource", None, (_pointer, _pointer, _pointer)),
            (core, "CFRunLoopRemoveSource", None, (_pointer, _pointer, _pointer)),
            (core, "CFRunLoopRun", None, ()),
            (core, "CFRunLoopStop", None, (_pointer,)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = gives, takes
        self._iokit, self._core = iokit, core
        return iokit, core


_pointer, _u32 = ctypes.c_void_p, ctypes.c_uint32
_to_pointer, _to_u32 = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint32)
# IOServiceInterestCallback: refcon, service (mach_port_t), message type (natural_t), argument.
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
