"""What cloud.py has done on the rented machine. It is sent there through ssh and needs nothing but Python 3.8 and Linux.

Requests come as lines of JSON on standard input, answers go out as lines of JSON on standard output; file contents follow
a line as raw bytes. Paths and commands travel as JSON and as lists of arguments: no shell ever sees them.

    python3 host.py supervise '["python3", "train.py", ...]' OUT_DIR      keeps a run going until it is done; `start` begins it
"""
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

BLOCK = 1 << 20
QUICK_SECONDS, QUICK_FAILURES = 60, 10      # a run that ends so soon so often is not started again


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def inside(folder, name):
    """A path below folder, made absolute. ValueError for one that leads out of it."""
    path = os.path.normpath(os.path.join(folder, name))
    if os.path.commonpath([os.path.abspath(folder), os.path.abspath(path)]) != os.path.abspath(folder):
        raise ValueError(f"{name}: leads out of {folder}")
    return path


def output(*command):
    """What a command prints, or "" where it is missing or fails."""
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60).stdout.decode("utf-8", "replace").strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def kind_of_disk(folder):
    """The type of the file system that holds a folder, from the longest mount point above it."""
    try:
        with open("/proc/mounts") as file:
            mounts = [line.split()[1:3] for line in file]
        above = [(point, kind) for point, kind in mounts if os.path.join(folder, "").startswith(os.path.join(point, ""))]
        return max(above, key=lambda mount: len(mount[0]))[1]
    except (OSError, ValueError, IndexError):
        return "unknown"


# ----------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------

def supervised(folder):
    """Return (the lock of the supervisor or None where another holds it, what it last noted)."""
    import fcntl
    lock = open(os.path.join(folder, ".supervisor.lock"), "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock = None
    try:
        with open(os.path.join(folder, ".supervisor.json")) as file:
            return lock, json.load(file)
    except (OSError, ValueError):
        return lock, {}


def supervise(command, out):
    """Start a command again and again until out/done.json stands. It ends with its reason noted; a signal goes on to the command."""
    folder = os.getcwd()
    lock, _ = supervised(folder)
    if lock is None:
        sys.exit("a run is supervised here already")
    child, stopping, note = None, [], dict(pid=os.getpid(), starts=0, code=None, ended=None)

    def write():
        with open(".supervisor.json.tmp", "w") as file:
            json.dump(note, file)
        os.replace(".supervisor.json.tmp", ".supervisor.json")

    def stop(which, frame):
        stopping.append(which)
        if child is not None:
            child.send_signal(which)
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    quick = 0
    while note["ended"] is None:
        began = time.monotonic()
        note["starts"] += 1
        write()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)         # its output goes where ours goes: train.log
        if stopping:
            child.send_signal(stopping[0])
        note["code"] = child.wait()
        quick = quick + 1 if time.monotonic() - began < QUICK_SECONDS else 0
        if os.path.exists(os.path.join(out, "done.json")):
            note["ended"] = "done"
        elif stopping:
            note["ended"] = "stopped"
        elif note["code"] == 2:
            note["ended"] = "a mistake that starting again would repeat"
        elif quick >= QUICK_FAILURES:
            note["ended"] = f"it ended {QUICK_FAILURES} times within {QUICK_SECONDS} seconds"
        else:
            print(f"supervisor: exit code {note['code']}, starting again in 5 seconds", flush=True)
            for _ in range(50):
                if not stopping:
                    time.sleep(0.1)
            note["ended"] = "stopped" if stopping else None
        write()


# ----------------------------------------------------------------------------------------------------------
# Requests: each returns its answer
# ----------------------------------------------------------------------------------------------------------

def hello(folder):
    """What this machine is. The folder is made."""
    os.makedirs(folder, exist_ok=True)
    return dict(python=list(sys.version_info[:3]), free=shutil.disk_usage(folder).free, disk=kind_of_disk(folder), rsync=bool(shutil.which("rsync")),
                gpus=output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines())


def hashes(folder, names):
    return [sha256(inside(folder, name)) if os.path.isfile(inside(folder, name)) else None for name in names]


def part(folder, name):
    """How much of a file has arrived."""
    path = inside(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return os.path.getsize(path + ".part") if os.path.isfile(path + ".part") else 0


def accept(folder, name, digest):
    """Give what has arrived its name if it is whole, else throw it away; returns whether it was."""
    path = inside(folder, name)
    if not os.path.isfile(path + ".part") or sha256(path + ".part") != digest:
        if os.path.exists(path + ".part"):
            os.remove(path + ".part")
        return False
    os.replace(path + ".part", path)
    return True


def put(folder, name, offset, size):
    """Take the bytes that follow the request: a file from offset on. What arrives before a broken line is kept."""
    path = inside(folder, name)
    with open(path + ".part", "r+b" if offset else "wb") as file:
        file.seek(offset)
        file.truncate()
        while offset < size:
            block = sys.stdin.buffer.read1(min(BLOCK, size - offset))
            if not block:
                sys.exit(1)
            file.write(block)
            offset += len(block)
        file.flush()
        os.fsync(file.fileno())
    return True


def get(folder, name, offset):
    """Send a file from offset on: a line with the number of bytes, then these. The line is null where there is no such file."""
    if not os.path.isfile(inside(folder, name)):
        return answer(None)
    with open(inside(folder, name), "rb") as file:
        size = max(0, os.fstat(file.fileno()).st_size - offset)
        file.seek(offset)
        answer(size)
        while size > 0:
            block = file.read(min(BLOCK, size))
            if not block:                           # it shrank: the other side must not wait for ever
                sys.exit(1)
            sys.stdout.buffer.write(block)
            size -= len(block)
        sys.stdout.buffer.flush()


def files(folder, out):
    """{name: bytes} of a run's folder."""
    path = inside(folder, out)
    return {name: os.path.getsize(os.path.join(path, name)) for name in sorted(os.listdir(path)) if os.path.isfile(os.path.join(path, name))} if os.path.isdir(path) else {}


def tail(folder, name, offset):
    """Text of a file from offset on (negative: from the end), whole lines; returns [text, the next offset]."""
    try:
        with open(inside(folder, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            offset = max(0, size + offset) if offset < 0 else offset if offset <= size else 0
            file.seek(offset)
            data = file.read(BLOCK)
    except OSError:
        return ["", 0]
    data = data[:data.rfind(b"\n") + 1]
    return [data.decode("utf-8", "replace"), offset + len(data)]


def state(folder, out):
    if not os.path.isdir(folder):
        return dict(running=False, done=False)
    lock, note = supervised(folder)
    return dict(note, running=lock is None, done=os.path.exists(os.path.join(inside(folder, out), "done.json")))


def start(folder, command, out):
    """Begin a run under a supervisor of its own session, so that a dropped line ends nothing. False where one is running."""
    lock, _ = supervised(folder)
    if lock is None:
        return False
    lock.close()
    with open(os.path.join(folder, "train.log"), "ab") as log:
        subprocess.Popen([sys.executable, "-u", "host.py", "supervise", json.dumps(command), out], cwd=folder, stdin=subprocess.DEVNULL, stdout=log,
                         stderr=subprocess.STDOUT, start_new_session=True)
    for _ in range(100):
        time.sleep(0.1)
        if supervised(folder)[0] is None:
            return True
    return False


def stop(folder, out):
    """Ask the run to save and end."""
    now = state(folder, out)
    if now["running"]:
        os.kill(now["pid"], signal.SIGTERM)
    return now["running"]


def run(folder, command):
    """Run a command and send each line it prints as {"line": ...}; returns its exit code."""
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        for line in child.stdout:
            answer(dict(line=line.decode("utf-8", "replace").rstrip("\n")))
        return child.wait()


REQUESTS = {work.__name__: work for work in (hello, hashes, part, accept, put, get, files, tail, state, start, stop, run)}


def answer(content):
    sys.stdout.buffer.write(json.dumps(content).encode("ascii") + b"\n")
    sys.stdout.buffer.flush()


def serve():
    """Answer requests until the line is closed."""
    answer("ready")
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        name, folder = request.pop("request"), os.path.abspath(os.path.expanduser(request.pop("folder")))
        try:
            result = REQUESTS[name](folder, **request)
            if name != "get":
                answer(dict(result=result))
        except (OSError, ValueError) as error:
            answer(dict(error=f"{name}: {error}"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["supervise"]:
        supervise(json.loads(sys.argv[2]), sys.argv[3])
    else:
        serve()
