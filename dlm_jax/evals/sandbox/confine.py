"""Takes from a process everything but a little time, a little memory and an empty folder. Linux, standard library only.

A confined process has a process tree, network (none, not even the loopback), shared memory and file system of its own:
the interpreter and the system's libraries, read-only, and a small folder in memory. It sees no home, no /proc and no
other process, holds no capability and cannot gain one, and dies with whoever started it, its children with it.

This file runs in the process that is to be confined, before it reads any text that it is not to trust.
"""

import ctypes
import os
import resource
import signal
import sys

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000  # the same number on every architecture
_RDONLY = 1
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38
_CAPABILITY_VERSION = 0x20080522
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/nix/store", "/gnu/store")
_STRANGERS = 1_900_000_000  # user ids that nobody has; each sandbox takes one, so that its processes count alone


class Refused(Exception):
    """The kernel refuses something that confinement needs."""


def confine(root: str, limits: dict[str, int]) -> None:
    """Confines the calling process; returns in a child of it, while the caller waits for that child and exits.

    Args:
      root: an empty folder, hidden by what is mounted over it in the new file system alone.
      limits: see `limit`; "disk" (bytes) is the room of the folder /tmp, where the process finds itself.

    Raises:
      Refused: what is missing, in words. Nothing is confined then.
    """
    stranger = _namespaces()
    child = os.fork()
    if child:
        _wait(child)
    _call("prctl", _SET_PDEATHSIG, signal.SIGKILL)
    _file_system(root, limits["disk"], stranger)
    _quiet("/proc/sys/kernel/shmmni", "0")  # of the new namespace; where it is hidden, shared memory stays countless
    os.chroot(root)  # a process in a chroot may not make user namespaces, so that no capability comes back
    os.chdir("/tmp")
    limit(limits)
    if stranger is not None:
        os.setgroups([])
        os.setresgid(stranger, stranger, stranger)
        os.setresuid(stranger, stranger, stranger)
    _drop_capabilities()
    _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _SET_PDEATHSIG, signal.SIGKILL)  # a change of user has cleared it


def limit(limits: dict[str, int]) -> None:
    """Sets what the kernel counts for the calling process and its children.

    Args:
      limits: "seconds" of processor time, "memory" (bytes of addresses), "file_size" (bytes), "processes" (threads
        count) and "open_files", each for one process, but "processes", which is for all.
    """
    for name, most in (("CPU", limits["seconds"]), ("AS", limits["memory"]), ("DATA", limits["memory"]),
                       ("FSIZE", limits["file_size"]), ("NPROC", limits["processes"]), ("CORE", 0), ("MSGQUEUE", 0),
                       ("NOFILE", limits["open_files"]), ("MEMLOCK", 0), ("STACK", 1 << 23)):
        kind = getattr(resource, f"RLIMIT_{name}", None)  # not every system counts everything
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            try:
                resource.setrlimit(kind, (most, most))
            except (OSError, ValueError) as error:
                raise Refused(f"a limit on {name}: {error}") from None


def _namespaces() -> int | None:
    """Enters new namespaces; returns the user id to take later where the process may take any, else None."""
    if not sys.platform.startswith("linux"):
        raise Refused(f"namespaces: {sys.platform} has none, Linux does")
    parts = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    if os.geteuid() == 0:
        stranger = _STRANGERS + os.getpid()
        if not _libc().unshare(parts):
            return stranger
        os.setgroups([])  # root without rights over mounts, as in a container: first somebody whose processes count
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEWUSER | parts)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    return None


def _wait(child: int) -> None:
    for number in range(3):
        os.close(number)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _file_system(root: str, disk: int, owner: int | None) -> None:
    """Puts together what the process is to see, under `root`."""
    mount = lambda source, place, kind, flags, data: _call(
        "mount", source.encode(), place.encode(), kind.encode(), flags, data.encode())
    mount("none", "/", "", _REC | _PRIVATE, "")
    mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    interpreter = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
    shown: list[str] = []
    for path in [*_SYSTEM, *sorted(interpreter)]:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path) and not any(path == other or path.startswith(other + "/") for other in shown):
            _bind(mount, path, root + path, _RDONLY | _NOSUID | _NODEV)
            shown.append(path)
    for device in ("/dev/null", "/dev/urandom"):
        _bind(mount, device, root + device, _NOSUID)
    os.makedirs(root + "/tmp")
    mount("tmpfs", root + "/tmp", "tmpfs", _NOSUID | _NODEV, f"size={disk},nr_inodes=1000,mode=700")
    if owner is not None:
        os.chown(root + "/tmp", owner, owner)
    _attributes(root, _RDONLY | _NOSUID | _NODEV, recursive=False)


def _bind(mount, source: str, place: str, attributes: int) -> None:
    if os.path.isdir(source):
        os.makedirs(place)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, place, "", _BIND | _REC, "")
    _attributes(place, attributes)


def _attributes(place: str, attributes: int, recursive: bool = True) -> None:
    set_and_cleared = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, -100, place.encode(), _AT_RECURSIVE if recursive else 0,
          ctypes.byref(set_and_cleared), ctypes.sizeof(set_and_cleared), name="mount_setattr")


def _drop_capabilities() -> None:
    header, nothing = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _call("capset", ctypes.byref(header), ctypes.byref(nothing))


def _libc():
    return ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments, name: str | None = None) -> None:
    # a bare int would travel as 32 bits through a variadic function
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if getattr(_libc(), function)(*passed) < 0:
        raise Refused(f"{name or function}: {os.strerror(ctypes.get_errno())}")


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None


def _quiet(path: str, text: str) -> None:
    try:
        _write(path, text)
    except Refused:
        pass
