"""Settings: the one rule by which every script is configured, and the few helpers every script shares.

    python SCRIPT.py [config/FILE.py] [--name=value ...]

A script lists its settings as plain lower-case globals with defaults between its imports and its first
function. The config file (plain Python, it is executed: run only files you trust) overrides those, an
option overrides both. One config file serves every script: in it, a name that another script knows is
passed over; on the command line it is an error that names its script. A name no script knows is an error
with the nearest name. Names that begin with an underscore are the file's own helpers.

Types are those of the defaults. An int serves for a float, a whole float (1e8) for an int, a bool for
neither. A setting that may be None, or may have several types, is annotated: `max_hours: float | None = None`.
All mistakes are listed at once, one line each, and the script ends with exit code 2.
"""
import ast
import difflib
import errno
import hashlib
import math
import os
import re
import shlex
import sys
import time
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("prepare.py", "tokenizer.py", "model.py", "train.py", "evaluate.py", "sample.py", "cloud.py")
TYPES = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict, "None": type(None)}
WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", list: "a list", dict: "a dict",
         type(None): "None"}


class UserError(Exception):
    """A mistake of the user's: its text says what, where and what to do. `run` turns it into exit code 2."""


# ----------------------------------------------------------------------------------------------------------
# The override rule
# ----------------------------------------------------------------------------------------------------------

def settings_of(script: str | Path) -> dict:
    """Read a script's settings from its source, without running it: {name: (default, allowed types)}."""
    found = {}
    for node in ast.parse(Path(script).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            break
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
        if not isinstance(target, ast.Name) or not target.id.islower() or target.id.startswith("_"):
            continue
        default = ast.literal_eval(node.value)
        if isinstance(node, ast.AnnAssign):
            allowed = tuple(TYPES[word.strip()] for word in ast.unparse(node.annotation).split("|"))
        else:
            allowed = (type(default),)
        found[target.id] = (default, allowed)
    return found


def parse(text: str, allowed: tuple):
    """Turn the text of an option into a value of one of the allowed types; ValueError if it is none of them."""
    if type(None) in allowed and text == "None":
        return None
    if bool in allowed and text in ("True", "true", "False", "false"):
        return text in ("True", "true")
    for kind in (int, float):
        if kind in allowed:
            try:
                return kind(text)
            except ValueError:
                if kind is int and float not in allowed:
                    return float(text)              # 1e8: check() makes it an int if it is whole
    if (list in allowed and text.startswith("[")) or (dict in allowed and text.startswith("{")):
        return ast.literal_eval(text)
    if str in allowed:
        return text
    raise ValueError(text)


def check(value, allowed: tuple):
    """Return value in one of the allowed types, converted between int and float where nothing is lost; else ValueError."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(value)
    if type(value) in allowed:
        return value
    if type(value) is int and float in allowed:
        return float(value)
    if type(value) is float and int in allowed and value.is_integer():
        return int(value)
    raise ValueError(value)


def read_config(path: str) -> dict:
    """Run a config file in a fresh namespace and return its assignments (functions, modules and _names left out)."""
    file = next((p for p in (Path(path), ROOT / path) if p.is_file() and p.suffix == ".py"), None)
    if file is None:
        near = difflib.get_close_matches(Path(path).name, [p.name for p in (ROOT / "config").glob("*.py")], 1, 0.5)
        raise UserError(f"{path!r}: no such config file (FILE.py)" + (f' - did you mean "config/{near[0]}"?' if near else ""))
    namespace = {}
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), namespace)
    except (Exception, SystemExit) as error:        # whatever the file does wrong is the user's to mend
        line = getattr(error, "lineno", None) or next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(file)), "?")
        raise UserError(f"{path}, line {line}: {type(error).__name__}: {error}") from None
    return {k: v for k, v in namespace.items()
            if not k.startswith("_") and not isinstance(v, (types.ModuleType, types.FunctionType, type))}


def override(namespace: dict, argv: list | None = None) -> dict:
    """Apply config file and options to a script's settings, in place, and return all effective settings.

    namespace is the script's globals(); argv defaults to the command line. Prints what differs from the
    defaults. Raises UserError with one line per mistake.
    """
    script = Path(namespace["__file__"]).name
    own = settings_of(namespace["__file__"])
    others = {}                                     # name -> scripts that know it
    for other in SCRIPTS:
        if other != script and (ROOT / other).is_file():
            for name in settings_of(ROOT / other):
                others.setdefault(name, []).append(other)
    given, mistakes, config_file = [], [], None     # given: (where, name, value, is_text)

    def unknown(where, name):
        near = difflib.get_close_matches(name, [*own, *others], 1, 0.6)
        mistakes.append(f'{where}: unknown setting "{name}"' + (f' - did you mean "{near[0]}"?' if near else ""))

    arguments = list(sys.argv[1:] if argv is None else argv)
    while arguments:
        arg = arguments.pop(0)
        if arg in ("-h", "--help"):
            print((namespace.get("__doc__") or "").strip(), "\n\nSettings and defaults:", sep="")
            lines = Path(namespace["__file__"]).read_text(encoding="utf-8").splitlines()
            for name, (default, _) in own.items():
                line = next(line for line in lines if re.match(rf"{name}\b[^#]*=", line))
                print(f"  {f'--{name}={default}':<36} {line.rpartition('  # ')[2].strip() if '  # ' in line else ''}".rstrip())
            raise SystemExit(0)
        if arg.startswith("-"):
            name, equals, text = arg.lstrip("-").partition("=")
            if not equals:
                is_flag = name in own and own[name][1] == (bool,)       # --name value: the value is no mistake of its own
                value = arguments.pop(0) if arguments and not arguments[0].startswith("-") and not arguments[0].endswith(".py") else "True" if is_flag else "VALUE"
                mistakes.append(f"{arg}: write --{name}={value}")
            elif name in own:
                given.append((arg, name, text, True))
            elif name in others:
                mistakes.append(f"{arg}: {name} is a setting of {', '.join(others[name])}, not of {script}")
            else:
                unknown(arg, name)
        elif config_file is not None:
            mistakes.append(f"{arg}: a second config file ({config_file} is the first); options are --name=value")
        else:
            config_file = arg
            try:
                values = read_config(arg)
            except UserError as error:
                mistakes.append(str(error))
                continue
            for name, value in values.items():
                if name in own:
                    given.insert(0, (arg, name, value, False))   # options win, wherever the file stands
                elif name not in others:
                    unknown(arg, name)

    effective = {name: default for name, (default, _) in own.items()}
    for where, name, value, is_text in given:
        allowed = own[name][1]
        try:
            effective[name] = check(parse(value, allowed) if is_text else value, allowed)
            if isinstance(effective[name], str) and ("\0" in effective[name] or name.endswith("_dir") and not effective[name].strip()):
                raise ValueError(effective[name])
        except (ValueError, SyntaxError, TypeError, OverflowError, MemoryError, RecursionError):
            got = "" if is_text else f", not {value!r}"
            mistakes.append(f"{where}: {name} must be {' or '.join(WORDS[kind] for kind in allowed)}{got}")
    if mistakes:
        raise UserError("\n".join(mistakes))
    namespace.update(effective)
    changed = {name: value for name, value in effective.items() if value != own[name][0]}
    print(f"{script}" + (f" with {config_file}" if config_file else "") + (":" if changed else ": default settings"),
          ", ".join(f"{name}={value!r}" for name, value in changed.items()))
    return effective


def option_name(arg: str) -> str:
    """The name in --name=value."""
    return arg.lstrip("-").partition("=")[0]


def command(script: str) -> str:
    """The command that runs a script on what this one was told: the config file and those of the options that it knows too."""
    known = settings_of(ROOT / script)
    given = [arg for arg in sys.argv[1:] if not arg.startswith("-") or option_name(arg) in known]
    return " ".join(["python", script, *map(shlex.quote, given)])


# ----------------------------------------------------------------------------------------------------------
# What every script shares
# ----------------------------------------------------------------------------------------------------------

def run(main) -> None:
    """Call a script's main; a user's mistake becomes one line per mistake on standard error and exit code 2."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))     # closed by the caller
    for stream in (sys.stdout, sys.stderr):         # a cp1252 console must not end a run on an odd character
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""       # torchrun starts several of us
        for line in str(error).splitlines():
            print(f"{rank}error: {line}", file=sys.stderr)
        if rank:                                    # a usual exit could wait for the other ranks, which wait for this one
            sys.stderr.flush()
            os._exit(2)
        raise SystemExit(2) from None
    except BrokenPipeError:                         # | head has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:                        # no space, no permission, a folder in the way
        advice = {errno.ENOSPC: " - free some space, then run the same command again", errno.EEXIST: " - a file is in the way, choose another folder",
                  errno.ENOTDIR: " - a file is in the way, choose another folder", errno.ENOENT: " - check the path",
                  errno.EACCES: " - choose another place, or ask for the permission"}.get(error.errno, "")
        print(f"error: {error.filename or 'operating system'}: {error.strerror or error}{advice}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\nstopped by the keyboard", file=sys.stderr)
        raise SystemExit(130) from None


def sha256_file(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def replace(source: str | Path, target: str | Path) -> None:
    """Rename source onto target in one step; on Windows an antivirus may hold a file, so try for 5 seconds."""
    for attempt in range(51):
        try:
            return os.replace(source, target)
        except PermissionError:
            if attempt == 50 or os.name != "nt":
                raise
            time.sleep(0.1)


def lock(folder: Path):
    """Claim a folder for this process: keep what is returned. UserError while another process holds it.

    The system releases it when the process ends, however it ends, so that no stale lock is left.
    """
    file = open(folder / ".lock", "a")
    try:
        if os.name == "nt":
            import msvcrt
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(f"{folder}: another process is at work in this folder - wait for it to end, or choose another folder") from None
    except OSError:                                 # a file system without locks
        pass
    return file


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all (aside, then renamed), UTF-8 with LF on every system."""
    aside = Path(f"{path}.tmp")
    with open(aside, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    replace(aside, path)
