"""A rented machine at the other end of ssh: send code and data, train there, bring every checkpoint home, verified.

    python cloud.py push HOST config/cloud_h100.py      code, data and, where the machine has none, the newest checkpoint
    python cloud.py train HOST config/cloud_h100.py     rehearse, then train until it is done, whatever happens to the line
    python cloud.py watch HOST config/cloud_h100.py     the figures as they come; Ctrl-C ends the watching, not the run
    python cloud.py pull HOST config/cloud_h100.py --every=10       all finished checkpoints, every ten minutes until the run is done
    python cloud.py verify HOST config/cloud_h100.py    what is at home: hashes, weights, and the loss that was noted
    python cloud.py all HOST config/cloud_h100.py       push, train, pull every ten minutes, verify
    python cloud.py stop HOST config/cloud_h100.py      the run saves and ends

HOST is what you give to ssh (user@address, or a name in ~/.ssh/config: port and key belong there). Options of train.py are passed on
to it. Needs ssh here and Python there, nothing else: rsync is used where both sides have it. Every file is compared by SHA-256
after its way and only then gets its name; what broke off goes on from the byte where it broke.
"""
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

import config
from config import UserError

# settings
data_dir = "data/cipher"             # here; there it has the same name below remote_dir
out_dir = "out/cipher"               # likewise
remote_dir = "cipher"                # on the machine; put it on the volume that outlives it (see the README)
remote_python = "python3"            # the Python there that has torch
ssh_config: str | None = None        # a file for ssh -F; None = ssh's own
transport = "auto"                   # "rsync", "stream" or "scp"; auto: rsync where both sides have it, else stream
every = 0.0                          # minutes between pulls, until the run is done; 0 = once
force = False                        # True: push without a preflight here, train without one there
dry_run = False                      # True: say what would be done

COMMANDS = ("push", "train", "watch", "pull", "verify", "all", "stop")
ATTEMPTS = 5                         # for a file without any progress
CHECKPOINT = re.compile(r"step_[0-9]+\.pt")
SMALL = ("config.json", "tokenizer.json", "best.json", "clock.json", "done.json", "preflight.json", "metrics.jsonl")     # of a run, beside its checkpoints
BOOTSTRAP = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), 'host.py', 'exec'))"
TROUBLE = (("could not resolve", "no such host is known - check its name"), ("remote host identification has changed", "its host key is another than before: a new machine at an "
            "old address, or somebody in between - if you know why, ssh-keygen -R HOST"), ("host key verification failed", "its host key is not accepted - connect once by hand: ssh HOST"),
           ("permission denied", "it does not take your key - try: ssh HOST"), ("connection refused", "nothing listens there - is the machine up, and the port right (~/.ssh/config)?"),
           ("no route to host", "it cannot be reached"), ("not found", "no Python of that name there - set --remote_python="), ("no such file", "no Python of that name there - set --remote_python="))


class Broken(Exception):
    """The line to the host broke; another try may go on from there."""


# ----------------------------------------------------------------------------------------------------------
# The line
# ----------------------------------------------------------------------------------------------------------

def ssh_options() -> list[str]:
    """No questions, new machines are accepted (changed ones are not), and a dead line is noticed within a minute."""
    return [*(("-F", ssh_config) if ssh_config else ()), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-o", "ConnectTimeout=15",
            "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]


class Host:
    """host.py at the other end of one ssh connection, opened when it is needed and again after it broke."""

    def __init__(self, name: str):
        self.name, self.process = name, None

    def open(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        command = ["ssh", *ssh_options(), "--", self.name, f"{shlex.quote(remote_python)} -u -c {shlex.quote(BOOTSTRAP)}"]
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except FileNotFoundError:
            raise UserError("ssh: not found here - install the OpenSSH client") from None
        self.said = []
        self.listener = threading.Thread(target=lambda pipe=self.process.stderr, said=self.said: said.extend(line.decode("utf-8", "replace") for line in pipe), daemon=True)
        self.listener.start()
        source = (config.ROOT / "host.py").read_bytes().replace(b"\r\n", b"\n")
        self.send(b"%d\n" % len(source) + source)
        if self.line() != "ready":
            raise UserError(f"{self.name}: does not answer as expected - a login script that prints? try: ssh {self.name} true")

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                try:
                    pipe.close()
                except OSError:
                    pass
            self.process = None

    def send(self, data: bytes) -> None:
        try:
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except OSError:
            self.fail()

    def line(self):
        data = self.process.stdout.readline()
        if not data.endswith(b"\n"):
            self.fail()
        try:
            return json.loads(data)
        except ValueError:
            return data

    def fail(self):
        """Raise what the end of the line means: UserError where trying again is hopeless, else Broken."""
        self.process.wait()
        self.listener.join(5)
        said = "".join(self.said).strip()
        self.close()
        for mark, means in TROUBLE:
            if mark in said.lower():
                raise UserError(f"{self.name}: {means} (ssh says: {said.splitlines()[-1][:150]})")
        raise Broken(said.splitlines()[-1][:150] if said else "the connection broke")

    def ask(self, request: str, **arguments):
        """Send a request to host.py and return its result."""
        self.request(request, **arguments)
        return self.reply()

    def ask_again(self, request: str, **arguments):
        """The same over a line that breaks."""
        return persist(lambda: self.ask(request, **arguments), self.name)

    def request(self, request: str, **arguments) -> None:
        self.open()
        self.send(json.dumps(dict(request=request, folder=remote_dir, **arguments)).encode("ascii") + b"\n")

    def reply(self):
        """The result of the last request; {"line": ...} before it are printed."""
        while True:
            reply = self.line()
            if isinstance(reply, dict) and "line" in reply:
                print("  " + reply["line"], flush=True)
            elif isinstance(reply, dict) and "error" in reply:
                raise UserError(f"{self.name}: {reply['error']}")
            else:
                return reply["result"] if isinstance(reply, dict) else reply


def persist(work, what: str, attempts=ATTEMPTS):
    """Do work again while the line breaks, so many times in a row at most, with longer and longer rests."""
    for attempt in range(attempts):
        try:
            return work()
        except Broken as error:
            if attempt + 1 == attempts:
                raise UserError(f"{what}: the line broke {attempts} times ({error}) - run the same command again to go on") from None
            print(f"  the line broke ({error}); trying again", flush=True)
            time.sleep(min(30, 2 ** attempt))


# ----------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------

def copy(command: list[str], what: str) -> bool:
    """Run rsync or scp. Broken where it fails."""
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Broken(f"{what}: {said[-1][:150] if said else done.returncode}")
    return True


def remote_path(host: Host, name: str) -> str:
    """A file there as rsync and scp take it: they start in the home folder and know no ~."""
    return f"{host.name}:{remote_dir.removeprefix('~/')}/{name}"


def rsync_command(source: str, target: str) -> list[str]:
    return ["rsync", "--partial", "--inplace", "-s", "-e", " ".join(map(shlex.quote, ["ssh", *ssh_options()])), "--", source, target]


def send_file(host: Host, source: Path, name: str, by: str, bar) -> None:
    """Bring a file to remote_dir/name: as name.part, compared, then renamed. A part that is there is gone on from."""
    size, digest = source.stat().st_size, digest_of(source)

    def once():
        there = host.ask("part", name=name)
        if by == "rsync":
            copy(rsync_command(str(source), remote_path(host, name + ".part")), "rsync")
        elif by == "scp":
            copy(["scp", "-q", "-s", *ssh_options(), "--", str(source), remote_path(host, name + ".part")], "scp")
        else:
            there = there if there <= size else 0
            host.request("put", name=name, offset=there, size=size)
            with open(source, "rb") as file:
                file.seek(there)
                while block := file.read(1 << 18):
                    host.send(block)
                    bar.update(len(block))
            host.reply()
        return host.ask("accept", name=name, digest=digest)

    for _ in range(2):                              # a part of another file, or a byte that was flipped: once more, whole
        if persist(once, name):
            return
        print(f"  {name}: arrived damaged, sending it again", flush=True)
    raise UserError(f"{name}: arrived damaged twice - is {source} being written, or the disk there failing?")


def fetch_file(host: Host, name: str, target: Path, size: int, by: str, bar) -> bool:
    """Bring remote_dir/name to target.part, going on from what is there. False where it is no more: train.py removes old checkpoints."""
    part = Path(f"{target}.part")

    def once():
        folder, _, last = name.rpartition("/")
        if last not in host.ask("files", out=folder):
            return False
        if by == "rsync":
            return copy(rsync_command(remote_path(host, name), str(part)), "rsync")
        if by == "scp":
            return copy(["scp", "-q", "-s", *ssh_options(), "--", remote_path(host, name), str(part)], "scp")
        here = part.stat().st_size if part.is_file() and part.stat().st_size <= size else 0
        if (left := host.ask("get", name=name, offset=here)) is None:
            return False
        with open(part, "r+b" if here else "wb") as file:
            file.seek(here)
            while left:
                block = host.process.stdout.read1(min(1 << 18, left))
                if not block:
                    host.fail()
                file.write(block)
                left -= len(block)
                bar.update(len(block))
            file.flush()
            os.fsync(file.fileno())
        return True

    return persist(once, name)


digest_of = functools.cache(config.sha256_file)     # of what is sent: each file is read once for it, and again to be sent


def choose_transport(there: dict) -> str:
    if transport != "auto":
        return transport
    return "rsync" if shutil.which("rsync") and there["rsync"] else "stream"


# ----------------------------------------------------------------------------------------------------------
# The commands
# ----------------------------------------------------------------------------------------------------------

def plan(config_file: str | None, options: list[str]) -> dict:
    """What is to run there: train.py's settings, its command, and {name there: file here} of code and data."""
    import train
    with contextlib.redirect_stdout(None):
        settings = config.override(vars(train), [*([config_file] if config_file else []), *options])
    below = lambda path, kind: path if not Path(path).is_absolute() and ".." not in Path(path).parts else f"{kind}/{Path(path).name}"
    folders = {name: Path(below(settings[name], kind)).as_posix() for name, kind in (("data_dir", "data"), ("out_dir", "out"))}
    code = {path.relative_to(config.ROOT).as_posix(): path for path in (*config.ROOT.glob("*.py"), *config.ROOT.glob("config/*.py"), config.ROOT / "page.html", config.ROOT / "requirements.txt")
            if path.name != "test_smoke.py"}
    command = [remote_python, "-u", "train.py"]
    if config_file:
        path = next(p for p in (Path(config_file), config.ROOT / config_file) if p.is_file())
        command.append(f"config/{path.name}")
        code[f"config/{path.name}"] = path
    command += [*(option for option in options if config.option_name(option) not in folders), *(f"--{name}={value}" for name, value in folders.items())]
    from prepare import read_manifest
    here = Path(settings["data_dir"])
    shards = {here / shard["file"]: shard["sha256"] for split in read_manifest(here)["splits"].values() for shard in split["shards"]}
    data = {f"{folders['data_dir']}/{path.name}": path for path in (here / "manifest.json", here / "tokenizer.json", *shards)}
    from model import architecture, count_parameters
    return dict(settings=settings, command=command, files=code | data, shards=shards, folders=folders, checkpoint_bytes=12 * count_parameters(architecture(settings))["total"],
                here=shlex.join(["python", "train.py", *([config_file] if config_file else []), *options]))


def check_shards(job: dict) -> None:
    for path, digest in job["shards"].items():
        if not path.is_file() or digest_of(path) != digest:
            raise UserError(f"{path}: missing or damaged here - run prepare.py again")


def check_stamp(job: dict) -> None:
    """The free rehearsal comes before the paid one: UserError without a preflight's stamp of this very run."""
    import train
    file = Path(job["settings"]["out_dir"]) / "preflight.json"
    here = Path(job["settings"]["data_dir"])
    hashes = dict(manifest_sha256=config.sha256_file(here / "manifest.json"))
    try:
        stamped = json.loads(file.read_text(encoding="utf-8"))
        other = [name for name, digest in train.stamp(job["settings"], hashes).items() if stamped[name] != digest]
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"{file}: no preflight of this run - make one, it costs nothing: {job['here']} --preflight=True (or --force=True)") from None
    if other:
        raise UserError(f"{file}: the preflight was of other {' and '.join(other)} - make it again: {job['here']} --preflight=True (or --force=True)")


def look_around(host: Host) -> dict:
    """Say what the machine is; UserError where it cannot serve."""
    there = host.ask_again("hello")
    print(f"{host.name}: {', '.join(there['gpus']) or 'no GPU that nvidia-smi knows'}; Python {'.'.join(map(str, there['python']))}, {there['free'] / 1e9:.1f} GB free on {there['disk']}"
          + ("; warning: this disk is the container's own and goes with it - set --remote_dir= to a folder on the volume" if there["disk"] == "overlay" else ""))
    if there["python"] < [3, 10]:
        raise UserError(f"{host.name}: {remote_python} is Python {'.'.join(map(str, there['python']))}, 3.10 or newer is needed - set --remote_python=")
    return there


def differing(host: Host, files: dict[str, Path]) -> list[str]:
    """Names of the files that are not there as they are here."""
    names = list(files)
    return [name for name, digest in zip(names, host.ask_again("hashes", names=names)) if digest != digest_of(files[name])]


def has_checkpoint(host: Host, job: dict) -> bool:
    """Tell whether a run has begun there."""
    return any(CHECKPOINT.fullmatch(name) for name in host.ask_again("files", out=job["folders"]["out_dir"]))


def push(host: Host, job: dict) -> None:
    if not force:
        check_stamp(job)
    files = dict(job["files"])
    there = look_around(host)
    home, run = Path(job["settings"]["out_dir"]), job["folders"]["out_dir"]
    from model import list_checkpoints, read_checkpoint
    if home.is_dir() and not has_checkpoint(host, job):
        for newest in reversed(list_checkpoints(home)):             # an empty machine goes on from what was brought home
            try:
                read_checkpoint(newest, mmap=True)
            except UserError as error:
                print(f"passed over: {error}")
                continue
            files |= {f"{run}/{name}": home / name for name in (newest.name, f"{newest.name}.sha256", *SMALL) if (home / name).is_file() and name not in ("preflight.json", "done.json")}
            print(f"no checkpoint there: it will go on from {newest}")
            break
    missing = differing(host, files)
    total = sum(files[name].stat().st_size for name in missing)
    if there["free"] < (needed := total + 2 * job["checkpoint_bytes"]):
        raise UserError(f"{host.name}: {there['free'] / 1e9:.1f} GB free in {remote_dir}, {needed / 1e9:.1f} are needed for what is sent and two checkpoints - another "
                        f"--remote_dir= or a larger disk")
    by = choose_transport(there)
    print(f"{len(files) - len(missing)} files are there already, {len(missing)} to send ({total / 1e6:.1f} MB, by {by})")
    if dry_run:
        return print("\n".join(f"  would send {name}" for name in missing))
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for name in missing:
            send_file(host, files[name], name, by, bar)
    if wrong := differing(host, files):
        raise UserError(f"{host.name}: {wrong[0]} is not there as it is here - push again")
    print(f"pushed: all {len(files)} files are in {remote_dir}, SHA-256 equal")


def train_there(host: Host, job: dict) -> None:
    look_around(host)
    run = job["folders"]["out_dir"]
    now = host.ask_again("state", out=run)
    if now["done"]:
        return print(f"the run in {run} is done there already")
    if now["running"]:
        raise UserError(f"{host.name}: a run is going on there already - watch it, or stop it first")
    if wrong := differing(host, job["files"]):
        raise UserError(f"{host.name}: {wrong[0]} is not there as it is here - push first")
    if dry_run:
        return print("  would run there: " + shlex.join(job["command"]))
    if not force and not has_checkpoint(host, job):
        print("rehearsing there:")
        if (code := host.ask("run", command=[*job["command"], "--preflight=True"])):
            raise UserError(f"{host.name}: the preflight failed there (exit code {code}) - nothing was started; --force=True trains all the same")
    if not host.ask_again("start", command=job["command"], out=run):
        raise UserError(f"{host.name}: a run is going on there already, or none could be started - see train.log there")
    print(f"training: {shlex.join(job['command'])}\nit goes on without this connection. Watch it: {shlex.join(['python', 'cloud.py', 'watch', *sys.argv[2:]])}")


def watch(host: Host, job: dict) -> None:
    """Print the run's figures as they come; the line may break and the user may leave."""
    run, place, tries = job["folders"]["out_dir"], -3000, 0
    print(f"{'step':>7} {'tokens':>13} {'ce':>8} {'val ce':>8} {'lr':>8} {'norm':>7} {'tokens/s':>10} {'hours':>6}")
    try:
        while True:
            try:
                text, place = host.ask("tail", name=f"{run}/metrics.jsonl", offset=place)
                now, tries = host.ask("state", out=run), 0
            except Broken as error:
                tries += 1
                print(f"  the line broke ({error}); trying again", flush=True)
                time.sleep(min(60, 2 ** tries))
                continue
            for line in text.splitlines():
                try:
                    row = json.loads(line)
                except ValueError:                  # the first may be cut
                    continue
                shown = lambda name, form: format(row[name], form) if row.get(name) is not None else "".rjust(int(re.match(r"\d+", form)[0]))
                print(" ".join(shown(*column) for column in (("step", "7d"), ("tokens", "13,d"), ("ce", "8.4f"), ("val_ce", "8.4f"), ("lr", "8.1e"), ("grad_norm", "7.2f"),
                                                             ("tokens_per_s", "10,.0f"), ("hours", "6.2f"))), flush=True)
            if now["done"] and not text:
                return print("done: bring it home with pull")
            if not now["running"] and not text:
                log, _ = host.ask("tail", name="train.log", offset=-2000)
                raise UserError(f"{host.name}: no run is going on there ({now.get('ended') or 'none was started, or the machine was started anew'}); train.log ends:\n" + log[-1500:])
            time.sleep(3)
    except KeyboardInterrupt:
        print("\nnot watching any more; the run goes on")


def pull_once(host: Host, job: dict) -> bool:
    """Bring home what is finished there and not here; returns whether the run is done."""
    home, run = Path(job["settings"]["out_dir"]), job["folders"]["out_dir"]
    now = host.ask("state", out=run)
    found = host.ask("files", out=run)
    ready = sorted((name for name in found if CHECKPOINT.fullmatch(name) and f"{name}.sha256" in found), key=lambda name: -int(name[5:-3]))     # the newest first
    if not found:
        raise UserError(f"{host.name}: nothing in {remote_dir}/{run} - has it been started, and with the same config file?")
    home.mkdir(parents=True, exist_ok=True)
    sides = dict(zip(ready, (host.ask("tail", name=f"{run}/{name}.sha256", offset=0)[0] for name in ready)))
    ready = [name for name in ready if sides[name]]                 # removed in this moment
    wanted = []
    for name in ready:
        if not (home / name).is_file():
            wanted.append(name)
        elif config.sha256_file(home / name) != sides[name][:64]:
            raise UserError(f"{home / name}: is another file than the one there, of another run or damaged - move it away, or choose another --out_dir")
        elif not (home / f"{name}.sha256").is_file():
            config.write_text(home / f"{name}.sha256", sides[name])
    total = sum(found[name] - (part.stat().st_size if (part := home / f"{name}.part").is_file() else 0) for name in wanted)
    if (free := shutil.disk_usage(home).free) < total:
        raise UserError(f"{home}: {free / 1e9:.1f} GB free here, {total / 1e9:.1f} are to come - make room")
    print(f"{time.strftime('%H:%M:%S')} {len(ready)} checkpoints there, {len(wanted)} to bring ({total / 1e6:.1f} MB)" + (": " + ", ".join(wanted) if wanted else ""), flush=True)
    if dry_run:
        return now["done"]
    by = choose_transport(host.ask("hello"))
    damaged = []
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for name in wanted:
            part = Path(f"{home / name}.part")
            for attempt in range(2):                # a flipped byte on the way: once more, whole
                if not (there := fetch_file(host, f"{run}/{name}", home / name, found[name], by, bar)):
                    break
                if whole := config.sha256_file(part) == sides[name][:64]:
                    break
                part.unlink()
            if not there:
                part.unlink(missing_ok=True)
                continue
            if not whole:
                damaged.append(name)
                continue
            config.write_text(home / f"{name}.sha256", sides[name])                 # the hash first, as train.py does
            config.replace(part, home / name)
    for name in (name for name in SMALL if name in found):
        if fetch_file(host, f"{run}/{name}", home / name, 0, "stream", tqdm(disable=True)):
            config.replace(Path(f"{home / name}.part"), home / name)
    if damaged:
        raise UserError(f"{host.name}: {', '.join(damaged)}: what is there is not what its .sha256 says, so it was not taken; everything else is here")
    return now["done"]


def pull(host: Host, job: dict, minutes: float) -> None:
    from model import list_checkpoints
    home = Path(job["settings"]["out_dir"])
    home.mkdir(parents=True, exist_ok=True)
    held = config.lock(home)                        # noqa: F841 - until it is done
    while not persist(lambda: pull_once(host, job), "pull", ATTEMPTS if not minutes else 10 ** 6) and minutes:
        host.close()
        time.sleep(60 * minutes)
    print(f"home: {home}, {len(list_checkpoints(home))} checkpoints")


def verify(job: dict) -> None:
    settings = job["settings"]
    code = subprocess.run([sys.executable, str(config.ROOT / "evaluate.py"), f"--verify={settings['out_dir']}", f"--data_dir={settings['data_dir']}"]).returncode
    if code:
        raise SystemExit(code)


def main():
    given = sys.argv[1:]
    if given and given[0] in ("-h", "--help"):
        config.override(globals())
    if len(given) < 2 or given[0] not in COMMANDS or given[1].startswith("-"):
        raise UserError(f"usage: python cloud.py {'|'.join(COMMANDS)} HOST [config/FILE.py] [--name=value ...]")
    command, name, rest = given[0], given[1], given[2:]
    known = {script: config.settings_of(config.ROOT / script) for script in ("cloud.py", "train.py")}
    mine = [arg for arg in rest if not arg.startswith("-") or config.option_name(arg) in known["cloud.py"] or config.option_name(arg) not in known["train.py"]]
    config.override(globals(), mine)
    if transport not in ("auto", "rsync", "stream", "scp"):
        raise UserError(f'transport={transport}: must be "auto", "rsync", "stream" or "scp"')
    if every < 0:
        raise UserError(f"every={every} must not be negative")
    if re.search(r"[\0\n]", remote_dir) or remote_dir.startswith("-") or not remote_dir:
        raise UserError(f"remote_dir={remote_dir!r}: not a folder's name")
    config_file = next((arg for arg in rest if not arg.startswith("-")), None)
    job = plan(config_file, [arg for arg in rest if arg.startswith("-") and config.option_name(arg) in known["train.py"]])
    host = Host(name)
    try:
        if command in ("push", "train", "all"):
            check_shards(job)
        if command in ("push", "all"):
            push(host, job)
        if command == "train" or command == "all" and not host.ask_again("state", out=job["folders"]["out_dir"])["running"]:
            train_there(host, job)
        if command == "watch":
            watch(host, job)
        if command == "stop":
            print("asked to save and end" if host.ask_again("stop", out=job["folders"]["out_dir"]) else "no run is going on there")
        if command in ("pull", "all"):
            pull(host, job, every or 10.0 * (command == "all"))
        if command in ("verify", "all"):
            verify(job)
    except Broken as error:
        raise UserError(f"{name}: the line broke ({error}) - run the same command again") from None
    finally:
        host.close()


if __name__ == "__main__":
    config.run(main)
