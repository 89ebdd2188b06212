"""Turn text into training data: sources -> curated documents -> tokenizer -> token shards and a manifest.

    python prepare.py                                   Python's own standard library, 12 MB, no network needed
    python prepare.py config/local_cpu.py               the same for the small local model
    python prepare.py --sources=~/code --data_dir=data/mine
    python prepare.py --sources="notes/*.jsonl.gz" --data_dir=data/notes

A source is a folder (every file below it, hidden ones and caches left out), a file, a glob, a Hugging Face dataset
saved on disk, or one by name (hf:NAME, hf:NAME:CONFIG:SPLIT). The rows of .jsonl and .parquet files and of datasets hold
a document each in the field `text_field`; any other file is one document. All but .parquet may be gzipped.
A document of more than 256 KiB is cut into pieces at line ends, and each piece is treated as one.

Writes into data_dir: tokenizer.json, tokenizer_report.json, curation.md (what was dropped and why, with examples),
train_*.pt and val_*.pt (1-D uint16 tensors, every document as `<s> tokens </s>`) and, last, manifest.json. Everything
is built in data_dir/.building and moved when it is whole; an interrupted run goes on there. The same input gives the
same bytes. TokenStream, at the end, reads what this writes.
"""
import bisect
import collections
import errno
import glob
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import stat
import sysconfig
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import config
import curate
import tokenizer
from config import UserError

# settings
data_dir = "data/cipher"                # where the shards go
sources: str | list | dict = "stdlib"   # a path or glob, a list of them, or {name: path or glob}; ~ is expanded
vocab_size = 32768                      # tokens
seed_vocab: str | None = None           # a vocabulary (tokenizer.json, {token: id}) that is kept and completed to vocab_size
val_fraction = 0.05                     # of the text, held out by whole projects
text_field = "text"                     # the field of a row (.jsonl, .parquet, dataset) that holds the document
min_chars = 64                          # shorter documents are dropped
rules_off: str | list = []              # rules of curate.py that are not applied, for example ["near duplicate"]
fim_share = 0.0                         # of the code documents to train on, re-ordered for filling in the middle
mix: dict | None = None                 # {source: share of the training text}; None = as much as there is of each
shard_tokens = 10_000_000               # tokens per shard (2 bytes each)
overwrite = False                       # True: replace what is prepared in data_dir

FORMAT = 2                              # version of the manifest
PIECE = 1 << 18                         # bytes; longer documents are cut, so that memory stays flat and a single file can be split
MAX_ROW = 64 << 20                      # bytes of a .jsonl line, which is held in memory whole
BATCH_DOCUMENTS, BATCH_CHARS = 256, 1 << 22     # encoded at a time
TOKENIZER_BYTES = 100_000_000           # of training text the tokenizer sees; more changes little
MAX_REPEATS = 4                         # more passes over a text are worth little (arXiv 2305.16264)
CODE_SUFFIXES = set(""".py .pyi .js .mjs .jsx .ts .tsx .java .kt .scala .c .h .cc .cpp .cxx .hh .hpp .cs .go .rs .swift .m .rb .php .pl .pm
    .lua .r .jl .hs .ml .ex .exs .erl .clj .lisp .el .sh .bash .zsh .ps1 .sql .vim .zig .nim .d .dart .v .sv .vhd .asm .s .f90 .cu""".split())
WORK = ("spool.jsonl", "records", "tally.json", "encoding", "moving")      # in .building, never moved into place
SHARD = re.compile(r"(train|val)_\d{5}\.pt")
OURS = re.compile(SHARD.pattern + r"|tokenizer\.json|step_\d+\.pt")       # what must not be overwritten unasked
# Folders that prepare.py and train.py have written, by what lies in them, and the files there that are no corpus
WRITTEN = ({"manifest.json", "tokenizer.json", "curation.md"}, {"config.json", "tokenizer.json", "metrics.jsonl"})
OUTPUT = re.compile(SHARD.pattern + r"|step_\d+\.pt.*|(manifest|tokenizer|tokenizer_report|config|best|clock|done|preflight|scorecard)\.json|curation\.md|metrics\..*")
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}


# ----------------------------------------------------------------------------------------------------------
# Sources
# ----------------------------------------------------------------------------------------------------------

def named_sources(given: str | list | dict) -> dict[str, str]:
    """Return {name: path or glob}; a source without a name is called by the last part of its path."""
    if isinstance(given, dict):
        pairs = list(given.items())
    else:
        pairs = [(None, path) for path in (given if isinstance(given, list) else [given])]
    named = {}
    for name, path in pairs:
        if not isinstance(path, str) or not path:
            raise UserError(f"sources: {path!r} must be a path or a glob")
        name = name or Path(path).name or path
        if name in named:
            raise UserError(f'sources: two sources are called "{name}" - name them in a config file: sources = {{"name": "path"}}')
        named[name] = path
    if not named:
        raise UserError("sources: no source given")
    return named


def is_dataset(folder: Path) -> bool:
    """Tell whether a folder is what save_to_disk of Hugging Face datasets writes."""
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()


def find_files(where: str) -> tuple[str, Iterator[str]]:
    """Return (root, files in a fixed order) of a folder, file or glob. Links to folders are not followed (loops)."""
    if where == "stdlib":
        root = sysconfig.get_path("stdlib")
        return root, (p for p in walk(root, {"idle_test"}) if p.endswith(".py") and not any(
            part.startswith("test") for part in p[len(root) + 1:].split(os.sep)))
    path = str(Path(os.path.expanduser(where)))
    if os.path.isdir(path) and not is_dataset(Path(path)):
        return path, walk(path)
    if os.path.exists(path):
        return os.path.dirname(path), iter([path])
    root = os.path.dirname(re.split(r"[*?\[]", path, maxsplit=1)[0])
    found = sorted((p for p in glob.glob(path, recursive=True) if not os.path.isdir(p)), key=os.fsencode)
    if not found:
        raise UserError(f"sources: {where}: no such file or folder, and as a glob it matches no file" + (
            """ - several are a list: --sources='["one", "two"]'""" if "," in where else " - check the path"))
    return root, iter(found)


def walk(folder: str, skipped: set = frozenset()) -> Iterator[str]:
    """Yield the files below a folder in a fixed order, hidden ones and caches left out."""
    closed = []                                     # folders that may not be read: as files they are counted unreadable
    for here, folders, files in os.walk(folder, onerror=lambda error: closed.append(error.filename)):
        folders[:] = sorted((f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS | skipped), key=os.fsencode)
        ours = any(names <= set(files) for names in WRITTEN)
        yield from (os.path.join(here, name) for name in sorted(files, key=os.fsencode) if not name.startswith(".") and not (ours and OUTPUT.fullmatch(name)))
    yield from closed


def source_files(where: str, own: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (file, its path below the source, its project) of a source; what lies in own, our output, is no corpus."""
    root, files = find_files(where)
    inside, prefix = Path(os.path.abspath(root or ".")) in own.parents, os.path.join(own, "")
    for path in files:
        if inside and os.path.abspath(path).startswith(prefix):
            continue
        place = path[len(root):].lstrip(os.sep) or os.path.basename(root)       # the root itself, where it may not be read
        place = os.fsencode(place).decode("utf-8", "replace").replace(os.sep, "/")      # the same in every locale
        first, slash, _ = place.partition("/")
        yield path, place, first if slash else Path(first).stem


def survey(named: dict[str, str], own: Path) -> tuple[str, int]:
    """Return (a hash over path, size and time of every file of the sources, their bytes on disk)."""
    digest, total = hashlib.sha256(), 0
    for name, where in named.items():
        digest.update(f"\0{name}".encode())
        for path, place, _ in source_files(where, own) if not where.startswith("hf:") else ():
            try:
                now = os.stat(path)
            except OSError:
                continue
            digest.update(f"{place}\0{now.st_size}\0{now.st_mtime_ns}\n".encode())
            total += now.st_size
    return digest.hexdigest(), total


def pieces(file) -> Iterator[bytes]:
    """Yield a file in one piece, or cut at line ends into pieces of PIECE to 2 PIECE bytes."""
    carry = b""
    while raw := file.read(PIECE):
        whole, raw = len(raw) < PIECE, carry + raw
        cut = len(raw) if whole else raw.rfind(b"\n") + 1
        if not cut:                                 # a line without end: cut before its last character
            cut = max((i for i in range(len(raw) - 4, len(raw)) if raw[i] & 0xC0 != 0x80), default=len(raw))
        yield raw[:cut]
        carry = raw[cut:]
    if carry:
        yield carry


def library(name: str):
    """Import an optional package; UserError with its install command where it is missing."""
    try:
        return __import__(name.partition(".")[0]) if "." not in name else __import__(name, fromlist=["_"])
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(f"sources: {package} is needed to read this - pip install {package}") from None


def read_rows(path: str, advance: Callable[[int], None]) -> Iterator[dict | str]:
    """Yield each row of a .jsonl or .parquet file or of a dataset, or the reason why it is none."""
    if os.path.isdir(path):
        loaded = library("datasets").load_from_disk(path)
        for part in loaded.values() if isinstance(loaded, dict) else [loaded]:
            yield from part
    elif path.endswith(".parquet"):
        arrow, parquet = library("pyarrow"), library("pyarrow.parquet")
        try:
            for batch in parquet.ParquetFile(path).iter_batches(256):
                yield from batch.to_pylist()
        except (arrow.ArrowException, OSError):
            yield "damaged archive"
    else:
        with open(path, "rb") as raw, gzip.open(raw) if path.endswith(".gz") else raw as file:
            first = True
            while line := file.readline(MAX_ROW + 1):
                advance(raw.tell())
                if len(line) > MAX_ROW:
                    yield "too large"
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_ROW)
                elif line.strip():
                    if first and (line.strip() == b"[" or line.startswith(b"[{")):
                        yield "a JSON array, not lines"
                        return
                    first = False
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError):
                        row = None
                    yield row if isinstance(row, dict) else "bad row"


def row_documents(rows, place: str) -> Iterator[tuple[bytes | None, str, str | None, str | None]]:
    """As read_documents, of rows: the field `repo`, where there is one, is the group, `path` the place."""
    for number, row in enumerate(rows, 1):
        text = None if isinstance(row, str) else row.get(text_field)
        if not isinstance(text, str):
            yield None, f"{place}:{number}", None, row if isinstance(row, str) else f'no text in the field "{text_field}"'
            continue
        repo, inner = row.get("repo"), row.get("path")
        for raw in pieces(io.BytesIO(tokenizer.clean(text).encode("utf-8"))):
            yield raw, tokenizer.clean(inner) if isinstance(inner, str) else f"{place}:{number}", repo if isinstance(repo, str) else None, None


def read_documents(path: str, place: str, project: str, advance: Callable[[int], None]) -> Iterator[tuple[bytes | None, str, str | None, str | None]]:
    """Yield (raw document or None, its place for people, its group, the reason to drop it or None) for each of a file.

    The group is what the split keeps together: the project, or a row's `repo`; None means the document alone.
    advance is told how far the file is read, in bytes.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode) and is_dataset(Path(path)) or stat.S_ISREG(mode) and path.removesuffix(".gz").endswith((".jsonl", ".parquet")):
            yield from row_documents(read_rows(path, advance), place)
        elif not stat.S_ISREG(mode):                # a device or a pipe would hang
            yield None, place, None, "unreadable"
        else:
            with open(path, "rb") as raw, gzip.open(raw) if path.endswith(".gz") else raw as file:
                number = 0
                for number, piece in enumerate(pieces(file), 1):
                    advance(raw.tell())
                    if number == 1 and piece[257:262] == b"ustar":
                        yield None, place, None, "a tar archive, unpack it"
                        break
                    yield piece, place + f", piece {number}" * (number > 1), project, None
                if not number:
                    yield b"", place, project, None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        yield None, place, None, "damaged archive"
    except OSError:
        yield None, place, None, "unreadable"


def hub_documents(name: str) -> Iterator[tuple[bytes | None, str, str | None, str | None]]:
    """As read_documents, of a dataset streamed by name: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT."""
    name, kind, split, *_ = *name.split(":"), "", ""
    try:
        rows = library("datasets").load_dataset(name, kind or None, split=split or "train", streaming=True)
        yield from row_documents(rows, name)
    except (OSError, ValueError, RuntimeError) as error:      # what the library and its network raise
        raise UserError(f"sources: hf:{name}: {(str(error).splitlines() or [type(error).__name__])[0]}") from None


def all_documents(named: dict[str, str], own: Path, progress) -> Iterator[tuple[int, bytes | None, str, str | None, str | None]]:
    """Yield (source number, *read_documents) for every document of all sources in a fixed order."""
    for number, where in enumerate(named.values()):
        if where.startswith("hf:"):
            for document in hub_documents(where[3:]):
                progress.update(len(document[0] or b""))
                yield number, *document
            continue
        for path, place, project in source_files(where, own):
            before = progress.n
            for document in read_documents(path, place, project, lambda position: progress.update(before + position - progress.n)):
                yield number, *document


# ----------------------------------------------------------------------------------------------------------
# Reading: every document through the rules of curate.py, the good ones into a spool
# ----------------------------------------------------------------------------------------------------------

RECORD = np.dtype([("group", "u8"), ("content", "u8"), ("offset", "u8"), ("size", "u4"), ("source", "u2"),
                   ("signature", "u1", curate.HASHES)])             # 155 bytes a document: all that is kept of it in memory
READ_BYTES = 1 << 20                    # given to a worker at a time
SINGLE_BYTES = 32 << 20                 # on disk, up to which reading is over before workers would have started
STOP_BYTES = 64 << 20                   # of text between two states saved while reading: what an interruption costs
EXAMPLES = 3                            # per source and reason in curation.md


def watch_parent() -> None:
    """Set up a worker: Ctrl-C is the parent's to handle, and a parent that was killed must not leave it behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def examine_all(documents: Iterator[tuple], rules: set, workers: int) -> Iterator[tuple[tuple, tuple]]:
    """Yield each of all_documents with what curate.examine says of it (None where it is dropped already), in their order."""
    def batches():
        batch, size = [], 0
        for document in documents:
            batch.append(document)
            size += len(document[1] or b"")
            if size > READ_BYTES or len(batch) == 1024:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    texts = lambda batch: [raw for _, raw, _, _, reason in batch if reason is None]
    results = lambda batch, found: ((document, next(found) if document[4] is None else None) for document in batch)
    if workers < 2:
        for batch in batches():
            yield from results(batch, iter(curate.examine(texts(batch), rules, min_chars)))
        return
    # Processes are started afresh on every system (spawn): forking one with threads may hang.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), watch_parent) as pool:
        ahead = collections.deque()
        try:
            for batch in batches():
                ahead.append((batch, pool.submit(curate.examine, texts(batch), rules, min_chars)))
                if len(ahead) > 2 * workers:
                    batch, future = ahead.popleft()
                    yield from results(batch, iter(future.result()))
            for batch, future in ahead:
                yield from results(batch, iter(future.result()))
        except BrokenProcessPool:
            raise UserError("a reading process was killed, perhaps for want of memory - run the same command again to go on") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def add_example(examples: dict, reason: str, place: str, text: str) -> None:
    """Keep the EXAMPLES documents whose places have the least hashes: any order of reading gives the same."""
    best = examples.setdefault(reason, [])
    best.append([hashlib.sha256(place.encode("utf-8")).hexdigest(), place, text[:400]])
    best.sort()
    del best[EXAMPLES:]


def read_all(named: dict[str, str], own: Path, building: Path, rules: set, tally: dict, total: int, report) -> np.ndarray:
    """Write the documents that pass into building/spool.jsonl, a JSON line [place, text] each; return their RECORDs.

    tally counts what was dropped and scrubbed by source. It is saved beside the spool now and then, and reading goes on
    from what it says was read.
    """
    def save_tally():
        spool.flush()
        records.flush()
        tally.update(spool=spool.tell(), records=records.tell())
        config.write_text(building / "tally.json", json.dumps(tally))

    names, since = list(named), 0
    with open(building / "spool.jsonl", "ab") as spool, open(building / "records", "ab") as records:
        for file, size in ((spool, tally["spool"]), (records, tally["records"])):
            file.truncate(size)                     # what was written after the tally
            file.seek(size)
        progress = tqdm(desc="reading", total=total, unit="B", unit_scale=True, disable=None, leave=False)
        left = itertools.islice(all_documents(named, own, progress), tally["documents"], None) if not tally["done"] else iter(())
        for (number, raw, place, group, reason), found in examine_all(left, rules, min(8, os.cpu_count() or 1) if total > SINGLE_BYTES else 1):
            tally["documents"], since = tally["documents"] + 1, since + len(raw or b"")
            account, text = tally["sources"][names[number]], ""
            if found is not None:
                reason, text, scrubbed, content, signature = found
            if reason is not None:
                account["dropped"][reason] = account["dropped"].get(reason, 0) + 1
                add_example(account["examples"], reason, place, text)
                if reason in ("unreadable", "damaged archive", "a JSON array, not lines", "a tar archive, unpack it") and account["dropped"][reason] <= 10:
                    report(f"  {reason}: {place}")
            else:
                for name, times in scrubbed.items():
                    account["scrubbed"][name] = account["scrubbed"].get(name, 0) + times
                    around = max(0, text.find(curate.REPLACEMENT) - 100) if name == "secret" else 0
                    add_example(account["examples"], name, place, text[around:] if name == "secret" else raw.decode("utf-8-sig"))
                group = f"{content}" if group is None else f"{names[number]}/{group}"
                group = int.from_bytes(hashlib.sha256(group.encode("utf-8", "surrogatepass")).digest()[:8], "little")
                records.write(np.array([(group, content, spool.tell(), len(text.encode("utf-8")), number, np.frombuffer(signature, np.uint8))], RECORD).tobytes())
                spool.write(json.dumps([place, text]).encode("ascii") + b"\n")
            if since > STOP_BYTES:
                save_tally()
                since = 0
        progress.close()
        tally["done"] = True
        save_tally()
    return np.fromfile(building / "records", RECORD)


def find_repeated(records: np.ndarray, rules: set) -> tuple[np.ndarray, np.ndarray]:
    """Return (int64 [n]: which earlier document each one repeats, or -1, bool [n]: exactly, its white space aside)."""
    everyone = np.arange(len(records))
    repeats, exact = np.full(len(records), -1), np.zeros(len(records), bool)
    if "duplicate" in rules:
        _, first, inverse = np.unique(records["content"], return_index=True, return_inverse=True)
        exact = first[inverse] != everyone
        repeats[exact] = first[inverse][exact]
    if "near duplicate" in rules:
        left = everyone[~exact]
        near = curate.near_duplicates(records["signature"][left])
        repeats[left[near >= 0]] = left[near[near >= 0]]
    return repeats, exact


def read_spool(path: Path, offsets) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of the documents at the given offsets, in their order."""
    with open(path, "rb") as file:
        for offset in offsets:
            file.seek(int(offset))                  # free where the lines follow each other
            yield json.loads(file.readline())


def write_report(path: Path, named: dict, tally: dict, spool: Path, records: np.ndarray, repeats: np.ndarray, exact: np.ndarray) -> None:
    """Write curation.md: per source and reason the counts and a few shortened examples."""
    lines = ["# What was kept and what was dropped", "", "Rules, bars and patterns stand in curate.py; `rules_off` turns single ones off. "
             "Examples are drawn at random and cut.", ""]
    for number, (name, where) in enumerate(named.items()):
        account, own = tally["sources"][name], records["source"] == number
        counts = {"kept": int((own & (repeats < 0)).sum())} | dict(sorted(account["dropped"].items()))
        lines += [f"## {name} ({where})", "", "| documents | |", "|---:|---|", *(f"| {n:,} | {reason} |" for reason, n in counts.items() if n)]
        lines += [f"| {n:,} | scrubbed: {what} |" for what, n in sorted(account["scrubbed"].items())] + [""]
        examples = dict(account["examples"])
        for reason, these in (("kept", own & (repeats < 0)), ("duplicate", own & exact), ("near duplicate", own & ~exact & (repeats >= 0))):
            some = np.flatnonzero(these)
            some = some[np.argsort(records["content"][some], kind="stable")[:EXAMPLES]]
            for i, (place, text) in zip(some, read_spool(spool, records["offset"][some])):
                if repeats[i] >= 0:
                    place += " repeats " + next(read_spool(spool, records["offset"][[repeats[i]]]))[0]
                examples.setdefault(reason, []).append(["", place, text[:400]])
        for reason in sorted(examples, key=lambda reason: (reason != "kept", reason)):
            lines += [f"### {reason}", ""]
            for _, place, text in examples[reason]:
                text = re.sub(r"[\x00-\x08\x0e-\x1f\x7f]", "\ufffd", text)
                shown = [f"    {line[:150]}" for line in text.splitlines()[:12] if line.strip()]
                lines += [f"`{place}`", "", *shown, ""]
    config.write_text(path, "\n".join(lines).encode("utf-8", "replace").decode("utf-8"))


def choose_validation(records: np.ndarray, fraction: float, report) -> np.ndarray:
    """Return a bool per document: held out for validation or not. Documents of one group go to one side.

    Groups are taken in the order of their hashes while they fit into the share. Where every group is larger
    than the share (a single project), documents are taken one by one, and that is said.
    """
    sizes = records["size"].astype(np.int64)
    target = fraction * sizes.sum()
    for column in ("group", "content"):
        keys, inverse = np.unique(records[column], return_inverse=True)
        weights = np.bincount(inverse, sizes)
        taken, have = np.zeros(len(keys), bool), 0
        for i, weight in enumerate(weights):
            if have + weight <= 1.05 * target:
                taken[i], have = True, have + weight
        if have >= 0.5 * target:
            return taken[inverse]
        if column == "group":
            report(f"  the {len(keys)} projects (top-level folders) are too large to hold out {fraction:.0%} of the text by "
                   f"whole projects: single documents are held out, and validation loss may flatter the model")
    if len(records) < 2:
        raise UserError("sources: only one document was kept - validation needs another; give more text")
    taken = np.zeros(len(records), bool)
    taken[np.argmin(sizes)] = True                  # a handful of large documents: the smallest one serves
    return taken


def choose_copies(records: np.ndarray, is_val: np.ndarray, named: dict, report) -> np.ndarray:
    """Return how often each document is trained on, so that the sources' shares of the training text are those of mix.

    The text is as long as without a mix: a source short of its share is repeated, one with too much is sampled, by the
    order of its documents' hashes. Documents held out for validation count once.
    """
    copies = np.ones(len(records), np.int64)
    if mix is None:
        return copies
    train = [~is_val & (records["source"] == number) for number in range(len(named))]
    have = np.array([int(records["size"][these].sum()) for these in train])
    if missing := [name for name, n in zip(named, have) if not n]:
        raise UserError(f"mix: nothing to train on is left of the source {missing[0]} - remove it from sources and mix")
    planned = np.array([mix[name] for name in named]) / sum(mix.values())
    times = planned * have.sum() / have
    for these, factor in zip(train, times):
        some = np.flatnonzero(these)
        some = some[np.argsort(records["content"][some], kind="stable")]
        more = np.cumsum(records["size"][some]) - records["size"][some] / 2 < (factor - int(factor)) * records["size"][some].sum()
        copies[some] = int(factor) + more
    reached = np.array([int((records["size"][these] * copies[these]).sum()) for these in train])
    for name, plan, got, factor in zip(named, planned, reached / reached.sum(), times):
        report(f"    {name:<20} planned {plan:>6.1%}, reached {got:>6.1%} of the training text: {factor:.2f} times what there is")
        if factor > MAX_REPEATS:
            report(f"  warning: {name} is repeated {factor:.1f} times - more than {MAX_REPEATS} passes teach next to nothing new; "
                   f"find more of it or lower its share")
    return copies


# ----------------------------------------------------------------------------------------------------------
# Shards
# ----------------------------------------------------------------------------------------------------------

def save_synced(content, path: Path) -> None:
    """torch.save to the disk itself. OSError if it could not be written, which torch reports in words of its own.

    Through an open file: given a path, torch writes the file's name into it, and equal contents differ.
    """
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            raise OSError(errno.ENOSPC, "could not be written whole, is the disk full?", str(path)) from error
        file.flush()
        os.fsync(file.fileno())


class ShardWriter:
    """Cut a stream of token arrays into files of shard_tokens tokens and keep the account for the manifest."""

    def __init__(self, folder: Path, split: str, shard_tokens: int):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.pending, self.n_pending = [], 0
        self.account = dict(tokens=0, documents=0, text_bytes=0, shards=[])

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        self.pending.append(ids)
        self.n_pending += len(ids)
        self.account["documents"] += 1
        self.account["text_bytes"] += text_bytes
        while self.n_pending >= self.shard_tokens:
            self.write(self.shard_tokens)

    def write(self, n_tokens: int) -> None:
        """Write the first n_tokens pending tokens as the next shard."""
        joined = np.concatenate(self.pending)
        self.pending, self.n_pending = [joined[n_tokens:]], len(joined) - n_tokens
        path = self.folder / f"{self.split}_{len(self.account['shards']):05d}.pt"
        save_synced(torch.from_numpy(joined[:n_tokens]).clone(), path)       # a slice would save its whole buffer
        self.account["tokens"] += n_tokens
        self.account["shards"].append(dict(file=path.name, tokens=n_tokens, sha256=config.sha256_file(path)))

    def close(self) -> dict:
        if self.n_pending:
            self.write(self.n_pending)
        return self.account


def lay_out(text: str, fim: bool, seed: list[int], tok) -> list[str | int]:
    """Return the parts of a document in their order: texts to encode and the ids of control tokens.

    A plain one is <s> text </s>. For filling in the middle (arXiv 2207.14255) a text is cut at two random characters and
    becomes, half the time each, <s> <fim_prefix> prefix <fim_suffix> suffix <fim_middle> middle </s> (PSM) or
    <s> <fim_prefix> <fim_suffix> suffix <fim_middle> prefix middle </s> (SPM): the three parts put together are the text.
    """
    begin, end, before, after, middle = map(tok.token_to_id, ("<s>", "</s>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    if not fim:
        return [begin, text, end]
    random = np.random.default_rng(seed)
    one, two = sorted(random.integers(len(text) + 1, size=2).tolist())
    if random.random() < 0.5:
        return [begin, before, text[:one], after, text[two:], middle, text[one:two], end]
    return [begin, before, after, text[two:], middle, text[:one], text[one:two], end]


def encode_batches(encode: Callable, layouts: Iterator[list[str | int]]) -> Iterator[list[tuple[list[str | int], np.ndarray]]]:
    """Yield [(layout, its ids)] batch by batch; while one is written the next is encoded, on all cores."""
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:         # the encoders let go of the interpreter lock
        def submit(batch):
            texts = [[part for layout in batch[i::cores] for part in layout if isinstance(part, str)] for i in range(cores)]
            return batch, [pool.submit(encode, some) for some in texts]

        def collect(batch, futures):
            arrays = [iter(future.result()) for future in futures]
            for i, layout in enumerate(batch):
                yield layout, np.concatenate([next(arrays[i % cores]) if isinstance(part, str) else [part] for part in layout])

        ahead, batch, chars = None, [], 0
        for layout in layouts:
            batch.append(layout)
            chars += sum(len(part) for part in layout if isinstance(part, str))
            if len(batch) == BATCH_DOCUMENTS or chars > BATCH_CHARS:
                previous, ahead, batch, chars = ahead, submit(batch), [], 0
                if previous:
                    yield list(collect(*previous))
        for rest in (ahead, submit(batch)):
            if rest and rest[0]:
                yield list(collect(*rest))


def tokenize(tok, spool: Path, records: np.ndarray, order: np.ndarray, is_val: np.ndarray, named: dict, folder: Path) -> tuple[dict, dict, dict]:
    """Encode documents into shards, in the given order: int64 [n, 2], which one and its how manieth copy (0 is the first).

    Returns (account per split, account per source, statistics for the gates). After each full shard the state is saved, and an interrupted run goes on from there.
    """
    writers = {split: ShardWriter(folder, split, shard_tokens) for split in ("train", "val")}
    names, used = list(named), np.zeros(vocab_size, bool)
    state = dict(position=0, sources={name: dict(path=where, documents=0, text_bytes=0, tokens=0, val_tokens=0, fim_documents=0) for name, where in named.items()},
                 stats=dict(text_bytes=0, text_tokens=0, sampled=0, sampled_words=0, sampled_tokens=0, failed=0))
    state_file = folder / "encoding"
    if state_file.is_file():
        state = torch.load(state_file, weights_only=True)
        used = state.pop("used").numpy()
        for split, (account, pending) in state.pop("writers").items():
            writers[split].account, writers[split].pending, writers[split].n_pending = account, [pending.numpy()], len(pending)
    stats, n_shards = state["stats"], lambda: sum(len(w.account["shards"]) for w in writers.values())
    offsets, sizes, saved = records["offset"], records["size"], n_shards()
    encode, library = tokenizer.batch_encoder(tok, [text for _, text in read_spool(spool, offsets[order[:64, 0]])])
    progress = tqdm(desc=f"encoding with {library}", total=int(sizes[order[:, 0]].sum()), initial=int(sizes[order[:state["position"], 0]].sum()),
                    unit="B", unit_scale=True, disable=None, leave=False)

    def layouts(order):
        for (index, copy), (place, text) in zip(order.tolist(), read_spool(spool, offsets[order[:, 0]])):
            seed = [int(records["content"][index]), copy]
            code = Path(place.partition(", piece ")[0].removesuffix(".gz")).suffix.lower() in CODE_SUFFIXES
            yield lay_out(text, code and not is_val[index] and np.random.default_rng([*seed, 1]).random() < fim_share, seed, tok)

    for batch in encode_batches(encode, layouts(order[state["position"]:])):
        for layout, ids in batch:
            index = order[state["position"], 0]
            assert ids.max() < vocab_size <= tokenizer.MAX_VOCAB, (ids.max(), vocab_size)   # uint16 would wrap silently
            size = int(sizes[index])
            writers["val" if is_val[index] else "train"].add(ids.astype(np.uint16), size)
            account = state["sources"][names[records["source"][index]]]
            account["documents"] += 1
            account["text_bytes"] += size
            account["tokens"] += len(ids)
            account["val_tokens"] += len(ids) * bool(is_val[index])          # in the split they lie source after source
            account["fim_documents"] += len(layout) > 3
            used[ids] = True
            stats["text_bytes"] += size
            stats["text_tokens"] += len(ids) - 2
            if state["position"] % 20 == 0:
                text = "".join(part for part in layout if isinstance(part, str))
                stats["sampled"] += 1
                stats["sampled_words"] += len(text.split())
                stats["sampled_tokens"] += len(ids) - 2
                stats["failed"] += tok.decode(ids.tolist()) != text      # less the control tokens
            state["position"] += 1
            progress.update(size)
        if n_shards() > saved:
            saved = n_shards()
            pending = {split: (w.account, torch.from_numpy(np.concatenate([*w.pending, np.zeros(0, np.uint16)]))) for split, w in writers.items()}
            save_synced(state | dict(used=torch.from_numpy(used), writers=pending), folder / "encoding.tmp")
            config.replace(folder / "encoding.tmp", state_file)
    progress.close()
    used[[tok.token_to_id(token) for token in (*tokenizer.CONTROL, *tokenizer.STRUCTURE)]] = False
    return {s: w.close() for s, w in writers.items()}, state["sources"], stats | dict(used=int(used.sum()))


# ----------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------

def read_manifest(data_dir: str | Path) -> dict:
    """Return data_dir/manifest.json; UserError where there is none or it is not one of ours."""
    path = Path(data_dir) / "manifest.json"
    if not path.is_file():
        raise UserError(f"{data_dir}: no prepared data here (no manifest.json) - run python prepare.py first, with the "
                        f"same config file, or set data_dir")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["version"] != FORMAT:
            raise UserError(f"{path}: made by another version of prepare.py - run prepare.py again")
        for split in ("train", "val"):              # the parts every reader relies on
            for shard in manifest["splits"][split]["shards"]:
                shard["file"] + shard["sha256"], shard["tokens"] + manifest["splits"][split]["tokens"] + manifest["vocab_size"] + manifest["document_start"]
        manifest["tokenizer_sha256"] + manifest["corpus_sha256"], manifest["settings"].get("sources"), manifest["sources"].items()
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{path}: damaged - run prepare.py again with --overwrite=True") from None
    return manifest


def already_prepared(folder: Path, settings: dict) -> bool:
    """True where folder holds finished data of the same settings; UserError where its settings differ."""
    if overwrite or not (folder / "manifest.json").exists():
        return False
    before = read_manifest(folder)["settings"]
    different = [f"{name}={before.get(name)!r} there, {value!r} now" for name, value in settings.items() if before.get(name) != value]
    if different:
        raise UserError(f"{folder}: holds data prepared with other settings ({'; '.join(different)}) - "
                        f"--overwrite=True replaces it, another --data_dir keeps both")
    return True


def print_summary(manifest: dict) -> None:
    total = sum(s["tokens"] for s in manifest["sources"].values())
    print(f"  {'source':<20} {'documents':>10} {'MB':>9} {'tokens':>13} {'share':>6}")
    for name, s in manifest["sources"].items():
        print(f"  {name:<20} {s['documents']:>10,} {s['text_bytes'] / 1e6:>9.2f} {s['tokens']:>13,} {s['tokens'] / total:>6.1%}")
    if len(manifest["sources"]) > 1 and (most := max(manifest["sources"].items(), key=lambda s: s[1]["tokens"]))[1]["tokens"] > 0.8 * total:
        print(f"  warning: {most[0]} is {most[1]['tokens'] / total:.0%} of the tokens - the model will mostly learn that source")
    for split, s in manifest["splits"].items():
        print(f"  {split:<20} {s['documents']:>10,} {s['text_bytes'] / 1e6:>9.2f} {s['tokens']:>13,}   in {len(s['shards'])} shard(s)")
    print("  dropped:", ", ".join(f"{n:,} {reason}" for reason, n in manifest["dropped"].items()) or "nothing")


def move_into_place(building: Path, folder: Path) -> None:
    """Move finished data from building to folder, the manifest last: without it nothing trains on a mixture.

    What stands in folder goes only now that the new is whole. Stopped in between, the next run goes on here.
    """
    (folder / "manifest.json").unlink(missing_ok=True)
    for old in folder.iterdir():
        if SHARD.fullmatch(old.name) and not (building / "moving").exists():
            old.unlink()
    (building / "moving").touch()
    for new in sorted(building.iterdir(), key=lambda p: p.name == "manifest.json"):
        if new.name not in WORK:
            config.replace(new, folder / new.name)
    shutil.rmtree(building)


def main():
    settings = config.override(globals())
    del settings["overwrite"], settings["data_dir"]
    tokenizer.check_vocab_size(vocab_size)
    mistakes = [f"{name}={value} must be {bar}" for name, value, bar, good in (
        ("val_fraction", val_fraction, "above 0 and at most 0.5", 0 < val_fraction <= 0.5),
        ("fim_share", fim_share, "between 0 and 1", 0 <= fim_share <= 1),
        ("min_chars", min_chars, "0 or more", min_chars >= 0),
        ("rules_off", rules_off, f"some of {', '.join(curate.RULES)}", not rules_off or set([rules_off] if isinstance(rules_off, str) else rules_off) <= set(curate.RULES)),
        ("shard_tokens", shard_tokens, "1,000 or more", shard_tokens >= 1000)) if not good]
    if mistakes:
        raise UserError("\n".join(mistakes))
    seed = None if seed_vocab is None else tokenizer.read_seed_vocab(seed_vocab, vocab_size)
    named = named_sources(sources)
    if mix is not None and (set(mix) != set(named) or not all(type(share) in (int, float) and share > 0 for share in mix.values())):
        raise UserError(f"mix={mix} must give every source ({', '.join(named)}) a share above 0")
    folder = Path(data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    held = config.lock(folder)                      # noqa: F841 - until the process ends
    building = folder / ".building"
    if (building / "manifest.json").exists():       # whole: a run was stopped in the moment of the move
        move_into_place(building, folder)
    if already_prepared(folder, settings):
        print(f"{folder}: already prepared with these settings (--overwrite=True prepares again)")
        print_summary(read_manifest(folder))
        return
    foreign = [p.name for p in folder.iterdir() if OURS.fullmatch(p.name)]
    if foreign and not overwrite:                   # without a manifest: one would have ended the run above
        raise UserError(f"{folder}: holds {foreign[0]} but no manifest.json, so no finished data of prepare.py - choose another --data_dir, or "
                        f"--overwrite=True replaces it")
    rules = set(curate.RULES) - set([rules_off] if isinstance(rules_off, str) and rules_off else rules_off)
    survey_hash, total = survey(named, folder.absolute())
    read = [config.sha256_file(path) for path in (curate.__file__, tokenizer.__file__, __file__, *[seed_vocab] * (seed is not None))]
    tally = dict(key=hashlib.sha256(json.dumps([settings, survey_hash, read]).encode("utf-8", "surrogatepass")).hexdigest(), documents=0,
                 spool=0, records=0, done=False, sources={name: dict(dropped={}, scrubbed={}, examples={}) for name in named})
    try:
        before = json.loads((building / "tally.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    if before.get("key") == tally["key"]:
        tally = before
        print(f"going on with what was begun: {tally['documents']:,} documents are read")
    else:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
    spool = building / "spool.jsonl"

    print(f"1/3 reading and curating {', '.join(f'{name} ({where})' if name != where else name for name, where in named.items())}")
    records = read_all(named, folder.absolute(), building, rules, tally, total, tqdm.write)
    repeats, exact = find_repeated(records, rules)
    for number, account in enumerate(tally["sources"].values()):
        own = records["source"] == number
        account["dropped"] |= {reason: int(n) for reason, n in (("duplicate", (own & exact).sum()), ("near duplicate", (own & ~exact & (repeats >= 0)).sum())) if n}
    write_report(building / "curation.md", named, tally, spool, records, repeats, exact)
    dropped = {reason: sum(account["dropped"].get(reason, 0) for account in tally["sources"].values())
               for reason in sorted({reason for account in tally["sources"].values() for reason in account["dropped"]})}
    records = records[repeats < 0]
    if not len(records):
        raise UserError(f"sources: no usable document in {', '.join(named.values())} "
                        f"({', '.join(f'{n} {reason}' for reason, n in dropped.items()) or 'no files'}) - "
                        + (f"--text_field= names the field that holds the text" if any("in the field" in reason for reason in dropped) else
                           f"{folder / 'curation.md'} has examples, --rules_off= turns rules off" if dropped else
                           f"hidden files and folders called {', '.join(sorted(SKIPPED_FOLDERS))} are left out; give the folder of the text itself"))
    is_val = choose_validation(records, val_fraction, print)
    sizes = records["size"].astype(np.int64)
    print(f"    {len(records):,} documents, {sizes.sum() / 1e6:.1f} MB kept, {sum(dropped.values()):,} dropped (why: {folder / 'curation.md'}); "
          f"{is_val.sum():,} held out for validation")
    copies = choose_copies(records, is_val, named, print)
    order = np.concatenate([np.stack([some, np.full(len(some), n)], 1) for n in range(copies.max()) for some in [np.flatnonzero(copies > n)]])

    # The documents whose hashes are least, up to TOKENIZER_BYTES.
    train_bytes = int(sizes[~is_val & (copies > 0)].sum())
    sample = ~is_val & (copies > 0) & (records["content"] <= np.uint64(min(1, TOKENIZER_BYTES / max(1, train_bytes)) * (2 ** 64 - 2 ** 12)))
    print(f"2/3 training the tokenizer, {vocab_size:,} tokens (about {sizes[sample].sum() * 0.4e-6 + 1:.0f} s)")
    if not (building / "tokenizer.json").is_file():
        tokenizer.train_tokenizer((text for _, text in read_spool(spool, records["offset"][sample])), vocab_size, building / "tokenizer.json", seed)
    tok = tokenizer.load_tokenizer(building / "tokenizer.json")
    print("3/3 encoding")
    splits, per_source, stats = tokenize(tok, spool, records, order, is_val, named, building)
    rows = tokenizer.gates(tok, vocab_size, stats, seed)
    tokenizer.print_gates(rows)
    if failed := [row["gate"] for row in rows if not row["passed"]]:
        print(f"  warning: the tokenizer fails {', '.join(failed)} - look at curation.md for text that is none, give more text, or set another --vocab_size")
    config.write_text(building / "tokenizer_report.json", json.dumps(dict(gates=rows, statistics=stats), indent=1) + "\n")
    for name, account in tally["sources"].items():
        per_source[name] |= dict(dropped=dict(sorted(account["dropped"].items())), scrubbed=dict(sorted(account["scrubbed"].items())))
    manifest = dict(
        version=FORMAT, vocab_size=vocab_size, document_start=tok.token_to_id("<s>"), tokenizer_sha256=config.sha256_file(building / "tokenizer.json"),
        corpus_sha256=config.sha256_file(spool), splits=splits, sources=per_source, dropped=dropped, settings=settings,
        python=platform.python_version())
    config.write_text(building / "manifest.json", json.dumps(manifest, indent=1) + "\n")

    move_into_place(building, folder)
    print(f"{folder}: ready")
    print_summary(manifest)
    print(f"next: {config.command('train.py')}")


# ----------------------------------------------------------------------------------------------------------
# The reader
# ----------------------------------------------------------------------------------------------------------

class TokenStream:
    """The windows of one split, seq_len tokens each and the token behind them, in a fixed random order.

    Validation is cut every seq_len tokens, so that each counts once. A training window begins where the one before it
    ends, or, where that end cuts a document that began inside it, at that document: its beginning is read twice, but
    no document loses its beginning to a cut. At equal training, mean of three seeds that differ by 0.06, 5.27 nats instead of 5.35
    on documents from their start and 5.45 instead of 5.48 on windows cut every seq_len tokens (1M tokens of Go and Rust tests, 264
    tokens each, seq_len 512). Attention crosses from a document into those before it: masking that gave 0.02 to 0.06, for a slower kernel.

    Window number n of the endless sequence is window perm(seed, pass)[place] with pass, place = divmod(n, W): every
    window once a pass, another order each pass, and position n = token_offset // seq_len is all there is to resume.
    """

    def __init__(self, data_dir: str | Path, split: str, seq_len: int, seed: int):
        """Open and verify a split. UserError for missing, damaged, swapped or unlisted shards or too few tokens."""
        folder, manifest = Path(data_dir), read_manifest(data_dir)
        self.seq_len, self.seed, self.manifest = seq_len, seed, manifest
        account = manifest["splits"][split]
        listed = {shard["file"] for shard in account["shards"]}
        if extra := sorted(p.name for p in folder.glob(f"{split}_*.pt") if p.name not in listed):
            raise UserError(f"{folder / extra[0]}: a shard that manifest.json does not list - remove it, or run prepare.py again with --overwrite=True")
        self.shards = []
        for shard in account["shards"]:
            path = folder / shard["file"]
            if not path.is_file():
                raise UserError(f"{path}: missing, though manifest.json lists it - copy it again, or run prepare.py again with --overwrite=True")
            if config.sha256_file(path) != shard["sha256"]:
                raise UserError(f"{path}: damaged (its SHA-256 is not the manifest's) - copy it again, or run prepare.py again with --overwrite=True")
            try:
                tokens = torch.load(path, mmap=True, weights_only=True)
                assert tokens.dtype == torch.uint16 and tokens.dim() == 1
            except Exception:                       # unpickling a foreign file can raise nearly anything
                raise UserError(f"{path}: not a shard, though its SHA-256 is the manifest's - run prepare.py again") from None
            self.shards.append(tokens)
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])    # first token of each shard, and the end
        self.n_tokens = int(self.starts[-1])
        self.windows = self.cut(manifest["document_start"]) if split == "train" else range(0, self.n_tokens - seq_len, seq_len)
        self.n_windows = len(self.windows)          # their first tokens
        if self.n_windows < 1:
            raise UserError(f"{folder}: the {split} split has {self.n_tokens} tokens, fewer than one window of seq_len + 1 = "
                            f"{seq_len + 1} - prepare more text or set a smaller seq_len")
        self.order = (-1, None)                     # (pass, its permutation)

    def cut(self, document_start: int) -> np.ndarray:
        """Return the first token of every training window, int64. document_start: the id a document begins with."""
        documents = [place for shard, start in zip(self.shards, self.starts) for place in (np.flatnonzero(shard.numpy() == document_start) + start).tolist()]
        windows, begin, document = [], 0, 0
        while begin + self.seq_len < self.n_tokens:
            windows.append(begin)
            document = bisect.bisect_right(documents, begin + self.seq_len, document)       # the first that begins later
            cut = documents[document - 1] if document else 0
            begin = cut if cut > begin else begin + self.seq_len
        return np.array(windows, np.int64)

    def tokens(self, start: int, stop: int) -> torch.Tensor:
        """Return tokens [start, stop) of the joined shards as int64 (uint16 has next to no arithmetic)."""
        parts, shard = [], int(np.searchsorted(self.starts, start, "right")) - 1
        while start < stop:
            end = min(stop, int(self.starts[shard + 1]))
            parts.append(self.shards[shard][start - int(self.starts[shard]):end - int(self.starts[shard])].long())
            start, shard = end, shard + 1
        return torch.cat(parts)

    def window_number(self, n: int) -> int:
        """Return which window the n-th of the endless sequence is."""
        number, place = divmod(n, self.n_windows)
        if self.order[0] != number:
            self.order = (number, np.random.default_rng([self.seed, number]).permutation(self.n_windows))
        return int(self.order[1][place])

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return windows first ... first + count - 1 of the sequence as (inputs, targets), int64 [count, seq_len] each."""
        starts = [int(self.windows[self.window_number(n)]) for n in range(first, first + count)]
        windows = torch.stack([self.tokens(start, start + self.seq_len + 1) for start in starts])
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


if __name__ == "__main__":
    config.run(main)
