"""Turn text into training data: sources -> curated documents -> tokenizer -> token shards and a manifest.

    python prepare.py                                   Python's own standard library, 12 MB, no network needed
    python prepare.py config/local_cpu.py               the same for the small local model
    python prepare.py --sources=~/code --data_dir=data/mine
    python prepare.py --sources="notes/*.jsonl.gz" --data_dir=data/notes

A source is a folder (every file below it, hidden ones and caches left out), a file or a glob. `.jsonl` holds a
document per line in the field `jsonl_field`; any other file is one document; each may be gzipped.

Writes into data_dir: tokenizer.json, tokenizer_report.json, train_*.pt and val_*.pt (1-D uint16 tensors,
every document as `<s> tokens </s>`) and, last, manifest.json. Everything is built in data_dir/.building and
moved when it is whole. The same input gives the same bytes. TokenStream, at the end, reads what this writes.
"""
import errno
import glob
import gzip
import hashlib
import json
import os
import platform
import re
import shutil
import sysconfig
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import config
import tokenizer
from config import UserError

# settings
data_dir = "data/cipher"                # where the shards go
sources: str | list | dict = "stdlib"   # a path or glob, a list of them, or {name: path or glob}; ~ is expanded
vocab_size = 32768                      # tokens
val_fraction = 0.05                     # of the text, held out by whole projects
min_chars = 64                          # shorter documents are dropped
jsonl_field = "text"                    # the field of a .jsonl line that holds the document
shard_tokens = 10_000_000               # tokens per shard (2 bytes each)
overwrite = False                       # True: replace what is prepared in data_dir

FORMAT = 1                              # version of the manifest
MAX_DOCUMENT = 64 << 20                 # bytes; a document is held in memory, so a larger one is dropped
BATCH_DOCUMENTS, BATCH_CHARS = 64, 1 << 22  # one encode_batch call: larger ones hold all their encodings at once
SHARD = re.compile(r"(train|val)_\d{5}\.pt")
OURS = re.compile(SHARD.pattern + r"|tokenizer\.json|step_\d+\.pt")       # what must not be overwritten unasked
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


def find_files(where: str) -> tuple[Path, Iterator[Path]]:
    """Return (root, files in a fixed order) of a folder, file or glob. Links to folders are not followed (loops)."""
    if where == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return root, (p for p in walk(root, {"idle_test"}) if p.suffix == ".py" and not any(
            part.startswith("test") for part in p.relative_to(root).parts))
    path = Path(os.path.expanduser(where))
    if path.is_dir():
        return path, walk(path)
    if path.exists():
        return path.parent, iter([path])
    fixed = re.split(r"[*?\[]", str(path), maxsplit=1)[0]
    root = Path(fixed if fixed.endswith(("/", os.sep)) else os.path.dirname(fixed) or ".")
    found = sorted(p for p in glob.glob(str(path), recursive=True) if not os.path.isdir(p))
    if not found:
        raise UserError(f"sources: {where}: no such file or folder, and as a glob it matches nothing")
    return root, map(Path, found)


def walk(folder: Path, skipped: set = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder in a fixed order, hidden ones and caches left out."""
    closed = []                                     # folders that may not be read: as files they are counted unreadable
    for here, folders, files in os.walk(folder, onerror=lambda error: closed.append(error.filename)):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS | skipped)
        yield from (Path(here, name) for name in sorted(files) if not name.startswith("."))
    yield from map(Path, closed)


def read_documents(path: Path, group: str | None) -> Iterator[tuple[bytes | str | None, str | None, str | None]]:
    """Yield (raw document, its group, None) or (None, None, reason to drop it) for each document of a file.

    The group is what the split keeps together: the given one, or a line's `repo`; None means the document alone.
    """
    lines = path.name.removesuffix(".gz").endswith(".jsonl")
    try:
        if not path.is_file():                      # a device or a pipe would hang
            yield None, None, "unreadable"
            return
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            if not lines:
                raw = file.read(MAX_DOCUMENT + 1)
                yield (raw, group, None) if len(raw) <= MAX_DOCUMENT else (None, None, "too large")
                return
            while line := file.readline(MAX_DOCUMENT + 1):
                if len(line) > MAX_DOCUMENT:
                    yield None, None, "too large"
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_DOCUMENT)
                elif line.strip():
                    try:
                        row = json.loads(line)
                        text, repo = row[jsonl_field], row.get("repo")
                    except (ValueError, TypeError, KeyError, RecursionError):
                        text = None
                    if isinstance(text, str):
                        yield text, repo if isinstance(repo, str) else None, None
                    else:
                        yield None, None, "bad jsonl line"
    except (EOFError, zlib.error, gzip.BadGzipFile):
        yield None, None, "damaged archive"
    except OSError:
        yield None, None, "unreadable"


# ----------------------------------------------------------------------------------------------------------
# Curation: a function per rule, each returns the reason to drop a document, or None
# ----------------------------------------------------------------------------------------------------------

def undecodable(raw: bytes) -> str | None:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"


def binary(text: str) -> str | None:
    """A NUL, or more than one control character in fifty, is no text."""
    if "\0" in text or 50 * len(re.findall(r"[\x01-\x08\x0e-\x1f\x7f]", text)) > len(text):
        return "binary"


def too_short(text: str) -> str | None:
    stripped = len(text.strip())
    if stripped < min_chars:
        return "too short" if stripped else "empty"


def minified(text: str) -> str | None:
    """Lines no person wrote: one of more than 20,000 characters, or 500 on average over the document."""
    lines = text.splitlines()
    if len(text) > 500 * len(lines) and len(text) > 5000 or max(map(len, lines), default=0) > 20_000:
        return "minified"


def content_digest(text: str) -> bytes:
    """Hash a text by its words: copies that differ in white space or line ends alone are duplicates."""
    return hashlib.sha256(" ".join(text.split()).encode("utf-8")).digest()[:16]


def curate(named: dict[str, str], own: Path, spool, report) -> tuple[np.ndarray, Counter]:
    """Write the documents to keep into the spool, a JSON line [source number, text] each; what lies in own is left out.

    Returns a record per document (hash of its group, hash of its content, bytes) and the dropped ones by reason.
    A copy is dropped wherever it lies; the first in the order of sources and paths stays.
    """
    seen, dropped = set(), Counter()
    groups, contents, sizes = array("Q"), array("Q"), array("Q")      # 24 bytes a document, beside 100 in `seen`
    progress = tqdm(desc="reading", unit="B", unit_scale=True, disable=None, leave=False)
    for number, (name, where) in enumerate(named.items()):
        root, files = find_files(where)
        for path in files:
            if own in path.absolute().parents:      # data_dir inside a source: what we wrote ourselves is no corpus
                continue
            parts = path.relative_to(root).parts or (root.name,)            # the root itself, where it may not be read
            project = Path(parts[0]).stem if len(parts) == 1 else parts[0]
            for raw, group, reason in read_documents(path, project):
                text = None
                if reason is None and isinstance(raw, bytes):
                    progress.update(len(raw))
                    reason = undecodable(raw)
                    text = raw.decode("utf-8-sig") if reason is None else None    # the byte order mark is no text
                elif reason is None:
                    text = tokenizer.clean(raw)
                    progress.update(len(text))
                for rule in (too_short, binary, minified):
                    reason = reason or rule(text)
                if reason is None:
                    digest = content_digest(text)
                    reason = "duplicate" if digest in seen else None
                if reason is not None:
                    dropped[reason] += 1
                    if reason in ("unreadable", "damaged archive"):
                        report(f"  {reason}: {path}")
                    continue
                seen.add(digest)
                group = digest if group is None else f"{name}/{group}".encode("utf-8", "surrogatepass")
                groups.append(int.from_bytes(hashlib.sha256(group).digest()[:8], "little"))
                contents.append(int.from_bytes(digest[:8], "little"))
                data = text.encode("utf-8")
                sizes.append(len(data))
                spool.write(json.dumps([number, text]) + "\n")
    progress.close()
    return np.stack([np.frombuffer(column, dtype=np.uint64) for column in (groups, contents, sizes)], 1), dropped


def choose_validation(records: np.ndarray, fraction: float, report) -> np.ndarray:
    """Return a bool per document: held out for validation or not. Documents of one group go to one side.

    Groups are taken in the order of their hashes while they fit into the share. Where every group is larger
    than the share (a single project), documents are taken one by one, and that is said.
    """
    sizes = records[:, 2].astype(np.int64)
    target = fraction * sizes.sum()
    for column in (0, 1):
        keys, inverse = np.unique(records[:, column], return_inverse=True)
        weights = np.bincount(inverse, sizes)
        taken, have = np.zeros(len(keys), bool), 0
        for i, weight in enumerate(weights):
            if have + weight <= 1.05 * target:
                taken[i], have = True, have + weight
        if have >= 0.5 * target:
            return taken[inverse]
        if column == 0:
            report(f"  the {len(keys)} projects (top-level folders) are too large to hold out {fraction:.0%} of the text by "
                   f"whole projects: single documents are held out, and validation loss may flatter the model")
    if len(records) < 2:
        raise UserError("sources: only one document was kept - validation needs another; give more text")
    taken = np.zeros(len(records), bool)
    taken[np.argmin(sizes)] = True                  # a handful of large documents: the smallest one serves
    return taken


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


def read_spool(path: Path) -> Iterator[tuple[int, str]]:
    with open(path, encoding="utf-8", newline="\n") as file:
        for line in file:
            yield json.loads(line)


def encode_batches(tok, spool: Path) -> Iterator[tuple[list[tuple[int, str]], list[list[int]]]]:
    """Yield ([(source number, text)], [ids]) batch by batch; encode_batch_fast keeps all cores busy."""
    def encoded(batch):
        return batch, [e.ids for e in tok.encode_batch_fast([text for _, text in batch], add_special_tokens=False)]

    batch, chars = [], 0
    for document in read_spool(spool):
        batch.append(document)
        chars += len(document[1])
        if len(batch) == BATCH_DOCUMENTS or chars > BATCH_CHARS:
            yield encoded(batch)
            batch, chars = [], 0
    if batch:
        yield encoded(batch)


def tokenize(tok, spool: Path, is_val: np.ndarray, named: dict, folder: Path, n_bytes: int) -> tuple[dict, dict, dict]:
    """Encode the spool into shards. Returns (account per split, account per source, statistics for the gates)."""
    begin, end = tok.token_to_id("<s>"), tok.token_to_id("</s>")
    writers = {split: ShardWriter(folder, split, shard_tokens) for split in ("train", "val")}
    per_source = {name: dict(path=where, documents=0, text_bytes=0, tokens=0) for name, where in named.items()}
    names, used = list(named), np.zeros(vocab_size, np.int64)
    stats = dict(text_bytes=0, text_tokens=0, words=0, sampled=0, failed=0)
    progress = tqdm(desc="encoding", total=n_bytes, unit="B", unit_scale=True, disable=None, leave=False)
    index = 0
    for batch, encoded in encode_batches(tok, spool):
        for (number, text), ids in zip(batch, encoded):
            ids = np.array([begin, *ids, end], np.int64)
            assert ids.max() < vocab_size <= tokenizer.MAX_VOCAB, (ids.max(), vocab_size)   # uint16 would wrap silently
            size = len(text.encode("utf-8"))
            writers["val" if is_val[index] else "train"].add(ids.astype(np.uint16), size)
            account = per_source[names[number]]
            account["documents"] += 1
            account["text_bytes"] += size
            account["tokens"] += len(ids)
            used += np.bincount(ids, minlength=vocab_size)
            stats["text_bytes"] += size
            stats["text_tokens"] += len(ids) - 2
            stats["words"] += len(text.split())
            if index % 20 == 0:
                stats["sampled"] += 1
                stats["failed"] += tokenizer.decode(tok, ids[1:-1].tolist()) != text
            index += 1
            progress.update(size)
    progress.close()
    fixed = len(tokenizer.CONTROL) + len(tokenizer.STRUCTURE)
    return {s: w.close() for s, w in writers.items()}, per_source, stats | dict(used=int((used[fixed:] > 0).sum()))


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
                shard["file"] + shard["sha256"], shard["tokens"] + manifest["splits"][split]["tokens"] + manifest["vocab_size"]
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
        if new.name != "moving":
            config.replace(new, folder / new.name)
    (building / "moving").unlink()
    building.rmdir()


def main():
    settings = config.override(globals())
    del settings["overwrite"], settings["data_dir"]
    tokenizer.check_vocab_size(vocab_size)
    mistakes = [f"{name}={value} must be {bar}" for name, value, bar, good in (
        ("val_fraction", val_fraction, "between 0 and 0.5", 0 < val_fraction <= 0.5),
        ("min_chars", min_chars, "0 or more", min_chars >= 0),
        ("shard_tokens", shard_tokens, "1,000 or more", shard_tokens >= 1000)) if not good]
    if mistakes:
        raise UserError("\n".join(mistakes))
    named = named_sources(sources)
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
    shutil.rmtree(building, ignore_errors=True)     # what an interrupted run left
    building.mkdir(parents=True)

    print(f"1/3 reading and curating {', '.join(f'{name} ({where})' if name != where else name for name, where in named.items())}")
    with open(building / "spool.jsonl", "w", encoding="utf-8", newline="\n") as spool:
        records, dropped = curate(named, folder.absolute(), spool, tqdm.write)
    if not len(records):
        raise UserError(f"sources: no usable document in {', '.join(named.values())} "
                        f"({', '.join(f'{n} {reason}' for reason, n in dropped.items()) or 'no files'})")
    is_val = choose_validation(records, val_fraction, print)
    n_bytes = int(records[:, 2].sum())
    print(f"    {len(records):,} documents, {n_bytes / 1e6:.1f} MB kept, {sum(dropped.values()):,} dropped; "
          f"{is_val.sum():,} held out for validation")

    print(f"2/3 training the tokenizer, {vocab_size:,} tokens (about {n_bytes * 0.95 / 2e6 + 2:.0f} s)")
    tok = tokenizer.train_tokenizer((t for i, (_, t) in enumerate(read_spool(building / "spool.jsonl")) if not is_val[i]),
                                    vocab_size, building / "tokenizer.json")
    print("3/3 encoding")
    splits, per_source, stats = tokenize(tok, building / "spool.jsonl", is_val, named, building, n_bytes)
    rows = tokenizer.gates(tok, vocab_size, stats)
    tokenizer.print_gates(rows)
    config.write_text(building / "tokenizer_report.json", json.dumps(dict(gates=rows, statistics=stats), indent=1) + "\n")
    manifest = dict(
        version=FORMAT, vocab_size=vocab_size, tokenizer_sha256=config.sha256_file(building / "tokenizer.json"),
        corpus_sha256=config.sha256_file(building / "spool.jsonl"), splits=splits, sources=per_source,
        dropped=dict(sorted(dropped.items())), settings=settings, python=platform.python_version())
    config.write_text(building / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    (building / "spool.jsonl").unlink()

    move_into_place(building, folder)
    print(f"{folder}: ready")
    print_summary(manifest)
    config_file = config.config_argument()
    print(f"next: python train.py{config_file and ' ' + config_file}")


# ----------------------------------------------------------------------------------------------------------
# The reader
# ----------------------------------------------------------------------------------------------------------

class TokenStream:
    """The windows of one split in a fixed random order.

    The joined shards hold W = (tokens - 1) // seq_len windows of seq_len tokens, each with the token behind it.
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
        self.n_windows = (self.n_tokens - 1) // seq_len
        if self.n_windows < 1:
            raise UserError(f"{folder}: the {split} split has {self.n_tokens} tokens, fewer than one window of seq_len + 1 = "
                            f"{seq_len + 1} - prepare more text or set a smaller seq_len")
        self.order = (-1, None)                     # (pass, its permutation)

    def tokens(self, start: int, stop: int) -> torch.Tensor:
        """Return tokens [start, stop) of the joined shards as int64 (uint16 has next to no arithmetic)."""
        parts, shard = [], int(np.searchsorted(self.starts, start, "right")) - 1
        while start < stop:
            end = min(stop, int(self.starts[shard + 1]))
            parts.append(self.shards[shard][start - int(self.starts[shard]):end - int(self.starts[shard])].long())
            start, shard = end, shard + 1
        return torch.cat(parts)

    def window_number(self, n: int) -> int:
        """Return which window of the joined shards the n-th of the endless sequence is."""
        number, place = divmod(n, self.n_windows)
        if self.order[0] != number:
            self.order = (number, np.random.default_rng([self.seed, number]).permutation(self.n_windows))
        return int(self.order[1][place])

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return windows first ... first + count - 1 of the sequence as (inputs, targets), int64 [count, seq_len] each."""
        starts = [self.window_number(n) * self.seq_len for n in range(first, first + count)]
        windows = torch.stack([self.tokens(start, start + self.seq_len + 1) for start in starts])
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


if __name__ == "__main__":
    config.run(main)
