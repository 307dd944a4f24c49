"""Creates the sandboxes of `areal.sandbox.outside`. A separate script, which needs only Python.

    python -s -P inside.py SOCKET MODE PACKAGES FOLDER...

PACKAGES are folders of Python packages, joined by `:`, which programs can import.

The script sends `{"ready": true}` or `{"error": ...}` on the socket, once. It then creates a sandbox for each message
that it receives there. A message carries five file descriptors: the job (JSON), stdin, stdout, stderr and a socket. The
result is sent on that socket; closing the other end of it stops the program. When the script ends, every process in its
sandboxes ends.

    worker ── launcher ── server, process 1 of namespaces that see the system's folders and nothing else
                            └─ for each program: init, process 1 of the program's own namespaces; it enforces the limits
                                 └─ the program: another user, no capabilities, a filter on its system calls

A Python program runs in a fork of this interpreter: starting a new interpreter would take longer than everything else.

These processes never hold anything secret: a program that could read all their memory would learn only its own input.
"""

import base64
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
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
import types

TICK_SECONDS = 0.01
PAGE = resource.getpagesize()
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# In the namespace, user 0 is the user that started the sandbox. Programs run as user 1 if that can be mapped to another
# user, which needs root.
PROGRAM_ID = 1
OVERFLOW_ID = 65534
# Address space allowed beyond the memory limit: JavaScript reserves gigabytes that it never touches.
RESERVED_BYTES = 4 << 30
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
}

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_NAMESPACES = 0x7E020080
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, AT_RECURSIVE = 1, 2, 0x8000
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
SYSCALL_MOUNT_SETATTR = 442

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """Calls a function of libc. If it fails, raises OSError with its name."""
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


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

# The refused system calls, with their numbers on x86-64 and on arm64 (-1: it does not exist there). They give access to
# other parts of the kernel (io_uring, bpf, ...), other processes' memory, namespaces and mounts, keys, and memory that
# belongs to no process and would therefore not be counted (memfd, System V).
REFUSED = {
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41),
    "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "lookup_dcookie": (212, 18),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "vhangup": (153, 58),
    "iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1), "uselib": (134, -1), "_sysctl": (156, -1),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
# By machine: AUDIT_ARCH, its column in REFUSED, and its numbers of clone, socket, socketpair and mmap.
MACHINES = {"x86_64": (0xC000003E, 0, (56, 41, 53, 9)), "aarch64": (0xC00000B7, 1, (220, 198, 199, 222))}
CLONE3 = 435
LAST_KNOWN = 462
AF_UNIX = 1
SHARED_ANONYMOUS = 0x21
# Instructions of classic BPF, and the return values of a filter.
LOAD, EQUAL, AT_LEAST, AND, ANSWER = 0x20, 0x15, 0x35, 0x54, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38


def filter_program(machine):
    """The filter in the kernel's format. Raises KeyError if `machine` is not in MACHINES."""
    architecture, column, (clone, sock, pair, mmap) = MACHINES[machine]
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (ANSWER, 0, 0, KILL), (LOAD, 0, 0, 0)]

    def refuse(test, value, error):
        steps.extend([(test, 0, 1, value), (ANSWER, 0, 0, ERRNO | error)])

    # System calls that are newer than this list, and those of the x32 interface. Without clone3, libc uses clone.
    refuse(AT_LEAST, LAST_KNOWN + 1, ENOSYS)
    refuse(EQUAL, CLONE3, ENOSYS)
    for numbers in REFUSED.values():
        if numbers[column] >= 0:
            refuse(EQUAL, numbers[column], EPERM)
    argument = [16 + 8 * i for i in range(6)]
    for number in (sock, pair):
        steps += [(EQUAL, 0, 4, number), (LOAD, 0, 0, argument[0]), (EQUAL, 1, 0, AF_UNIX)]
        steps += [(ANSWER, 0, 0, ERRNO | EPERM), (ANSWER, 0, 0, ALLOW)]
    # clone with flags for new namespaces.
    steps += [(EQUAL, 0, 5, clone), (LOAD, 0, 0, argument[0]), (AND, 0, 0, ALL_NAMESPACES), (EQUAL, 1, 0, 0)]
    steps += [(ANSWER, 0, 0, ERRNO | EPERM), (ANSWER, 0, 0, ALLOW)]
    # Shared anonymous memory, which outlives every process that has touched it.
    steps += [(EQUAL, 0, 5, mmap), (LOAD, 0, 0, argument[3]), (AND, 0, 0, SHARED_ANONYMOUS)]
    steps += [(EQUAL, 0, 1, SHARED_ANONYMOUS), (ANSWER, 0, 0, ERRNO | EPERM), (ANSWER, 0, 0, ALLOW)]
    steps += [(ANSWER, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def install_filter(program):
    code = ctypes.create_string_buffer(program, len(program))
    call("prctl", PR_SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)), 0, 0)


# --- the server: its own namespaces, which show the system's folders and nothing else


def enter_user_namespace():
    """Creates a user namespace. True if programs can run in it as another user than the one of this script."""
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


def enter_root(folders, packages):
    """Switches to a new root with its own /proc, and with the system's folders, Python's and `folders`, read-only.
    `packages` are the folders at /packages/0, /packages/1, ...; their paths on the host are not shown."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.chdir("/tmp")
    os.mkdir("old")
    call("pivot_root", b".", b"old")
    os.chdir("/")
    for name in ("proc", "tmp", "dev", "etc"):
        os.mkdir(name)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/old/{name}"):
            os.symlink(os.readlink(f"/old/{name}"), f"/{name}")
        else:
            bind(f"/{name}")
    for path in ("/etc/alternatives", "/etc/ld.so.cache", "/dev/null", "/dev/full", "/dev/random", "/dev/urandom"):
        bind(path)
    for folder in folders:
        bind(folder)
    for number, folder in enumerate(packages):
        bind(folder, f"/packages/{number}")
        sys.path.append(f"/packages/{number}")
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
    """Mounts a file or folder of the host at `target`, or else at the same path, if the host has it."""
    source, path = f"/old{path}", target or path
    if not os.path.exists(source) or os.path.exists(path):
        return
    if os.path.isdir(source):
        os.makedirs(path)
    else:
        write(path, "")
    mount(source, path, None, MS_BIND | MS_REC)


def serve(requests, start):
    """Calls `start` for each request, each in its own process, until the worker closes the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
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


class Sandbox:
    """Runs each program in its own namespaces or, if `plain`, without namespaces."""

    def __init__(self, plain, other_user=False):
        self.plain = plain
        self.other_user = other_user
        self.filter = None if plain else filter_program(platform.machine())

    def start(self, run, *descriptors):
        if not self.plain:
            call("unshare", CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET)
            if os.fork():
                return
        call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.init(run, *descriptors)

    def init(self, run, asked, stdin, stdout, stderr):
        with open(asked) as file:
            job = json.load(file)
        folder = self.make_folder(job)
        try:
            for name, content in job["files"].items():
                put(folder, name, base64.b64decode(content))
            program = os.fork()
            if program == 0:
                self.become(job, folder, (stdin, stdout, stderr))
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)
            result = Watch(program, run, job).result()
            self.end_all()
            result["files"] = {name: found for name in job["keep"] if (found := take(folder, name)) is not None}
        finally:
            if self.plain:
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(BrokenPipeError):  # the caller is gone
            run.sendall(json.dumps(result).encode())

    def make_folder(self, job):
        """Creates an empty working folder for the program. It is removed with the sandbox."""
        if self.plain:
            return tempfile.mkdtemp(prefix="program-")
        options = f"mode=777,size={job['disk_bytes']},nr_inodes={job['disk_files']}"
        mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
        mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
        return "/tmp"

    def become(self, job, folder, descriptors):
        """Turns this process into the program. Does not return."""
        try:
            os.setsid()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            os.chdir(folder)
            self.give_up(job)
            if job["command"][0] == sys.executable:
                run_python(job["command"][1])
            path = shutil.which(job["command"][0], path=ENVIRONMENT["PATH"]) or job["command"][0]
            os.execve(path, job["command"], ENVIRONMENT | {"HOME": folder})
        except BaseException as error:  # this process must not go on as a second init
            os.write(2, f"sandbox: {error}\n".encode())
        finally:
            os._exit(127)

    def give_up(self, job):
        """Sets the limits of this process, and drops every right that a program does not need."""
        if self.other_user:
            os.setgroups([])
            os.setresgid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
            os.setresuid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
        if not self.plain:
            # The kernel counts processes per user and user namespace. In its own namespace a program shares its limit
            # with no other program.
            call("unshare", CLONE_NEWUSER)
            resource.setrlimit(resource.RLIMIT_NPROC, (job["processes"],) * 2)
        limits = {
            resource.RLIMIT_DATA: job["memory_bytes"],
            resource.RLIMIT_AS: job["memory_bytes"] + RESERVED_BYTES,
            resource.RLIMIT_FSIZE: job["disk_bytes"],
            resource.RLIMIT_CPU: int(job["cpu_seconds"]) + 2,
            resource.RLIMIT_NOFILE: 128,
            resource.RLIMIT_CORE: 1,  # with 0 the kernel could still pass the dump to a program of the host
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
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
        """Kills every process that the program has left."""
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
    """Does in this process what `python path` would do in a new one. Does not return."""
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
    # New ones: those of the launcher know what kind of file it was started with. The second names keep them open where
    # a program wraps their buffers.
    streams = (("stdin", 0, "r", "strict"), ("stdout", 1, "w", "strict"), ("stderr", 2, "w", "backslashreplace"))
    for name, descriptor, mode, errors in streams:
        buffering = 1 if name == "stderr" else -1
        stream = open(descriptor, mode, buffering, errors=errors, closefd=False)  # noqa: SIM115
        vars(sys).update({name: stream, f"__{name}__": stream})
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


class Watch:
    """Enforces the limits on a program and on all processes that it starts."""

    def __init__(self, program, run, job):
        self.program = program
        self.run = run
        self.job = job
        self.started = time.monotonic()

    def result(self):
        status, code = self.until_the_end()
        return {"status": status, "exit": code, "seconds": time.monotonic() - self.started}

    def until_the_end(self):
        """(status, exit code) as in areal.sandbox.outside.Outcome."""
        poll = select.poll()
        poll.register(self.run, select.POLLIN)
        poll.register(os.pidfd_open(self.program), select.POLLIN)
        while True:
            poll.poll(1000 * TICK_SECONDS)
            code = self.reap()
            if code is not None:
                return ("ok" if code >= 0 else "killed"), code
            broken = self.broken_limit()
            if broken:
                return broken, None

    def reap(self):
        """The program's exit code; None while it is running."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self.program:
                return os.waitstatus_to_exitcode(status)
            if pid == 0:
                return None

    def broken_limit(self):
        """The status for the limit that is exceeded, or "stopped" if the caller has closed the socket; else None."""
        if select.select([self.run], [], [], 0)[0]:
            return "stopped"
        pids = descendants()
        if time.monotonic() - self.started > self.job["wall_seconds"] or cpu_seconds(pids) > self.job["cpu_seconds"]:
            return "timeout"
        # Resident memory counts a shared page once per process. Only if that exceeds the limit is the exact share read.
        limit = self.job["memory_bytes"]
        if sum(map(resident_bytes, pids)) > limit and sum(map(share_of_memory, pids)) > limit:
            return "memory"
        return None


def descendants():
    """The ids of all direct and indirect child processes."""
    parents = {int(name): parent for name in os.listdir("/proc") if name.isdigit() and (parent := parent_of(name))}
    below: list[int] = []
    layer = {os.getpid()}
    while layer := {pid for pid, parent in parents.items() if parent in layer}:
        below += layer
    return below


def parent_of(pid):
    fields = read_stat(pid)
    return int(fields[1]) if fields else None


def read_stat(pid):
    """The fields of /proc/PID/stat after the process name; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def cpu_seconds(pids):
    """CPU time of the processes `pids`, of their children that have ended, and of ours that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = sum(sum(map(int, read_stat(pid)[11:15])) for pid in pids)
    return ended.ru_utime + ended.ru_stime + ticks / CLOCK_TICKS


def resident_bytes(pid):
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def share_of_memory(pid):
    """Bytes in memory and swap. A page that n processes share counts as 1/n of a page in each."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines()[1:])
    except OSError:  # it has ended, or may not be inspected
        return resident_bytes(pid)
    return sum(1024 * int(lines[key].split()[0]) for key in (b"Pss", b"SwapPss") if key in lines)


def put(folder, name, content):
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb", opener=lambda path, flags: os.open(path, flags, 0o755)) as file:
        file.write(content)


def take(folder, name):
    """The content of a file that the program has left, in base64; None if there is none."""
    try:
        descriptor = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        return base64.b64encode(file.read()).decode() if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def main():
    requests = socket.socket(fileno=int(sys.argv[1]))
    plain, packages, folders = sys.argv[2] == "none", sys.argv[3].split(os.pathsep), sys.argv[4:]
    with contextlib.suppress(OSError):
        write("/proc/self/oom_score_adj", "1000")  # when memory is short, the kernel kills programs first
    try:
        other_user = not plain and enter_user_namespace()
        sandbox = Sandbox(plain, other_user)
        if not plain:
            call("unshare", CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
            server = os.fork()
            if server:
                requests.close()
                os.waitpid(server, 0)
                return
            enter_root(folders, packages)
        else:
            sys.path += packages
        call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (OSError, KeyError) as error:
        requests.send(json.dumps({"error": str(error)}).encode())
        return
    serve(requests, sandbox.start)


if __name__ == "__main__":
    main()
