"""Runs a command that can change files in one folder only, enforced by Landlock (Linux 6.2).

Run as `python -I -S FILE FOLDER COMMAND...`: this process restricts itself and becomes the command,
so native code is restricted too and the command's interpreter never loads ctypes. Reading stays
open. Where the kernel knows them, TCP and signals to other processes are refused as well. Imports
nothing of forerun.
"""

from __future__ import annotations

import ctypes
import os
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on all architectures
PR_SET_NO_NEW_PRIVS = 38
QUERY_VERSION = 1  # a flag of CREATE_RULESET
RULE_PATH_BENEATH = 1

# rights of linux/landlock.h
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
CHANGE_FOLDER = sum(1 << bit for bit in (4, 5, 7, 8, 9, 10, 12))  # remove, make all but devices
MAKE_DEVICES = 1 << 6 | 1 << 11
REFER = 1 << 13  # rename and link between folders
TCP = 1 << 0 | 1 << 1  # bind, connect
SCOPES = 1 << 0 | 1 << 1  # abstract Unix sockets, signals
TRUNCATE_SINCE, TCP_SINCE, SCOPES_SINCE = 3, 4, 6  # ABI versions
MIN_VERSION = TRUNCATE_SINCE  # before it files could be emptied


class Ruleset(ctypes.Structure):
    """`struct landlock_ruleset_attr`: the rights that are refused unless a rule grants them."""

    _fields_ = (
        ("files", ctypes.c_uint64),
        ("net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class PathRule(ctypes.Structure):
    """`struct landlock_path_beneath_attr`: rights granted below an open path."""

    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


def call(number: int, *args: object) -> int:
    """The result of a system call; raises OSError on failure."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *args))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def version() -> int:
    """The Landlock ABI of the running kernel; raises OSError if there is none."""
    return call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(QUERY_VERSION))


def restrict(folder: str) -> None:
    """Refuses all changes of files outside the folder, for this process and its children."""
    known = version()
    if known < MIN_VERSION:
        raise OSError(f"Landlock ABI {known}; {MIN_VERSION} is needed")
    write = WRITE_FILE | TRUNCATE
    rules = Ruleset(files=write | CHANGE_FOLDER | MAKE_DEVICES | REFER)
    rules.net = TCP if known >= TCP_SINCE else 0
    rules.scoped = SCOPES if known >= SCOPES_SINCE else 0
    size = 24 if known >= SCOPES_SINCE else 16 if known >= TCP_SINCE else 8
    ruleset = call(CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0))
    allow(ruleset, folder, write | CHANGE_FOLDER | REFER)
    allow(ruleset, os.devnull, write)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs is refused")
    call(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def allow(ruleset: int, path: str, rights: int) -> None:
    """Grants rights below a path."""
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = PathRule(rights=rights, parent=parent)
    call(
        ADD_RULE,
        ctypes.c_int(ruleset),
        ctypes.c_int(RULE_PATH_BENEATH),
        ctypes.byref(rule),
        ctypes.c_uint32(0),
    )
    os.close(parent)


def main() -> None:
    """Restricts this process, then becomes the command."""
    folder, *command = sys.argv[1:]
    restrict(folder)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
