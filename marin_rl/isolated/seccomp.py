"""A seccomp filter of system calls that sandboxed programs have no use for.

Built as classic BPF without a library, for x86-64 and 64-bit ARM; numbers are those of the kernel's
`unistd.h`. It is a second line: namespaces, missing capabilities and resource limits hold without
it. It takes away new namespaces, mounts, tracing, keys, BPF, io_uring, memory outside of any limit
(`memfd_create`, System V), sockets other than IP and Unix ones (vsock has no namespace), and typing
into terminals. Leaves out how it gets into a program (`sandbox`).
"""

import errno
import platform
import struct

# From linux/bpf_common.h: opcodes of the four instructions that are used.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# From linux/seccomp.h: what a filter returns, and offsets into the data that it reads.
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_NAMESPACES = 0x7E020000  # CLONE_NEW* of linux/sched.h, without NEWTIME, which clone cannot take
_X32 = 0x40000000  # numbers of x86-64's second ABI begin here
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Call numbers on x86-64 and on 64-bit ARM; None if the architecture lacks the call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280),
    "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_settime": (227, 112),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "finit_module": (313, 273),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "init_module": (175, 105), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "ioperm": (173, None), "iopl": (172, None), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "mbind": (237, 235), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "modify_ldt": (154, None), "mount": (165, 40),
    "mount_setattr": (442, 442), "move_mount": (429, 429), "move_pages": (279, 239),
    "msgget": (68, 186), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "perf_event_open": (298, 241), "personality": (135, 92),
    "pidfd_getfd": (438, 438), "pivot_root": (155, 41), "process_madvise": (440, 440),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117),
    "quotactl": (179, 60), "reboot": (169, 142), "request_key": (249, 218), "semget": (64, 190),
    "set_mempolicy": (238, 237), "setdomainname": (171, 162), "sethostname": (170, 161),
    "setns": (308, 268), "settimeofday": (164, 170), "shmget": (29, 194), "swapoff": (168, 225),
    "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282), "vhangup": (153, 58),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SOCKET, _IOCTL = (41, 198), (16, 29)


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """Return the filter for a machine (`platform.machine()`), None for one that is not known."""
    machine = platform.machine() if machine is None else machine
    if machine not in _AUDIT:
        return None
    column = list(_AUDIT).index(machine)
    program = [
        _op(_LOAD, _ARCHITECTURE),
        _op(_EQUAL, _AUDIT[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_op(_AT_LEAST, _X32, 0, 1), _refusal(errno.EPERM)]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [_op(_EQUAL, number, 0, 1), _refusal(errno.EPERM)]
    # Its flags lie in memory, out of a filter's reach; the C library falls back to clone.
    program += [_op(_EQUAL, _CLONE3[column], 0, 1), _refusal(errno.ENOSYS)]
    program += _if_call(
        _CLONE[column],
        [
            _op(_LOAD, _ARGUMENTS),
            _op(_ANY_BIT, _NAMESPACES, 0, 1),
            _refusal(errno.EPERM),
            _op(_RETURN, _ALLOW),
        ],
    )
    program += _if_call(
        _SOCKET[column],
        [
            _op(_LOAD, _ARGUMENTS),
            *(
                _op(_EQUAL, family, len(_FAMILIES) - place, 0)
                for place, family in enumerate(_FAMILIES)
            ),
            _refusal(errno.EAFNOSUPPORT),
            _op(_RETURN, _ALLOW),
        ],
    )
    program += _if_call(
        _IOCTL[column],
        [
            _op(_LOAD, _ARGUMENTS + 8),  # the low half of the second argument
            _op(_EQUAL, _TERMINAL_INPUT[0], 1, 0),
            _op(_EQUAL, _TERMINAL_INPUT[1], 0, 1),
            _refusal(errno.EPERM),
            _op(_RETURN, _ALLOW),
        ],
    )
    return b"".join([*program, _op(_RETURN, _ALLOW)])


def _op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction; jumps count the instructions that are skipped."""
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _refusal(number: int) -> bytes:
    return _op(_RETURN, _ERRNO | number)


def _if_call(number: int, body: list[bytes]) -> list[bytes]:
    return [_op(_EQUAL, number, 0, len(body)), *body]
