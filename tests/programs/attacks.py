# ruff: noqa: E501
"""Programs that attack the sandbox or the grader. {canary} is a file of the host, {parent} the worker's process id."""

PRELUDE = """
import ctypes, fcntl, mmap, os, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
room = ctypes.create_string_buffer(4096)

def syscall(*arguments):
    if libc.syscall(*map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def libc_call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def read_other(pid, what):
    assert open(f"/proc/{pid}/{what}", "rb").read(1)

def expect(condition):
    assert condition

def attempt(*arguments):
    if libc.syscall(*map(ctypes.c_long, arguments)) < 0 and ctypes.get_errno() in (1, 22):
        raise OSError(ctypes.get_errno(), "refused")

def expect_a_lock_is_seen(command):
    file, shared = open("/usr/bin/env"), struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0)
    fcntl.fcntl(file, command, shared)
    if os.fork() == 0:
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
        os._exit(struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_GETLK, wanted))[0] == fcntl.F_RDLCK)
    assert os.wait()[1]

def in_children(count, call):
    for _ in range(count):
        if os.fork() == 0:
            call()
            time.sleep(99)
    time.sleep(99)

def fill(*sockets):
    for one in sockets:
        one.setblocking(False)
        try:
            while True:
                one.send(bytes(1 << 16))
        except BlockingIOError:
            pass

def reserve(size, kind):
    libc.mmap.restype = ctypes.c_void_p
    return libc.mmap(None, ctypes.c_size_t(size), kind, 0x4022, -1, ctypes.c_long(0))
"""

# Each is one expression, or statement, that must fail.
REACHES = {
    "read a file of the host": "open('{canary}').read()",
    "write a file of the host": "open('{canary}', 'w').write('x')",
    "list the host's home": "expect(set(os.listdir('/root' if os.path.exists('/root') else '/home')) - {'.pyenv'})",
    "read passwords": "open('/etc/shadow').read()",
    "find users of the host": "expect('root' in open('/etc/passwd').read())",
    "find an inherited variable": "expect('HARNESS_SECRET' in os.environ)",
    "read init's environment": "read_other(1, 'environ')",
    "read init's memory": "read_other(1, 'mem')",
    "read init's files": "os.listdir('/proc/1/fd')",
    "go to init's root": "os.listdir('/proc/1/root')",
    "see the worker": "os.kill({parent}, 0)",
    "see many processes": "expect(len([n for n in os.listdir('/proc') if n.isdigit()]) > 2)",
    "read the kernel's settings": "os.listdir('/proc/sys')",
    "crash the kernel": "open('/proc/sysrq-trigger', 'w').write('c')",
    "set where cores go": "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')",
    "read sysfs": "expect(os.listdir('/sys'))",
    "read a disk": "open('/dev/vda', 'rb').read(1)",
    "read memory": "open('/dev/mem', 'rb').read(1)",
    "use a terminal": "open('/dev/tty')",
    "use fuse": "open('/dev/fuse')",
    "use kvm": "open('/dev/kvm')",
    "make a device": "os.mknod('/tmp/disk', 0o60666, os.makedev(254, 0))",
    "write to the system": "open('/usr/bin/mine', 'w')",
    "write to Python": "open(os.__file__, 'a')",
    "write to the root": "os.mkdir('/mine')",
    "hard link a system file": "os.link('/usr/bin/env', '/tmp/env')",
    "follow a link to the host": "os.symlink('{canary}', '/tmp/link') or open('/tmp/link').read()",
    "leave by a chroot": "os.chroot('/tmp')",
    "become root": "os.setuid(0)",
    "become root by set-user-id": "expect(subprocess.run(['su', '-c', 'id -u'], input=b'').returncode == 0)",
    "connect": "socket.create_connection(('127.0.0.1', 22), 1)",
    "listen": "socket.create_server(('127.0.0.1', 0))",
    "send datagrams": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "use IPv6": "socket.socket(socket.AF_INET6)",
    "use raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "use netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "use vsock": "socket.socket(40)",
    "use the kernel's crypto": "socket.socket(38, 5)",
    "use D-Bus": "socket.socket(socket.AF_UNIX).connect('/run/dbus/system_bus_socket')",
    "find an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + '{canary}')",
    "use io_uring": "syscall(425, 8, ctypes.addressof(room))",
    "load bpf": "syscall(321, 0, 0, 0)",
    "use userfaultfd": "syscall(323, 0)",
    "use perf events": "syscall(298, 0, 0, -1, -1, 0)",
    "use keys": "syscall(250, 0, -3, 1)",
    "trace": "syscall(101, 16, 1, 0, 0)",
    "trace its parent": "syscall(101, 0x4206, os.getppid(), 0, 0)",
    "send a signal of a timer": "syscall(129, os.getpid(), 0, ctypes.addressof(room))",
    "send a signal of a timer by a descriptor": "syscall(424, os.pidfd_open(os.getpid()), 0, 0, 0)",
    "read another's memory": "syscall(310, 1, 0, 0, 0, 0, 0)",
    "mount": "libc_call('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None)",
    "unmount": "libc_call('umount2', b'/proc', 2)",
    "mount anew": "syscall(428, -100, 0, 1)",
    "make a user namespace": "libc_call('unshare', 0x10000000)",
    "clone into a namespace": "syscall(56, 0x10000011, 0, 0, 0, 0)",
    "clone by clone3": "syscall(435, 0, 0)",
    "enter a namespace": "libc_call('setns', os.open('/proc/self/ns/net', 0), 0)",
    "hide memory in a file": "os.memfd_create('x')",
    "hide memory in System V": "syscall(29, 0, 1 << 20, 0o1600)",
    "hide memory in shared pages": "mmap.mmap(-1, 1 << 20)",
    "hide memory in a queue": "syscall(240, 0, 66, 384, 0)",
    "lock memory": "libc_call('mlockall', 3)",
    "queue writes in the kernel": "syscall(206, 1, ctypes.addressof(room))",
    "watch folders": "syscall(294, 0)",
    "watch folders by signals": "fcntl.fcntl(os.open('/usr', 0), fcntl.F_NOTIFY, 1)",
    "lock a system file": "fcntl.flock(open('/usr/bin/env'), fcntl.LOCK_SH)",
    "lock its own file": "fcntl.flock(open('main.py'), fcntl.LOCK_EX)",
    "signal by a lock": "expect_a_lock_is_seen(fcntl.F_SETLK)",
    "signal by a lock of an open file": "expect_a_lock_is_seen(37)",
    "signal by a lease": "open('x', 'w').close() or fcntl.fcntl(open('x'), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "limit init": "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))",
    "limit another process": "if os.fork() == 0: time.sleep(99)\nelse: resource.prlimit(2, resource.RLIMIT_NOFILE, (9, 9))",
    "schedule others": "os.sched_setaffinity(1, {0})",
    "schedule its children": "pid = os.fork() or time.sleep(9)\nos.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))",
    "be nicer to others": "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "be nicer to init": "os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "order the disk": "syscall(251, 1, 0, 0x6000)",
    "share a core": "attempt(157, 62, 1, 0, 0, 0)",
    "ask for memory of the kernel": "attempt(157, 78, 1, 1 << 10, 0, 0)",
    "make rules for the kernel to keep": "libc_call('syscall', 444, struct.pack('Q', 1), 8, 0)",
    "use a filter of its own": "attempt(317, 2, 0, 0)",
    "use huge pages": "attempt(9, 0, 1 << 21, 3, 0x40022, -1, 0)",
    "enlarge a pipe": "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
    "enlarge a socket": "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)",
    "use datagrams": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "put pages into a pipe": "attempt(278, os.pipe()[1], ctypes.addressof((ctypes.c_long * 2)(ctypes.addressof(room), 1)), 1, 0)",
    "put a file into a pipe": "os.splice(os.open('main.py', 0), os.pipe()[1], 1)",
    "put a file into a socket": "os.sendfile(socket.socketpair()[0].fileno(), os.open('main.py', 0), 0, 1)",
    "have a thread with files of its own": "attempt(56, 0x10d00 & ~0x400, 0, 0, 0, 0)",
    "raise its limits": "resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))",
    "set the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "rename the host": "socket.sethostname('mine')",
    "load a module": "syscall(313, 0, 0, 0)",
    "reboot": "syscall(169, 0xFEE1DEAD, 672274793, 0, 0)",
    "be scheduled first": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))",
    "be nicer to itself": "os.nice(-10)",
    "spare itself from the OOM killer": "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    "call the x32 way": "syscall(0x40000000 + 39)",
    "call what is newer than the filter": "syscall(463, 0, 0, 0)",
    "open by handle": "syscall(304, 0, 0, 0)",
    "watch the file system": "syscall(300, 0, 0)",
    "stop init": "os.kill(1, signal.SIGKILL) or time.sleep(0.1) or expect(not os.path.exists('/proc/1'))",
    "make a huge file": "open('big', 'w').close() or os.truncate('big', 1 << 40)",
}

# Maps 60,000 times a file whose path is 4 KB long, of characters that /proc writes as four.
LONG_MAPS = """
for _ in range(1990):
    os.mkdir("\\n")
    os.chdir("\\n")
file = os.open("f", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 8192)
libc.mmap.restype = ctypes.c_void_p

def map_often():
    for i in range(60000): libc.mmap(None, ctypes.c_size_t(4096), 1, 2, file, ctypes.c_long(4096 * (i % 2)))

def hold():
    global kept
    kept = [os.dup(file) for _ in range(100)], bytearray(80 << 20)
"""

# Each uses up something. What may become of it: its statuses.
EXHAUSTS = {
    "loop": ("while True: pass", {"timeout"}),
    "sleep": ("time.sleep(1000)", {"timeout"}),
    "wait for input": ("sys.stdin.read(); os.read(0, 1); signal.pause()", {"timeout"}),
    "ignore signals": (
        "for n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        {"timeout"},
    ),
    "stop itself": ("os.kill(os.getpid(), signal.SIGSTOP)", {"timeout"}),
    "fork bomb": ("while True:\n    try: os.fork()\n    except OSError: pass", {"timeout"}),
    "fork bomb in bash": ("os.execvp('bash', ['bash', '-c', ':(){ :|:& };:; sleep 100'])", {"timeout", "ok", "output"}),
    "threads": (
        "while True:\n    try: threading.Thread(target=time.sleep, args=(99,)).start()\n    except RuntimeError: pass",
        {"timeout"},
    ),
    "fill memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"ok", "memory"}),
    "fill memory from C": (
        "libc.malloc.restype = ctypes.c_void_p\nwhile True:\n    p = libc.malloc(1 << 24)\n    if not p: sys.exit(1)\n    libc.memset(ctypes.c_void_p(p), 1, 1 << 24)",
        {"ok", "memory", "killed", "timeout"},
    ),
    "fill memory by children": (
        "for _ in range(16):\n    if os.fork() == 0:\n        x = bytearray(40 << 20)\n        time.sleep(99)\ntime.sleep(99)",
        {"memory"},
    ),
    "fill memory by orphans": (
        "for _ in range(7):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            x = bytearray(40 << 20)\n            time.sleep(99)\n        os._exit(0)\ntime.sleep(99)",
        {"memory"},
    ),
    "fill the stack": (
        "sys.setrecursionlimit(1 << 30)\nf = lambda *a: f(f, *a) if a else f(1)\nf()",
        {"ok", "killed", "memory", "timeout"},
    ),
    "fill the disk": ("for i in range(99):\n    open(f'f{i}', 'wb').write(bytes(1 << 20))", {"ok"}),
    "fill the disk with names": ("for i in range(1 << 20): open(f'f{i}', 'w').close()", {"ok", "timeout"}),
    "print for ever": ("while True: print('x' * 4096)", {"output"}),
    "complain for ever": ("while True: sys.stderr.write('x' * 4096)", {"output"}),
    "open everything": ("fs = [open('/dev/null') for _ in range(1 << 20)]", {"ok"}),
    "fill pipes": ("ps = []\nwhile True:\n    ps.append(os.pipe())\n    os.write(ps[-1][1], bytes(1 << 16))", {"ok"}),
    "zombies": ("while True:\n    try:\n        if os.fork() == 0: os._exit(0)\n    except OSError: pass", {"timeout"}),
    "close everything and stay": ("os.closerange(0, 99)\nwhile True: pass", {"timeout"}),
    "spin in children": (
        "for _ in range(4):\n    if os.fork() == 0:\n        while True: pass\nos.wait()",
        {"timeout"},
    ),
    "spin in a chain of processes": (
        "if os.fork(): time.sleep(99)\nwhile True:\n    end = time.process_time() + 0.005\n    while time.process_time() < end: pass\n    if os.fork(): os._exit(0)",
        {"timeout"},
    ),
    "spin in orphans that it adopts": (
        "libc.prctl(36, 1)\nfor _ in range(9):\n    if os.fork() == 0:\n        if os.fork() == 0:\n            while time.process_time() < 0.2: pass\n        os._exit(0)\ntime.sleep(99)",
        {"timeout"},
    ),
    "spin under a strange name": ("libc.prctl(15, b') Z 1 (x) 0 0')\nwhile True: pass", {"timeout"}),
    "spin where the signal is ignored": (
        "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nsignal.setitimer(signal.ITIMER_PROF, 0)\nlibc.prctl(29, 1 << 40)\nwhile True: pass",
        {"timeout"},
    ),
    "stop all its processes": (
        "for _ in range(9):\n    if os.fork() == 0: break\nos.kill(0, signal.SIGSTOP)",
        {"timeout"},
    ),
    "wait for a child that holds it": ("libc.syscall(56, 0x4011, 0, 0, 0, 0)\ntime.sleep(99)", {"timeout"}),
    "start itself again for ever": (
        "open('again', 'w').write('exec sh again')\nos.execvp('sh', ['sh', 'again'])",
        {"timeout"},
    ),
    "arguments and variables without end": (
        "os.execve('/bin/sleep', ['sleep'] + ['9' * 99000] * 9, {f'x{i}': 'y' * 99000 for i in range(9)})",
        {"timeout"},
    ),
    "threads that come and go": (
        "while True:\n    for t in [threading.Thread(target=int) for _ in range(9)]: t.start()",
        {"timeout"},
    ),
    "address space without end": (
        "size = 1 << 40\nwhile size > 4096:\n    if reserve(size, 0) in (None, 2**64 - 1): size //= 2\ntime.sleep(99)",
        {"timeout"},
    ),
    "files within files": (
        "try:\n    while True: os.mkdir('a') or os.chdir('a')\nexcept OSError: time.sleep(99)",
        {"timeout"},
    ),
    "descriptors in all processes": (
        "def hold():\n    global kept\n    kept = [open('/dev/null') for _ in range(120)]\nin_children(20, hold)",
        {"timeout"},
    ),
    "sockets with long names": (
        "def hold():\n    global kept\n    kept = [socket.socket(socket.AF_UNIX) for _ in range(120)]\n"
        "    for i, one in enumerate(kept): one.bind(f'\\0{os.getpid()}-{i}-'.ljust(107, '\\n'))\nin_children(20, hold)",
        {"memory"},
    ),
    "epoll files": (
        "import select\ndef hold():\n    global kept\n    kept = [select.epoll() for _ in range(60)]\n"
        "    for one in kept:\n        for other in kept:\n            if one is not other:\n                try: one.register(other, 1)\n                except OSError: pass\nin_children(20, hold)",
        {"timeout", "memory"},
    ),
    "a file with a long path, mapped very often": (LONG_MAPS + "map_often()\nhold()\ntime.sleep(99)", {"timeout"}),
    "a file with a long path, mapped by many": (LONG_MAPS + "in_children(12, map_often)", {"memory", "timeout"}),
    "maps that change all the time": (
        LONG_MAPS
        + "map_often()\nhold()\ndef change():\n    while True: libc.munmap(ctypes.c_void_p(reserve(1 << 26, 1)), ctypes.c_size_t(1 << 26))\n"
        "for _ in range(8): threading.Thread(target=change).start()\ntime.sleep(99)",
        {"memory", "timeout"},
    ),
}

# Each uses more than 64 MiB of memory that does not show as its processes' resident memory.
HIDES = {
    "behind a first thread that has ended": """
def hide():
    def later():
        time.sleep(0.2)
        global kept
        kept = bytearray(40 << 20)
        time.sleep(99)
    threading.Thread(target=later).start()
    libc.syscall(60, 0)
in_children(3, hide)""",
    "in page tables": """
def hide():
    start = reserve(4 << 30, 1)
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(4 << 30), 15)
    for page in range(start, start + (4 << 30), 1 << 21): ctypes.string_at(page, 1)
in_children(9, hide)""",
    "in areas": """
def hide():
    start = reserve(66000 << 12, 1)
    for page in range(start, start + (66000 << 12), 1 << 13): libc.mprotect(ctypes.c_void_p(page), 4096, 0)
in_children(5, hide)""",
    "in pipes": """
kept = []
def hide():
    for _ in range(60):
        kept.append(os.pipe())
        os.write(kept[-1][1], bytes(1 << 12))
in_children(20, hide)""",
    "in pipes with names": """
kept = []
def hide():
    for i in range(110):
        name = f"{os.getpid()}-{i}"
        os.mkfifo(name)
        kept.append(os.open(name, os.O_RDWR))
        os.write(kept[-1], bytes(1 << 12))
in_children(12, hide)""",
    "in sockets": """
kept = []
def hide():
    for _ in range(50):
        kept.append(socket.socketpair())
        fill(*kept[-1])
in_children(4, hide)""",
    "in connections that nobody accepts": """
server = socket.socket(socket.AF_UNIX)
server.bind("server")
server.listen(4096)
for _ in range(500):
    with socket.socket(socket.AF_UNIX) as one:
        one.setblocking(False)
        one.connect("server")
        fill(one)
time.sleep(99)""",
    "in what epoll watches": """
import select
def hide():
    global kept
    kept = files, polls = [os.eventfd(0) for _ in range(55)], [select.epoll() for _ in range(55)]
    for file in files:
        for number in range(118, 128):
            os.dup2(file, number)
            for poll in polls: poll.register(number, 0)
in_children(12, hide)""",
}

# Each uses about 3 seconds of CPU time.
LOSES_TIME = """
for _ in range({count}):
    if os.fork() == 0:
        while time.process_time() < 3 / {count}: pass
        os._exit(0)
    try: os.wait()
    except OSError: pass
print("done")"""
LOSES = {
    "where the signal is ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)" + LOSES_TIME.format(count=25),
    "where it is asked not to wait": (
        "libc.sigaction(17, bytes(136) + struct.pack('iiQ', 2, 0, 0), None)" + LOSES_TIME.format(count=25)
    ),
    "in a program that it may not read": """
import shutil
shutil.copy("/bin/bash", "mine")
os.chmod("mine", 0o111)
os.execv("mine", ["mine", "-c", "for ((i = 0; i < 2000000; i++)); do :; done; echo done"])""",
}

# Each leaves something behind, or breaks what is around it.
REMAINS = {
    "a daemon": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n    os._exit(0)",
    "a daemon with its output open": "subprocess.Popen(['sleep', '1000'])",
    "daemons that ignore signals": (
        "for _ in range(8):\n    if os.fork() == 0:\n        signal.pthread_sigmask(0, range(1, 65))\n        time.sleep(1000)"
    ),
    "nobody alive": "os.kill(-1, signal.SIGKILL)",
    "its group dead": "os.killpg(0, signal.SIGKILL)",
    "itself dead": "os.kill(os.getpid(), signal.SIGKILL)",
    "a crash": "ctypes.string_at(0)",
    "a core": "resource.setrlimit(resource.RLIMIT_CORE, (1, 1))\nos.abort()",
    "an early end": "os._exit(0)",
    "files that nobody can remove": (
        "os.makedirs('a/' * 200)\nos.mkfifo('fifo')\nos.chmod('a', 0)\nopen('-rf *', 'w')\nos.symlink('/', 'root')"
    ),
    "no program": "os.remove('main.py')",
    "init interrupted": "os.kill(1, signal.SIGINT)\ntime.sleep(0.2)",
    "half a line in another encoding": "os.write(1, bytes(range(256)))",
}

# Each wants `f(7) == secret` to hold, and does not know the secret.
CHEATS = {
    "leaves early": "import os\nos._exit(0)",
    "exits early": "raise SystemExit(0)",
    "exits in the call": "def f(x):\n    import os\n    os._exit(0)",
    "exits at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "equals everything": "class A(int):\n    def __eq__(self, o): return True\n    __ne__ = __eq__\n    __hash__ = None\ndef f(x): return A(1)",
    "an object that equals everything": "class A:\n    def __eq__(self, o): return True\n    def __bool__(self): return True\ndef f(x): return A()",
    "a list that equals everything": "class L(list):\n    def __eq__(self, o): return True\ndef f(x): return L()",
    "patches the builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.all = builtins.print = builtins.isinstance = lambda *a, **k: True\ndef f(x): return 0",
    "patches modules": "import json, sys\njson.load = json.loads = lambda *a, **k: None\nsys.modules['ast'] = None\ndef f(x): return 0",
    "replaces itself in sys.modules": "import sys\nsys.modules['__main__'].judge = lambda *a: None\nsys.modules['tests'] = sys\ndef f(x): return 0",
    "prints a verdict": "import os\nfor fd in range(9):\n    for s in (b'x 0 1\\n', b'0 1\\n'):\n        try: os.write(fd, s)\n        except OSError: pass\ndef f(x): return 0",
    "answers before it is asked": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'{\"value\": 1}\\n' * 9)\n    except OSError: pass\ndef f(x): return 0",
    "sends no data": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'[' * 100000 + b'\\n')\n    except OSError: pass\ndef f(x): return 0",
    "sends another object": 'import os\nfor fd in range(3, 9):\n    try: os.write(fd, b\'{"value": {"object": "__class__"}}\\n\' * 9)\n    except OSError: pass\ndef f(x): return 0',
    "reads the tests": "import os\ndef f(x):\n    for p in [os.getppid(), 1]:\n        for n in os.listdir(f'/proc/{p}/fd'):\n            t = open(f'/proc/{p}/fd/{n}').read()\n            return int(t.split('f(7) == ')[1].split('\"')[0])",
    "reads the tests from memory": "import os, re\ndef f(x):\n    m = open(f'/proc/{os.getppid()}/mem', 'rb', 0)\n    for l in open(f'/proc/{os.getppid()}/maps'):\n        a, b = (int(v, 16) for v in l.split()[0].split('-'))\n        m.seek(a)\n        t = re.search(rb'f\\(7\\) == (\\d+)', m.read(b - a))\n        if t: return int(t[1])",
    "reads the tests from its own memory": "import re\ndef f(x):\n    m = open('/proc/self/mem', 'rb', 0)\n    for l in open('/proc/self/maps'):\n        a, b = (int(v, 16) for v in l.split()[0].split('-'))\n        if 'v' in l.split()[-1]: continue\n        m.seek(a)\n        t = re.search(rb'f\\(7\\) == (\\d{5,})', m.read(b - a))\n        if t: return int(t[1])",
    "reads the tests from stdin": "import os, sys\ndef f(x):\n    os.lseek(0, 0, 0)\n    return int(sys.stdin.read().split('== ')[1][:9])",
    "looks through the frames": "import sys, gc\ndef f(x):\n    fr = sys._getframe()\n    while fr:\n        for v in fr.f_locals.values():\n            if isinstance(v, dict) and 'tests' in v: return int(v['tests'][0].split('== ')[1])\n        fr = fr.f_back\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'tests' in o and isinstance(o['tests'], list): return int(o['tests'][0].split('== ')[1])",
    "rewrites the runner": "import os\nopen('main.py', 'w').write('print(1)')\nos.execv('/proc/self/exe', ['python', 'main.py'])",
    "traces the runner": "import ctypes, os\nl = ctypes.CDLL(None)\nwhile l.ptrace(16, os.getppid(), 0, 0) == 0: pass\ndef f(x): return 0",
    "kills the runner": "import os\ndef f(x): os.kill(os.getppid(), 9)",
    "stops the runner": "import os\ndef f(x): os.kill(os.getppid(), 19)",
    "lets it wait": "import time\ndef f(x): time.sleep(1000)",
    "answers without end": "import os\ndef f(x):\n    while True: os.write(4, b'1' * 65536)",
    "forges an error": "class ProgramError(BaseException): pass\ndef f(x): raise ProgramError",
    "raises what ends the runner": "def f(x): raise SystemExit(0)",
    "raises for ever": "def f(x): return f(x)",
    "defines the verdict": "nonce = 1\ndef check(c): return True\nclass Remote: pass\ndef f(x): return True",
}

# Tests that hold only for the secret. No program that does not know it may pass any of them.
CHEATED = [
    "assert f(7) == {secret}",
    "assert {secret} == f(7)",
    "assert all(f(x) == y for x, y in [(7, {secret})])",
    "assert all(map(lambda x: f(x) == {secret}, [7, 7]))",
    "for x, y in zip([7], [{secret}]):\n    assert f(x) == y",
    "assert [*map(f, [7])] == [{secret}]",
    "import math\nassert math.isclose(f(7), {secret}.0, rel_tol=1e-12)",
    "assert abs(f(7) - {secret}) < 1",
    "assert abs({secret} - f(7)) < 1",
    "assert isclose(f(7), {secret}, rel_tol=1e-12)",
    "assert f(7) in ({secret},) and f(7) in [{secret}] and {secret} in [f(7)]",
    "assert {secret} in [f(7)]",
    "assert f(7) in {{{secret}}}",
    "assert {{{secret}: True}}.get(f(7))",
    "assert str(f(7)) == '{secret}'",
    "assert not f(7) != {secret}",
    "assert {secret} <= f(7) <= {secret}",
    "assert int(f(7)) == {secret}",
    "assert set([f(7)]) == {{{secret}}}",
    "assert len([x for x in [7] if f(x) == {secret}]) == 1",
    "import collections\nassert collections.Counter([f(7)]) == {{{secret}: 1}}",
    "import colorsys\nassert f(7) + colorsys.rgb_to_hsv(1, 1, 1)[2] == {secret} + 1",
    "import unittest\nunittest.TestCase().assertEqual(f(7), {secret})",
    "import unittest\nunittest.TestCase().assertAlmostEqual(f(7), {secret})",
    "xs = [7]\nassert g(xs) == {secret}",
    "assert sum(f(x) for x in [7, 7]) == 2 * {secret}",
    "assert next(iter([f(7)])) == {secret}",
    "class Expected(int):\n    pass\nassert f(7) == Expected({secret})",
    "import numpy as np\nassert np.array_equal([f(7)], [{secret}])",
    "try:\n    assert f(7) == {secret}\nexcept Missing:\n    pass",
    "try:\n    assert f(7) == {secret}\nexcept ValueError:\n    assert False",
]
# The same in modules of pytest, whose imports are run first.
CHEATED_MODULE = """
import colorsys, csv, unittest
import pytest
from solution import *
import solution

def test_equal():
    assert f(7) == {secret}

@pytest.mark.parametrize("x, y", [(7, {secret})])
def test_parametrized(x, y):
    assert solution.f(x) == y

def test_near():
    assert f(7) == pytest.approx({secret})

def test_error():
    with pytest.raises(ZeroDivisionError, match="{secret}"):
        f(7)

def test_output(capsys):
    f(7)
    assert "{secret}" in capsys.readouterr().out

def test_own_error():
    with pytest.raises(Missing):
        assert f(7) != {secret} or None

class TestF(unittest.TestCase):
    def test_f(self):
        self.assertEqual(f(7), {secret})
"""

EVERYTHING = """
class Any:
    def __getattr__(self, name): return self
    def me(self): return [self]
    f = lambda self, x: self
"""
_ALWAYS = {
    "True": "eq ne lt le gt ge contains bool",
    "self": "add radd sub rsub mul rmul neg pos call getitem iter enter round",
    "0": "abs int index hash len",
    "0.0": "float",
}
for _value, _names in _ALWAYS.items():
    for _name in _names.split():
        EVERYTHING += f"    __{_name}__ = lambda self, *a, **k: {_value}\n"
EVERYTHING += "    def __next__(self): raise StopIteration\n"
# What CHEATED calls besides `f`. It comes before a program, which may define it anew.
AROUND = """
g = lambda xs: f(xs[0])
class Missing(Exception): pass
"""
WRITES_MODULES = """
import os, sys
code = '''
import sys, os, gc
class Same:
    def __radd__(self, other): return SAME
    __add__ = __radd__
    def __eq__(self, other): return True
SAME = Same()
def rgb_to_hsv(*a): return [0, 0, SAME]
for f in list(sys._current_frames().values()):
    while f:
        n = f.f_locals.get('job', {})
        if isinstance(n, dict) and 'nonce' in n:
            for fd in range(20):
                for i in range(99):
                    try: os.write(fd, b'\\\\n%s %d 1\\\\n' % (n['nonce'].encode(), i))
                    except OSError: pass
        f = f.f_back
def __getattr__(name): return SAME
'''
names = 'colorsys csv plistlib nturl2path unittest inspect pathlib tempfile numpy math_ sitecustomize usercustomize asyncio mock types_ _pytest pytest conftest io_ itertools_ typing_ uuid statistics_ difflib pprint signal_ logging'.split()
folders = ['.', '/tmp', os.path.expanduser('~/.local/lib/python3.%d/site-packages' % sys.version_info.minor), '/tmp/lib']
for folder in folders:
    os.makedirs(folder, exist_ok=True)
    for name in names:
        open(f'{folder}/{name}.py', 'w').write(code)
        os.makedirs(f'{folder}/{name}', exist_ok=True)
        open(f'{folder}/{name}/__init__.py', 'w').write(code)
    open(f'{folder}/x.pth', 'w').write('import colorsys')
def f(x): return 0
"""
CHEATS |= {
    **{
        f"raises {error}": f"class Own(StopIteration): pass\nclass Last(BaseException): pass\nimport asyncio, unittest\ndef f(x): raise {error}"
        for error in (
            *("StopIteration", "StopIteration(7)", "StopAsyncIteration", "GeneratorExit", "Own", "Last", "SystemExit(0)"),
            *("KeyboardInterrupt", "asyncio.CancelledError", "unittest.SkipTest", "IndexError", "LookupError(1)"),
            *("AttributeError", "AssertionError", "NotImplementedError", "Warning", "OSError", "EOFError"),
        )
    },
    "writes modules": WRITES_MODULES,
    "writes modules again and again": WRITES_MODULES + "import threading\nsource = open(os.path.join('.', 'colorsys.py')).read()\ndef again():\n    while True:\n        for name in names: open(name + '.py', 'w').write(source)\nthreading.Thread(target=again, daemon=True).start()",
    "sets where modules are": WRITES_MODULES + "os.environ['PYTHONPATH'] = '/tmp'\nsys.path.insert(0, '/tmp')\nos.symlink('/tmp', '/tmp/lib2')",
    "defines what the tests do not import": "class math:\n    isclose = lambda *a, **k: True\nisclose = all = any = abs = str = int = sum = len = set = lambda *a, **k: True\ndef f(x): return 0",
    "an object that does everything": EVERYTHING + "def f(x): return Any()",
    "a class that does everything": EVERYTHING + "f = Any\nC = Any",
    "a class of the tests that does everything": EVERYTHING + "C = Any\ndef f(x): return 0",
    "a function that is a class": EVERYTHING + "class f(Any): pass",
    **{
        f"a kind of {kind} that does everything": EVERYTHING.replace("class Any:", f"class Any({kind}):") + f"def f(x): return Any({value})"
        for kind, value in (("int", 1), ("float", 1.0), ("str", "'1'"), ("list", "[1]"), ("dict", ""), ("tuple", "(1,)"), ("Exception", ""), ("bytes", "b''"))
    },
    "a class that says it is another": "class A:\n    __class__ = property(lambda self: int)\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\ndef f(x): return A()",
    "a metaclass that equals everything": "class M(type):\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\n    def __getattr__(self, n): return 0\nclass A(metaclass=M): pass\ndef f(x): return A",
    "an array that equals everything": "import numpy as np\nclass A(np.ndarray):\n    def __eq__(self, o): return np.array(True)\n    def __sub__(self, o): return np.zeros(())\n    __rsub__ = __sub__\ndef f(x): return np.zeros(()).view(A)",
    "an array of everything": EVERYTHING + "import numpy as np\ndef f(x):\n    a = np.empty((), object)\n    a[()] = Any()\n    return a",
    "empty arrays": "import numpy as np\ndef f(x): return np.array([])",
    "a callable iterator": "def f(x): return iter(lambda: True, False)",
    "an endless generator": "def f(x):\n    while True: yield True",
    "a mock": "from unittest.mock import MagicMock, ANY\ndef f(x): return ANY",
    "NotImplemented": "def f(x): return NotImplemented",
    "a coroutine": "async def f(x): return 0",
    "changes its argument": "def f(x):\n    return 0\ndef g(xs):\n    xs[:] = []\n    return xs",
    "traces": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x):\n    fr = sys._getframe()\n    while fr.f_back: fr = fr.f_back\n    return 0",
    "replaces the runner's modules": "import sys\nfor n in ('plain_data', 'tests_runner', '__main__', 'solution', 'json', 'pickle', 'socket'):\n    if n in sys.modules: sys.modules[n].__dict__.update(passes=lambda *a: True, perform=lambda *a: True)\ndef f(x): return 0",
    "interrupts the runner": "import os, signal, threading\ndef f(x):\n    for s in (2, 10, 12, 14, 13, 28):\n        if s in (2,): os.kill(os.getppid(), s)\n    return 0",
    "closes everything": "import os\ndef f(x): os.closerange(0, 99)",
    "leaves children": "import os, time\ndef f(x):\n    if os.fork() == 0:\n        while True:\n            for fd in range(99):\n                try: os.write(fd, b'{\"answer\": true}\\n')\n                except OSError: pass\n            time.sleep(0.01)\n    return 0",
    "edits memory": "import ctypes\ndef f(x):\n    ctypes.memset(id(0) + 24, 1, 4)\n    ctypes.cast(id(7) + 24, ctypes.POINTER(ctypes.c_uint32))[0] = 8\n    return 7",
    "patches the built-in functions everywhere": "import builtins, operator, math, unittest\nfor m in (builtins, operator, math):\n    for n in dir(m):\n        if n in ('all', 'any', 'eq', 'isclose', 'abs', 'isinstance', 'sum', 'AssertionError'): setattr(m, n, lambda *a, **k: True)\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x): return 0",
    "hooks imports": "import builtins, sys\nold = builtins.__import__\ndef imported(*a, **k): return old(*a, **k)\nbuiltins.__import__ = imported\nclass F:\n    def find_spec(*a): return None\nsys.meta_path.insert(0, F())\ndef f(x): return 0",
    "returns code": "def f(x): return \"__import__('os')._exit(0)\"",
    "prints every verdict": "import os\ndef f(x):\n    for fd in range(20):\n        for i in range(40):\n            try: os.write(fd, b'\\n%d 1\\n' % i)\n            except OSError: pass\n    for p in os.listdir('/proc'):\n        if p.isdigit():\n            for n in range(20):\n                try: open(f'/proc/{p}/fd/{n}', 'wb').write(b'0 1\\n')\n                except OSError: pass\n    return 0",
    "reads every process": "import os, re\ndef f(x):\n    for p in os.listdir('/proc'):\n        for what in ('environ', 'cmdline', 'mem', 'maps', 'stack', 'fd/0', 'cwd/main.py', 'root/tmp/main.py', 'task/1/comm'):\n            try: t = open(f'/proc/{p}/{what}', 'rb').read(1 << 20)\n            except (OSError, OverflowError): continue\n            m = re.search(rb'f\\(7\\) == (\\d{9})', t)\n            if m: return int(m[1])\n    return 0",
    "is read as a number": "class A:\n    def __float__(self): return float('nan')\n    def __int__(self): return 0\n    def __index__(self): return 0\n    def __eq__(self, o): return o\n    __sub__ = __rsub__ = lambda s, o: type('Z', (), {'__abs__': lambda s: s, '__lt__': lambda s, o: True, '__bool__': lambda s: True})()\ndef f(x): return A()",
    "infinite": "def f(x): return float('inf')",
    "not a number": "def f(x): return float('nan')",
}  # fmt: skip

# Programs that know the judge's source code: what they answer with in place of each result.
LINK = """
import os, tests_runner
send = tests_runner.send
def fd(): return next(n for n in range(3, 99) if os.path.exists(f'/proc/self/fd/{n}') and os.readlink(f'/proc/self/fd/{n}').startswith('socket'))
def answer_with(make):
    tests_runner.send = lambda stream, message: send(stream, make(message))
"""
ANSWERS = {
    "a reference to nothing": '["return", {"ref": 99}, [], ["", ""]]',
    "a negative reference": '["return", {"ref": -1}, [], ["", ""]]',
    "a boolean reference": '["return", {"ref": True}, [], ["", ""]]',
    "a reference to itself": '["return", [{"ref": 0}, {"ref": 1}], [], ["", ""]]',
    "a number as text": '["return", {"int": "secret"}, [], ["", ""]]',
    "a number beyond all": '["return", 1e999, [], ["", ""]]',
    "an array of objects in place of numbers": '["return", {"ndarray": ["|O", [1], [7]]}, [], ["", ""]]',
    "an array of fields": '["return", {"ndarray": ["|V8", [1], [7]]}, [], ["", ""]]',
    "a huge shape": '["return", {"ndarray": ["<f8", [0, 1 << 40], []]}, [], ["", ""]]',
    "a negative shape": '["return", {"ndarray": ["<f8", [-1], [7]]}, [], ["", ""]]',
    "a shape of many dimensions": '["return", {"ndarray": ["<f8", [1] * 9999, [7]]}, [], ["", ""]]',
    "an array of long texts": '["return", {"ndarray": ["<U999999999", [1], ["7"]]}, [], ["", ""]]',
    "deep nesting": '["return", eval("[" * 90 + "]" * 90), [], ["", ""]]',
    "deeper nesting": 'message + [os.write(fd(), (200000).to_bytes(8, "big") + b"[" * 100000 + b"]" * 100000)]',
    "many parts": 'message + [os.write(fd(), (1 << 23).to_bytes(8, "big") + b"[],[]," * 9)]',
    "two values in one": '["return", {"int": "0x1", "str": "x"}, [], ["", ""]]',
    "nothing": '["return", {}, [], ["", ""]]',
    "a type": '["return", {"type": ["x"]}, [], ["", ""]]',
    "names of the judge": '["return", {"Function": [0]}, [], ["", ""]]',
    "a built-in function": '["return", {"builtin": "all"}, [], ["", ""]]',
    "a class of errors": '["return", {"error": "BaseException"}, [], ["", ""]]',
    "an iterator that ends with what is no error": '["return", {"iterator": [[], ["StopIteration", "", [], [], None]]}, [], ["", ""]]',
    "an iterator of no items": '["return", {"iterator": [5, None]}, [], ["", ""]]',
    "what ends an iteration": '["raise", ["StopIteration", "", [], []], [], ["", ""]]',
    "what refuses tests": '["raise", [["Unsupported", ["BaseException"]], "", [], []], [], ["", ""]]',
    "an error of no base": '["raise", [["E", []], "", [], []], [], ["", ""]]',
    "an error that is no error": '["raise", ["int", "", [], []], [], ["", ""]]',
    "an error with a strange name": '["raise", [["\\0", ["Exception"]], "", [], []], [], ["", ""]]',
    "an error with bases that do not fit": '["raise", [["E", ["OSError", "SyntaxError", "KeyError"]], "", [], []], [], ["", ""]]',
    "an error with fields of Python": '["raise", [["E", ["Exception"]], "", [], ["__class__", 1, "__dict__", {"dict": [None, []]}, "args", 5]], [], ["", ""]]',
    "an error with text of its own": '["raise", [["E", ["ZeroDivisionError"]], 5, [[]], []], [], ["", ""]]',
    "an error of another kind of text": '["raise", ["UnicodeDecodeError", "", [1], []], [], ["", ""]]',
    "changes of what it never got": '["return", True, [[n, [0]] for n in range(-9, 99)]]',
    "changes of everything it got": '["return", True, [[0, []]]]',
    "changes of the wrong kind": '["return", True, [[0, ["x"]], [1.5, []], ["0", []]]]',
    "no list": "5",
    "an empty list": "[]",
    "an unfinished request": '["ask"]',
    "a verdict": '"x 0 1"',
    "a fraction of texts": '["return", {"Fraction": ["1e9999999", None]}, [], ["", ""]]',
    "a decimal without end": '["return", {"Decimal": ["1e999999999"]}, [], ["", ""]]',
    "a date of bytes": '["return", {"date": [{"bytes": ["07e40101"]}]}, [], ["", ""]]',
    "a zone of a day and more": '["return", {"timezone": [{"timedelta": [9, 0, 0]}]}, [], ["", ""]]',
    "a queue of negative length": '["return", {"deque": [-1, [1]]}, [], ["", ""]]',
    "a dict that makes what it likes": '["return", {"defaultdict": ["eval", []]}, [], ["", ""]]',
    "a dict of half an item": '["return", {"dict": [None, [1]]}, [], ["", ""]]',
    "a dict with keys that cannot be keys": '["return", {"dict": [None, [[], 1]]}, [], ["", ""]]',
    "a path elsewhere": '["return", {"PosixPath": {"ref": 0}}, [], ["", ""]]',
}
CHEATS |= {
    f"answers with {name}": LINK + f"def f(x):\n    answer_with(lambda message: {answer})\n    return True"
    for name, answer in ANSWERS.items()
}
CHEATS |= {
    "answers in advance": LINK + "def answer(message):\n    return message\ndef f(x):\n    for _ in range(9): os.write(fd(), (35).to_bytes(8, 'big') + b'[\"return\", true, [], [\"\", \"\"]]     ')\n    return True",
    "names what it likes": LINK + "answer_with(lambda message: ['return', ['data', True], [], ['', '']])",
    "says that its names are errors": LINK + "answer_with(lambda message: ['return', ['error', '[\"E\", []]'], [], ['', '']])",
    "says that its names are AssertionError": LINK + "answer_with(lambda message: ['return', ['error', '\"AssertionError\"'], [], ['', '']])",
    "prints without end": LINK + "answer_with(lambda message: [*message[:3], ['x' * (1 << 24), 'y']])",
    "prints what is no text": LINK + "answer_with(lambda message: [*message[:3], [0, None]])",
    "writes lengths only": LINK + "def f(x):\n    for n in (0, 1 << 63, (1 << 25) + 1): os.write(fd(), n.to_bytes(8, 'big'))\n    return 0",
    "writes half a message": LINK + "def f(x):\n    os.write(fd(), (9).to_bytes(8, 'big') + b'[\"ask\",')\n    os._exit(0)",
    # what the tests' own comparison makes of a result, or of an exception
    **{
        f"weakens: {value}": f"import numpy as np\ndef f(x): return {value}"
        for value in ("np.float16('inf')", "np.float32('inf')", "np.array(np.float16('inf'))", "np.array([np.float16('inf')])", "np.longdouble('inf')", "10**400", "-10**400", "1e308", "np.str_('')", "np.clongdouble('inf')")
    },
    **{
        f"weakens: {error} under another name": f"Missing = {error}\ndef f(x): return 0"
        for error in ("Exception", "BaseException", "AssertionError", "LookupError", "(AssertionError, Exception)", "NameError")
    },
    **{
        f"weakens: {error} made its own": f"class Missing({error}): pass\nMissing.__name__ = Missing.__qualname__ = 'AssertionError'\nMissing.__module__ = 'builtins'\ndef f(x): raise Missing"
        for error in ("Exception", "AssertionError", "BaseException")
    },
    # types
    "types: a text with its own startswith": "class S(str):\n    startswith = endswith = __contains__ = __eq__ = isdigit = lambda *a: True\n    __hash__ = str.__hash__\n    __str__ = lambda s: s\n    __len__ = lambda s: 9\ndef f(x): return S('x')",
    "types: a metaclass that contains everything": "class M(type):\n    __contains__ = __instancecheck__ = __subclasscheck__ = __eq__ = lambda *a: True\n    __hash__ = type.__hash__\n    __iter__ = lambda c: iter([c])\n    __getitem__ = lambda c, x: c\nclass C(metaclass=M): pass\nf = C",
    "types: decimals and fractions of its own": "from decimal import Decimal\nfrom fractions import Fraction\nclass D(Decimal):\n    __eq__ = __le__ = __ge__ = __lt__ = lambda *a: True\n    __sub__ = __rsub__ = lambda *a: D(0)\n    __hash__ = Decimal.__hash__\ndef f(x): return D(0)",
    "types: dates of its own": "import datetime\nclass D(datetime.datetime):\n    __eq__ = lambda *a: True\n    __hash__ = lambda s: 0\n    tzinfo = property(lambda s: s)\n    utcoffset = lambda *a: 0\ndef f(x): return D(2020, 1, 1)",
    "types: an enum of numbers": "import enum\nclass E(enum.IntEnum):\n    A = 1\n    __eq__ = lambda *a: True\n    __hash__ = lambda s: 0\ndef f(x): return E.A",
    "types: a named tuple": "import collections\nclass P(collections.namedtuple('P', 'x')):\n    __eq__ = __contains__ = lambda *a: True\n    __getitem__ = lambda *a: P(1)\ndef f(x): return P(1)",
    "types: a class called int": "class int_(float):\n    __eq__ = lambda *a: True\nint_.__name__ = int_.__qualname__ = 'int'\nint_.__module__ = 'builtins'\ndef f(x): return int_(1)",
    "types: a class of the judge": "import tests_runner\nclass f(tests_runner.Program): pass",
    "types: made by type": EVERYTHING + "C = type('C', (Any,), {'__slots__': (), '__module__': 'solution'})\nf = C()",
    "types: an error class as the function": "class f(BaseException):\n    __eq__ = lambda *a: True\nC = f",
    "types: a function without a name": EVERYTHING + "class F(Any):\n    __name__ = __doc__ = property(lambda s: 1 / 0)\nf = C = F()",
    "types: a module": "import sys\nf = C = sys",
    # containers
    "containers: a dict of everything": "import collections\nclass D(dict):\n    __missing__ = get = __getitem__ = lambda *a: True\ndef f(x): return D()\ng = h = f",
    "containers: a default for everything": "import collections\ndef f(x): return collections.defaultdict(lambda: True)",
    "containers: a counter": "import collections\ndef f(x): return collections.Counter({x: 10**9})",
    "containers: what it was given": "def f(x): return x\ng = h = f",
    "containers: itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "containers: much from little": "def f(x):\n    a = []\n    for _ in range(60): a = [a, a]\n    return a",
    "containers: deeper than the stack": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "containers: a long range": "def f(x): return range(10**18)",
    "containers: views of changing dicts": "class V(type({}.keys())) if 0 else object: pass\nd = {}\ndef f(x):\n    d[len(d)] = x\n    return d.keys()",
    "containers: numbers that collide": "def f(x): return {i * (2**61 - 1) for i in range(3000)}",
    "containers: it empties what it gets": "def f(x): return 0\ndef g(xs):\n    xs.clear()\n    return xs",
    # numpy
    **{
        f"numpy: {value}": f"import numpy as np\ndef f(x): return {value}"
        for value in (
            *("np.empty((0, 1, 1, 1))", "np.ma.masked", "np.ma.array([1], mask=[1])", "np.bool_(True)", "np.float64('nan')"),
            *("np.array([True, True])", "np.array('x')", "np.datetime64('NaT')", "np.matrix([[1]])", "np.array(None)"),
            *("np.broadcast_to(np.int8(1), (1 << 20, 1 << 20))", "np.array([(1, 2)], dtype=[('a', int), ('b', int)])"),
            *("np.void(b'x')", "np.longdouble('nan')", "np.zeros((1,) * 30)", "np.array([f, f])", "np.str_('x')", "np.nditer([1])"),
        )
    },
    "numpy: functions of its own": "import numpy as np\nclass A(np.ndarray):\n    __array_function__ = __array_ufunc__ = lambda *a, **k: True\n    __array_priority__ = 1e9\n    __bool__ = __eq__ = lambda *a: True\ndef f(x): return np.zeros(1).view(A)",
    "numpy: objects that are arrays": "class A:\n    __array__ = lambda s, *a, **k: 1 / 0\n    __array_interface__ = {}\n    __array_ufunc__ = __array_function__ = lambda *a, **k: True\ndef f(x): return A()",
    # text
    **{
        f"text: {value}": f"def f(x): return {value}"
        for value in ("'\\0'", "'\\ud800'", "b'\\xff'", "'x' * 10**6", "'{0.__class__}'", "'%s' * 9", "'assert True'", "str", "'1' * 5000")
    },
    # exceptions
    **{
        f"exceptions: {error}": f"class E(Exception):\n    {body}\ndef f(x): raise {error}"
        for error, body in (
            ("E()", "__reduce__ = lambda s: 1 / 0"),
            ("E", "args = property(lambda s: (s,))"),
            ("E('')", "__str__ = __repr__ = lambda s: 5"),
            ("E(1)", "__eq__ = lambda *a: True"),
            ("E(E(E()))", "__cause__ = property(lambda s: s)"),
            ("E() from E()", "__init__ = lambda s: setattr(s, '__dict__', {1: 2})"),
            ("ExceptionGroup('', [AssertionError()])", "pass"),
            ("BaseExceptionGroup('', [SystemExit(0)])", "pass"),
            ("MemoryError", "pass"),
            ("RecursionError", "pass"),
            ("ZeroDivisionError('division by zero')", "pass"),
            ("UnicodeDecodeError('utf-8', b'', 0, 1, '')", "pass"),
            ("__import__('plain_data').NotPlain('f')", "pass"),
            ("__import__('plain_data').ProgramError", "pass"),
        )
    },
    "exceptions: a class with a strange name": "E = type('\\ud800', (Exception,), {})\ndef f(x): raise E",
    "exceptions: while it loads": "raise __import__('plain_data').NotPlain('f')",
    "exceptions: in its own hooks": "import sys\nsys.excepthook = sys.unraisablehook = lambda *a: None\nclass C:\n    def __del__(self): raise SystemExit\ndef f(x):\n    C()\n    raise AssertionError",
    # mocks
    "mocks: prints to a mock": "def f(x):\n    print()\n    print(f)\n    print(print)\n    return print",
    "mocks: asserts on a mock": "def f(x):\n    try:\n        print.assert_called_with = print.called = lambda *a: True\n    except Exception: pass\n    return getattr(print, 'return_value', 0)",
    "mocks: of everything": "import builtins\nfrom unittest.mock import MagicMock\nC = MagicMock\ndef f(x):\n    m = MagicMock()\n    m.__eq__ = lambda *a: True\n    return m",
    "mocks: replaces output": "import io, sys\ndef f(x):\n    sys.stdout = sys.stderr = io.StringIO('1' * 99)\n    return 0",
    # time and resources
    "time: for ever": "def f(x):\n    while True: pass",
    "time: in the background": "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()\ndef f(x): return 0",
    "time: stops the judge for a while": "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.kill(judge, 19)\n        time.sleep(0.1)\n        os.kill(judge, 18)\n        os._exit(0)\n    return 0\njudge = os.getppid()",
    "time: stops the judge for long": "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.kill(judge, 19)\n        time.sleep(5)\n        os.kill(judge, 18)\n        os._exit(0)\n    return 0\njudge = os.getppid()",
    "resources: memory": "def f(x): return [bytearray(1 << 20) for _ in range(1 << 14)]",
    "resources: a result too large": "def f(x): return 'x' * (1 << 25)",
    "resources: open files": "import os\ndef f(x):\n    try:\n        while True: os.dup(1)\n    except OSError: return 0",
    "resources: processes": "import os, time\ndef f(x):\n    for _ in range(40):\n        try:\n            if os.fork() == 0: time.sleep(9)\n        except OSError: pass\n    return 0",
    "resources: limits of its own": "import resource\ndef f(x):\n    for n in range(16):\n        try: resource.setrlimit(n, (0, 0))\n        except (OSError, ValueError): pass\n    return 0",
    "resources: no stack": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
}  # fmt: skip
