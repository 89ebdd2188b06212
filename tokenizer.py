"""The byte-level BPE tokenizer: training, gates, loading. prepare.py calls these; every other script loads.

    python tokenizer.py                              the gates' verdicts for the tokenizer in data_dir
    python tokenizer.py --text="def fib(n):"         and how it splits a text
    python tokenizer.py --split_files="~/code/**/*.py"   bytes per token of other ways to split, on files of yours

Reads data_dir/tokenizer.json and data_dir/tokenizer_report.json (both written by prepare.py).

Lossless: every valid Unicode string decodes to itself. All 256 bytes are in the alphabet, there is no
normaliser and no prefix space.
"""
import codecs
import glob
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import config
from config import UserError

# settings
data_dir = "data/cipher"  # where prepare.py put tokenizer.json
text = ""                 # a text to split, for a look
split_files: str | list = ""  # files (a glob, or a list of them), to compare ways to split on; each gets a column
vocab_size = 32768        # tokens, of the vocabularies compared

# Ids are given from 0 up in this order (a seed vocabulary may give others), and asked for by name.
# Control tokens are placed by code alone: text that spells one out is encoded as plain characters.
CONTROL = ("<unk>", "<s>", "</s>", "<pad>", "<mask>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<sep>", "<persona>")
# Structure tags are recognised in text: a corpus or a prompt may write them.
STRUCTURE = ("<task>", "<guidelines>", "<check>", "<mind_spock>", "<mind_sheldon>", "<code>", "<execute>", "<observe>",
             "<deliver>")
BYTES = 256
MAX_VOCAB = 65_536        # shards are uint16: the largest id is 65,535
# Unbounded, one line of 80,000 equal letters teaches tokens of 8,192 letters and takes training super-linear.
MAX_TOKEN_LENGTH = 16     # bytes, less than this: 15 still hold four levels of indentation, whose last blank goes to the word

# A word takes its leading blank or punctuation mark along; digits by three; runs of punctuation with the line ends behind
# them; line ends with the blanks before them; a run of blanks less its last, which goes to the word behind it. GPT-4's
# split, less its English contractions. Measured on 32 MB of Go, Rust, Python and documentation, vocabulary 32,768, in bytes
# per token on other files, code / prose: GPT-2's 2.90 / 3.65, GPT-4's 3.06 / 3.88, this one 3.06 / 3.88, with digits one by
# one 2.85 / 3.80, with the next line's indentation in the token of the line end 3.12 / 3.94. That last one is not taken: a
# prompt that ends with a line end would ask for a line without indentation.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
OTHER_SPLITS = {
    "as it is": SPLIT,
    "digits one by one": SPLIT.replace("{1,3}", ""),
    "indentation with line ends": SPLIT.replace(r"|\s*[\r\n]+|", r"|\s*[\r\n]+[ \t]*|"),
    "GPT-4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "GPT-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"}

LONG_BLANK = re.compile(r"\s{1000}")
LONG_WORD = re.compile(r"\S{1000}")
AWKWARD = ["<s></s><task>x</task><unk>", "  \t\n \r\n\r x  y", "1234567 don't \u00e9\u6f22\U0001f600", "a" * 300, "=" * 300, " " * 300]
SURROGATE = re.compile("[\ud800-\udfff]")


# ----------------------------------------------------------------------------------------------------------
# Training
# ----------------------------------------------------------------------------------------------------------

def check_vocab_size(vocab_size: int) -> None:
    """Raise UserError for a vocabulary that cannot hold the fixed tokens or does not fit into uint16 ids."""
    least = len(CONTROL) + len(STRUCTURE) + BYTES
    if not least < vocab_size <= MAX_VOCAB:
        raise UserError(f"vocab_size={vocab_size} must be from {least + 1} (fixed tokens and bytes) to {MAX_VOCAB} (ids are uint16)")


def bounded(texts: Iterable[str]) -> Iterator[str]:
    """Cut the endless words and blanks of texts to learn from: training time grows faster than the longest one."""
    for text in texts:
        if len(text) > 1000 and (LONG_BLANK.search(text) or max(map(len, text.splitlines())) > 1000):
            text = LONG_BLANK.sub(" x ", LONG_WORD.sub(r"\g<0> ", text))
        yield text


def untrained(split: str = SPLIT) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tok.decoder = decoders.ByteLevel()
    return tok


def train(tok: Tokenizer, texts: Iterable[str], vocab_size: int, longest: int = MAX_TOKEN_LENGTH) -> None:
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*CONTROL, *STRUCTURE], max_token_length=longest,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path, seed: dict[str, int] | None = None) -> Tokenizer:
    """Train on texts, write path (tokenizer.json) and return it loaded. The same texts give the same file.

    seed: read_seed_vocab's, whose entries keep their ids. Raises UserError where the texts hold too few different words for vocab_size.
    """
    check_vocab_size(vocab_size)
    tok = untrained()
    entries = seed_texts(seed or {})
    train(tok, with_seed(bounded(texts), entries, vocab_size), vocab_size, max([MAX_TOKEN_LENGTH, *(len(entry.encode()) + 1 for entry in entries)]))
    saved = json.loads(tok.to_str())
    if seed is not None:
        keep_ids(saved, seed, vocab_size)
    found = len(saved["model"]["vocab"])
    if found < vocab_size:
        least = BYTES + len(CONTROL) + len(STRUCTURE)
        fits = found // 64 * 64 if found // 64 * 64 > least else found          # a multiple of 64 suits the hardware
        raise UserError(f"vocab_size={vocab_size}: the corpus is too small for it, {found - least} merges were found - " +
                        (f"--vocab_size={fits} would do, or prepare more text" if fits > least else "prepare more text"))
    # The trainer marks everything in special_tokens special; only the saved file can say otherwise.
    for token in saved["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    config.write_text(path, json.dumps(saved, ensure_ascii=False, indent=1))
    return load_tokenizer(path)


# ----------------------------------------------------------------------------------------------------------
# Seed vocabulary
# ----------------------------------------------------------------------------------------------------------

def read_seed_vocab(path: str | Path, vocab_size: int) -> dict[str, int]:
    """Read a vocabulary to complete: {token as it is spelt in tokenizer.json: id}.

    The file is a tokenizer.json of tokenizers, a JSON object {token: id} or a JSON list of tokens. Tokens are spelt as
    in GPT-2's files ("\u0120the") or plain (" the"). Raises UserError for any other file and for ids that collide or
    reach vocab_size.
    """
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(given, dict) and "model" in given:
            given = given["model"]["vocab"] | {token["content"]: token["id"] for token in given.get("added_tokens", ())}
        elif isinstance(given, list):
            given = {token: i for i, token in enumerate(given)} if len(set(given)) == len(given) else None
        if not given or not all(isinstance(token, str) and token and type(i) is int and i >= 0 for token, i in given.items()):
            raise ValueError(f"it must give different tokens ids from 0 to {vocab_size - 1}")
        if max(given.values()) >= vocab_size:
            raise ValueError(f"its ids go up to {max(given.values())}: set --vocab_size={max(given.values()) + 1} or more, it is {vocab_size}")
        spelling = byte_spelling()
        learnt = {token: i for token, i in given.items() if token not in (*CONTROL, *STRUCTURE)}
        characters = set("".join(learnt))
        if not characters <= set(spelling.values()) or max(characters, default="") < "\u0100":        # plain
            learnt = {"".join(spelling[b] for b in token.encode("utf-8")): i for token, i in learnt.items()}
        vocab = {token: i for token, i in given.items() if token in (*CONTROL, *STRUCTURE)} | learnt
        if not len(given) == len(vocab) == len(set(vocab.values())):
            raise ValueError("two entries have one id or one spelling")
    except OSError as error:
        raise UserError(f"seed_vocab: {path}: {error.strerror or error} - check the path") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"seed_vocab: {path}: not a vocabulary to go on from - {error}") from None
    return vocab


def seed_texts(seed: dict[str, int]) -> list[str]:
    """Return the entries of a seed vocabulary that are text."""
    texts = (spelt.decode("utf-8", "replace") for token, spelt in zip(seed, unspell(seed), strict=True) if token not in (*CONTROL, *STRUCTURE))
    return [text for text in texts if "\ufffd" not in text]


def with_seed(texts: Iterable[str], entries: list[str], vocab_size: int) -> Iterator[str | list[str]]:
    """Yield texts and, behind them, each entry so often that training is sure to make a token of it.

    The rarest of V tokens stands for far less than 1 / V of the bytes.
    """
    total = 0
    for text in texts:
        total += len(text)
        yield text
    for entry in entries:
        yield [entry] * (1 + total // vocab_size)


def keep_ids(saved: dict, seed: dict[str, int], vocab_size: int) -> None:
    """Give a trained tokenizer (tokenizer.json as read) the ids of a seed vocabulary, in place.

    What the seed lacks comes in its order, fixed tokens, bytes, most frequent first, in the free ids from 0 up.
    """
    vocab, trained = dict(seed), saved["model"]
    never = [token for token in seed if token not in trained["vocab"]]
    if never:
        print(f"  note: {len(never)} of the {len(seed)} entries of seed_vocab keep their ids but no text will give them, because text is split "
              f"within them: {', '.join(repr(spelt.decode('utf-8', 'replace')) for spelt in unspell(never[:5]))}")
    free = iter(sorted({*range(vocab_size)} - {*seed.values()}))
    vocab |= zip((token for token in sorted(trained["vocab"], key=trained["vocab"].get) if token not in seed), free)
    trained["vocab"] = dict(sorted(vocab.items(), key=lambda entry: entry[1]))
    trained["merges"] = [[left, right] for left, right in trained["merges"] if left in vocab and right in vocab and left + right in vocab]
    for token in saved["added_tokens"]:
        token["id"] = vocab[token["content"]]
    saved["added_tokens"].sort(key=lambda token: token["id"])


# ----------------------------------------------------------------------------------------------------------
# Loading, encoding, decoding
# ----------------------------------------------------------------------------------------------------------

def load_tokenizer(path: str | Path, sha256: str | None = None) -> Tokenizer:
    """Load tokenizer.json; with sha256 given, refuse any other file than the one the data or model was made with."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no tokenizer here - run python prepare.py first, or set data_dir")
    if sha256 is not None and config.sha256_file(path) != sha256:
        raise UserError(f"{path}: not the tokenizer this data or checkpoint was made with (its SHA-256 differs from "
                        f"{sha256[:12]}...) - use the tokenizer.json that belongs to it, or run prepare.py again")
    try:
        tok = Tokenizer.from_str(path.read_text(encoding="utf-8"))     # from_file fails on odd paths in a C locale
    except Exception as error:                      # the library raises bare Exception for every fault
        raise UserError(f"{path}: not a tokenizer file ({error}) - run prepare.py again with --overwrite=True") from None
    special = {token.content: token.special for token in tok.get_added_tokens_decoder().values()}
    for name in (*CONTROL, *STRUCTURE):
        if special.get(name) != (name in CONTROL):
            raise UserError(f"{path}: {name} is not the {'control token' if name in CONTROL else 'structure tag'} it should be - this is "
                            f"not a tokenizer of Cipher")
    tok.encode_special_tokens = True                # lost by every save and copy; keeps control tokens out of text
    return tok


def clean(text: str) -> str:
    """Replace lone surrogates, which no UTF-8 can hold, by U+FFFD; any other text is returned as it is."""
    return SURROGATE.sub("\ufffd", text)


def encode(tok: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text; a control token spelt out in it becomes plain characters."""
    return tok.encode(clean(text), add_special_tokens=False).ids


def fill_in_ids(tok: Tokenizer, before: list[int], suffix: str) -> list[int]:
    """Return the ids behind which a model fills in what stands between: the first of prepare.lay_out's two orders, less its <s>."""
    first, second, middle = map(tok.token_to_id, ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    return [first, *before, second, *encode(tok, suffix), middle]


def batch_encoder(tok: Tokenizer, sample: list[str]) -> tuple[Callable[[list[str]], list[np.ndarray]], str]:
    """Return (a function from texts to arrays of ids, the name of the library that does the work).

    tiktoken, given the same vocabulary, encodes 8 times as fast per core. It is taken where it is installed and gives the
    ids of tokenizers for the sample and for the text of every token: it joins any two tokens that form a third, tokenizers
    only those it joined in training.
    """
    def slow(texts: list[str]) -> list[np.ndarray]:
        return [np.array(encoding.ids, np.uint32) for encoding in tok.encode_batch_fast(texts, add_special_tokens=False)]

    def fast(texts: list[str]) -> list[np.ndarray]:
        return [fast_one(text) for text in texts]

    def fast_one(text: str) -> np.ndarray:
        if not LONG_BLANK.search(text):             # its regex engine overflows on those
            try:
                return id_of[encoding.encode_to_numpy(text, allowed_special=tags, disallowed_special=())]
            except BaseException as error:          # a panic of Rust is no Exception
                if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                    raise
        return slow([text])[0]

    try:
        import tiktoken
        merges, spelling, bytes_of = json.loads(tok.to_str())["model"]["merges"], byte_spelling(), token_bytes(tok)
        by_rank = [tok.token_to_id(token) for token in dict.fromkeys([*spelling.values(), *(left + right for left, right in merges)])]
        ranks, tags = {bytes_of[i]: rank for rank, i in enumerate(by_rank)}, frozenset(STRUCTURE)
        special = {tag: len(by_rank) + i for i, tag in enumerate(STRUCTURE)}
        id_of = np.array([*by_rank, *map(tok.token_to_id, STRUCTURE)], np.uint32)
        encoding = tiktoken.Encoding("cipher", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=special)
        proofs = [*sample, *AWKWARD, *(token.decode("utf-8", "ignore") for token in bytes_of)]
        if all(np.array_equal(a, b) for a, b in zip(fast(proofs), slow(proofs), strict=True)):
            return fast, "tiktoken"
    except (ImportError, ValueError, AttributeError):       # not there, too old, or a vocabulary it does not take
        pass
    return slow, "tokenizers"


def decode(tok: Tokenizer, ids: list[int]) -> str:
    """Return the text of ids, control tokens by name. Raises ValueError for an id outside the vocabulary."""
    if any(not 0 <= i < tok.get_vocab_size() for i in ids):
        raise ValueError(f"id outside the vocabulary of {tok.get_vocab_size()}: {[i for i in ids if not 0 <= i < tok.get_vocab_size()][:5]}")
    return tok.decode(ids, skip_special_tokens=False)


def byte_spelling() -> dict[int, str]:
    """Return the printable character that stands for each byte in the trained file.

    Those that print stand for themselves, the others follow from U+0100 on in their order (GPT-2's scheme).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(b for b in range(BYTES) if b not in printable)}


def unspell(tokens: Iterable[str]) -> list[bytes]:
    """Return the bytes that tokens, as they are spelt in the trained file, stand for; of control tokens none."""
    byte_of = {character: b for b, character in byte_spelling().items()}
    return [b"" if t in CONTROL else t.encode() if t in STRUCTURE else bytes(byte_of[c] for c in t) for t in tokens]


def token_bytes(tok: Tokenizer) -> list[bytes]:
    """Return the bytes each id stands for."""
    return unspell(tok.id_to_token(i) for i in range(tok.get_vocab_size()))


class TextStream:
    """Turn ids into text one by one. The bytes of an unfinished character wait for the rest of it, and text that may be the
    beginning of a stop string for what follows; at a stop string the text ends before it and `stopped` becomes True.
    """

    def __init__(self, bytes_of: list[bytes], stop: str | Iterable[str] = ()):
        """bytes_of: token_bytes of the tokenizer. stop: one text or several; empty ones are none."""
        self.bytes_of, self.waiting, self.stopped = bytes_of, "", False
        self.stop = [word for word in ([stop] if isinstance(stop, str) else stop) if word]
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take the next id; return the text that is certain now."""
        return self.release(self.decoder.decode(self.bytes_of[token]))

    def release(self, text: str, final=False) -> str:
        text, self.waiting = self.waiting + text, ""
        if (found := [place for word in self.stop if (place := text.find(word)) >= 0]):
            self.stopped = True
            return text[:min(found)]
        if not final:
            held = max((n for word in self.stop for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
            text, self.waiting = text[:len(text) - held], text[len(text) - held:]
        return text

    def close(self) -> str:
        """Return what still waited."""
        return "" if self.stopped else self.release(self.decoder.decode(b"", final=True), final=True)


# ----------------------------------------------------------------------------------------------------------
# Gates
# ----------------------------------------------------------------------------------------------------------

def gates(tok: Tokenizer, vocab_size: int, stats: dict, seed: dict[str, int] | None = None) -> list[dict]:
    """Judge a tokenizer on the corpus it was made for: a list of {gate, value, bar, passed}.

    stats: text_bytes, text_tokens, used (different ids seen in text); of a sample: sampled (documents), sampled_tokens,
    sampled_words (split at white space), failed (round trips). seed: the vocabulary whose entries must have kept their ids;
    without one the fixed tokens come first. The bars are set where a healthy tokenizer of this kind never comes near them.
    """
    ids = {token: i for i, token in enumerate((*CONTROL, *STRUCTURE))} if seed is None else seed
    per_token = stats["text_bytes"] / max(1, stats["text_tokens"])
    fertility = stats["sampled_tokens"] / max(1, stats["sampled_words"])
    learnt = vocab_size - len(CONTROL) - len(STRUCTURE)
    used = stats["used"] / learnt
    rows = [
        ("vocabulary size", tok.get_vocab_size(), f"= {vocab_size}", tok.get_vocab_size() == vocab_size),
        ("specials at their ids" if seed is None else "tokens of the seed at their ids", sum(tok.token_to_id(t) == i for t, i in ids.items()), f"= {len(ids)}",
         all(tok.token_to_id(t) == i for t, i in ids.items())),
        (f"round trips failed, of {stats['sampled']}", stats["failed"], "= 0", stats["failed"] == 0 < stats["sampled"]),
        ("bytes per token", round(per_token, 3), "> 2.5", per_token > 2.5),
        ("tokens per word (fertility)", round(fertility, 3), "< 5", fertility < 5),
        ("share of vocabulary used", round(used, 3), "> 0.8", used > 0.8),
    ]
    return [dict(gate=gate, value=value, bar=bar, passed=bool(passed)) for gate, value, bar, passed in rows]


def print_gates(rows: list[dict]) -> None:
    for row in rows:
        print(f"  {row['gate']:<32} {row['value']:>10}   {row['bar']:<9} {'pass' if row['passed'] else 'FAIL'}")


def compare_splits(patterns: list[str]) -> None:
    """Train each way to split on every other file and print the bytes per token on the rest, a column per pattern."""
    columns = {}
    for pattern in patterns:
        files = sorted(p for p in glob.glob(str(Path(pattern).expanduser()), recursive=True) if Path(p).is_file())
        texts = [text for p in files if (text := Path(p).read_bytes().decode("utf-8", "ignore")).strip()]
        if len(texts) < 2:
            raise UserError(f'split_files: {pattern}: {len(texts)} files with text - two or more are needed (a glob such as "~/code/**/*.py")')
        columns[pattern] = (texts[::2], texts[1::2])
    print(f"  {'bytes per token':<28}" + "".join(f" {pattern[-24:]:>25}" for pattern in patterns))
    for name, split in OTHER_SPLITS.items():
        tok = untrained(split)
        train(tok, bounded(text for texts, _ in columns.values() for text in texts), vocab_size)
        short = "" if tok.get_vocab_size() == vocab_size else f"   (only {tok.get_vocab_size():,} tokens found)"
        values = [sum(len(text.encode()) for text in texts) / sum(len(e.ids) for i in range(0, len(texts), 64) for e in tok.encode_batch_fast(
            texts[i:i + 64], add_special_tokens=False)) for _, texts in columns.values()]
        print(f"  {name:<28}" + "".join(f" {value:>25.3f}" for value in values) + short, flush=True)


def main():
    config.override(globals())
    if split_files:
        check_vocab_size(vocab_size)
        compare_splits([split_files] if isinstance(split_files, str) else split_files)
        return
    tok = load_tokenizer(Path(data_dir) / "tokenizer.json")
    report = Path(data_dir) / "tokenizer_report.json"
    if report.is_file():
        print_gates(json.loads(report.read_text(encoding="utf-8"))["gates"])
    if text:
        ids = encode(tok, text)
        print(f"{len(text.encode('utf-8', 'replace'))} bytes, {len(ids)} tokens:", " ".join(f"{i}:{decode(tok, [i])!r}" for i in ids))


if __name__ == "__main__":
    config.run(main)
