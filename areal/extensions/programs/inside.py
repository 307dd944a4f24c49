"""Creates the sandboxes of `areal.extensions.programs.outside`. A separate script, which needs only Python.

    python -s -P inside.py SOCKET MODE PACKAGES CGROUP FOLDER...

PACKAGES are folders of Python packages, joined by `:`, which programs can import. CGROUP is a control group that is
delegated to the sandbox, or empty.

The script sends `{"ready": true}` or `{"error": ...}` on the socket, once. Every message on the socket creates a
sandbox. A message carries five file descriptors: the job (JSON), stdin, stdout, stderr and a socket for the result.
Closing its other end stops the program. When the script ends, all processes in its sandboxes end.

    worker ── launcher ── server, process 1 of namespaces that see the system's folders and nothing else
                            └─ for each program: init, process 1 of the program's own namespaces; it enforces the limits
                                 └─ the program: another user, no capabilities, a filter on its system calls

A Python program runs in a fork of this interpreter: starting a new interpreter would take longer than everything else.

No process here holds anything secret: a program that could read all memory would learn only the program's input.
"""

import _thread
import base64
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import platform
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
import traceback
import types
from errno import EINVAL, ENOSYS, EPERM

TICK_SECONDS = 0.01
# A sandbox of many commands is idle after this time with less than this share of a core: the caller is told, once.
IDLE_SECONDS, IDLE_SHARE = 1.0, 0.05
# The most CPU time of a look at a program's memory (by the clock BUSY times as long, since the machine may have other
# work), and the most bytes read of a file in /proc. A program can make both large; an excess counts as the most.
LOOK_SECONDS, BUSY = 2.0, 5
READ_BYTES = 1 << 18
PAGE = resource.getpagesize()
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# In the namespace, user 0 is the user that started the sandbox. Programs run as user 1 if root can map that.
PROGRAM_ID = 1
OVERFLOW_ID = 65534
# The root of programs: new folders, and folders of the system.
OWN_FOLDERS = ("proc", "tmp", "dev", "etc")
SYSTEM_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
# The most that the kernel uses for a full pipe, for a file that epoll watches, for an area of an address space (and the
# most areas of a process), for an open pipe or epoll, and for data sent to a Unix socket.
PIPE_BYTES = 16 * PAGE
WATCH_BYTES = 256
AREA_BYTES, MOST_AREAS = 256, 1 << 16
FILE_BYTES = 1 << 20
with socket.socket(socket.AF_UNIX) as example:
    SOCKET_BYTES = example.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
# Prefix of the names of a sandbox's control groups. Several sandboxes may use a delegated group.
GROUP_PREFIX = f"areal-{os.urandom(4).hex()}-"
# The most files and folders in the working folder of a program, and of a sandbox of many commands.
MOST_FILES, MOST_FILES_OF_MANY = 1 << 12, 1 << 16
# Address space allowed beyond the memory limit: JavaScript reserves gigabytes without touching them.
RESERVED_BYTES = 4 << 30
# The stack that a thread may reserve beyond the limit, for deep recursion. The used part counts.
STACK_BYTES = (1 << 30) + (1 << 26)
# The folder in which `python` and `python3` are the interpreter of the run: not every system has a `python`.
PYTHONS = "/packages/bin"
ENVIRONMENT = {
    "PATH": f"{PYTHONS}:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONINTMAXSTRDIGITS": "0",  # programs print numbers of any length
    "OMP_NUM_THREADS": "1",
}

RLIMIT_SIGPENDING = 11
PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
PERF_SOFTWARE, PERF_TASK_CLOCK, PERF_INHERIT_NO_KERNEL = 1, 1, 1 << 1 | 1 << 5 | 1 << 6
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_INTO_CGROUP = 0x200000000
ALL_NAMESPACES = 0x7E020080
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, AT_RECURSIVE = 1, 2, 0x8000
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
SYSCALL_MOUNT_SETATTR = 442

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """Return the result of a function of libc. Raises OSError with the function's name if the call fails."""
    result = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def mount(source, target, kind, flags, options=None):
    call("mount", *(text and text.encode() for text in (source, target, kind)), flags, options and options.encode())


# The modules that programs import most are loaded in advance.
MODULES = (
    *("bisect", "collections", "copy", "dataclasses", "datetime", "functools", "heapq", "inspect", "itertools", "math"),
    *("operator", "random", "re", "statistics", "string", "typing"),
)
for name in MODULES:
    importlib.import_module(name)


# --- the filter on system calls

# The refused system calls, with their numbers on x86-64 and on arm64 (-1: missing there). The calls give access to
# other parts of the kernel (io_uring, bpf, ...), other processes' memory, namespaces and mounts, keys, memory that
# belongs to no process and would not be counted (memfd, System V), scarce resources of the whole machine (io_setup,
# inotify), locks of files that all programs see (flock), and signals that seem to come from a timer (rt_sigqueueinfo).
REFUSED = {
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_setup": (206, 0),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "seccomp": (317, 277),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "landlock_create_ruleset": (444, 444),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41),
    "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "statmount": (457, 457), "listmount": (458, 458),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "lookup_dcookie": (212, 18),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "ioprio_set": (251, 30), "flock": (73, 32),
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "vhangup": (153, 58), "cachestat": (451, 451),
    "iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1), "uselib": (134, -1), "_sysctl": (156, -1),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
# Calls that put pages into pipes and sockets, where pages are not counted. Programs then read and write instead.
INVALID = {"sendfile": (40, 71), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75)}
# Calls that succeed and do nothing, instead of writing to disks or changing the kernel's cache of foreign files.
NEEDLESS = {
    "sync": (162, 81),
    "syncfs": (306, 267),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "sync_file_range": (277, 84),
    "fadvise64": (221, 223),
    "readahead": (187, 213),
}
# By machine: AUDIT_ARCH, and its column in the tables.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
CLONE3 = 435
LAST_KNOWN = 462
CLONE_FILES, CLONE_THREAD = 0x400, 0x10000
SHARED_MEMORY, MAP_HUGETLB = 0x21, 0x40000  # MAP_SHARED | MAP_ANONYMOUS
MS_SYNC = 4
AF_UNIX, SOCK_STREAM, SOCK_TYPE = 1, 1, 0xF
SOL_SOCKET, BUFFER_OPTIONS = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and the same with FORCE
# Commands of fcntl: POSIX locks, which succeed and do nothing, because SQLite wants locks even if only one process uses
# a file; the last of the first twelve, all allowed; and further allowed commands. Refused are locks of open files,
# leases, signals about folders, and the size of a pipe.
FCNTL_LOCKS, FCNTL_LAST, FCNTL_MORE = (6, 7), 11, (1030, 1032, 1034)
PR_SCHED_CORE, PR_FUTEX_HASH = 62, 78  # no program of today needs PR_FUTEX_HASH, which takes memory, or anything above
# Instructions of classic BPF, and the return values of a filter.
LOAD, EQUAL, AT_LEAST, AND, ANSWER = 0x20, 0x15, 0x35, 0x54, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def answer_if(test, value, answer):
    return [(test, 0, 1, value), (ANSWER, 0, 0, answer)]


def argument(number, mask=0xFFFFFFFF):
    """Load the low half of an argument: the half that the kernel reads as an `int`."""
    return [(LOAD, 0, 0, 16 + 8 * number), (AND, 0, 0, mask)]


def only(number, value, mask=0xFFFFFFFF):
    """Refuse the call if an argument has another value."""
    return [*argument(number, mask), (EQUAL, 1, 0, value), (ANSWER, 0, 0, ERRNO | EPERM)]


def never(number, value, mask=0xFFFFFFFF, error=EPERM):
    return [*argument(number, mask), *answer_if(EQUAL, value, ERRNO | error)]


def for_all(values, check):
    return [step for value in values for step in check(value)]


UNIX = [*only(0, AF_UNIX), *only(1, SOCK_STREAM, SOCK_TYPE)]
CALLER = only(0, 0)  # 0 is the process or thread that calls
# Calls that are refused depending on their arguments: the numbers, and the checks.
CHECKED = {
    "clone": (56, 220, [*only(0, 0, ALL_NAMESPACES), *never(0, CLONE_THREAD, CLONE_THREAD | CLONE_FILES)]),
    # Shared anonymous memory outlives every process that has touched it; huge pages are not counted as resident.
    "mmap": (9, 222, [*never(3, SHARED_MEMORY, SHARED_MEMORY), *never(3, MAP_HUGETLB, MAP_HUGETLB)]),
    "socket": (41, 198, UNIX), "socketpair": (53, 199, UNIX),
    "setsockopt": (54, 208, [
        *argument(1), (EQUAL, 1, 0, SOL_SOCKET), (ANSWER, 0, 0, ALLOW),
        *for_all(BUFFER_OPTIONS, lambda option: never(2, option)),
    ]),
    "fcntl": (72, 25, [
        *argument(1),
        *for_all(FCNTL_LOCKS, lambda command: answer_if(EQUAL, command, ERRNO)),
        *for_all(FCNTL_MORE, lambda command: answer_if(EQUAL, command, ALLOW)),
        *answer_if(AT_LEAST, FCNTL_LAST + 1, ERRNO | EPERM),
    ]),
    "prctl": (157, 167, [
        *never(0, PR_SET_SECCOMP), *never(0, PR_SCHED_CORE),
        *argument(0), *answer_if(AT_LEAST, PR_FUTEX_HASH, ERRNO | EINVAL),
    ]),
    "msync": (26, 227, never(2, MS_SYNC, MS_SYNC, error=0)),
    "setpriority": (141, 140, [*CALLER, *only(1, 0)]), "prlimit64": (302, 261, CALLER),
    "sched_setparam": (142, 118, CALLER), "sched_setscheduler": (144, 119, CALLER),
    "sched_setaffinity": (203, 122, CALLER), "sched_setattr": (314, 274, CALLER),
}  # fmt: skip


def filter_program(machine):
    """Return the filter in the kernel's format. Raises KeyError if `machine` is not in MACHINES."""
    architecture, column = MACHINES[machine]
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (ANSWER, 0, 0, KILL), (LOAD, 0, 0, 0)]
    # System calls newer than the tables, and calls of the x32 interface. Without clone3, libc uses clone.
    steps += [*answer_if(AT_LEAST, LAST_KNOWN + 1, ERRNO | ENOSYS), *answer_if(EQUAL, CLONE3, ERRNO | ENOSYS)]
    for table, error in ((REFUSED, EPERM), (INVALID, EINVAL), (NEEDLESS, 0)):
        for numbers in table.values():
            if numbers[column] >= 0:
                steps += answer_if(EQUAL, numbers[column], ERRNO | error)
    for *columns, check in CHECKED.values():
        steps += [(EQUAL, 0, len(check) + 1, columns[column]), *check, (ANSWER, 0, 0, ALLOW)]
    steps += [(ANSWER, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def install_filter(program):
    code = ctypes.create_string_buffer(program, len(program))
    call("prctl", PR_SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)), 0, 0)


# --- the server: its own namespaces, which show the system's folders and nothing else


def enter_user_namespace():
    """Create a user namespace. Return whether programs can run in the namespace as another user than this script's."""
    uid, gid = os.geteuid(), os.getegid()
    extra = f"\n{PROGRAM_ID} {OVERFLOW_ID} 1" if uid == 0 else ""
    target = os.getpid()
    wait, go = os.pipe()
    writer = os.fork()
    if writer == 0:
        code = 1
        with contextlib.suppress(OSError):  # reported by its exit code
            os.close(go)
            os.read(wait, 1)
            if not extra:
                write(f"/proc/{target}/setgroups", "deny")
            write(f"/proc/{target}/uid_map", f"0 {uid} 1{extra}")
            write(f"/proc/{target}/gid_map", f"0 {gid} 1{extra}")
            code = 0
        os._exit(code)
    try:
        call("unshare", CLONE_NEWUSER)
    finally:
        os.close(go)
        os.close(wait)
        _, status = os.waitpid(writer, 0)
    if status:
        raise OSError(EPERM, "users of a new namespace cannot be mapped")
    return bool(extra)


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def add_packages(folders):
    """Find the run's packages before packages of perhaps other versions beside the interpreter."""
    first = next((i for i, folder in enumerate(sys.path) if folder.endswith("-packages")), len(sys.path))
    sys.path[first:first] = folders


def enter_root(folders, packages):
    """Switch to a new root with its own /proc, and with the system's folders, Python's and `folders`, read-only.
    `packages` are the folders at /packages/0, /packages/1, ...; their paths on the host are not shown."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.chdir("/tmp")
    os.mkdir("old")
    call("pivot_root", b".", b"old")
    os.chdir("/")
    for name in OWN_FOLDERS:
        os.mkdir(name)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in SYSTEM_FOLDERS:
        if os.path.islink(f"/old/{name}"):
            os.symlink(os.readlink(f"/old/{name}"), f"/{name}")
        else:
            bind(f"/{name}")
    devices = "null", "zero", "full", "random", "urandom"
    for path in ("/etc/alternatives", "/etc/ld.so.cache", *map("/dev/{}".format, devices)):
        bind(path)
    for folder in folders:
        bind(folder)
    for number, folder in enumerate(packages):
        bind(folder, f"/packages/{number}")
    add_packages([f"/packages/{number}" for number, _ in enumerate(packages)])
    os.makedirs(PYTHONS)
    for name in "python", "python3":
        os.symlink(sys.executable, f"{PYTHONS}/{name}")
    write("/etc/passwd", "nobody:x:65534:65534::/tmp:/bin/sh\n")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    os.symlink("/proc/self/fd", "/dev/fd")
    os.symlink("/tmp", "/dev/shm")
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    mount_setattr, size = ctypes.c_long(SYSCALL_MOUNT_SETATTR), ctypes.c_long(len(attributes))
    call("syscall", mount_setattr, ctypes.c_long(-1), b"/", ctypes.c_long(AT_RECURSIVE), attributes, size)
    socket.sethostname("sandbox")


def bind(path, target=None):
    """Mount a file or folder of the host, if there is one, at `target` or else at the same path."""
    source, path = f"/old{path}", target or path
    if not os.path.exists(source) or os.path.exists(path):
        return
    if os.path.isdir(source):
        os.makedirs(path)
    else:
        write(path, "")
    mount(source, path, None, MS_BIND | MS_REC)


def serve(requests, start):
    """Call `start` for each request, in a new process, until the worker closes the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.freeze()  # else garbage collection in a program would copy every page that is loaded here
    requests.send(json.dumps({"ready": True}).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, 5)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run = None
            try:
                run = socket.socket(fileno=descriptors.pop())
                start(run, *descriptors)
            except OSError as error:
                if run is not None:
                    run.sendall(json.dumps({"error": str(error)}).encode())
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


# --- init: one program


class ProgramRunner:
    """Runs programs in namespaces of their own or, if `plain`, without namespaces."""

    def __init__(self, plain, other_user, groups):
        """groups: the folder for control groups of programs, or None."""
        self.plain = plain
        self.other_user = other_user
        self.groups = groups
        self.filter = None if plain else filter_program(platform.machine())

    def start(self, run, *descriptors):
        if not self.plain:
            call("unshare", CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET)
            if os.fork():
                return
        call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.init(run, *descriptors)

    def init(self, run, job_file, *descriptors):
        job = read_job(job_file)
        folder = self.make_folder(job)
        try:
            for name, content in job["files"].items():
                write_program_file(folder, name, base64.b64decode(content))
            self.answer(run, job, folder, descriptors)
            while job["stays"]:  # further commands in the same folder, until the caller closes its end
                message, received, _, _ = socket.recv_fds(run, 1, 4)
                if not message:
                    return
                self.answer(run, read_job(received[0]), folder, received[1:])
        finally:
            if self.plain:
                shutil.rmtree(folder, ignore_errors=True)

    def answer(self, run, job, folder, descriptors):
        """Run the program of a job, end all remaining processes, and send the result in one line."""
        usage = PolledUsage(job, self.plain) if self.groups is None else ControlGroup(self.groups, job)
        program = usage.fork()
        if program == 0:
            self.become(job, folder, descriptors)
        for descriptor in {*descriptors}:
            os.close(descriptor)
        ended = os.pidfd_open(program)
        status, code = watch(program, ended, run, usage, job)
        os.close(ended)
        result = {"status": status, "exit": code}
        self.end_all()
        usage.remove()
        result["files"] = {name: data for name in job["keep"] if (data := read_program_file(folder, name)) is not None}
        with contextlib.suppress(BrokenPipeError):  # the caller is gone
            run.sendall(json.dumps(result).encode() + b"\n")

    def make_folder(self, job):
        """Create an empty working folder for the program. The folder is removed with the sandbox."""
        if self.plain:
            return tempfile.mkdtemp(prefix="program-")
        most_files = MOST_FILES_OF_MANY if job["stays"] else MOST_FILES
        options = f"mode=777,size={job['disk_bytes']},nr_inodes={most_files}"
        mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
        mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
        return "/tmp"

    def become(self, job, folder, descriptors):
        """Turn this process into the program. Does not return."""
        try:
            os.setsid()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            os.chdir(folder)
            self.give_up(job)
            if job["command"][0] == sys.executable:
                run_python(job["command"][1])
            environment = ENVIRONMENT | {"HOME": folder} | job["environment"]
            path = shutil.which(job["command"][0], path=environment["PATH"]) or job["command"][0]
            os.execve(path, job["command"], environment)
        except BaseException as error:  # this process must not go on as a second init
            os.write(2, f"sandbox: {error}\n".encode())
        finally:
            os._exit(127)

    def give_up(self, job):
        """Set the limits of the process, and drop every right without use for a program."""
        if self.other_user:
            os.setgroups([])
            os.setresgid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
            os.setresuid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
        if not self.plain:
            # The kernel counts processes per user and user namespace: in its own, a program shares its limit with none.
            call("unshare", CLONE_NEWUSER)
            resource.setrlimit(resource.RLIMIT_NPROC, (job["processes"],) * 2)
        limits = {
            resource.RLIMIT_DATA: job["memory_bytes"] + STACK_BYTES,
            resource.RLIMIT_AS: job["memory_bytes"] + RESERVED_BYTES,
            resource.RLIMIT_FSIZE: job["disk_bytes"],
            resource.RLIMIT_CPU: int(job["cpu_seconds"]) + 2,
            resource.RLIMIT_NOFILE: 128,
            resource.RLIMIT_CORE: 1,  # with 0 the kernel could still pass the dump to a program of the host
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            RLIMIT_SIGPENDING: 1024,  # counts timers, too
        }
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):  # two signals cannot be changed, and libc reserves some
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if not self.plain:
            call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
            install_filter(self.filter)

    def end_all(self):
        """Kill every process that the program has left."""
        while True:
            if self.plain:
                for pid in descendants():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def run_python(path):
    """Do in this process what `python path` would do in a new process. Does not return."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT | {"HOME": os.getcwd()})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
    main = types.ModuleType("__main__")
    vars(main).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = [path]
    sys.path.insert(0, os.getcwd())
    # New streams: the launcher's know its kind of file. The second names keep streams open when a program wraps them.
    streams = (("stdin", 0, "r", "strict"), ("stdout", 1, "w", "strict"), ("stderr", 2, "w", "backslashreplace"))
    for name, descriptor, mode, errors in streams:
        buffering = 1 if name == "stderr" else -1
        stream = open(descriptor, mode, buffering, errors=errors, closefd=False)  # noqa: SIM115
        vars(sys).update({name: stream, f"__{name}__": stream})
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(sys.getrecursionlimit() + depth() + 1)  # exec takes one
    code = 0
    try:
        with open(path, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec"), main.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:  # the program may raise anything
        trace = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(trace and trace.tb_next), None)
        code = 1
    ctypes.pythonapi.Py_Exit(code & 0xFF)  # waits for threads, runs exit handlers, flushes


def depth():
    """Return the number of frames, the caller's included."""
    return 1 + sum(1 for _ in traceback.walk_stack(sys._getframe(1).f_back))


def watch(program, ended, run, usage, job):
    """Wait for the program. ended: readable after its end. Returns (status, exit code) as in outside.Outcome."""
    deadline = time.monotonic() + job["wall_seconds"]
    look, used = (time.monotonic() + IDLE_SECONDS if job["stays"] else math.inf), 0.0
    poll = select.poll()
    poll.register(run, select.POLLIN)
    poll.register(ended, select.POLLIN)
    pause = TICK_SECONDS
    while True:
        poll.poll(1000 * pause)
        cpu_start = time.thread_time()
        code = reap(program)
        if code in (None, -signal.SIGKILL) and (limit := usage.exceeded()):
            return limit, None
        if code is not None:
            return ("ok" if code >= 0 else "killed"), code
        if select.select([run], [], [], 0)[0]:
            return "stopped", None
        if (now := time.monotonic()) > deadline:
            return "timeout", None
        if now > look:  # a busy machine may give the program no CPU time, so the state counts, too
            used_before, used, look = used, usage.cpu_seconds(), now + IDLE_SECONDS
            runs = any(fields[0] in (b"R", b"D") for fields in descendants().values())
            if not runs and used - used_before < IDLE_SHARE * IDLE_SECONDS:
                with contextlib.suppress(OSError):  # the caller is gone
                    run.sendall(b'{"idle": true}\n')
                look = math.inf
        pause = max(TICK_SECONDS, time.thread_time() - cpu_start)  # a look at many processes takes long


class ControlGroup:
    """A program's usage by the kernel's accounts: the program is started in a control group of its own."""

    def __init__(self, groups, job):
        """Create the group in the folder `groups`."""
        self.job = job
        self.groups, self.name = groups, f"{GROUP_PREFIX}{os.urandom(8).hex()}"
        os.mkdir(self.name, dir_fd=groups)
        self.folder = os.open(self.name, os.O_RDONLY, dir_fd=groups)
        # Files in /tmp count as memory here. When memory is short, the kernel ends all processes of the group.
        limits = {"memory.max": job["memory_bytes"] + job["disk_bytes"], "memory.swap.max": 0, "memory.oom.group": 1}
        for name, value in limits.items():
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                write(f"/proc/self/fd/{self.folder}/{name}", str(value))

    def fork(self):
        """Fork with the child in the group. Moving a process there later takes milliseconds."""
        # libc has no such call, and would not know the new process either. So a first child forks as usual and ends.
        # The second child is among the first processes in the namespace, and the id fits into an exit code.
        clone = struct.pack("11Q", CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, self.folder)
        starter = call("syscall", ctypes.c_long(CLONE3), clone, ctypes.c_long(len(clone)))
        if starter:
            return os.waitstatus_to_exitcode(os.waitpid(starter, 0)[1])
        with contextlib.suppress(OSError):  # 0 is no process: init reports it
            program = os.fork()
            if program == 0:
                return 0
            os._exit(program)
        os._exit(0)

    def exceeded(self):
        """Return the status of a program that has exceeded a limit; else None."""
        if b"\noom_kill 0\n" not in self.read("memory.events"):
            return "memory"
        return "timeout" if self.cpu_seconds() > self.job["cpu_seconds"] else None

    def cpu_seconds(self):
        return int(self.read("cpu.stat").split()[1]) / 1e6

    def read(self, name):
        return read(f"/proc/self/fd/{self.folder}/{name}")

    def remove(self):
        os.close(self.folder)
        os.rmdir(self.name, dir_fd=self.groups)


class PolledUsage:
    """A program's usage by regular looks at all its processes."""

    def __init__(self, job, plain):
        """Made before the program, since the counter of CPU time counts only later processes."""
        self.job = job
        self.plain = plain
        self.counter = open_counter()
        self.own_cpu = time.process_time()  # CPU seconds of this process, before the counter
        self.earlier = kept_seconds({})  # CPU seconds of earlier programs
        self.cpu: dict[int, float] = {}  # CPU seconds of each process at the last look
        self.seen_cpu = 0.0  # CPU seconds of all processes ever seen, up to the last look at each
        self.processes: dict[int, list[bytes]] = {}
        self.looking = False  # closely at the memory, after a first excess
        self.look_began = None
        self.memory_exceeded = False

    fork = staticmethod(os.fork)

    def exceeded(self):
        """Return the status of a program that has exceeded a limit; else None."""
        self.processes = descendants()
        if self.cpu_seconds() > self.job["cpu_seconds"]:
            return "timeout"
        if not self.looking and self.memory_bytes(most_bytes) > self.job["memory_bytes"]:
            self.looking = True
            _thread.start_new_thread(self.watch_memory, ())
        cpu, began = self.look_began or (math.inf, math.inf)
        late = time.process_time() - cpu > LOOK_SECONDS or time.monotonic() - began > BUSY * LOOK_SECONDS
        return "memory" if self.memory_exceeded or late else None

    def cpu_seconds(self):
        """Return the CPU time of the program and its descendants: the largest of three sums. None is ever too large.

        * The kernel's accounts, without processes that nobody waited for (where SIGCHLD is ignored).
        * The times seen, without CPU time after the last look at a process.
        * The counter, if any, without programs with a file that the program itself may not read."""
        now = {pid: process_seconds(pid) for pid in self.processes}
        for pid, seconds in now.items():
            last_seconds = self.cpu.get(pid, 0.0)
            # A smaller time than at the last look belongs to another process with the same id.
            self.seen_cpu += seconds - (last_seconds if seconds >= last_seconds else 0.0)
        self.cpu = now
        return max(self.seen_cpu, kept_seconds(self.processes) - self.earlier, self.counted_seconds())

    def counted_seconds(self):
        if self.counter is None:
            return 0.0
        counted = int.from_bytes(os.read(self.counter, 8), sys.byteorder) / 1e9
        return counted - (time.process_time() - self.own_cpu)

    def watch_memory(self):
        """Look closely at the memory, in a thread: meanwhile time and CPU time are still checked."""
        limit = self.job["memory_bytes"]
        while not self.memory_exceeded:
            cpu_start, self.look_began = time.thread_time(), (time.process_time(), time.monotonic())
            self.memory_exceeded = self.memory_bytes(most_bytes) > limit and self.memory_bytes(exact_bytes) > limit
            self.look_began = None
            time.sleep(max(TICK_SECONDS, time.thread_time() - cpu_start))

    def memory_bytes(self, measure):
        """Return the memory of all processes by `measure`, which is most_bytes or exact_bytes, and of Unix sockets."""
        sockets = 0 if self.plain else SOCKET_BYTES * lines("/proc/self/net/unix", math.inf)
        return sockets + measure([living_task(pid, fields) for pid, fields in self.processes.items()])

    def remove(self):
        self.memory_exceeded = True  # the thread that looks at the memory ends
        if self.counter is not None:
            os.close(self.counter)


def reap(program):
    """Return the program's exit code; None while the program is running."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def open_counter():
    """Return a counter of the CPU time (ns) of this process and of all descendants started later. None where the
    kernel's setting perf_event_paranoid forbids the counter."""
    attributes = struct.pack("IIQQQQQ16x", PERF_SOFTWARE, 64, PERF_TASK_CLOCK, 0, 0, 0, PERF_INHERIT_NO_KERNEL)
    number = ctypes.c_long(PERF_EVENT_OPEN.get(platform.machine(), -1))
    counter = libc.syscall(number, attributes, ctypes.c_long(0), ctypes.c_long(-1), ctypes.c_long(-1), ctypes.c_long(8))
    return None if counter < 0 else counter


def descendants():
    """Return all direct and indirect child processes: by id the fields of `stat`."""
    processes = {int(name): fields for name in os.listdir("/proc") if name.isdigit() and (fields := read_stat(name))}
    if processes.pop(1, None) and os.getpid() == 1:  # in its own namespace
        return processes
    below: dict[int, list[bytes]] = {}
    layer = {os.getpid()}
    while layer := {pid for pid, fields in processes.items() if int(fields[1]) in layer}:
        below |= {pid: processes[pid] for pid in layer}
    return below


def read(path):
    """Return the content of a file, cut after READ_BYTES; empty if its process has ended, or may not be inspected."""
    try:
        with open(path, "rb", buffering=0) as file:
            text = b""
            while len(text) < READ_BYTES and (part := file.read(PAGE)):
                text += part
            return text
    except OSError:
        return b""


def lines(path, default):
    """Return the number of lines of a file; `default` if the file is too long to be read."""
    text = read(path)
    return text.count(b"\n") if len(text) < READ_BYTES else default


def read_stat(task):
    """Return the fields of /proc/TASK/stat after the process name; empty if the process has ended."""
    return read(f"/proc/{task}/stat").rpartition(b")")[2].split()


def process_seconds(pid):
    """Return the CPU time of a process, with all threads and without children."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid of libc
    except OSError:
        return 0.0


def kept_seconds(processes):
    """Return the CPU time of processes and of their ended children, and of ended children of this process."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = sum(sum(map(int, fields[11:15])) for fields in processes.values())
    return ended.ru_utime + ended.ru_stime + ticks / CLOCK_TICKS


def living_task(pid, fields):
    """Return the folder in /proc of a process, or of a living thread if the process's first thread has ended."""
    if fields[0] == b"Z":
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                if read_stat(f"{pid}/task/{thread}")[:1] not in ([], [b"Z"]):
                    return f"/proc/{pid}/task/{thread}"
    return f"/proc/{pid}"


def fields_of(text):
    """Return the numbers in lines such as `VmRSS: 1024 kB`, in bytes."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: 1024 * int(row[1]) for row in rows if len(row) == 3 and row[2] == b"kB"}


def open_files(task):
    """Return the number of open files of a process."""
    try:
        return os.stat(f"{task}/fd").st_size or len(os.listdir(f"{task}/fd"))  # kernels before 6.2 say 0
    except OSError:
        return 0


def most_bytes(tasks):
    """Return an upper bound of the memory of processes, read fast: shared memory counts in full for each process."""
    total = 0
    for task in tasks:
        sizes = fields_of(read(f"{task}/status"))
        if b"VmRSS:" in sizes:
            total += sum(sizes.get(key, 0) for key in (b"VmRSS:", b"VmSwap:", b"VmPTE:"))
            total += AREA_BYTES * MOST_AREAS + FILE_BYTES * open_files(task)
    return total


def exact_bytes(tasks):
    """Return the memory of processes, and the kernel's memory for them: page tables, areas of address spaces, pipes and
    watches of epoll. A page that n processes share counts as 1/n of a page in each, a pipe counts once."""
    total, pipes = 0, set()
    for task in tasks:
        shares = fields_of(read(f"{task}/smaps_rollup"))
        if not shares:  # the process has ended, or may not be inspected
            total += most_bytes([task])
            continue
        total += shares.get(b"Pss:", 0) + shares.get(b"SwapPss:", 0)
        total += fields_of(read(f"{task}/status")).get(b"VmPTE:", 0)
        total += AREA_BYTES * lines(f"{task}/maps", MOST_AREAS)
        with contextlib.suppress(OSError):
            for number in os.listdir(f"{task}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    status = os.stat(f"{task}/fd/{number}")
                    if stat.S_ISFIFO(status.st_mode):
                        pipes.add((status.st_dev, status.st_ino))
                    elif not stat.S_IFMT(status.st_mode):
                        total += WATCH_BYTES * lines(f"{task}/fdinfo/{number}", math.inf)
    return total + PIPE_BYTES * len(pipes)


def read_job(descriptor):
    with open(descriptor) as file:
        return json.load(file)


def write_program_file(folder, name, content):
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb", opener=lambda path, flags: os.open(path, flags, 0o755)) as file:
        file.write(content)


def read_program_file(folder, name):
    """Return the content of a file that the program has left, in base64, or None without such a file."""
    try:
        descriptor = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        return base64.b64encode(file.read()).decode() if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def remove_groups(groups):
    """Remove the groups of programs that ended with the sandbox."""
    for name in os.listdir(groups):
        if name.startswith(GROUP_PREFIX):
            os.rmdir(name, dir_fd=groups)


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # programs and terminals send SIGINT: the worker decides
    _, descriptor, mode, packages, delegated, *folders = sys.argv
    requests, plain = socket.socket(fileno=int(descriptor)), mode == "none"
    with contextlib.suppress(OSError):
        write("/proc/self/oom_score_adj", "1000")  # when memory is short, the kernel kills programs first
    # Modules that run tests are loaded in advance, too.
    sys.path.append(os.path.dirname(__file__))
    importlib.import_module("call_runner")
    tests_runner = importlib.import_module("tests_runner")
    sys.path.pop()
    try:
        groups = os.open(delegated, os.O_RDONLY) if delegated and not plain else None
        other_user = not plain and enter_user_namespace()
        runner = ProgramRunner(plain, other_user, groups)
        if not plain:
            call("unshare", CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
            server = os.fork()
            if server:
                requests.close()
                os.waitpid(server, 0)
                if groups is not None:
                    remove_groups(groups)
                return
            enter_root(folders, packages.split(os.pathsep))
        else:
            add_packages(packages.split(os.pathsep))
        with contextlib.suppress(ImportError):
            tests_runner.pytest_config()
        call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (OSError, KeyError) as error:
        requests.send(json.dumps({"error": str(error)}).encode())
        return
    serve(requests, runner.start)


if __name__ == "__main__":
    main()
